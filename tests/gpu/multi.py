# SPDX-License-Identifier: Apache-2.0
"""A layer on several GPUs, one process each: `torchrun --nproc-per-node 4 -m tests.gpu.multi`.

Also under mpirun and srun. Every rank draws the weights of all experts and compares its outputs
with the float64 reference; a rank whose check fails ends all of them with its error.
`test_multi.py` starts it where there are several GPUs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

import moeos
from moeos import MoEConfig, NumericalError, World
from moeos.config import reference, sizes
from tests.gpu.cases import (
    DEADLINE,
    LARGE_EXPERTS,
    RankLayer,
    assert_matches,
    call_on_gpu,
    draw_routed_call,
    draw_weights_on_gpu,
)
from tests.gradients import OF_EXPERTS, drawn, expected_of, found_of, leaves_of
from tests.gradients import TOLERANCE as GRADIENT_TOLERANCES
from tests.layers import PREFERENCES, Call, Weights, config, draw_given_call, draw_weights

INPUTS = 61
"""Different calls of a rank among the many; a prime, so that ranks meet in many combinations."""
LONGEST_PAUSE = 200_000  # clock cycles that a rank's stream sleeps between some calls

LARGE = config(
    dtype=torch.bfloat16, hidden=2048, intermediate=768, experts=128, top_k=8, max_tokens=512
)
OTHERS = {
    "gelu, capacity, biases": config(
        dtype=torch.float16,
        activation="gelu",
        hidden=512,
        intermediate=384,
        experts=32,
        top_k=4,
        max_tokens=300,
        capacity_factor=0.8,
        bias=True,
    ),
    "groups, sigmoid, selection bias": config(
        dtype=torch.bfloat16,
        hidden=256,
        intermediate=200,
        experts=64,
        top_k=6,
        max_tokens=300,
        scoring="sigmoid",
        selection_bias=True,
        expert_groups=8,
        top_groups=3,
        routed_scaling=2.5,
        swiglu_limit=0.5,
    ),
    "large experts": config(dtype=torch.bfloat16, experts=8, **LARGE_EXPERTS),
}
UNEVEN = config(
    dtype=torch.bfloat16, hidden=512, intermediate=384, experts=16, top_k=2, max_tokens=4096
)
POPULAR = -2.0 * torch.arange(1, UNEVEN.experts + 1).log()
"""By Zipf's law with 2.0: nearly all rows of all ranks are for the first one's experts."""

GRADIENTS = config(
    dtype=torch.bfloat16,
    hidden=512,
    intermediate=384,
    experts=32,
    top_k=4,
    max_tokens=300,
    bias=True,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every check in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="of the long check")
    parser.add_argument("--ranks-per-node", type=int, help="1: every peer is put to")
    options = parser.parse_args(arguments)
    calls, nodes = options.calls, options.ranks_per_node
    with moeos.init("cuda", deadline=DEADLINE, ranks_per_node=nodes) as world:
        for name, cfg in {"swiglu": LARGE, **OTHERS}.items():
            began = time.monotonic()
            check_routings(world, cfg)
            say(world, f"{name}: every routing is right", began)
        began = time.monotonic()
        check_two_layers(world, *OTHERS.values())
        say(world, "two layers in turn on one stream are right", began)
        if world.size > 1:
            began = time.monotonic()
            check_different_layers(world, *OTHERS.values())
            say(world, "ranks that call different layers are told both, until reset", began)
        if nodes is None:
            began = time.monotonic()
            check_gradients(world, GRADIENTS)
            say(world, "gradients are right", began)
        began = time.monotonic()
        check_recovery(world, LARGE)
        say(world, "logits that are not finite end a call on all ranks, until reset", began)
        began = time.monotonic()
        check_many_calls(world, LARGE, calls)
        say(world, f"{calls} calls back to back are right, bit for bit", began)
        if world.size > 1:
            began = time.monotonic()
            with few_places():
                check_many_calls(world, UNEVEN, calls, POPULAR)
            say(world, f"{calls} calls that use places in turn are right, bit for bit", began)


def few_places() -> mock._patch[int]:
    """Layers made in it have places between the products for the rows of even routing, and no more.

    Else two ranks have a place for each row, and four use them in turn in the rarest calls alone.
    `tests/host/compile/test_kernel_shape.py` holds that calls of `UNEVEN` by `POPULAR` have more
    rows.
    """
    return mock.patch.object(sizes, "_BETWEEN_SHARES", 1)


def say(world: World, what: str, began: float) -> None:
    """Rank 0 tells that all ranks have got here."""
    world.control.barrier()
    if world.rank == 0:
        print(f"{world.size} ranks: {what} ({time.monotonic() - began:.1f} s)", flush=True)


def check_routings(world: World, cfg: MoEConfig) -> None:
    """Every routing, and token counts that differ by rank, with poisoned rows."""
    weights = draw_weights_on_gpu(cfg)
    layer = RankLayer(weights, world)
    counts = (cfg.max_tokens, 37, 0, 1, 128, 129)
    for number in range(len(counts)):
        tokens = counts[(number + world.rank) % len(counts)]
        call = draw_routed_call(weights, tokens, 100 * world.rank + number)
        layer.poison()
        assert_matches(weights, call, layer(call), f"rank {world.rank}, {tokens} tokens")
    for name, preference in PREFERENCES.items():
        popular = preference(cfg.experts, world.size)
        call = call_on_gpu(draw_given_call(cfg, cfg.max_tokens, world.rank, popular))
        layer.poison()
        assert_matches(weights, call, layer(call), f"rank {world.rank}, {name}")
    layer.engine.check()


def check_two_layers(world: World, *configs: MoEConfig) -> None:
    """Layers that take turns on one stream, back to back."""
    pairs = []
    for cfg in configs:
        weights = draw_weights_on_gpu(cfg)
        call = draw_routed_call(weights, cfg.max_tokens - 11 * world.rank, world.rank)
        pairs.append((weights, RankLayer(weights, world), call))
    outputs = [layer(call) for _ in range(50) for _, layer, call in pairs]
    for place, (weights, layer, call) in enumerate(pairs):
        layer.engine.check()
        mine = outputs[place :: len(pairs)]
        assert_matches(weights, call, mine[0], f"rank {world.rank}, layer {place}")
        assert all(torch.equal(y, mine[0]) for y in mine)


def check_different_layers(world: World, *configs: MoEConfig) -> None:
    """The last rank calls another layer than the others, with another kernel."""
    weights = [draw_weights_on_gpu(cfg) for cfg in configs]
    layers = [RankLayer(each, world) for each in weights]
    calls = [draw_routed_call(each, 100 + world.rank, world.rank) for each in weights]
    mine = int(world.rank == world.size - 1)
    layers[mine](calls[mine])
    with pytest.raises(RuntimeError, match="the ranks call different layers") as raised:
        layers[mine].engine.check()
    assert all(f"layer {layer.engine.number}" in str(raised.value) for layer in layers[:2])
    world.reset()
    for each, layer, call in zip(weights, layers, calls, strict=True):
        assert_matches(each, call, layer(call), f"rank {world.rank}, after the reset")
        layer.engine.check()


def check_gradients(world: World, cfg: MoEConfig) -> None:
    """Of calls with other token counts on each rank, in turn with forward calls."""
    weights = draw_weights(cfg)
    layer = weights.layer(world).requires_grad_()
    counts = (cfg.max_tokens, 37, 0, 1)
    for number in range(len(counts)):
        every = [
            draw_given_call(cfg, counts[(number + rank) % len(counts)], 100 * rank + number)
            for rank in range(world.size)
        ]
        layer.zero_grad()
        mine = leaves_of(call_on_gpu(every[world.rank]))
        y = mine(layer)
        with torch.no_grad():
            mine(layer)
        y.backward(drawn(every[world.rank], world.rank).cuda())
        with torch.no_grad():
            mine(layer)
        found = {name: gradient.cpu() for name, gradient in found_of(mine, layer).items()}
        expected = expected_of(weights, every)[world.rank]
        for name in ("x", "topk_weights", *OF_EXPERTS):
            error = reference.relative_error(found[name], expected[name])
            assert error <= GRADIENT_TOLERANCES[cfg.dtype], (
                f"rank {world.rank}, {name}: error {error:.2e}"
            )
    layer.check()


def check_recovery(world: World, cfg: MoEConfig) -> None:
    """One rank's bad token ends the call everywhere; after a reset calls are right again."""
    weights = draw_weights_on_gpu(cfg)
    layer = RankLayer(weights, world)
    good = draw_routed_call(weights, 200, world.rank)
    bad = Call(good.x.clone())
    culprit = world.size - 1
    if world.rank == culprit:
        bad.x[131, 5] = torch.nan
    layer(bad)
    with pytest.raises(NumericalError, match=f"token 131 on rank {culprit}"):
        layer.engine.check()
    world.reset()
    assert_matches(weights, good, layer(good), f"rank {world.rank}, after the reset")


