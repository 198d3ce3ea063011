# SPDX-License-Identifier: Apache-2.0
"""Which heap of a world on GPUs a layer gets, with heaps that only note that they were freed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from moeos.engines.cuda.device_heap import DeviceHeap
from moeos.engines.cuda.shared import HeapPool
from moeos.system.call_gate import CallGate
from moeos.system.errors import ConfigMismatch
from moeos.world.control import ThreadControl

DEADLINE = 60.0
RANKS = 3


class Rank:
    """One rank's pool. Attributes: `made`, sizes in the order of making; `freed`, likewise."""

    def __init__(self, control: ThreadControl) -> None:
        self.rank = control.rank
        self.made: list[int] = []
        self.freed: list[int] = []
        self.pool = HeapPool(control, CallGate(control.rank), self._make)

    def _make(self, size: int) -> DeviceHeap:
        number = len(self.made)
        self.made.append(size)
        heap = SimpleNamespace(size=size, number=number, close=lambda: self.freed.append(number))
        return cast(DeviceHeap, heap)

    def take(self, size: int) -> tuple[Any, bool]:
        heap, used = self.pool.take(size)
        assert heap.size >= size
        return heap, used


def on_all_ranks(rank_main: Callable[[Rank], Any]) -> list[Any]:
    """What each rank returns, or the exception that it raises."""

    def live(control: ThreadControl) -> Any:
        try:
            return rank_main(Rank(control))
        except Exception as error:
            return error
        finally:
            control.close()

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(live, ThreadControl.group(RANKS, DEADLINE)))


def test_the_heap_of_a_layer_that_is_gone_is_used_again_by_the_next_that_fits() -> None:
    def rank_main(rank: Rank) -> tuple[Any, ...]:
        first, used = rank.take(100)
        assert not used
        rank.pool.give_back(first)
        larger, used = rank.take(101)
        assert not used
        smaller, used = rank.take(60)
        assert used
        assert smaller is first
        return rank.made, larger.number, smaller.number

    assert on_all_ranks(rank_main) == [([100, 101], 1, 0)] * RANKS


def test_the_smallest_free_heap_that_fits_is_taken() -> None:
    def rank_main(rank: Rank) -> list[int]:
        heaps = [rank.take(size)[0] for size in (300, 100, 200, 100)]
        for heap in heaps:
            rank.pool.give_back(heap)
        return [rank.take(150)[0].number, rank.take(80)[0].number, rank.take(80)[0].number]

    assert on_all_ranks(rank_main) == [[2, 1, 3]] * RANKS


def test_a_heap_that_one_rank_still_uses_is_given_to_nobody() -> None:
    """A layer is deleted on one rank earlier than on another."""

    def rank_main(rank: Rank) -> list[tuple[int, bool]]:
        first, _ = rank.take(100)
        if rank.rank != 1:
            rank.pool.give_back(first)
        second, used = rank.take(100)
        taken = [(second.number, used)]
        if rank.rank == 1:
            rank.pool.give_back(first)
        third, used = rank.take(100)
        return [*taken, (third.number, used)]

    assert on_all_ranks(rank_main) == [[(1, False), (0, True)]] * RANKS


def test_heaps_that_are_given_back_in_another_order_on_every_rank_stay_paired() -> None:
    def rank_main(rank: Rank) -> list[int]:
        numbers = []
        for _ in range(5):
            heaps = [rank.take(50)[0] for _ in range(4)]
            numbers += [heap.number for heap in heaps]
            turned = heaps[rank.rank :] + heaps[: rank.rank]
            ends = [threading.Thread(target=rank.pool.give_back, args=(one,)) for one in turned]
            for end in ends:
                end.start()
            for end in ends:
                end.join()
        assert rank.made == [50] * 4
        return numbers

    first, *others = on_all_ranks(rank_main)
    assert others == [first] * (RANKS - 1)
    assert first == [0, 1, 2, 3] * 5


def test_ranks_that_ask_for_different_sizes_all_raise_and_make_no_heap() -> None:
    def rank_main(rank: Rank) -> list[int]:
        try:
            rank.pool.take(100 + rank.rank)
        finally:
            assert rank.made == []
        return rank.made

    assert all(isinstance(one, ConfigMismatch) for one in on_all_ranks(rank_main))


def test_the_end_of_a_world_frees_each_heap_once_in_one_order() -> None:
    def rank_main(rank: Rank) -> list[int]:
        heaps = [rank.take(size)[0] for size in (10, 20, 30)]
        if rank.rank == 2:
            rank.pool.give_back(heaps[1])
        assert rank.pool.end(world_ends=True)
        assert rank.pool.end()
        return rank.freed

    assert on_all_ranks(rank_main) == [[2, 1, 0]] * RANKS
