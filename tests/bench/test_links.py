# SPDX-License-Identifier: Apache-2.0
"""Links between nodes of a straggler study: the same for moeos and for the all-to-all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bench.studies.links import LimitedAllToAll, Nodes
from moeos.world.faults import SlowLink


def test_ranks_of_other_nodes_are_far() -> None:
    nodes = Nodes(4, 2)
    assert (nodes.ranks_per_node, nodes.far(0), nodes.far(3)) == (2, [2, 3], [0, 1])
    assert Nodes(4, 1).ranks_per_node is None
    assert Nodes(4, 1).far(2) == []


def test_moeos_is_told_of_every_link_between_nodes() -> None:
    links = Nodes(4, 2, 1e-3, 1e9).plan().slow_links
    assert len(links) == 8
    assert SlowLink(rank=1, peer=2, seconds=1e-3, bytes_per_second=1e9) in links
    assert Nodes(4, 2).plan().slow_links == ()


def test_an_exchange_waits_for_the_slowest_link(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "bench.studies.links.dist.all_to_all_single",
        lambda *arguments, **options: made.append((*arguments, options)),
    )
    exchange = LimitedAllToAll(Nodes(4, 2, 0.01, 1e6), rank=0)
    rows = torch.zeros(100, 25)  # 100 bytes a row
    begin = time.perf_counter()
    exchange(rows, rows, [25] * 4, [0, 0, 200, 100], async_op=True)
    assert time.perf_counter() - begin >= 0.01 + 200 * 100 / 1e6
    assert made == [(rows, rows, [25] * 4, [0, 0, 200, 100], {"async_op": True})]
    begin = time.perf_counter()
    exchange(torch.zeros(4000), torch.zeros(4000))  # 1000 numbers to each rank
    assert time.perf_counter() - begin >= 0.01 + 4000 / 1e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 3), "--nodes is 3; it must divide 4 ranks equally"),
        ((4, 0), "--nodes is 0"),
        ((4, 1, 0.1), "--nodes is 1: there is none"),
    ],
)
def test_nodes_that_cannot_be_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Nodes(*arguments)
