# SPDX-License-Identifier: Apache-2.0
"""Experts in slices on several GPUs: `torchrun --nproc-per-node 2 -m tests.gpu.slices`.

Every rank draws the whole layer and the same tokens, and compares its outputs with the float64
reference. `test_slices.py` starts it where there are several GPUs.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import moeos
from moeos import MoEConfig, World
from moeos.cli.shared import process_group
from moeos.partition.slicing import Output, Slicing
from tests.gpu.cases import (
    DEADLINE,
    assert_matches,
    call_on_gpu,
    draw_routed_call,
    draw_weights_on_gpu,
    on_gpu,
)
from tests.layers import Call, Weights, config, draw_given_call, draw_weights

CALLS = 300
ROWS_AT_ONCE = 128
CFG = config(
    **{"dtype": torch.bfloat16, "hidden": 1024, "intermediate": 1024, "experts": 32, "top_k": 4},
    **{"max_tokens": 2048, "bias": True},
)
LAYERS = {
    "plain": CFG,
    "shared experts": dataclasses.replace(
        CFG, shared_experts=1, shared_intermediate=512, shared_gate=True
    ),
    "FP8": dataclasses.replace(
        CFG, bias=False, weight_format="fp8_block128", activation_format="fp8_group128"
    ),
}
TOKENS = (2048, 1, 8, 0, 131, 700)


def main() -> None:
    """Runs every check; all ranks run the same ones."""
    with moeos.init("cuda", deadline=DEADLINE) as world:
        for name, cfg in LAYERS.items():
            check(name, cfg, world)
        check_graphs(world)
        with process_group.over(world):
            check_policies(world)
        if world.rank == 0:
            print("slices are right", flush=True)


def calls_of(weights: Weights) -> list[Call]:
    """The same on all ranks: routed by the layer, and by the caller."""
    calls = [draw_routed_call(weights, tokens, tokens) for tokens in TOKENS]
    given = [draw_given_call(weights.cfg, tokens, tokens, unused=0.3) for tokens in (3, 600)]
    return calls + [call_on_gpu(call) for call in given]


def check(name: str, cfg: MoEConfig, world: World) -> None:
    """A layer with either output is the reference's, and the same in all runs."""
    weights = on_gpu(draw_weights(cfg))
    calls = calls_of(weights)
    outputs: tuple[Output, ...] = ("replicated", "scattered")
    for output in outputs:
        layer = weights.layer(world, parallel="tensor", output=output)
        slicing = Slicing(world.size, everywhere=output == "replicated")
        for call in calls:
            layer.check_inputs(call.x, call.ids, call.weights)
            y = layer(call.x, call.ids, call.weights)
            layer.check()
            mine = slicing.tokens_of(world.rank, len(call.x))
            what = f"{name}, {output}, {len(call.x)} tokens"
            assert y.shape == (len(mine), cfg.hidden), what
            every = gathered(world, y, len(call.x), what)
            if output == "replicated":
                assert all(torch.equal(other, every[0]) for other in every), what
                every = every[:1]
            whole = torch.cat(every)
            assert_matches(weights, call, whole.to(call.x.device), what)
        first = layer(calls[0].x)
        for _ in range(CALLS):  # back to back, few and many tokens
            layer(calls[1].x)
            again = layer(calls[0].x)
        layer.check()
        assert torch.equal(again, first), f"{name}, {output}"
    with pytest.raises(ValueError, match="differ from those of rank 0"):
        layer.check_inputs(calls[0].x + world.rank)


def gathered(world: World, y: Tensor, most: int, what: str) -> list[Tensor]:
    """The outputs of all ranks, of up to `most` rows, in pieces that the control plane takes."""
    pieces = [
        world.control.allgather(y[first : first + ROWS_AT_ONCE].cpu(), what)
        for first in range(0, max(1, most), ROWS_AT_ONCE)
    ]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def check_policies(world: World) -> None:
    """Sums are right that torch.distributed adds up, also in a graph; layouts have equal bits."""
    weights = draw_weights_on_gpu(CFG)
    after = weights.layer(world, parallel="tensor", reduce="after")
    fused = weights.layer(world, parallel="tensor", reduce="fused")
    copied = weights.layer(world, parallel="tensor", layout="expert_major_persistent")
    for call in calls_of(weights):
        given = (call.x, call.ids, call.weights)
        y, z = after(*given), fused(*given)
        after.check()
        what = f"after, {len(call.x)} tokens"
        every = gathered(world, y, len(call.x), what)
        assert all(torch.equal(other, every[0]) for other in every), what
        assert_matches(weights, call, y, what)
        assert torch.equal(copied(*given), z), f"layouts, {len(call.x)} tokens"
    call, other = (draw_routed_call(weights, 64, seed) for seed in (1, 2))
    x = call.x.clone()
    after(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = after(x)
    for drawn in (other, call):
        x.copy_(drawn.x)
        graph.replay()
        torch.cuda.synchronize()
        assert_matches(weights, drawn, y, "a replay of a call and its all-reduce")
    small = dataclasses.replace(CFG, max_tokens=8)
    few = draw_weights_on_gpu(small)
    in_place = few.layer(world, parallel="tensor", layout="gathered")
    for tokens in (8, 1, 0):
        call = draw_routed_call(few, tokens, tokens)
        assert_matches(few, call, in_place(call.x), f"gathered, {tokens} tokens")


def check_graphs(world: World) -> None:
    """A captured call is replayed with other tokens."""
    weights = draw_weights_on_gpu(CFG)
    layer = weights.layer(world, parallel="tensor")
    call, other = (draw_routed_call(weights, 64, seed) for seed in (1, 2))
    x = call.x.clone()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for given in (other, call):
        x.copy_(given.x)
        graph.replay()
        torch.cuda.synchronize()
        assert_matches(weights, given, y, "a replay")
    layer.check()


if __name__ == "__main__":
    main()