def check_many_calls(
    world: World, cfg: MoEConfig, calls: int, popular: torch.Tensor | None = None
) -> None:
    """Calls without a barrier, whose token counts change every time. The gate routes them, or
    `popular` does, as in `draw_given_call`.

    An output depends on the rank's own tokens alone, bit for bit, whatever the peers send. So each
    output is compared on the GPU with the first one of the same input, and these with the
    reference in the end.
    """
    weights = draw_weights_on_gpu(cfg)
    layer = RankLayer(weights, world)
    drawn = random.Random(world.rank)
    inputs = draw_inputs(weights, drawn, world.rank, popular)
    firsts: list[torch.Tensor | None] = [None] * INPUTS
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(calls):
        place = drawn.randrange(INPUTS)
        if drawn.random() < 0.01:
            torch.cuda._sleep(drawn.randrange(LONGEST_PAUSE))
        y = layer(inputs[place])
        first = firsts[place]
        if first is None:
            firsts[place] = y
        else:
            wrong += (y != first).any()
    layer.engine.check()
    assert int(wrong) == 0, f"rank {world.rank}: {int(wrong)} of {calls} outputs differ"
    for place, first in enumerate(firsts):
        if first is not None:
            assert_matches(weights, inputs[place], first, f"rank {world.rank}, input {place}")


def draw_inputs(
    weights: Weights, drawn: random.Random, rank: int, popular: torch.Tensor | None
) -> list[Call]:
    """Calls with 0, 1 and other numbers of tokens up to the most."""
    most = weights.cfg.max_tokens
    counts = [0, 1, most, *(drawn.randrange(most) for _ in range(INPUTS - 3))]
    if popular is None:
        return [draw_routed_call(weights, n, 1000 * rank + i) for i, n in enumerate(counts)]
    return [
        call_on_gpu(draw_given_call(weights.cfg, n, 1000 * rank + i, popular))
        for i, n in enumerate(counts)
    ]


if __name__ == "__main__":
    main()
