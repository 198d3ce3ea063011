# SPDX-License-Identifier: Apache-2.0
"""What shared experts cost inside the layer's call and outside of it.

    torchrun --nproc-per-node 2 -m bench.studies.shared_experts --out FILE CONFIG ...

Each CONFIG is a layer's TOML file with shared experts. Three contestants take the same tokens in
turn: the layer; a layer without shared experts; and that layer with the shared experts by PyTorch
behind it, as a model would do it. The weights of the routed experts are shared by all three. It
times and compares; whether the values are right is the tests' affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, silu

import moeos
from bench.gpu.in_turn import InTurn
from bench.studies import options
from moeos.config.sizes import routed_alone

TOKENS = (1, 8, 128, 512, 2048, 4096)
AGREES = 0.02
"""Relative distance that the layer and PyTorch's sum may have: each rounds to BF16."""


def contestants(
    layer: moeos.MoELayer, routed: moeos.MoELayer, x: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to compute the layer's tokens, by name."""
    cfg = layer.cfg
    w1, w2, gate = layer.shared_w1, layer.shared_w2, layer.shared_gate
    assert w1 is not None
    assert w2 is not None

    def beside() -> torch.Tensor:
        y: torch.Tensor = routed(x)
        for first, second in zip(w1, w2, strict=True):
            gates, ups = linear(x, first).split(cfg.shared_intermediate, dim=-1)
            term = linear(silu(gates) * ups, second)
            if gate is not None:
                term = term * torch.sigmoid(linear(x, gate[None]))
            y = y + term
        return y

    return {"inside": lambda: layer(x), "routed alone": lambda: routed(x), "PyTorch's": beside}


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one layer. Collective."""
    layer = moeos.MoELayer(cfg, world).requires_grad_(False)
    plain = routed_alone(cfg)
    routed = moeos.MoELayer(plain, world, init=False).requires_grad_(False)
    for name in ("w1", "w2", "gate"):
        setattr(routed, name, getattr(layer, name))
    found = []
    for tokens in (count for count in TOKENS if count <= cfg.max_tokens):
        generator = torch.Generator("cuda").manual_seed(1000 * tokens + world.rank)
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)
        ways = contestants(layer, routed, x)
        outputs = ways["inside"](), ways["PyTorch's"]()
        distance = options.require_equal(f"rank {world.rank}", tokens, *outputs, AGREES)
        times = options.timed(clock, tokens, ways)
        found.append({"tokens": tokens, "distance": distance, "seconds": times})
    return found


if __name__ == "__main__":
    options.run("shared_experts", __doc__, measure)
