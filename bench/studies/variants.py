# SPDX-License-Identifier: Apache-2.0
"""Kernels of several source trees against each other, in one run: is a change worth it?

    python -m bench.studies.variants --out FILE --tokens 1,2048 --config CONFIG NAME=FOLDER ...

Each FOLDER holds kernels/ and runtime/; the first is what the others are compared with. On one GPU,
or, under torchrun or mpirun, one a rank, with the same weights for all. The document holds how
every variant's sources differ, so that a result can be had again. Variants must take the arguments
of this tree's kernels, and use memory as these do; `launch/bench guard` compares whole trees.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import moeos
from bench import study
from bench.studies import options
from bench.study import Case, Out, Study, numbers
from moeos.compile import jit
from moeos.engines.base import CallTensors
from moeos.engines.cuda.engine import CudaEngine

_SOURCES = ("kernels", "runtime")


def main(
    variants: Annotated[
        list[str], typer.Argument(help="NAME=FOLDER, the one to compare with first")
    ],
    out: Out,
    config: Annotated[list[Path], typer.Option(help="A layer's TOML file; repeatable.")],
    tokens: Annotated[str, typer.Option(help="Token counts, comma between.")] = "1,2048",
    late: Annotated[
        float, typer.Option(help="Microseconds by which the last rank is late.", min=0, max=1e6)
    ] = 0.0,
) -> None:
    """Times kernels of several source trees against each other."""

    def body(one: Study) -> None:
        folders = parse(variants)
        counts = numbers("--tokens", tokens, 0)
        layers = {path.stem: moeos.MoEConfig.from_toml(path) for path in config}
        one.compile(
            [
                (name, {"cfg": cfg, "world_size": one.world.size, "root": root})
                for name, cfg in layers.items()
                for root in folders.values()
            ]
        )
        one.document["variants"] = differences(folders)
        for name, cfg in layers.items():
            about = {"config": json.loads(cfg.digest()), "late": late * 1e-6}
            made = functools.partial(make, one, cfg, folders, about["late"])
            options.measure(one, name, about, counts, made)

    options.run("variants", out, body)


def parse(texts: list[str]) -> dict[str, Path]:
    """NAME=FOLDER each, with the folders in full.

    Raises `ValueError` for one that is not so, for a name twice, and for a folder without sources.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in found:
            raise ValueError(f"the variant is {text!r}; it must be NAME=FOLDER, each name once")
        found[name] = Path(folder).absolute()
        for part in _SOURCES:
            if not (found[name] / part).is_dir():
                raise ValueError(f"the variant {name}: {folder} has no {part}/")
    return found


def differences(folders: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """The sources of each variant, as a difference from the first one's."""
    texts = {name: _texts(folder) for name, folder in folders.items()}
    base = next(iter(texts.values()))
    found = {}
    for name, mine in texts.items():
        lines: list[str] = []
        for path in sorted(base.keys() | mine.keys()):
            old, new = (of.get(path, "").splitlines() for of in (base, mine))
            lines += difflib.unified_diff(old, new, path, path, lineterm="")
        found[name] = {"diff": "\n".join(lines)}
    return found


def _texts(folder: Path) -> dict[str, str]:
    files = (file for part in _SOURCES for file in (folder / part).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}


def make(
    one: Study, cfg: moeos.MoEConfig, folders: Mapping[str, Path], late: float
) -> options.Measure:
    """A layer's measurement, the last rank late by `late` seconds."""
    layer = moeos.MoELayer(cfg, one.world).requires_grad_(False)
    engines = {}
    # Each has its own: in another variant's sources things may lie elsewhere.
    workspaces = {name: moeos.Workspace(one.world) for name in folders}
    for name, folder in folders.items():
        with jit.sources_in(folder):
            engines[name] = CudaEngine(cfg, one.world, workspaces[name].shared)

    def measure(tokens: int) -> Case:
        x = options.drawn(one, cfg, tokens)
        calls = {name: call_of(layer, x) for name in engines}
        ways = {
            name: functools.partial(engine.forward, calls[name]) for name, engine in engines.items()
        }
        delay = late if one.world.rank == one.world.size - 1 else 0.0
        times = one.timed(ways, tokens, late=delay)
        for engine in engines.values():
            engine.check()
        first = next(iter(calls.values())).out
        return {
            "distances": {
                name: one.worst(study.distance(call.out, first) if tokens else 0.0)
                for name, call in calls.items()
            },
            "seconds": times,
        }

    return measure


def call_of(layer: moeos.MoELayer, x: torch.Tensor) -> CallTensors:
    """A call that the layer's gate routes."""
    gate = layer.gate
    fields = (name for name in CallTensors._fields if name.startswith(("w", "b", "shared")))
    weights: dict[str, Any] = {name: getattr(layer, name, None) for name in fields}
    return CallTensors(
        x=x,
        out=torch.empty_like(x),
        topk_ids=None,
        topk_weights=None,
        gate=gate.weight,
        selection_bias=gate.selection_bias,
        router_bias=gate.bias,
        expert_scale=gate.expert_scale,
        **weights,
    )


if __name__ == "__main__":
    study.start(main)
