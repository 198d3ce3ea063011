# SPDX-License-Identifier: Apache-2.0
"""Times kernels of several source trees against each other, in one run: is a change worth it?

    python -m bench.studies.variants --out FILE --shapes A,B --tokens 1,2048 NAME=FOLDER ...

Each FOLDER holds kernels/ and runtime/; the first is what the others are compared with. On one GPU,
or, under torchrun or mpirun, one a rank. The layers are a suite's, as in `launch/bench gpu`, with
the same weights for all variants, and the contestants have turns (bench.gpu.in_turn), since
GPUs of two days differ by more than most changes are worth. The file holds how every variant's
sources differ, so that a result can be had again; a file ABOUT in its folder says in words what the
variant is. Variants must use memory as this installation does; whether their outputs differ is
noted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import moeos
from bench.gpu import compile_ahead, suite
from bench.gpu.in_turn import FLUSHED_TOKENS, InTurn
from bench.gpu.one_rank import describe
from bench.gpu.suite import Case, Suite
from moeos.cli.shared import failures, output, provenance
from moeos.compile import jit
from moeos.config import reference
from moeos.config.config import MoEConfig
from moeos.engines.base import CallTensors
from moeos.engines.cuda.engine import CudaEngine

_STARTING = 600.0  # seconds in which ranks meet again outside of calls, the compiler included
_CALLING = 20.0  # seconds in which a call must end
_LATEST = 1.0  # seconds that a rank may be late
_SEED = 1 << 30
_SOURCES = ("kernels", "runtime")


def main(
    variants: Annotated[
        list[str], typer.Argument(help="NAME=FOLDER, the one to compare with first")
    ],
    out: Annotated[Path, typer.Option(help="Where the results go.")],
    shapes: Annotated[str, typer.Option(help="Shapes of the suite, comma between.")] = "",
    tokens: Annotated[str, typer.Option(help="Token counts, comma between; any.")] = "1,2048",
    late: Annotated[
        str, typer.Option(help="Microseconds, comma between, by which the last rank is late.")
    ] = "0",
    suite_file: Annotated[Path, typer.Option("--suite", help="TOML file of the suite.")] = Path(
        "configs/suites/gpu.toml"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds that count; four more warm up.")] = 24,
) -> None:
    """Times kernels of several source trees against each other."""

    def command() -> int:
        folders = parse_variants(variants)
        counts = suite.token_counts(tokens)
        delays = parse_delays(late)
        output.check_writable(out, "--out")
        names = tuple(name for name in shapes.split(",") if name)
        chosen = suite.read(suite_file).only(names, ())
        with moeos.init("cuda", deadline=_STARTING) as world:
            clock = InTurn(world)
            layers = layers_for(chosen, counts, world.size)
            compile_all([(name, cfg) for name, cfg, _ in layers], folders, world)
            results = []
            for name, cfg, of_layer in layers:
                for found in measure(cfg, of_layer, delays, folders, clock, rounds):
                    results.append({"shape": name, **found})
                    if world.rank == 0:
                        print(_line(results[-1]), flush=True)
            document = {
                "benchmark": "variants-1",
                **describe(provenance.command("bench.studies.variants"), world.size),
                "commit": provenance.commit(),
                "rounds": rounds,
                "variants": describe_variants(folders),
                "results": results,
            }
            if world.rank == 0:
                out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            if dist.is_initialized():
                dist.destroy_process_group()
        return failures.DONE

    failures.finish(command)


def parse_variants(texts: list[str]) -> dict[str, Path]:
    """NAME=FOLDER each.

    Raises `ValueError` as `parse_folders` does, and for a folder without sources.
    """
    found = parse_folders("variant", texts)
    for name, folder in found.items():
        missing = [part for part in _SOURCES if not (folder / part).is_dir()]
        if missing:
            raise ValueError(f"the variant {name}: {folder} has no {missing[0]}/")
    return found


def parse_folders(what: str, texts: list[str]) -> dict[str, Path]:
    """NAME=FOLDER each, with the folders in full; `what`: what each is called.

    Raises `ValueError` for one that is not so, and for a name twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in found:
            raise ValueError(f"the {what} is {text!r}; it must be NAME=FOLDER, each name once")
        found[name] = Path(folder).absolute()
    return found


def parse_delays(text: str) -> list[float]:
    """Seconds, of microseconds with commas between.

    Raises `ValueError` for what is no number from 0 on.
    """
    try:
        delays = [float(part) * 1e-6 for part in text.split(",")]
    except ValueError:
        delays = [-1.0]
    if not all(0 <= delay <= _LATEST for delay in delays):
        raise ValueError(
            f"--late is {text!r}; it must be microseconds from 0 to {_LATEST * 1e6:.0f}"
        )
    return delays


def layers_for(
    chosen: Suite, counts: Sequence[int], ranks: int
) -> list[tuple[str, MoEConfig, list[int]]]:
    """The suite's layers on so many ranks for calls with any numbers of tokens: name of the shape,
    layer, and which of the numbers are its.

    Raises `ValueError` without numbers, or for a negative one.
    """
    if not counts or min(counts) < 0:
        raise ValueError(f"--tokens has {list(counts)}; it must be numbers from 0 on")
    layers = []
    for shape in chosen.shapes:
        most = max(shape.cfg.max_tokens, *counts)
        asked = dataclasses.replace(
            shape,
            cfg=dataclasses.replace(shape.cfg, max_tokens=most),
            cases=tuple(Case(count) for count in sorted(set(counts))),
        )
        for cfg, cases in chosen.layers_of(asked, ranks).items():
            layers.append((shape.name, cfg, [case.tokens for case in cases]))
    return layers


