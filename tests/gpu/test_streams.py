# SPDX-License-Identifier: Apache-2.0
"""Calls on several streams of one GPU: each is right, whatever stream it is on."""

from __future__ import annotations

import pytest
import torch

from moeos.world import virtual
from moeos.world.world import World
from tests.gpu.cases import (
    CASES,
    DEADLINE,
    RankLayer,
    assert_matches,
    call_on_gpu,
    draw_routed_call,
    draw_weights_on_gpu,
    why_not,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

CFG = next(case.cfg for case in CASES.values() if not case.faults)


def alone(function: object) -> None:
    virtual.run(function, ranks=1, backend="cuda", deadline=DEADLINE)  # type: ignore[arg-type]


def test_calls_of_two_layers_on_two_streams_in_turn_are_right() -> None:
    def rank_main(world: World) -> None:
        weights = draw_weights_on_gpu(CFG)
        layers = [RankLayer(weights, world) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        calls = [call_on_gpu(draw_routed_call(weights, 64, number)) for number in range(8)]
        torch.cuda.synchronize()
        outputs = []
        for number, call in enumerate(calls):
            with torch.cuda.stream(streams[number % 2]):
                outputs.append(layers[number // 2 % 2](call))
        torch.cuda.synchronize()
        for number, (call, y) in enumerate(zip(calls, outputs, strict=True)):
            assert_matches(weights, call, y, f"call {number}")
        for layer in layers:
            layer.engine.check()

    alone(rank_main)


def test_replays_of_two_graphs_at_once_are_right_or_fail_by_name() -> None:
    def rank_main(world: World) -> None:
        weights = draw_weights_on_gpu(CFG)
        layer = RankLayer(weights, world)
        call = call_on_gpu(draw_routed_call(weights, 64, 1))
        layer(call)
        torch.cuda.synchronize()
        graphs, outputs = [], []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs.append(layer(call))
            graphs.append(graph)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(200):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        failed = ""
        try:
            layer.engine.check()
        except RuntimeError as error:
            failed = str(error)
        if failed:
            assert "two calls of one workspace ran at the same time on rank 0" in failed
            world.reset()
            outputs = [layer(call)]
            torch.cuda.synchronize()
        print(failed or "the replays were not at once")
        for y in outputs:
            assert_matches(weights, call, y, "a replay")
        layer.engine.check()

    alone(rank_main)
