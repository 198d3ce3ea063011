# SPDX-License-Identifier: Apache-2.0
"""What weights in FP8 and 4 bits gain and cost, beside the same layer with BF16 weights; and tokens
in FP8 beside such weights.

    torchrun --nproc-per-node 2 -m bench.studies.weight_formats --out FILE CONFIG ...

Each CONFIG is a layer's TOML file without a format, whose sizes fit all of them. The layer and its
copies in each format take the same tokens in turn. It times; whether the values are right is the
tests' affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

import moeos
from bench.gpu import compile_ahead
from bench.gpu.in_turn import FLUSHED_TOKENS, InTurn
from bench.studies import options
from moeos.config.element_formats import NAMES

TOKENS = (1, 8, 128, 512, 2048, 8192)
ROUNDS, WARM_UP = 20, 4
PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {name: {"weight_format": name} for name in NAMES}
VARIANTS |= {
    f"{name} by FP8": {"weight_format": name, "activation_format": "fp8_group128"} for name in NAMES
}
"""Fields of a config, by what a table calls them."""


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one layer. Collective."""
    plain = moeos.MoELayer(cfg, world).requires_grad_(False)
    layers = {PLAIN: plain}
    for name, formats in VARIANTS.items():
        layers[name] = moeos.quantize(plain, **formats)
    found = []
    for tokens in (count for count in TOKENS if count <= cfg.max_tokens):
        generator = torch.Generator("cuda").manual_seed(1000 * tokens + world.rank)
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)
        exact = plain(x).float()
        distances = {
            name: float((layer(x).float() - exact).norm() / exact.norm())
            for name, layer in layers.items()
        }
        times = clock.time(
            {name: functools.partial(layer, x) for name, layer in layers.items()},
            flushed=tokens <= FLUSHED_TOKENS,
            warm_up_rounds=WARM_UP,
            rounds=ROUNDS,
        )
        found.append({"tokens": tokens, "distances": distances, "seconds": times})
    return found


def compile_all(configs: Mapping[str, moeos.MoEConfig], world: moeos.World) -> None:
    """The kernels of all layers, side by side. Collective."""
    every = [
        (name, dataclasses.replace(cfg, **formats))
        for name, cfg in configs.items()
        for formats in ({}, *VARIANTS.values())
    ]
    mine = every[world.rank :: world.size]
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    with compile_ahead.started(mine, world.size, gpu.multi_processor_count) as compiling:
        refused = compiling.wait(lambda: None)
    world.control.allgather(None)
    if refused:
        raise RuntimeError(f"the compiler refuses: {refused}")


if __name__ == "__main__":
    options.run("weight_formats", __doc__, measure, compile_all)