def describe_variants(folders: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Of each variant what it is in words, and its sources as a difference from the first one's."""
    texts = {name: _texts(folder) for name, folder in folders.items()}
    base = texts[next(iter(folders))]
    described = {}
    for name, folder in folders.items():
        mine = texts[name]
        lines: list[str] = []
        for path in sorted(base.keys() | mine.keys()):
            old, new = (of.get(path, "").splitlines() for of in (base, mine))
            lines += difflib.unified_diff(old, new, path, path, lineterm="")
        about = folder / "ABOUT"
        words = about.read_text(encoding="utf-8").strip() if about.is_file() else ""
        described[name] = {"what": words, "diff": "\n".join(lines)}
    return described


def _texts(folder: Path) -> dict[str, str]:
    files = (file for part in _SOURCES for file in (folder / part).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}


def compile_all(
    layers: Sequence[tuple[str, MoEConfig]], folders: Mapping[str, Path], world: moeos.World
) -> None:
    """Compiles every layer's kernel of every variant, side by side. Collective.

    Raises `RuntimeError` with what the compiler says of the first that it refuses.
    """
    mine = layers if world.rank == 0 else []
    gpu = torch.cuda.get_device_properties()
    roots = list(folders.values())
    with compile_ahead.started(mine, world.size, gpu.multi_processor_count, roots) as compiling:
        for name, what in compiling.wait(lambda: None).items():
            raise RuntimeError(f"the kernel of {name}: {what}")
    world.control.barrier()


def measure(
    cfg: MoEConfig,
    tokens: list[int],
    delays: list[float],
    folders: Mapping[str, Path],
    clock: InTurn,
    rounds: int,
) -> list[dict[str, Any]]:
    """One layer's calls with each of so many tokens, the last rank late by each of so many seconds.
    Collective.
    """
    results = []
    with moeos.init("cuda", deadline=_CALLING) as world:
        layer = moeos.MoELayer(cfg, world)
        engines = {}
        # Each has its own: in another variant's sources things may lie elsewhere.
        workspaces = [moeos.Workspace(world) for _ in folders]
        for workspace, (name, folder) in zip(workspaces, folders.items(), strict=True):
            with jit.sources_in(folder):
                engines[name] = CudaEngine(cfg, world, workspace.shared)
        for count in tokens:
            generator = torch.Generator("cuda").manual_seed(_SEED + world.rank)
            x = torch.randn(count, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)
            calls = {name: _call(layer, x) for name in engines}
            contestants = {
                name: functools.partial(engines[name].forward, calls[name]) for name in engines
            }
            for delay in delays:
                times = clock.time(
                    contestants,
                    flushed=count <= FLUSHED_TOKENS,
                    warm_up_rounds=4,
                    rounds=rounds,
                    late=delay if world.rank == world.size - 1 else 0.0,
                )
                for engine in engines.values():
                    engine.check()
                found = world.control.allgather(_differences(calls))
                results.append(
                    {
                        "tokens": count,
                        "max_tokens": cfg.max_tokens,
                        "late": delay,
                        "difference": {name: max(of[name] for of in found) for name in engines},
                        "times": {name: _summary(of) for name, of in times.items()},
                    }
                )
    return results


def _differences(calls: Mapping[str, CallTensors]) -> dict[str, float]:
    """The relative errors of all outputs against the first one."""
    expected = next(iter(calls.values())).out
    return {name: reference.relative_error(call.out, expected) for name, call in calls.items()}


def _summary(times: Mapping[str, Any]) -> dict[str, Any]:
    """Of a contestant's times what is kept of many variants: median and quartiles, seconds."""
    return {name: times[name] for name in ("median", "quartiles")}


def _call(layer: moeos.MoELayer, x: torch.Tensor) -> CallTensors:
    return CallTensors(
        x=x,
        out=torch.empty_like(x),
        topk_ids=None,
        topk_weights=None,
        gate=layer.gate.weight,
        selection_bias=layer.gate.selection_bias,
        router_bias=layer.gate.bias,
        expert_scale=layer.gate.expert_scale,
        w1=layer.w1,
        b1=layer.b1,
        w2=layer.w2,
        b2=layer.b2,
        shared_w1=layer.shared_w1,
        shared_w2=layer.shared_w2,
        shared_gate=layer.shared_gate,
        w1_scale=layer.w1_scale,
        w2_scale=layer.w2_scale,
        w1_scale_2=layer.w1_scale_2,
        w2_scale_2=layer.w2_scale_2,
        shared_w1_scale=layer.shared_w1_scale,
        shared_w2_scale=layer.shared_w2_scale,
        shared_w1_scale_2=layer.shared_w1_scale_2,
        shared_w2_scale_2=layer.shared_w2_scale_2,
    )


def _line(found: Mapping[str, Any]) -> str:
    times = {name: of["median"] * 1e6 for name, of in found["times"].items()}
    base = next(iter(times.values()))
    told = (f"{name} {time:.1f} ({time / base - 1:+.1%})" for name, time in times.items())
    wrong = [name for name, error in found["difference"].items() if error != 0]
    late = f", {found['late'] * 1e6:.0f} µs late" if found["late"] > 0 else ""
    return f"{found['shape']}:{found['tokens']}{late}: {', '.join(told)}" + (
        f"; other outputs: {', '.join(wrong)}" if wrong else ""
    )


if __name__ == "__main__":
    typer.run(main)
