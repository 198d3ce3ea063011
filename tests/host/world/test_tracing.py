# SPDX-License-Identifier: Apache-2.0
"""What a layer's trace holds: every part once, in its order, and how many had no room."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
import pytest
from torch import Tensor

import moeos
from moeos import MoELayer, TwinOptions, World
from moeos.world import tracing, virtual
from moeos.world.tracing import EVENT, MAX_EVENTS, OS_ACTORS, TASK_KINDS, RankTrace
from tests.layers import Call, config, draw_call, draw_given_call, draw_weights

NOBODY = 0xFFFFFFFF
Traced = tuple[RankTrace, dict[str, Any], Tensor]

CFG = config(experts=12, max_tokens=300)
SEVERAL = TwinOptions(processors=3, split_os=True)


def run(
    ranks: int,
    calls: int = 2,
    twin: TwinOptions = SEVERAL,
    events: int = 4096,
    tokens: tuple[int, ...] = (300, 0, 77),
    **options: Any,
) -> list[Traced]:
    """The last call's trace, stats and output of each rank."""
    weights = draw_weights(CFG)

    def rank_main(world: World) -> Traced:
        layer = weights.layer(world)
        for number in range(calls):
            y = draw_call(CFG, tokens[world.rank % len(tokens)], number + 7 * world.rank)(layer)
        return layer.trace(), layer.stats(), y

    return virtual.run(rank_main, ranks, twin=twin, trace_events=events, **options)


def parts_of(trace: RankTrace) -> Any:
    return numpy.concatenate(trace.events[: trace.processors])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (3, {}), (4, {"ranks_per_node": 2}), (2, {"twin": TwinOptions(processors=1)})],
    ids=["1 rank", "3 ranks", "2 nodes", "1 processor"],
)
def test_every_part_of_the_last_call_is_there_once(ranks: int, options: dict[str, Any]) -> None:
    for rank, (trace, stats, _) in enumerate(run(ranks, **options)):
        parts = parts_of(trace)
        assert trace.rank == rank
        assert len(trace.events) == trace.processors + len(OS_ACTORS)
        assert not any(trace.dropped)
        kinds = Counter(TASK_KINDS[kind] for kind in parts["kind"])
        assert {kind: kinds[kind] for kind in TASK_KINDS} == {
            kind: stats["tasks"][kind] for kind in TASK_KINDS
        }
        which = parts[["kind", "part", "peer", "expert", "place"]].tolist()
        assert len(set(which)) == len(which)
        for actor in range(len(OS_ACTORS)):
            steps = trace.events[trace.processors + actor]
            seen = stats["tokens"] > 0 or OS_ACTORS[actor] != "returns"  # else nothing returns
            assert set(steps["kind"].tolist()) == ({len(TASK_KINDS) + actor} if seen else set())


