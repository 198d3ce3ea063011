# SPDX-License-Identifier: Apache-2.0
"""Times forward calls of Experts that read weights in a caller's layout, and in the plain one.

    python -m bench.studies.weight_layouts OUT.json [name ...]

One process, one GPU. Each contestant is a CUDA graph of one call; contestants take turns in every
round, the L2 cache is flushed before each. Medians in microseconds, and in place / plain. Outputs
are compared first: bit-equal is what the emulator gives.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

import moeos
from bench.gpu.in_turn import InTurn
from moeos import MoEConfig
from moeos.compile import jit
from moeos.compile.kernel_shape import KernelShape
from moeos.config.config import GateUp

TOKENS = (1, 8, 64, 128, 512, 2048, 8192)
ROUNDS, WARM_UP = 60, 8
COMMON: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 8192, "routing": "caller"}


def layer(**fields: Any) -> MoEConfig:
    return MoEConfig(**(COMMON | fields))


GPT_OSS = layer(
    hidden=2880,
    intermediate=2880,
    experts=32,
    top_k=4,
    bias=True,
    activation="swigluoai",
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
)
ARIA = layer(hidden=2560, intermediate=1664, experts=64, top_k=6)
QWEN = layer(hidden=2048, intermediate=768, experts=128, top_k=8)
LLAMA4 = layer(hidden=5120, intermediate=8192, experts=16, top_k=1)
# Each layer, and its layouts: gate_up, transposed.
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


def configs(name: str) -> dict[str, MoEConfig]:
    plain, layouts = LAYERS[name]
    found = {"plain": plain}
    for gate_up, transposed in layouts:
        key = gate_up + (", transposed" if transposed else "")
        found[key] = dataclasses.replace(plain, gate_up=gate_up, transposed=transposed)
    return found


def interleaved(rows: torch.Tensor | None) -> torch.Tensor | None:
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
    return t


def drawn(cfg: MoEConfig) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=cfg.dtype, device="cuda")
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    e, h, i = cfg.experts, cfg.hidden, cfg.intermediate
    t: dict[str, Any] = {"b1": None, "b2": None, "w1_scale": None, "w2_scale": None, "w3": None}
    if cfg.bias:
        t["b1"], t["b2"] = draw(e, 2 * i), draw(e, h)
    if cfg.weight_format is None:
        return t | {"w1": draw(e, 2 * i, h), "w2": draw(e, h, i)}
    for key, rows, columns in (("w1", 2 * i, h), ("w2", h, i)):
        t[key] = torch.randint(
            256, (e, rows, columns // 2), dtype=torch.uint8, device="cuda", generator=generator
        )
        t[f"{key}_scale"] = torch.randint(
            117,
            121,
            (e, rows, columns // 32),
            dtype=torch.uint8,
            device="cuda",
            generator=generator,
        )
    return t


def compile_one(cfg: MoEConfig, blocks: int) -> None:
    jit.compile_kernel(KernelShape(cfg=cfg, world_size=1, processors=blocks - 1))


def graph_of(experts: moeos.Experts, x: Any, ids: Any, weights: Any, t: dict[str, Any]) -> Any:
    out = torch.empty_like(x)

    def call() -> None:
        named = {key: value for key, value in t.items() if value is not None}
        experts(x, ids, weights, **named, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph, out


def main() -> None:
    path, names = Path(sys.argv[1]), sys.argv[2:] or list(LAYERS)
    blocks = torch.cuda.get_device_properties().multi_processor_count
    began = time.time()
    every = [cfg for name in names for cfg in configs(name).values()]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(every), mp_context=spawn) as pool:
        list(pool.map(compile_one, every, [blocks] * len(every)))
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    found: dict[str, Any] = {}
    with moeos.init(backend="cuda", deadline=900.0) as world, torch.no_grad():
        clock = InTurn(world)
        for name in names:
            plain = LAYERS[name][0]
            tensors = drawn(plain)
            contestants = {
                key: (moeos.Experts(cfg, world), moved(cfg, tensors))
                for key, cfg in configs(name).items()
            }
            found[name] = {}
            for tokens in TOKENS:
                generator = torch.Generator("cuda").manual_seed(tokens)
                x = torch.randn(tokens, plain.hidden, device="cuda", generator=generator)
                x = x.to(plain.dtype)
                scores = torch.rand(tokens, plain.experts, device="cuda", generator=generator)
                weights, ids = scores.topk(plain.top_k, dim=1)
                made = {
                    key: graph_of(experts, x, ids, weights, t)
                    for key, (experts, t) in contestants.items()
                }
                right = made["plain"][1]
                equal = {key: torch.equal(out, right) for key, (_, out) in made.items()}
                far = {
                    key: float((out.float() - right.float()).norm() / right.float().norm())
                    for key, (_, out) in made.items()
                }
                times = clock.time(
                    {key: graph.replay for key, (graph, _) in made.items()},
                    flushed=True,
                    warm_up_rounds=WARM_UP,
                    rounds=ROUNDS,
                )
                medians = {key: 1e6 * its["median"] for key, its in times.items()}
                found[name][tokens] = {
                    "us": medians,
                    "of_plain": {key: us / medians["plain"] for key, us in medians.items()},
                    "equal": equal,
                    "far": far,
                }
                said = ", ".join(
                    f"{key} {us:.1f} ({us / medians['plain']:.3f}; off {far[key]:.0e})"
                    for key, us in medians.items()
                )
                print(f"{name} {tokens}: {said}", flush=True)
                path.write_text(json.dumps(found, indent=1))
            del contestants, tensors
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
