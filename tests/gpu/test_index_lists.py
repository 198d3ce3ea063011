# SPDX-License-Identifier: Apache-2.0
"""MoEBlaze's three steps as kernels: their lists are those by a sort."""

from __future__ import annotations

import pytest
import torch

from bench.studies.index_lists import Steps, by_sort
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


@pytest.mark.parametrize(
    ("tokens", "experts", "slots"),
    [(1, 1, 1), (16, 4, 2), (1000, 40, 8), (20_000, 128, 8), (16_385, 256, 8), (70_001, 300, 4)],
)
def test_the_steps_make_the_lists_of_a_sort(tokens: int, experts: int, slots: int) -> None:
    steps = Steps(tokens, slots, experts)
    for seed in range(2):  # the second call finds what the first one left
        generator = torch.Generator("cuda").manual_seed(seed)
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        ids = scores.topk(slots, dim=1).indices.contiguous()
        expected = by_sort(ids, experts)
        for one, other in zip(steps(ids), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_more_slots_than_a_byte_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="256 experts"):
        Steps(16, 256, 512)
