# SPDX-License-Identifier: Apache-2.0
"""What a layer counts in every call: against the routing, the clock, and ranks that are late."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest

import moeos
from moeos import PeerTimeout, TwinOptions, World
from moeos.engines import counters
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan, SlowProcessor, StartDelay
from tests.layers import Call, config, draw_call, draw_given_call, draw_weights

RANKS = 3
CFG = config(experts=6, max_tokens=200)
WEIGHTS = draw_weights(CFG)
DELAY = 0.3

ways = pytest.mark.parametrize(
    "way",
    [
        {"twin": TwinOptions(processors=1)},
        # Counts of all ranks are often here before any row is, and results are seen before rows.
        {"twin": TwinOptions(processors=1, jitter_us=300.0, jitter_seed=5)},
        {"twin": TwinOptions(processors=2, split_os=True), "ranks_per_node": 1},
    ],
    ids=["direct", "jittered", "remote"],
)


def calls_of(tokens: list[int]) -> list[Call]:
    return [draw_given_call(CFG, count, rank) for rank, count in enumerate(tokens)]


def stats_of(calls: list[Call], **options: Any) -> list[tuple[dict[str, Any], float]]:
    """The stats of each rank's second call, and its seconds on the host."""

    def rank_main(world: World) -> tuple[dict[str, Any], float]:
        layer = WEIGHTS.layer(world)
        calls[world.rank](layer)
        world.control.barrier()
        begin = time.perf_counter()
        calls[world.rank](layer)
        return layer.stats(), time.perf_counter() - begin

    return virtual.run(rank_main, len(calls), **options)


@ways
def test_times_lie_in_the_call_and_in_its_order(way: dict[str, Any]) -> None:
    for rank, (stats, seconds) in enumerate(stats_of(calls_of([150, 70, 200]), **way)):
        assert 0 < stats["first_tile_after"] < stats["seconds"] <= seconds
        for counts, rows, results in zip(
            stats["counts_after"], stats["rows_after"], stats["results_after"], strict=True
        ):
            assert 0 < counts < rows <= stats["seconds"]
            assert 0 < results <= stats["seconds"]
        # A peer may return this rank's rows before it sends its own. And the OS need not have seen
        # rows before their tile is handed out and computed: processors may wait for them.
        assert stats["counts_after"][rank] < stats["results_after"][rank]
        assert min(stats["counts_after"]) < stats["first_tile_after"]
        assert all(0 <= waited < stats["seconds"] for waited in stats["waited_for"])
        assert stats["sweeps"] >= 1
        # Where processors always wait for parts, none waits for them.
        assert 0 <= stats["waiting_most"] <= sum(stats["tasks"].values())


@ways
def test_parts_wait_for_slow_processors(way: dict[str, Any]) -> None:
    slow = tuple(
        SlowProcessor(rank=rank, processor=processor, seconds=0.002)
        for rank in range(RANKS)
        for processor in range(way["twin"].processors)
    )
    plan = FaultPlan(slow_processors=slow)
    for stats, _ in stats_of(calls_of([150, 70, 200]), **way, faults=plan):
        assert 1 <= stats["waiting_most"] <= sum(stats["tasks"].values())


@ways
def test_busy_time_adds_up_and_fits_in_the_processors(way: dict[str, Any]) -> None:
    for stats, _ in stats_of(calls_of([150, 70, 200]), **way):
        assert stats["processors"] == way["twin"].processors
        assert stats["busy_seconds"] == pytest.approx(sum(stats["busy_seconds_by_task"].values()))
        busy = stats["busy_seconds_by_task"]
        idle = {"replicate"} if "ranks_per_node" in way else set()  # tokens go once to near ranks
        assert {kind for kind, seconds in busy.items() if seconds == 0} == idle
        share = stats["busy_seconds"] / stats["processors"] / stats["seconds"]
        assert stats["busy_share"] == pytest.approx(share)
        assert 0 < share <= 1


@ways
def test_bytes_of_rows_add_up_over_the_peers(way: dict[str, Any]) -> None:
    found = [stats for stats, _ in stats_of(calls_of([150, 0, 200]), **way)]
    for rank, stats in enumerate(found):
        assert sum(stats["row_bytes_by_peer"]) == stats["row_bytes_to_peers"]
        for peer, written in enumerate(stats["row_bytes_by_peer"]):
            assert 0 <= stats["rows_sent"][peer] <= stats["pairs_sent"][peer]
            rows = stats["rows_sent"][peer] + found[peer]["pairs_sent"][rank]
            assert written == (0 if peer == rank else rows * CFG.hidden * CFG.dtype.itemsize)


