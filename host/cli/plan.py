"""`moeos plan`: what a layer would need and cost, without making it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from moeos.cli import estimate, failures, output
from moeos.cli.estimate import (
    H200_GEMM_FLOPS,
    H200_LINK_BYTES,
    H200_MEMORY_BYTES,
    Sizes,
    Work,
)
from moeos.config import MoEConfig, RowMap

_SIZE_ROWS = (
    ("symmetric heap", "heap_bytes", output.size),
    ("queues, counters, maps", "memory_bytes", output.size),
    ("between the GEMMs", "intermediate_bytes", output.size),
    ("rows of a cell", "cell_rows", output.count),
    ("chunks of a cell", "chunks", output.count),
    ("row tiles, at most", "tiles", output.count),
    ("pieces of work, at most", "parts", output.count),
)


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the world.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each rank in a call; else max_tokens.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes all numbers to this file.")
    ] = None,
) -> None:
    """Says what a layer needs and what a call of it costs, on each rank."""
    failures.finish(lambda: execute(config, ranks, tokens, json_file))


def execute(config: Path, ranks: int, tokens: int | None, json_file: Path | None) -> int:
    """Runs the command; the exit code.

    Raises `OSError`, `ValueError` and `TypeError` for a file, a config or an argument.
    """
    cfg = MoEConfig.from_toml(config)
    output.check_writable(json_file)
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1")
    sizes = estimate.sizes_by_row_map(cfg, ranks)
    weights = estimate.weight_bytes_per_rank(cfg, ranks)
    work = estimate.work_of(cfg, ranks, cfg.max_tokens if tokens is None else tokens)
    if json_file is not None:
        document = {
            "config": json.loads(cfg.digest()),
            "ranks": ranks,
            "weight_bytes": weights,
            "sizes": {row_map: dataclasses.asdict(found) for row_map, found in sizes.items()},
            "call": dataclasses.asdict(work),
            "floor_seconds": work.floors,
        }
        output.write_json(json_file, document)

    _print_sizes(cfg, config, ranks, weights, sizes)
    _print_work(work)
    _print_floors(work)
    if cfg.dtype == torch.float32:
        print("the layer is float32: its GEMMs are slower than the BF16 rate above")
    return failures.DONE


def _print_sizes(
    cfg: MoEConfig,
    config: Path,
    ranks: int,
    weights: int,
    sizes: Mapping[RowMap, Sizes],
) -> None:
    made = output.table(*sizes)
    for label, name, write in _SIZE_ROWS:
        made.add_row(label, *(write(getattr(found, name)) for found in sizes.values()))
    print(
        f"{config}: {ranks} ranks with {cfg.experts_per_rank(ranks)} of {cfg.experts} experts "
        f"each, {output.size(weights)} of weights a rank\n\n"
        f"what a rank needs for up to {cfg.max_tokens} tokens and any routing, by row map:",
        flush=True,
    )
    output.tables(len(sizes)).print(made)


def _print_work(work: Work) -> None:
    made = output.table("a rank")
    made.add_row("pairs sent", output.count(work.pairs_sent))
    made.add_row("pairs received", output.count(work.pairs_received))
    made.add_row("row tiles", output.count(work.tiles))
    made.add_row("padding rows", output.count(work.padding_rows))
    made.add_section()
    for kind, number in work.tasks.items():
        made.add_row(f"{kind} tasks", output.count(number))
    made.add_section()
    made.add_row("router FLOPs", f"{work.router_flops:.4g}")
    made.add_row("expert FLOPs", f"{work.expert_flops:.4g}")
    made.add_row("weights read", output.size(work.weight_bytes))
    made.add_section()
    made.add_row("dispatched to peers", output.size(work.dispatch_bytes))
    made.add_row("returned to peers", output.size(work.combine_bytes))
    made.add_row("counts to peers", output.size(work.count_bytes))
    made.add_row("flags to peers", output.size(work.flag_bytes))
    print(f"\na call with {work.tokens} tokens a rank and even routing:", flush=True)
    output.tables(1).print(made)


def _print_floors(work: Work) -> None:
    rates = {
        "compute": ("FLOPs", f"{H200_GEMM_FLOPS / 1e12:.0f} TFLOP/s", "dense BF16 GEMM"),
        "link": ("bytes to peers", f"{H200_LINK_BYTES / 1e9:.0f} GB/s", "NVLink, out"),
        "memory": ("weights", f"{H200_MEMORY_BYTES / 1e12:.1f} TB/s", "memory, read"),
    }
    made = output.table("time", "at", "of")
    for limit, seconds in work.floors.items():
        label, rate, what = rates[limit]
        made.add_row(label, output.duration(seconds), rate, what)
    print("\nno call can be faster than each of these, with an H200 a rank:", flush=True)
    output.tables(3).print(made)
