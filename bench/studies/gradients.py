# SPDX-License-Identifier: Apache-2.0
"""What a layer's backward costs, beside autograd of torch._grouped_mm.

    python -m bench.studies.gradients --out FILE CONFIG ...

Each CONFIG is a layer's TOML file. Two contestants have the same routing and weights, and make the
gradients of x, of its experts' weights, and of w1 and w2: the layer; and, on one GPU, PyTorch,
which keeps all that its forward made. Forward calls are timed apart. Rates count two products for
each of the forward's, whatever is computed again. It times and compares; whether the values are
right is the tests' affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moeos
from bench.gpu.in_turn import InTurn
from bench.studies import grouped, options

TOKENS = (512, 2048, 8192)
AGREES = 0.03
"""Relative distance that the gradients of both may have: each rounds to BF16 on its way."""


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one layer. Collective."""
    layer = moeos.MoELayer(cfg, world)
    counts = [count for count in TOKENS if count <= cfg.max_tokens]
    return [_measure_tokens(layer, tokens, world, clock) for tokens in counts]


def _measure_tokens(
    layer: moeos.MoELayer, tokens: int, world: moeos.World, clock: InTurn
) -> dict[str, Any]:
    cfg = layer.cfg
    generator = torch.Generator("cuda").manual_seed(1000 * tokens + world.rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    x = draw(tokens, cfg.hidden).to(cfg.dtype).requires_grad_()
    d_out = draw(tokens, cfg.hidden).to(cfg.dtype)
    ids = draw(tokens, cfg.experts).topk(cfg.top_k, dim=1).indices
    weights = draw(tokens, cfg.top_k).softmax(dim=1).requires_grad_()
    wanted = (x, weights, layer.w1, layer.w2)

    def ours() -> Tensor:
        y: Tensor = layer(x, topk_ids=ids, topk_weights=weights)
        return y

    def backward_of(forward: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        with torch.enable_grad():
            y = forward()
        return lambda: torch.autograd.grad(y, wanted, d_out, retain_graph=True)

    ways = {"layer": backward_of(ours)}
    if world.size == 1 and cfg.activation == "swiglu" and not cfg.bias:
        ways["grouped_mm"] = backward_of(
            lambda: grouped.experts(x, ids, weights, layer.w1, layer.w2)
        )
    distances = _distances([way() for way in ways.values()])
    if any(distance > AGREES for distance in distances):
        raise ValueError(f"rank {world.rank}: relative distances {distances} at {tokens} tokens")
    times = options.timed(clock, tokens, ways)
    matrices = 3 if cfg.gated else 2
    flops = 2 * 2 * matrices * tokens * cfg.top_k * cfg.hidden * cfg.intermediate
    rates = {name: flops / time["median"] / 1e12 for name, time in times.items()}
    if world.rank == 0:
        shown = {name: f"{time['median'] * 1e3:.3f} ms" for name, time in times.items()}
        print(f"{tokens} tokens: {shown}, TFLOP/s of a GPU: {rates}", flush=True)
    return {
        "tokens": tokens,
        "distances": distances,
        "seconds": times,
        "tflops": rates,
        "forward_seconds": options.timed(clock, tokens, {"layer": ours}),
    }


def _distances(made: list[tuple[Tensor, ...]]) -> list[float]:
    """Of the first one's gradients from the last one's."""
    first, last = made[0], made[-1]
    return [
        float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))
        for one, other in zip(first, last, strict=True)
    ]


if __name__ == "__main__":
    options.run("gradients", __doc__, measure)
