# SPDX-License-Identifier: Apache-2.0
"""What weights in FP8 and 4 bits gain and cost, beside the same layer with BF16 weights.

    torchrun --nproc-per-node 2 -m moeos.bench.studies.weight_formats --out FILE CONFIG ...

Each CONFIG is a layer's TOML file without a format. The layer and its copies in each format take
the same tokens in turn. It times; whether the values are right is the tests' affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, get_args

import torch

import moeos
from moeos.bench.gpu import compile_ahead
from moeos.bench.gpu.in_turn import FLUSHED_TOKENS, InTurn
from moeos.bench.studies import options
from moeos.formats import WeightFormat

TOKENS = (1, 8, 128, 512, 2048, 8192)
ROUNDS, WARM_UP = 20, 4
PLAIN = "plain"


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one layer. Collective."""
    plain = moeos.MoELayer(cfg, world)
    layers = {PLAIN: plain}
    for name in get_args(WeightFormat):
        layers[name] = moeos.quantize(plain, name)
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
        (name, dataclasses.replace(cfg, weight_format=form))
        for name, cfg in configs.items()
        for form in (None, *get_args(WeightFormat))
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
