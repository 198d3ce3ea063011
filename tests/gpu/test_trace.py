# SPDX-License-Identifier: Apache-2.0
"""A traced kernel computes the same bits, and its events are the call that it made; which one that
is, and what it finds in the cache.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from torch import Tensor

from moeos import MoELayer, World
from moeos.cli.shared import device_reader
from moeos.cli.timeline import causes, chrome
from moeos.cli.timeline.call import MOMENTS, NONE, CallTrace
from moeos.engines.base import CallStats
from moeos.engines.cuda import clock as cuda_clock
from moeos.world import virtual
from moeos.world.tracing import OS_ACTORS, TASK_KINDS, RankTrace
from tests.gpu.cases import (
    CASES,
    DEADLINE,
    REMOTE_CASES,
    Case,
    RankLayer,
    call_on_gpu,
    on_gpu,
    why_not,
)
from tests.host.cli import commands
from tests.host.cli.timeline import chrome_format
from tests.layers import draw_call, draw_weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

ROOM = 2048

traced_cases = pytest.mark.parametrize(
    "case",
    [CASES["swiglu-1-rank"], CASES["swiglu-4-ranks"], REMOTE_CASES["swiglu-2-nodes-of-2"]],
    ids=["1 rank", "4 ranks", "2 nodes"],
)


def run(case: Case, events: int) -> list[tuple[list[Tensor], RankTrace | None, CallStats]]:
    """Two calls on each rank: the outputs, the last one's trace where it is noted, and stats."""
    weights = on_gpu(draw_weights(case.cfg))
    calls = [
        [call_on_gpu(draw_call(case.cfg, 300 - 70 * rank, 2 * rank + n)) for n in range(2)]
        for rank in range(case.ranks)
    ]

    def rank_main(world: World) -> tuple[list[Tensor], RankTrace | None, CallStats]:
        layer = RankLayer(weights, world)
        outputs = [layer(call) for call in calls[world.rank]]
        layer.engine.check()
        trace = layer.engine.trace() if events else None
        return outputs, trace, layer.engine.stats()

    return virtual.run(
        rank_main,
        ranks=case.ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=case.ranks_per_node,
        trace_events=events,
    )


def traces_of(results: list[tuple[Any, RankTrace | None, CallStats]]) -> list[RankTrace]:
    return [trace for _, trace, _ in results if trace is not None]


@traced_cases
def test_outputs_are_bitwise_those_of_the_kernel_without_a_trace(case: Case) -> None:
    for (traced, _, _), (plain, _, _) in zip(run(case, ROOM), run(case, 0), strict=True):
        assert all(one.equal(other) for one, other in zip(traced, plain, strict=True))


@traced_cases
def test_every_part_is_there_once_and_its_moments_are_in_order(case: Case) -> None:
    results = run(case, ROOM)
    for trace, (_, _, stats) in zip(traces_of(results), results, strict=True):
        assert len(trace.events) == trace.processors + len(OS_ACTORS)
        assert not any(trace.dropped)
        parts = numpy.concatenate(trace.events[: trace.processors])
        kinds = Counter(TASK_KINDS[kind] for kind in parts["kind"])
        assert {kind: kinds[kind] for kind in TASK_KINDS} == {
            kind: stats.tasks[kind] for kind in TASK_KINDS
        }
        assert parts["rows"][parts["kind"] == TASK_KINDS.index("combine")].sum() == stats.tokens
        which = parts[["kind", "part", "peer", "expert", "place"]].tolist()
        assert len(set(which)) == len(which)
    call = CallTrace.of(traces_of(results))
    for part in call.parts:
        there = [int(part[moment]) for moment in MOMENTS if part[moment] != NONE]
        assert there == sorted(there), part
        if TASK_KINDS[part["kind"]] in ("product0", "product1"):
            assert len(there) == len(MOMENTS), part
    steps = {int(kind) for kind in call.steps["kind"]}
    assert steps == set(range(len(TASK_KINDS), len(TASK_KINDS) + len(OS_ACTORS)))


@traced_cases
def test_no_part_begins_before_its_cause_and_viewers_can_show_the_call(case: Case) -> None:
    call = CallTrace.of(traces_of(run(case, ROOM)))
    found = causes.find(call)
    kinds = numpy.array(TASK_KINDS)[call.parts["kind"]]
    products = numpy.isin(kinds, ["product0", "product1"])
    assert (found.part[kinds != "route"] != NONE).all()
    waits = call.parts["claimed"] - found.since(call.parts)
    assert (waits[products] >= 0).all()
    assert causes.lead(call, found) == {}
    chrome_format.check(chrome.document(call, found, {}))


def test_the_clock_is_found_again_where_it_was() -> None:
    found = [cuda_clock.behind_host() for _ in range(3)]
    assert all(0 < difference.uncertainty < 20_000 for difference in found), found
    first = found[0]
    for other in found[1:]:
        apart = abs(other.nanoseconds - first.nanoseconds)
        assert apart <= first.uncertainty + other.uncertainty + 1000, found


def test_events_without_room_are_counted() -> None:
    case = CASES["swiglu-1-rank"]
    [(_, trace, stats)] = run(case, 1)
    assert trace is not None
    # A processor's list holds its courier's, too.
    assert all(len(events) <= 2 for events in trace.events[: trace.processors])
    assert all(len(events) <= 1 for events in trace.events[trace.processors :])
    noted = sum(len(events) for events in trace.events[: trace.processors])
    lost = sum(trace.dropped[: trace.processors])
    assert noted + lost == sum(stats.tasks.values())


def test_a_cold_trace_empties_the_cache_before_the_last_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "layer.toml"
    config.write_text("hidden = 512\nintermediate = 256\nexperts = 4\ntop_k = 2\nmax_tokens = 64\n")
    forward, flush, order = MoELayer.forward, device_reader.Reader.flush, []

    def called(layer: MoELayer, *arguments: Any) -> Any:
        order.append("call")
        return forward(layer, *arguments)

    def flushed(reader: device_reader.Reader) -> None:
        order.append("flush")
        flush(reader)

    monkeypatch.setattr(MoELayer, "forward", called)
    monkeypatch.setattr(device_reader.Reader, "flush", flushed)
    summary = tmp_path / "summary.json"
    options = ["--backend", "cuda", "--cold", "--calls", 2, "--no-summary", "--json", summary]
    assert commands.invoke("trace", config, *options) == (0, "", "")
    assert order == ["call", "call", "flush", "call"]
    assert json.loads(summary.read_text())["cold"]
