# SPDX-License-Identifier: Apache-2.0
"""What shared experts cost inside the layer's call and outside of it.

    torchrun --nproc-per-node 2 -m bench.studies.shared_experts --out FILE CONFIG ...

Each CONFIG is a layer's TOML file with shared experts. Three contestants take the same tokens in
turn: the layer; a layer without shared experts; and that layer with the shared experts by PyTorch
after it, as a model would do it. All three have the same routed experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu

import moeos
from bench.studies import options
from bench.study import Case, Study
from moeos.config.sizes import routed_alone

TOKENS = (1, 8, 128, 512, 2048, 4096)
AGREES = 0.02
"""Relative distance that the layer and PyTorch's sum may have: each rounds to BF16."""


def make(one: Study, cfg: moeos.MoEConfig) -> options.Measure:
    """A layer's measurement."""
    layer = moeos.MoELayer(cfg, one.world).requires_grad_(False)
    routed = moeos.MoELayer(routed_alone(cfg), one.world, init=False).requires_grad_(False)
    for name in ("w1", "w2", "gate"):
        setattr(routed, name, getattr(layer, name))
    w1, w2, gate = layer.shared_w1, layer.shared_w2, layer.shared_gate
    assert w1 is not None
    assert w2 is not None

    def beside(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = routed(x)
        for first, second in zip(w1, w2, strict=True):
            gates, ups = linear(x, first).split(cfg.shared_intermediate, dim=-1)
            term = linear(silu(gates) * ups, second)
            if gate is not None:
                term = term * torch.sigmoid(linear(x, gate[None]))
            y = y + term
        return y

    def measure(tokens: int) -> Case:
        x = options.drawn(one, cfg, tokens)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "inside": lambda: layer(x),
            "routed alone": lambda: routed(x),
            "PyTorch's": lambda: beside(x),
        }
        distance = options.require_alike(one, ways["inside"](), ways["PyTorch's"](), AGREES)
        return {"distance": distance, "seconds": one.timed(ways, tokens)}

    return measure


if __name__ == "__main__":
    options.start("shared_experts", TOKENS, make)