@ways
def test_a_call_without_tokens_has_no_rows_to_tell_of(way: dict[str, Any]) -> None:
    for stats, _ in stats_of(calls_of([0, 0, 0]), **way):
        assert stats["seconds"] > 0
        assert stats["first_tile_after"] is None
        assert all(counts > 0 for counts in stats["counts_after"])
        assert stats["rows_after"] == stats["results_after"] == [None] * RANKS
        assert stats["busy_seconds_by_task"]["product0"] == 0
        assert stats["rows_before_counts"] == [0] * RANKS


@ways
def test_a_rank_that_starts_late_is_the_one_that_is_waited_for(way: dict[str, Any]) -> None:
    late = StartDelay(distribution="constant", seconds=DELAY, rank=1)
    found = stats_of(calls_of([150, 70, 200]), faults=FaultPlan(start_delays=(late,)), **way)
    for rank, (stats, _) in enumerate(found):
        others = stats["pairs_received"][0] + stats["pairs_received"][2]
        if rank == 1:
            assert max(stats["waited_for"]) < DELAY
        else:
            assert stats["waited_for"][1] > 0.9 * DELAY
            assert stats["waited_for"][2 - rank] < 0.5 * DELAY
            assert stats["counts_after"][1] > 0.9 * DELAY
            # The others' work did not wait for it.
            assert stats["rows_before_counts"][1] == others
            assert stats["rows_before_counts"][rank] < others


def test_of_a_call_that_fails_nothing_is_said_to_have_ended() -> None:
    stalled = Fault(kind="stall", rank=1, call=1, stage="product0")

    def rank_main(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        layer = WEIGHTS.layer(world)
        before = layer.stats()
        with pytest.raises(PeerTimeout):
            draw_call(CFG, 100, world.rank)(layer)
        return before, layer.stats()

    for before, stats in virtual.run(
        rank_main, 2, deadline=0.3, faults=FaultPlan(faults=(stalled,))
    ):
        assert before["seconds"] is before["busy_share"] is None
        assert before["counts_after"] == [None, None]
        assert (before["tokens"], before["sweeps"]) == (0, 0)
        assert stats["seconds"] is stats["busy_share"] is None
        assert stats["tokens"] == 100
        assert all(counts > 0 for counts in stats["counts_after"])


def test_records_are_read_as_the_device_writes_them() -> None:
    """What tells the fields apart on the GPU, too: numbers that are all different."""
    tallies = numpy.arange(64, dtype="<u8").view(counters.TALLY)
    record = numpy.array([5, 10_000, 14_000, 90_000, 7, 8, *[0] * 10], "<u8").view(counters.RECORD)
    peers = [12_000, 0, 0, 21, 23, 13_000, 15_000, 19_000, 22, 2]
    peer_records = numpy.array(peers, "<u8").view(counters.PEER)
    received = [[1, 2, 0], [5, 6, 0]]  # the last place has no expert
    stats = counters.read(0, tallies, 1, record, peer_records, [3, 4], received, 2, 100, 200)
    # Words 0 to 5 of the processor's tally and 32 to 37 of its courier's, in the order of TaskKind.
    kinds = ("route", "combine", "product1", "product0", "dispatch", "replicate")
    assert stats.tasks == {kind: 2 * word + 32 for word, kind in enumerate(kinds)}
    assert (stats.row_bytes_to_peers, stats.count_bytes_to_peers) == (6 + 38, 7 + 39)
    assert (stats.flag_bytes_to_peers, stats.padding_rows, stats.drops) == (8 + 40, 9 + 41, 10 + 42)
    assert stats.busy_seconds_by_task["product1"] == pytest.approx((13 + 45) / 1e9)
    assert stats.busy_seconds == pytest.approx(sum(range(11, 17)) / 1e9)
    assert (stats.tokens, stats.sweeps, stats.waiting_most) == (5, 7, 8)
    assert (stats.seconds, stats.first_tile_after) == pytest.approx((8e-5, 4e-6))
    assert stats.counts_after == pytest.approx([2e-6, 3e-6])
    assert stats.rows_after == [None, pytest.approx(5e-6)]
    assert stats.results_after == [None, pytest.approx(9e-6)]
    assert stats.waited_for == pytest.approx([0.0, 3e-6])
    assert stats.rows_before_counts == [21, 22]
    assert (stats.pairs_received, stats.expert_pairs) == ([3, 11], [6, 8])
    assert stats.rows_sent == [23, 2]
    assert stats.row_bytes_by_peer == [0, 100 * 2 + 200 * 11]
    assert stats.processors == 1
    assert isinstance(stats, moeos.engines.counters.CallStats)
