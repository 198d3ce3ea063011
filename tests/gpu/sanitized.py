# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer watches: a small layer on virtual ranks, `python -m tests.gpu.sanitized`.

Small, because instrumented memory accesses take a hundred times as long. `test_sanitizer.py` starts
it under the tools.
"""

from __future__ import annotations

import sys

import torch

from moeos import World
from moeos.compile import jit
from moeos.partition.policies import Policy
from moeos.partition.slicing import Slicing
from moeos.world import virtual
from tests.gpu.cases import RankLayer, assert_matches, call_on_gpu, draw_routed_call, on_gpu
from tests.gradients import Gradients, assert_match, drawn, found_of, leaves_of
from tests.layers import Call, config, draw_given_call, draw_weights

DEADLINE = 200.0
"""Seconds: the kernel is slow under a tool."""

CONFIGS = {
    "swiglu": config(dtype=torch.bfloat16, max_tokens=160, bias=True),
    "groups": config(
        dtype=torch.float16,
        activation="gelu",
        max_tokens=96,
        experts=32,
        top_k=4,
        scoring="sigmoid",
        selection_bias=True,
        expert_groups=4,
        top_groups=2,
        capacity_factor=1.0,
    ),
    "fp32_router": config(
        dtype=torch.bfloat16, max_tokens=96, experts=144, hidden=1032, router_dtype=torch.float32
    ),
    "remote": config(dtype=torch.bfloat16, max_tokens=96, capacity_factor=1.5, row_map="capacity"),
    "gathered": config(dtype=torch.bfloat16, max_tokens=160, experts=3),
}
GATHERED = ("gathered",)
"""Whose own rows are read where their tokens are."""
TRAINED = {
    "gated": config(
        dtype=torch.bfloat16,
        max_tokens=96,
        bias=True,
        zero_experts=2,
        top_k=3,
        save="preactivation",
    ),
    "weights on inputs": config(
        dtype=torch.bfloat16,
        max_tokens=96,
        top_k=1,
        scoring="sigmoid",
        renormalize=False,
        apply_router_weight_on_input=True,
    ),
}
"""Of which calls of gradients are watched, too."""
RANKS_PER_NODE = {"remote": 1}
"""Where some peers are remote."""


def main(name: str, ranks: int) -> None:
    """Three calls of each rank: routed by the gate, by the caller, and without tokens on a rank."""
    jit._OPTIONS = (*jit._OPTIONS, "--generate-line-info")  # the tools then name source lines
    cfg = CONFIGS[name]
    weights = on_gpu(draw_weights(cfg))
    slicing = Slicing(policy=Policy(layout="gathered" if name in GATHERED else "auto"))

    def rank_main(world: World) -> None:
        layer = RankLayer(weights, world, slicing)
        most = cfg.max_tokens
        calls: list[Call] = [
            draw_routed_call(weights, most, world.rank),
            call_on_gpu(draw_given_call(cfg, most - 3 * world.rank, world.rank, unused=0.3)),
            draw_routed_call(weights, 5 * world.rank, world.rank),
        ]
        outputs = [layer(call) for call in calls]
        layer.engine.check()
        for number, (call, y) in enumerate(zip(calls, outputs, strict=True)):
            assert_matches(weights, call, y, f"rank {world.rank}, call {number}")

    virtual.run(
        rank_main,
        ranks=ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=RANKS_PER_NODE.get(name),
    )
    print(f"{name} on {ranks} virtual ranks is right", flush=True)


def train(name: str, ranks: int) -> None:
    """A call of each rank, and its backward."""
    jit._OPTIONS = (*jit._OPTIONS, "--generate-line-info")
    cfg = TRAINED[name]
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, cfg.max_tokens - 3 * rank, rank) for rank in range(ranks)]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(call_on_gpu(calls[world.rank]))
        call(layer).backward(drawn(calls[world.rank], world.rank).cuda())
        layer.check()
        return {name: gradient.cpu() for name, gradient in found_of(call, layer).items()}

    assert_match(
        weights, calls, virtual.run(rank_main, ranks=ranks, backend="cuda", deadline=DEADLINE)
    )
    print(f"{name} on {ranks} virtual ranks is right", flush=True)


if __name__ == "__main__":
    (main if sys.argv[1] in CONFIGS else train)(sys.argv[1], int(sys.argv[2]))
