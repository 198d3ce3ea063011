# SPDX-License-Identifier: Apache-2.0
"""Whether `layout="auto"` chooses the faster layout, of shapes that nobody picked.

    python -m bench.studies.layouts --out FILE --shapes 0,1,2

Shapes are drawn by a seed, and have a number each. A layer with "auto" and one with the layout that
"auto" has not chosen take the same tokens in turn, on one GPU that has all experts. So a shape
needs two kernels. Their outputs must have the same bits. FILE keeps what it has of other shapes,
so a run may measure a few of them. It knows none of the costs by which "auto" chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import moeos
from bench.gpu import compile_ahead
from bench.gpu.in_turn import InTurn
from bench.studies import options
from moeos.cli.shared import provenance
from moeos.compile.kernel_shape import HOPPER_BLOCKS
from moeos.partition.policies import Layout
from moeos.partition.slicing import slicing_of
from moeos.system.files import replace

SEED, SHAPES = 37, 12
BAR = 1.03
"""What "auto" may take, in calls of as many tokens as a layer is for, beside the faster layout."""

HIDDEN = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 7168)
INTERMEDIATE = (256, 384, 512, 640, 768, 896, 1024, 1536)
EXPERTS = (16, 32, 64, 128, 256, 512)
TOP_K = (2, 4, 6, 8, 10)
TOKENS = (1024, 2048, 4096, 8192, 16384)
WEIGHTS = 16 << 30
"""Bytes of a shape's experts, at most: two layers share them."""
FEWER = 8
"""Such a part of the tokens is measured, too."""

_DEADLINE = 900.0  # seconds; the compiler's time counts


def drawn(seed: int = SEED, shapes: int = SHAPES) -> list[moeos.MoEConfig]:
    """The configs of so many shapes; the same for the same seed, and those of fewer begin alike."""
    draw = random.Random(seed)
    found: list[moeos.MoEConfig] = []
    while len(found) < shapes:
        experts = draw.choice(EXPERTS)
        cfg = moeos.MoEConfig(
            hidden=draw.choice(HIDDEN),
            intermediate=draw.choice(INTERMEDIATE),
            experts=experts,
            top_k=draw.choice([k for k in TOP_K if 4 * k <= experts]),
            max_tokens=draw.choice(TOKENS),
            dtype=torch.bfloat16,
        )
        if experts * 3 * cfg.hidden * cfg.intermediate * cfg.dtype.itemsize <= WEIGHTS:
            found.append(cfg)
    return found


def chosen(cfg: moeos.MoEConfig) -> Layout:
    """What "auto" is, on a rank alone."""
    gathers = slicing_of("expert", "replicated", 1).sizes(cfg, 1)["gathers_rows"]
    return "gathered" if gathers else "expert_major_persistent"


def other(cfg: moeos.MoEConfig) -> Layout:
    """The layout that "auto" has not chosen."""
    return "expert_major_persistent" if chosen(cfg) == "gathered" else "gathered"


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """A shape's calls. Raises `ValueError` if the layouts' outputs differ in a bit."""
    layers = {"auto": moeos.MoELayer(cfg, world)}
    forced = layers[other(cfg)] = moeos.MoELayer(cfg, world, layout=other(cfg), init=False)
    for name in ("w1", "w2", "gate"):
        setattr(forced, name, getattr(layers["auto"], name))
    found = []
    for tokens in (cfg.max_tokens, cfg.max_tokens // FEWER):
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)
        options.require_equal("the layouts", tokens, layers["auto"](x), forced(x), 0.0)
        ways = {name: functools.partial(layer, x) for name, layer in layers.items()}
        seconds = options.timed(clock, tokens, ways)
        medians = {name: times["median"] for name, times in seconds.items()}
        found.append(
            {
                "tokens": tokens,
                "auto": chosen(cfg),
                "seconds": seconds,
                "auto_by_best": medians["auto"] / min(medians.values()),
            }
        )
    return found


def compile_all(configs: Mapping[str, moeos.MoEConfig], multiprocessors: int) -> None:
    """Two kernels of each shape, side by side. Raises `RuntimeError` if one is refused."""
    refused: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        pending = []
        for layout in ("gathered", "expert_major_persistent"):
            group = [(name, cfg) for name, cfg in configs.items() if other(cfg) == layout]
            forced = slicing_of("expert", "replicated", 1, layout=layout)
            kinds: tuple[dict[str, Any], ...] = ({}, {"slicing": forced})
            pending.append(
                stack.enter_context(compile_ahead.started(group, 1, multiprocessors, kinds=kinds))
            )
        for each in pending:
            refused |= each.wait(lambda: None)
    if refused:
        raise RuntimeError(f"the compiler refuses: {refused}")


def document(before: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """The document of this run, with what it has not measured from the one `before`."""
    found = options.document("layouts", 1, {**before.get("layers", {}), **layers})
    return found | {"seed": SEED, "bar": BAR}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Whether layout='auto' chooses the faster one.")
    parser.add_argument("--out", required=True, type=Path, help="the JSON document, which grows")
    every = ",".join(map(str, range(SHAPES)))
    parser.add_argument("--shapes", default=every, help="numbers of shapes, comma between")
    given = parser.parse_args()
    configs = {str(n): drawn()[n] for n in map(int, given.shapes.split(","))}
    before = json.loads(given.out.read_text()) if given.out.exists() else {}
    compile_all(configs, HOPPER_BLOCKS)
    layers: dict[str, Any] = {}
    with moeos.init(backend="cuda", deadline=_DEADLINE) as world, torch.no_grad():
        clock = InTurn(world)
        for name, cfg in configs.items():
            results = measure(cfg, world, clock)
            layers[name] = {
                "config": json.loads(cfg.digest()),
                "commit": provenance.commit(),
                "results": results,
            }
            replace(given.out, json.dumps(document(before, layers), indent=1) + "\n")
            for result in results:
                print(name, result["tokens"], result["auto"], round(result["auto_by_best"], 4))


if __name__ == "__main__":
    main()
