# SPDX-License-Identifier: Apache-2.0
"""Arguments as users have them, on the GPU: shapes and strides, outputs, pieces, experts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import moeos
from moeos import Experts, MoELayer, World
from moeos.world import virtual
from tests.gpu.cases import CASES, DEADLINE, assert_matches, call_on_gpu, on_gpu, why_not
from tests.layers import PREFERENCES, Call, Weights, draw_call, draw_given_call, draw_weights

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

CFG = CASES["swiglu-1-rank"].cfg
WEIGHTS = draw_weights(CFG)
ON_TWO = CASES["identity-2-ranks"].cfg
ROWS = 120


def on_ranks(function: Callable[[World], None], ranks: int = 1) -> None:
    virtual.run(function, ranks=ranks, backend="cuda", deadline=DEADLINE)


def own_of(layer: MoELayer) -> dict[str, Tensor | None]:
    """The weights of a layer's experts, as `Experts` takes them."""
    return {name: getattr(layer, name) for name in ("w1", "w2", "b1", "b2")}


def right(call: Call, y: Tensor, what: str, weights: Weights = WEIGHTS) -> None:
    assert_matches(on_gpu(weights), call, y.reshape(call.x.shape), what)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch and sequence": lambda x: x.view(4, -1, x.shape[1]),
    "transposed": lambda x: x.T.contiguous().T,
    "gaps": lambda x: torch.stack([x, x + 1], dim=1)[:, 0],
    "sequence first": lambda x: x.view(4, -1, x.shape[1]).transpose(0, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_x_of_any_shape_and_strides_is_right(shape: str) -> None:
    def rank_main(world: World) -> None:
        layer, experts = WEIGHTS.layer(world), Experts(CFG, world)
        call = call_on_gpu(draw_given_call(CFG, ROWS, 0))
        x = SHAPES[shape](call.x)
        same = dataclasses.replace(call, x=x.reshape(call.x.shape))
        for y in (
            layer(x, call.ids, call.weights),
            experts(x, call.ids, call.weights, **own_of(layer)),
        ):
            assert y.shape == x.shape
            right(same, y, shape)
        right(Call(same.x), layer(x), "routed")
        layer.check()

    on_ranks(rank_main)


def test_the_output_is_written_to_out() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = call_on_gpu(draw_call(CFG, ROWS, 0))
        room = torch.full((ROWS + 4, CFG.hidden), torch.nan, dtype=CFG.dtype, device="cuda")
        out = room[2:-2]
        assert layer(call.x, out=out) is out
        right(call, out, "out")
        assert room[:2].isnan().all()
        assert room[-2:].isnan().all()
        with pytest.raises(ValueError, match="out shares memory with x"):
            layer(call.x, out=call.x)
        odd = room.flatten()[1 : 1 + ROWS * CFG.hidden].view(ROWS, -1)
        with pytest.raises(ValueError, match=r"out lies at address .* multiple of 16"):
            layer(call.x, out=odd)
        right(call, layer(call.x), "behind the errors")

    on_ranks(rank_main)


@pytest.mark.parametrize("kind", ["uniform", "one-expert", "empty-rank"])
def test_a_long_call_in_pieces_is_right(kind: str) -> None:
    weights = draw_weights(ON_TWO)
    most = ON_TWO.max_tokens
    rows = ((3 * most, 0, most + 1), (2, 2 * most, 3 * most - 7))
    preference = PREFERENCES[kind](ON_TWO.experts, 2)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        for number, count in enumerate(rows[world.rank]):
            seed = 2 * number + world.rank
            call = call_on_gpu(draw_given_call(ON_TWO, count, seed, preference))
            y = layer(call.x, call.ids, call.weights, pieces=3)
            right(call, y, f"rank {world.rank}, call {number}", weights)
            tokens = torch.tensor([count // 2], dtype=torch.int32, device="cuda")
            y = layer(call.x, call.ids, call.weights, tokens=tokens, pieces=3)
            assert not y[count // 2 :].any()
            layer.check()

    on_ranks(rank_main, ranks=2)


@pytest.mark.parametrize("bad", ["an id", "tokens"])
def test_what_is_wrong_in_a_later_piece_is_found_by_the_kernel(bad: str) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = call_on_gpu(draw_given_call(CFG, 2 * CFG.max_tokens, 0))
        assert call.ids is not None
        tokens = None
        if bad == "an id":
            call.ids[-1, 0] = CFG.experts
        else:
            tokens = torch.tensor([len(call.x) + 1], dtype=torch.int32, device="cuda")
        layer(call.x, call.ids, call.weights, tokens=tokens, pieces=2)
        with pytest.raises(ValueError, match="topk_ids" if bad == "an id" else "tokens"):
            layer.check()
        layer.reset()

    on_ranks(rank_main)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_ids_that_are_no_experts_are_unused_slots_of_experts(ids: torch.dtype) -> None:
    def rank_main(world: World) -> None:
        layer, experts = WEIGHTS.layer(world), Experts(CFG, world)
        call = call_on_gpu(draw_given_call(CFG, ROWS, 0))
        assert call.ids is not None
        strange = call.ids.to(ids)
        outside = torch.tensor([-2, CFG.experts, -(1 << 31), (1 << 31) - 1], device="cuda").to(ids)
        fill = outside[torch.arange(strange.numel(), device="cuda").view_as(strange) % 4]
        strange = torch.where(strange < 0, fill, strange)
        right(call, experts(call.x, strange, call.weights, **own_of(layer)), "experts")
        experts.check()
        layer(call.x, strange, call.weights)
        with pytest.raises(ValueError, match=r"topk_ids\["):
            layer.check()
        layer.reset()

    on_ranks(rank_main)


def test_experts_take_other_weights_in_each_call_and_from_a_graph() -> None:
    all_weights = [draw_weights(CFG, seed) for seed in range(3)]

    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        layers = [weights.layer(world) for weights in all_weights]
        call = call_on_gpu(draw_given_call(CFG, ROWS, 0))
        assert call.ids is not None
        assert call.weights is not None
        graph = torch.cuda.CUDAGraph()
        captured = []
        with torch.cuda.graph(graph):
            for layer in layers:
                captured.append(experts(call.x, call.ids, call.weights, **own_of(layer)))
        for _ in range(2):
            graph.replay()
            for weights, layer, y in zip(all_weights, layers, captured, strict=True):
                right(call, y, "captured", weights)
                y.fill_(torch.nan)
                at_once = experts(call.x, call.ids, call.weights, **own_of(layer))
                right(call, at_once, "at once", weights)
        experts.check()

    on_ranks(rank_main)


def test_a_captured_call_in_pieces_writes_to_its_output_and_reads_tokens_at_each_replay() -> None:
    most = CFG.max_tokens

    def rank_main(world: World) -> None:
        layer, experts = WEIGHTS.layer(world), Experts(CFG, world)
        call = call_on_gpu(draw_given_call(CFG, 3 * most - 5, 0))
        assert call.ids is not None
        assert call.weights is not None
        tokens = torch.tensor([len(call.x)], dtype=torch.int32, device="cuda")
        outs = [torch.empty_like(call.x) for _ in range(2)]
        arguments = (call.x, call.ids, call.weights)
        how = {"tokens": tokens, "pieces": 4}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(*arguments, out=outs[0], **how)
            experts(*arguments, **own_of(layer), out=outs[1], **how)
        for count in (len(call.x), most, most + 1, 0, 2 * most - 1):
            tokens.fill_(count)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            some = Call(call.x[:count], call.ids[:count], call.weights[:count])
            for out in outs:
                right(some, out[:count], f"{count} tokens")
                assert not out[count:].any()
        layer.check()

    on_ranks(rank_main)


def test_inference_mode_and_autocast_are_right() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = call_on_gpu(draw_call(CFG, ROWS, 0))
        with torch.inference_mode():
            right(call, layer(call.x.clone()), "inference mode")
        with torch.autocast("cuda", torch.float16):
            right(call, layer(call.x.float()), "autocast")

    on_ranks(rank_main)


@pytest.mark.parametrize("what", ["a layer", "experts", "pieces", "an output"])
def test_graphs_that_the_compiler_records_are_right(what: str) -> None:
    """Prints why there is no graph, where there is none. In the main thread: in others PyTorch
    cannot record them.
    """
    torch._dynamo.reset()
    counters.clear()
    with moeos.init(backend="cuda", deadline=DEADLINE) as world, torch.no_grad():
        layer, experts = WEIGHTS.layer(world), Experts(CFG, world)

        def program(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
            if what == "experts":
                y = experts(x * 1, ids, weights, **own_of(layer))
            elif what == "pieces":
                y = layer(x * 1, ids, weights, pieces=2)
            elif what == "an output":
                y = layer(x * 1, ids, weights, out=out)
            else:
                y = layer(x * 1, ids, weights)
            return y + 0

        traced = torch.compile(program, fullgraph=True, mode="reduce-overhead")
        for seed in range(6):
            call = call_on_gpu(draw_given_call(CFG, ROWS, seed))
            out = torch.full_like(call.x, torch.nan)
            torch.compiler.cudagraph_mark_step_begin()
            y = traced(call.x, call.ids, call.weights, out).clone()
            right(call, y, f"run {seed}")
            if what == "an output":
                right(call, out, f"the output of run {seed}")
        layer.check()
        print(what, dict(counters["inductor"]))
        if what != "an output":  # which PyTorch does not record, since an input is written
            assert counters["inductor"]["cudagraph_skips"] == 0
