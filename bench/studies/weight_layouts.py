# SPDX-License-Identifier: Apache-2.0
"""Forward calls of Experts that read weights in a caller's layout, against those of the plain one.

    python -m bench.studies.weight_layouts --out FILE [--names gpt-oss,aria]

Each contestant is a CUDA graph of one call. The L2 cache is flushed before each. Outputs are
compared first: bit-equal is what the emulator gives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import moeos
from bench import study
from bench.studies import options
from bench.studies.expert_major import replayed
from bench.study import Case, Out, Study
from moeos import MoEConfig
from moeos.config.config import GateUp

TOKENS = (1, 8, 64, 128, 512, 2048, 8192)
PLAIN = "plain"


def layer(**fields: Any) -> MoEConfig:
    """A layer whose caller routes."""
    return MoEConfig(dtype=torch.bfloat16, max_tokens=8192, routing="caller", **fields)


GPT_OSS = layer(
    **{"hidden": 2880, "intermediate": 2880, "experts": 32, "top_k": 4, "bias": True},
    **{"activation": "swigluoai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
)
ARIA = layer(hidden=2560, intermediate=1664, experts=64, top_k=6)
QWEN = layer(hidden=2048, intermediate=768, experts=128, top_k=8)
LLAMA4 = layer(hidden=5120, intermediate=8192, experts=16, top_k=1)
LAYERS: dict[str, tuple[MoEConfig, list[tuple[GateUp, bool]]]] = {
    "gpt-oss": (GPT_OSS, [("interleaved", True)]),
    "aria": (ARIA, [("concatenated", True)]),
    "qwen3-30b": (QWEN, [("separate", False), ("separate", True)]),
    "llama4": (LLAMA4, [("concatenated", True)]),
    "gpt-oss-mxfp4": (
        dataclasses.replace(GPT_OSS, weight_format="mxfp4"),
        [("interleaved", False)],
    ),
}
"""Each layer, and its layouts: gate_up, transposed."""


def configs(name: str) -> dict[str, MoEConfig]:
    """The contestants of a layer, the plain one first."""
    plain, layouts = LAYERS[name]
    found = {PLAIN: plain}
    for gate_up, transposed in layouts:
        key = gate_up + (", transposed" if transposed else "")
        found[key] = dataclasses.replace(plain, gate_up=gate_up, transposed=transposed)
    return found


def interleaved(rows: Tensor | None) -> Tensor | None:
    """Rows of gates and ups by turns."""
    return None if rows is None else torch.stack(rows.chunk(2, 1), 2).flatten(1, 2).contiguous()


def moved(cfg: MoEConfig, t: dict[str, Any]) -> dict[str, Any]:
    """Plain tensors in a config's layout."""
    t = dict(t)
    if cfg.gate_up == "interleaved":
        t["w1"], t["b1"] = interleaved(t["w1"]), interleaved(t["b1"])
        t["w1_scale"] = interleaved(t["w1_scale"])
    elif cfg.gate_up == "separate":
        t["w1"], t["w3"] = (half.contiguous() for half in t["w1"].chunk(2, 1))
    if cfg.transposed:
        for key in ("w1", "w2", "w3"):
            if t.get(key) is not None:
                t[key] = t[key].mT.contiguous()
    return {key: value for key, value in t.items() if value is not None}


def drawn(cfg: MoEConfig) -> dict[str, Any]:
    """A plain layer's tensors."""
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=cfg.dtype, device="cuda")
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    def codes(least: int, most: int, *shape: int) -> Tensor:
        kind: Any = {"dtype": torch.uint8, "device": "cuda", "generator": generator}
        return torch.randint(least, most, shape, **kind)

    e, h, i = cfg.experts, cfg.hidden, cfg.intermediate
    t: dict[str, Any] = {"b1": None, "b2": None, "w1_scale": None, "w2_scale": None, "w3": None}
    if cfg.bias:
        t["b1"], t["b2"] = draw(e, 2 * i), draw(e, h)
    if cfg.weight_format is None:
        return t | {"w1": draw(e, 2 * i, h), "w2": draw(e, h, i)}
    for key, rows, columns in (("w1", 2 * i, h), ("w2", h, i)):
        t[key] = codes(0, 256, e, rows, columns // 2)
        t[f"{key}_scale"] = codes(117, 121, e, rows, columns // 32)
    return t


def make(one: Study, name: str) -> options.Measure:
    """A layer's measurement."""
    plain = LAYERS[name][0]
    tensors = drawn(plain)
    contestants = {
        key: (moeos.Experts(cfg, one.world), moved(cfg, tensors))
        for key, cfg in configs(name).items()
    }

    def measure(tokens: int) -> Case:
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, plain.hidden, device="cuda", generator=generator).to(plain.dtype)
        scores = torch.rand(tokens, plain.experts, device="cuda", generator=generator)
        weights, ids = scores.topk(plain.top_k, dim=1)

        def graph_of(experts: moeos.Experts, t: dict[str, Any]) -> Callable[[], Tensor]:
            out = torch.empty_like(x)
            return replayed(lambda: experts(x, ids, weights, **t, out=out))

        ways = {key: graph_of(*its) for key, its in contestants.items()}
        made = {key: way() for key, way in ways.items()}
        return {
            "equal": {key: torch.equal(y, made[PLAIN]) for key, y in made.items()},
            "distances": {key: study.distance(y, made[PLAIN]) for key, y in made.items()},
            "seconds": one.timed(ways, 0),  # always cold
        }

    return measure


def main(
    out: Out,
    names: Annotated[
        str, typer.Option(help="Names of layers, separated by commas; default: all.")
    ] = "",
) -> None:
    """Times calls with weights in callers' layouts, on one GPU."""

    def body(one: Study) -> None:
        chosen = study.names(names) or tuple(LAYERS)
        one.compile([(n, {"cfg": cfg}) for n in chosen for cfg in configs(n).values()])
        for name in chosen:
            about = {"config": json.loads(LAYERS[name][0].digest())}
            options.measure(one, name, about, TOKENS, functools.partial(make, one, name))

    options.run("weight_layouts", out, body)


if __name__ == "__main__":
    study.start(main)
