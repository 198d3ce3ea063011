# SPDX-License-Identifier: Apache-2.0
"""What a layer's backward costs, against autograd of torch._grouped_mm.

    torchrun --nproc-per-node 2 -m bench.studies.gradients --out FILE CONFIG ...

Each CONFIG is a layer's TOML file. Two contestants have the same routing and weights, and make the
gradients of x, of its experts' weights, and of w1 and w2: the layer; and, on one GPU, PyTorch,
which keeps all that its forward made. Forward calls are timed apart. Rates count two products for
each of the forward's, whatever is computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import moeos
from bench.studies import options, trained
from bench.study import Case, Study

TOKENS = (512, 2048, 8192)
AGREES = 0.03
"""Relative distance that the gradients of both may have: each rounds to BF16 on its way."""


def make(one: Study, cfg: moeos.MoEConfig) -> options.Measure:
    """A layer's measurement."""
    layer = moeos.MoELayer(cfg, one.world)

    def measure(tokens: int) -> Case:
        generator = torch.Generator("cuda").manual_seed(1000 * tokens + one.world.rank)

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
        if one.world.size == 1 and cfg.activation == "swiglu" and not cfg.bias:
            ways[trained.GROUPED] = backward_of(
                lambda: trained.grouped_experts(x, ids, weights, layer.w1, layer.w2)
            )
        first, *_, last = 2 * [way() for way in ways.values()]
        distances = [
            options.require_alike(one, mine, its, AGREES)
            for mine, its in zip(first, last, strict=True)
        ]
        times = one.timed(ways, tokens)
        flops = 2 * trained.forward_flops(cfg, tokens)
        return {
            "distances": distances,
            "seconds": times,
            "tflops": {name: flops / time["median"] / 1e12 for name, time in times.items()},
            "forward_seconds": one.timed({"layer": ours}, tokens),
        }

    return measure


if __name__ == "__main__":
    options.start("gradients", TOKENS, make)
