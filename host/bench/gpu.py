"""The layer on one GPU beside its own two matrix products: `python -m moeos.bench.gpu`.

One rank holds the experts that one of four ranks would hold, and routes to all of them; so every
row travels through the protocol, and none over a link. What it is compared with are the two GEMMs
alone, `torch._grouped_mm` on as many rows, evenly divided: no routing, no activation, no combine.
This file measures and writes JSON; it judges nothing.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import moeos
from moeos.cli import machine, output

SHAPES = {
    # experts of one of four ranks, as in configs/
    "qwen3-30b-a3b": moeos.MoEConfig(hidden=2048, intermediate=768, experts=32, top_k=8),
    "qwen3-235b-a22b": moeos.MoEConfig(hidden=4096, intermediate=1536, experts=32, top_k=8),
    "deepseek-v3": moeos.MoEConfig(hidden=7168, intermediate=2048, experts=64, top_k=8),
}
TOKENS = (8, 128, 512, 2048)
ROUNDS = 20
WARM_UP = 5


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the results go.")],
    commit: Annotated[str, typer.Option(help="The commit that is measured.")],
) -> None:
    """Measures every shape and token count in interleaved rounds and writes the results."""
    output.check_writable(json_file)
    with moeos.init("cuda") as world:
        if world.size != 1:
            raise RuntimeError(f"this measures one GPU, and there are {world.size} ranks")
        rows = [row for name in SHAPES for row in measure(name, world)]
    gpu = torch.cuda.get_device_properties()
    results = {
        "benchmark": "gpu",
        "command": ["python", "-m", "moeos.bench.gpu", *sys.argv[1:]],
        "commit": commit,
        "gpu": {"name": gpu.name, "multiprocessors": gpu.multi_processor_count},
        "machine": machine.describe(),
        "rounds": ROUNDS,
        "versions": machine.versions(),
        "results": rows,
    }
    output.write_json(json_file, results)
    for row in rows:
        typer.echo(
            f"{row['shape']:18} {row['tokens']:5} tokens  "
            f"layer {row['layer_us']['median']:8.0f} us  "
            f"grouped GEMMs {row['grouped_us']['median']:8.0f} us  ratio {row['ratio']:.2f}"
        )


def measure(name: str, world: moeos.World) -> list[dict[str, Any]]:
    """Times of one shape at every token count, in microseconds."""
    shape = SHAPES[name]
    cfg = moeos.MoEConfig(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        experts=shape.experts,
        top_k=shape.top_k,
        max_tokens=max(TOKENS),
    )
    layer = moeos.MoELayer(cfg, world)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, cfg.hidden, device="cuda").to(cfg.dtype)
        runs: dict[str, Callable[[], object]] = {
            "layer": functools.partial(layer, x),
            "grouped": grouped(layer, tokens),
        }
        times = interleave(runs)
        layer.check()
        medians = {what: statistics.median(values) for what, values in times.items()}
        rows.append(
            {
                "shape": name,
                "tokens": tokens,
                "ratio": medians["layer"] / medians["grouped"],
                **{
                    f"{what}_us": {"median": medians[what], "all": values}
                    for what, values in times.items()
                },
            }
        )
    return rows


def grouped(layer: moeos.MoELayer, tokens: int) -> Callable[[], object]:
    """The layer's two products for `tokens` tokens, with the same number of rows for each
    expert.
    """
    cfg = layer.cfg
    each = max(1, tokens * cfg.top_k // cfg.experts)
    ends = torch.arange(1, cfg.experts + 1, device="cuda", dtype=torch.int32) * each
    x = torch.randn(each * cfg.experts, cfg.hidden, device="cuda").to(cfg.dtype)
    inner = torch.randn(each * cfg.experts, cfg.intermediate, device="cuda").to(cfg.dtype)

    def run() -> None:
        torch._grouped_mm(x, layer.w1.transpose(1, 2), ends)
        torch._grouped_mm(inner, layer.w2.transpose(1, 2), ends)

    return run


def interleave(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Every run's times in microseconds; in turn, so that clocks and heat are the same for all."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {w: [] for w in runs}
    for turn in range(WARM_UP + ROUNDS):
        for what, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            if turn >= WARM_UP:
                events[what].append((begin, end))
    torch.cuda.synchronize()
    return {w: [b.elapsed_time(e) * 1e3 for b, e in pairs] for w, pairs in events.items()}


if __name__ == "__main__":
    typer.run(main)
