# SPDX-License-Identifier: Apache-2.0
"""What watching and tracing cost: `python -m tests.gpu.costs --out costs.json`.

The same calls by three kernels of one source, in turn, on one GPU: as it is; with deadlines that
never pass and never read the clock (a line of a copy of the sources is replaced); and with a trace.
Up to `FEW` tokens the L2 cache is flushed before each call. Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.clocks import timing
from bench.suites import shapes as read
from moeos import MoEConfig, World
from moeos.cli.shared import machine, provenance
from moeos.compile import jit
from moeos.engines.base import CallTensors
from moeos.engines.cuda.engine import CudaEngine
from moeos.world import virtual
from tests.gpu.cases import DEADLINE, draw_weights_on_gpu

FEW = 512
ROUNDS, WARM_UP = 60, 8
TOKENS = (1, 128, 2048, 8192)
EVENTS = 4096
LOOK = "    if ((++looks_ & 31U) != 0) {\n      return false;\n    }\n"
NEVER = "    return false;\n"
FLUSH_BYTES = 256 << 20


def unwatched(folder: Path) -> Path:
    """A copy of the sources in which no deadline passes."""
    for name in ("kernels", "runtime"):
        shutil.copytree(jit.include_root() / name, folder / name)
    watchdog = folder / "runtime" / "memory" / "watchdog.hpp"
    text = watchdog.read_text()
    assert text.count(LOOK) == 1
    watchdog.write_text(text.replace(LOOK, NEVER))
    return folder


def engines(world: World, cfg: MoEConfig, sources: Path) -> dict[str, CudaEngine]:
    shared = world.workspace.shared
    plain = CudaEngine(cfg, world, shared)
    with jit.sources_in(sources):
        without_watch = CudaEngine(cfg, world, shared)
    with mock.patch.object(world, "trace_events", EVENTS):
        traced = CudaEngine(cfg, world, shared)
    return {"plain": plain, "unwatched": without_watch, "traced": traced}


def measure(world: World, name: str, cfg: MoEConfig, sources: Path) -> list[dict[str, Any]]:
    weights = draw_weights_on_gpu(cfg)
    contestants = engines(world, cfg, sources)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for tokens in TOKENS:
        x = torch.randn(tokens, cfg.hidden, device="cuda", dtype=cfg.dtype)
        call = CallTensors(
            x=x,
            out=torch.empty_like(x),
            topk_ids=None,
            topk_weights=None,
            **{field: getattr(weights, field) for field in ("gate", "selection_bias")},
            **{field: getattr(weights, field) for field in ("w1", "b1", "w2", "b2")},
        )
        times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            each: [] for each in contestants
        }
        for turn in range(WARM_UP + ROUNDS):
            order = list(contestants)[turn % 3 :] + list(contestants)[: turn % 3]
            for each in order:
                if tokens <= FEW:
                    flush.fill_(turn)
                torch.cuda._sleep(60_000)  # so that the launch is not what is timed
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                contestants[each].forward(call)
                end.record()
                if turn >= WARM_UP:
                    times[each].append((begin, end))
        torch.cuda.synchronize()
        case: dict[str, Any] = {"layer": name, "tokens": tokens}
        for each, engine in contestants.items():
            engine.check()
            case[each] = timing([begin.elapsed_time(end) / 1e3 for begin, end in times[each]])
        case["watch"] = case["plain"]["median"] / case["unwatched"]["median"] - 1
        case["trace"] = case["traced"]["median"] / case["plain"]["median"] - 1
        found.append(case)
        print(f"{name}, {tokens}: {case['watch']:+.4f} {case['trace']:+.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    suite = read(Path("configs/suites/gpu.toml"))
    shapes = {shape.name: shape for shape in suite.shapes}

    def run(world: World) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            sources = unwatched(Path(folder))
            results = []
            for name in ("qwen3-30b-a3b", "deepseek-v3"):
                cfg = shapes[name].config_on(1, suite.full_ranks)
                cfg = dataclasses.replace(cfg, max_tokens=max(TOKENS))
                results += measure(world, name, cfg, sources)
            return results

    results = virtual.run(run, ranks=1, backend="cuda", deadline=DEADLINE)[0]
    document = {
        "benchmark": "costs-1",
        "command": provenance.command("tests.gpu.costs"),
        "commit": provenance.commit(),
        "device": machine.gpus()[0],
        "versions": machine.versions(),
        "rounds": ROUNDS,
        "warm_up_rounds": WARM_UP,
        "results": results,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
