# SPDX-License-Identifier: Apache-2.0
"""What the studies of a layer's options share: each layer at some numbers of tokens.

Their documents have, for each layer, its config and the results: tokens, the contestants' distances
from what they should compute, and their seconds. They time; whether values are right is the tests'
affair. Must not depend on any option.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import moeos
from bench import study
from bench.study import Case, Out, Study

Measure = Callable[[int], Case]
"""What is found of a layer, given the number of tokens. Collective."""
Make = Callable[[Study, moeos.MoEConfig], Measure]


def start(
    name: str,
    counts: Sequence[int],
    make: Make,
    variants: Sequence[Mapping[str, Any]] = (),
) -> None:
    """The command of the study `bench.studies.{name}`, whose layers are TOML files.

    `variants`: fields of the configs whose kernels are compiled before.
    """

    def main(
        configs: Annotated[list[Path], typer.Argument(help="Layers' TOML files.")], out: Out
    ) -> None:
        def body(one: Study) -> None:
            layers = {path.stem: moeos.MoEConfig.from_toml(path) for path in configs}
            size = one.world.size
            one.compile(
                [
                    (layer, {"cfg": dataclasses.replace(cfg, **fields), "world_size": size})
                    for layer, cfg in layers.items()
                    for fields in variants
                ]
            )
            for layer, cfg in layers.items():
                about = {"config": json.loads(cfg.digest())}
                chosen = [count for count in counts if count <= cfg.max_tokens]
                measure(one, layer, about, chosen, functools.partial(make, one, cfg))

        run(name, out, body)

    study.start(main)


def run(name: str, out: Path, body: Callable[[Study], None]) -> None:
    """Runs one rank of the study `bench.studies.{name}` on GPUs."""

    def of_world(world: moeos.World) -> Study:
        with torch.no_grad():
            benchmark = f"{name.replace('_', '-')}-{world.size}"
            one = Study(world, out, benchmark, f"bench.studies.{name}")
            body(one)
        return one

    study.run(of_world, "cuda")


def measure(
    one: Study, layer: str, about: Case, counts: Iterable[int], make: Callable[[], Measure]
) -> None:
    """Measures a layer with each of these numbers of tokens. Collective."""
    into = one.describe_layer("layers", layer, about).setdefault("results", [])
    found: Measure | None = None
    for case in one.cases(into, [{"tokens": count} for count in counts]):
        found = found or make()
        one.add(into, case, found(case["tokens"]))
    del found
    one.forget()


def drawn(one: Study, cfg: moeos.MoEConfig, tokens: int) -> Tensor:
    """x [tokens, H] of this rank."""
    generator = torch.Generator("cuda").manual_seed(1000 * tokens + one.world.rank)
    return torch.randn(tokens, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)


def require_alike(one: Study, first: Tensor, second: Tensor, agrees: float) -> float:
    """The relative distance of two outputs. Raises `ValueError`, alike on all ranks, if it is above
    `agrees`.
    """
    distance = one.worst(study.distance(first, second))
    if not distance <= agrees:
        raise ValueError(f"outputs of {len(first)} tokens differ by {distance}")
    return distance
