# SPDX-License-Identifier: Apache-2.0
"""Index lists of a routing: the example of MoEBlaze's paper, and the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.studies.index_lists import IndexLists, by_sort, by_steps

WAYS = (by_sort, by_steps)


def defined(ids: Tensor, experts: int) -> IndexLists:
    """By the meaning of the lists, pair by pair."""
    tokens: list[int] = []
    offsets = [0]
    places = torch.empty(ids.shape, dtype=torch.int32)
    for expert in range(experts):
        for token, of_token in enumerate(ids.tolist()):
            if expert in of_token:
                places[token, of_token.index(expert)] = len(tokens)
                tokens.append(token)
        offsets.append(len(tokens))
    made = (torch.tensor(one, dtype=torch.int32) for one in (tokens, offsets))
    return IndexLists(*made, places)


@pytest.mark.parametrize("way", WAYS)
def test_the_papers_example(way: type) -> None:
    ids = torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]])
    tokens, offsets, places = way(ids, 4)
    assert tokens.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert offsets.tolist() == [0, 3, 5, 7, 10]
    assert places[0].tolist() == [5, 7]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 300), st.data())
def test_both_ways_are_the_definition(
    seed: int, count: int, experts: int, data: st.DataObject
) -> None:
    slots = data.draw(st.integers(1, min(experts, 9)))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, experts, generator=generator).topk(slots, dim=1).indices
    expected = defined(ids, experts)
    for way in WAYS:
        for name, one, other in zip(expected._fields, way(ids, experts), expected, strict=True):
            assert one.dtype == torch.int32, name
            torch.testing.assert_close(one, other, msg=f"{way.__name__}, {name}")
