# SPDX-License-Identifier: Apache-2.0
"""What the studies of a layer's options share: a command line, and the document that they write.

A study measures each layer that it is given at some numbers of tokens, with contestants in turn.
Its document has, for each layer, its config and the results: tokens, the contestants' distances
from what they should compute, and their seconds. It knows no option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moeos
from bench.gpu.in_turn import FLUSHED_TOKENS, InTurn
from moeos.cli.shared import machine, provenance

ROUNDS, WARM_UP = 30, 5
_DEADLINE = 900.0  # seconds; the compiler's time counts

Measure = Callable[[moeos.MoEConfig, moeos.World, InTurn], list[dict[str, Any]]]
Prepare = Callable[[Mapping[str, moeos.MoEConfig], moeos.World], None]


def run(
    name: str, about: str, measure: Measure, prepare: Prepare = lambda configs, world: None
) -> None:
    """The command of the study `bench.studies.{name}`. Collective.

    `measure`: the results of a layer, on all ranks. `prepare`: is given all layers before.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("configs", nargs="+", type=Path, help="a layer's TOML file")
    parser.add_argument("--out", required=True, type=Path, help="where the JSON document goes")
    chosen = parser.parse_args()
    configs = {path.stem: moeos.MoEConfig.from_toml(path) for path in chosen.configs}
    layers: dict[str, Any] = {}
    with moeos.init(backend="cuda", deadline=_DEADLINE) as world, torch.no_grad():
        prepare(configs, world)
        clock = InTurn(world)
        for layer, cfg in configs.items():
            results = measure(cfg, world, clock)
            layers[layer] = {"config": json.loads(cfg.digest()), "results": results}
            if world.rank == 0:
                text = json.dumps(document(name, world.size, layers), indent=1)
                chosen.out.write_text(text + "\n")


def timed(clock: InTurn, tokens: int, ways: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Seconds of ways to compute so many tokens, in turn. Collective."""
    flushed = tokens <= FLUSHED_TOKENS
    return clock.time(ways, flushed=flushed, warm_up_rounds=WARM_UP, rounds=ROUNDS)


def require_equal(names: str, tokens: int, one: Tensor, other: Tensor, agrees: float) -> float:
    """The relative distance of two outputs. Raises `ValueError` if it is above `agrees`."""
    distance = float((one.float() - other.float()).norm() / other.float().norm())
    if distance > agrees:
        raise ValueError(f"{names}: relative distance {distance} at {tokens} tokens")
    return distance


def document(name: str, ranks: int, layers: Mapping[str, Any]) -> dict[str, Any]:
    """What a study of this name has found on so many ranks, by its layers."""
    return {
        "benchmark": f"{name.replace('_', '-')}-{ranks}",
        "ranks": ranks,
        "command": provenance.command(f"bench.studies.{name}"),
        "commit": provenance.commit(),
        "gpus": machine.gpus(),
        "processor": machine.processor(),
        "versions": machine.versions(),
        "layers": layers,
    }
