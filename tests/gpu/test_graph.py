# SPDX-License-Identifier: Apache-2.0
"""A call is one kernel on the caller's stream: it captures, and replays with other tokens.

One rank on one GPU, through `MoELayer`, as a user makes the calls.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from moeos import MoELayer, World
from moeos.compile.jit import KERNEL
from moeos.world import virtual
from tests.gpu.cases import CASES, assert_matches, call_on_gpu, on_gpu, why_not
from tests.layers import Call, draw_call, draw_given_call, draw_weights

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

CFG = CASES["swiglu-1-rank"].cfg
WEIGHTS = draw_weights(CFG)
ROWS = CFG.max_tokens
COUNTS = (ROWS, 37, 0, 1, 128, 129, 250)


def on_one_rank(function: Callable[[World], None]) -> None:
    """Runs `function` as the only rank."""
    virtual.run(function, ranks=1, backend="cuda", deadline=10.0)


def assert_is(call: Call, y: Tensor, tokens: int, what: str = "the call") -> None:
    """Asserts that y holds the outputs of the first tokens of a call, and zeros behind them."""
    assert_matches(on_gpu(WEIGHTS), call.first(tokens), y[:tokens], what)
    assert not y[tokens:].any(), what


def capture(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one call and its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function()
    return graph, y


@pytest.mark.parametrize("given", [False, True], ids=["routed", "given"])
def test_a_captured_call_replays_with_other_tokens_routing_and_counts(given: bool) -> None:
    draw = draw_given_call if given else draw_call
    calls = [call_on_gpu(draw(CFG, ROWS, seed)) for seed in range(len(COUNTS))]

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        static = calls[0].each(Tensor.clone)
        count = torch.zeros(1, dtype=torch.int32, device="cuda")
        graph, y = capture(lambda: layer(static.x, static.ids, static.weights, tokens=count))
        for call, tokens in zip(calls, COUNTS, strict=True):
            for mine, other in zip(vars(static).values(), vars(call).values(), strict=True):
                if mine is not None:
                    mine.copy_(other)
            static.x[tokens:] = torch.nan
            if static.ids is not None:
                static.ids[tokens:] = 1 << 40
            count.fill_(tokens)
            y.fill_(torch.nan)
            graph.replay()
            layer.check()
            assert_is(call, y, tokens, f"{tokens} tokens")
            assert layer.stats()["tokens"] == tokens

    on_one_rank(rank_main)


def test_two_layers_interleaved_in_one_graph_and_on_one_stream() -> None:
    others = draw_weights(CFG, 5)
    call = call_on_gpu(draw_call(CFG, 200, 0))

    def rank_main(world: World) -> None:
        one, two = WEIGHTS.layer(world), others.layer(world)

        def program() -> Tensor:
            x = call.x
            for layer in (one, two, one, two, two, one):
                x = layer(x)
            return x

        y = program()
        graph, replayed = capture(program)
        for _ in range(3):
            replayed.fill_(torch.nan)
            graph.replay()
            assert torch.equal(program(), y)
            one.check()
            two.check()
            assert torch.equal(replayed, y)
        x = call.x
        for weights in (WEIGHTS, others, WEIGHTS, others, others, WEIGHTS):
            layer = one if weights is WEIGHTS else two
            x, before = layer(x), x
            assert_matches(on_gpu(weights), Call(before), x, "a layer of the two")
        assert torch.equal(x, y)

    on_one_rank(rank_main)


def test_the_caller_s_stream_orders_a_call_behind_its_input_and_before_the_next_kernel() -> None:
    call = call_on_gpu(draw_call(CFG, 200, 0))

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(call.x)
            torch.cuda._sleep(20_000_000)
            late.copy_(call.x)
            y = layer(late) + 1
        stream.synchronize()
        assert torch.equal(y, layer(call.x) + 1)
        assert_is(call, layer(late), 200)

    on_one_rank(rank_main)


def calls_of_all_kinds(layer: MoELayer) -> dict[str, Callable[[], Tensor]]:
    """Calls with every kind of argument that the kernel takes as it is."""
    call = call_on_gpu(draw_given_call(CFG, 200, 0))
    assert call.ids is not None
    assert call.weights is not None
    x, ids, weights = call.x, call.ids, call.weights
    count = torch.tensor([150], dtype=torch.int32, device="cuda")
    kinds: dict[str, Callable[[], Tensor]] = {
        "routed": lambda: layer(x),
        "a count": lambda: layer(x, tokens=count),
        "a count of no dimension": lambda: layer(x, tokens=count[0]),
    }
    for ids_dtype in (torch.int32, torch.int64):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            given = (ids.to(ids_dtype), weights.to(dtype))
            kinds[f"{ids_dtype}, {dtype}"] = lambda given=given: layer(x, *given)  # type: ignore[misc]
    return kinds


def test_a_call_is_one_kernel_and_waits_for_nothing() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        kinds = calls_of_all_kinds(layer)
        for make in kinds.values():
            make()
        torch.cuda.synchronize()
        for name, make in kinds.items():
            torch.cuda.set_sync_debug_mode("error")
            try:
                with profile(activities=[ProfilerActivity.CUDA]) as trace:
                    make()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            device = [
                event.name for event in trace.events() if event.device_type == DeviceType.CUDA
            ]
            assert device == [KERNEL], f"{name}: {device}"

    on_one_rank(rank_main)


def test_a_call_returns_before_the_stream_has_come_to_it() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        for make in calls_of_all_kinds(layer).values():
            make()
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)
            begun = torch.cuda.Event()
            begun.record()
            make()
            assert not begun.query()

    on_one_rank(rank_main)


def test_routing_of_all_types_and_strides_is_read_as_what_it_is() -> None:
    call = call_on_gpu(draw_given_call(CFG, 200, 0))
    assert call.ids is not None
    assert call.weights is not None
    ids, weights = call.ids, call.weights.bfloat16()  # exact in every type but fp16

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        expected = layer(call.x, ids, weights.float())
        assert_is(Call(call.x, ids, weights.float()), expected, 200)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert torch.equal(layer(call.x, ids.int(), weights.to(dtype)), expected), dtype
        assert torch.equal(layer(call.x, ids.T.contiguous().T, weights.T.contiguous().T), expected)
        halves = weights.half()
        assert torch.equal(layer(call.x, ids, halves), layer(call.x, ids, halves.float()))

    on_one_rank(rank_main)