def test_parts_say_what_they_were_of() -> None:
    results = run(3)
    for trace, stats, _ in results:
        parts = parts_of(trace)
        sent = parts[parts["kind"] == TASK_KINDS.index("dispatch")]
        for peer, rows in enumerate(stats["pairs_sent"]):
            # Of the parts of a chunk, the one that is complete last has its rows.
            to_peer = numpy.sort(sent[sent["peer"] == peer], order=["place", "rows"])
            chunks = [*to_peer["place"].tolist(), -(-rows // trace.chunk_rows)]
            assert numpy.diff(chunks).tolist() == to_peer["rows"].tolist()
            assert chunks[0] == 0
        for kind in ("product0", "product1"):
            products = parts[parts["kind"] == TASK_KINDS.index(kind)]
            tiles = {(e["expert"], e["place"], e["rows"]) for e in products}
            rows = [0] * len(stats["expert_pairs"])
            for expert, _, count in tiles:
                rows[expert] += int(count)
            assert rows == stats["expert_pairs"]
        combined = parts[parts["kind"] == TASK_KINDS.index("combine")]
        assert combined["rows"].sum() == stats["tokens"]
        assert (combined["peer"] == NOBODY).all()
        # Parts hold consecutive tokens in the order in which they became complete; all sent rows.
        combined = numpy.sort(combined, order="place")
        ends = numpy.cumsum(combined["rows"])
        assert combined["place"].tolist() == [0, *ends][: len(combined)]
        assert (combined["part"] == 0).all()
        assert trace.received.sum(axis=1).tolist() == stats["pairs_received"]
        assert trace.received.sum(axis=0).tolist() == stats["expert_pairs"]


def test_each_chunk_of_a_source_that_sends_tokens_once_is_replicated_once() -> None:
    """Ranks 0 and 2 have many rows for each other and for rank 1. Own rows are never replicated,
    and neither is the first chunk of all, which brings all of its rows.
    """
    results = run(3)
    parts = [parts_of(trace) for trace, _, _ in results]
    for rank, (trace, stats, _) in enumerate(results):
        copies = parts[rank][parts[rank]["kind"] == TASK_KINDS.index("replicate")]
        assert (copies["rows"] == 1).all()
        for source, received in enumerate(stats["pairs_received"]):
            chunks = -(-received // trace.chunk_rows) if source != rank else 0
            of_source = copies[copies["peer"] == source]
            assert sorted(of_source["place"].tolist()) == list(range(1, chunks))
            sent = parts[source][parts[source]["kind"] == TASK_KINDS.index("dispatch")]
            went = int(sent["carried"][sent["peer"] == rank].sum())
            assert went == results[source][1]["rows_sent"][rank]
            # What did not cross the link was copied here.
            assert went + of_source["carried"].sum() == received
        couriers = [TASK_KINDS.index(kind) for kind in ("dispatch", "replicate")]
        assert not parts[rank]["carried"][~numpy.isin(parts[rank]["kind"], couriers)].any()
    assert any(stats["rows_sent"] != stats["pairs_sent"] for _, stats, _ in results)


def test_nothing_is_replicated_between_nodes() -> None:
    results = run(4, ranks_per_node=2)
    for rank, (trace, _, _) in enumerate(results):
        parts = parts_of(trace)
        sources = parts["peer"][parts["kind"] == TASK_KINDS.index("replicate")]
        assert set(sources.tolist()) <= {rank ^ 1}
    assert any(stats["tasks"]["replicate"] for _, stats, _ in results)


def test_times_are_ordered_and_a_processor_does_one_part_at_a_time() -> None:
    for trace, _, _ in run(3):
        for events in trace.events[: trace.processors]:
            begin, end = events["begin_ns"].astype(int), events["end_ns"].astype(int)
            assert (begin + events["computed"] <= begin + events["stored"]).all()
            assert (begin + events["stored"] <= end).all()
            assert (end[:-1] <= begin[1:]).all()
        for events in trace.events[trace.processors :]:
            assert (events["begin_ns"] <= events["end_ns"]).all()


def test_a_trace_holds_the_last_call_alone() -> None:
    (first, _, _), (third, stats, _) = (run(1, calls=calls)[0] for calls in (1, 3))
    assert len(parts_of(third)) == sum(stats["tasks"].values())
    assert parts_of(first)["end_ns"].max() < parts_of(third)["begin_ns"].min()


def test_tracing_changes_no_result() -> None:
    traced, untraced = run(3), virtual.run(untraced_outputs, 3, twin=SEVERAL)
    for (_, _, y), expected in zip(traced, untraced, strict=True):
        assert y.equal(expected)


def untraced_outputs(world: World) -> Tensor:
    layer = draw_weights(CFG).layer(world)
    for number in range(2):
        y = draw_call(CFG, (300, 0, 77)[world.rank], number + 7 * world.rank)(layer)
    return y


def test_events_without_room_are_counted_and_the_first_are_kept() -> None:
    twin = TwinOptions(processors=1)
    [(whole, stats, _)] = run(1, twin=twin)
    [(cut, cut_stats, _)] = run(1, twin=twin, events=5)
    assert len(cut.events[0]) == 5
    assert len(whole.events[0]) == sum(stats["tasks"].values())
    assert cut.dropped[0] == sum(cut_stats["tasks"].values()) - 5 > 0
    assert all(len(events) <= 5 for events in cut.events)
    # One processor begins every call alike, with Route.
    assert cut.events[0]["kind"].tolist() == whole.events[0]["kind"][:5].tolist()
    assert (cut.events[0]["begin_ns"][1:] >= cut.events[0]["end_ns"][:-1]).all()


def test_what_was_noted_and_what_found_no_room_are_told_apart() -> None:
    events = numpy.zeros((2, 3), EVENT)
    events["part"] = [[0, 1, 2], [3, 4, 5]]
    trace = tracing.read(1, numpy.array([5, 2], numpy.uint32), events, [[1, 2]], 32)
    assert [noted["part"].tolist() for noted in trace.events] == [[0, 1, 2], [3, 4]]
    assert trace.dropped == [2, 0]
    events["part"] = 9
    assert trace.events[0]["part"].tolist() == [0, 1, 2]  # a copy: the next call writes there


def test_a_layer_of_a_world_without_events_says_how_to_get_them() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world)
        with pytest.raises(RuntimeError, match=r"rank 1 does: .*moeos\.init\(\.\.\., trace_ev"):
            layer.trace()

    virtual.run(lambda world: rank_main(world) if world.rank == 1 else MoELayer(CFG, world), 2)


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        (-1, ValueError, "trace_events is -1; allowed: 0 to 65536"),
        (MAX_EVENTS + 1, ValueError, "trace_events is 65537; allowed: 0 to 65536"),
        (True, TypeError, "trace_events is True; it must be an integer"),
        (8.0, TypeError, "trace_events is 8.0; it must be an integer"),
    ],
)
def test_a_number_of_events_that_cannot_be_is_refused(
    events: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        moeos.init("twin", trace_events=events)
    with pytest.raises(error, match=message):
        virtual.run(lambda world: None, 1, trace_events=events)


def test_a_call_without_tokens_or_rows_has_a_trace() -> None:
    """Nobody sends a row; a token without experts is combined by a part of its own."""
    weights = draw_weights(CFG)

    def rank_main(world: World) -> Traced:
        layer = weights.layer(world)
        call = draw_given_call(CFG, 20 * world.rank, world.rank, unused=1.0)
        y = Call(call.x, call.ids, call.weights)(layer)
        return layer.trace(), layer.stats(), y

    for trace, stats, _ in virtual.run(rank_main, 2, trace_events=64):
        parts = parts_of(trace)
        assert len(parts) == sum(stats["tasks"].values())
        combined = parts[parts["kind"] == TASK_KINDS.index("combine")]
        assert combined["rows"].sum() == parts["rows"].sum() == stats["tokens"]
        assert (combined["place"] == NOBODY).all()
        assert stats["tasks"]["product0"] == 0
