# SPDX-License-Identifier: Apache-2.0
"""`moeos plan`: what a layer would need and cost, without making it."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from moeos import _runtime
from moeos.cli import estimate, memory
from moeos.cli.estimate import Sizes, Work
from moeos.cli.memory import RankMemory
from moeos.cli.shared import failures, machine, output
from moeos.cli.shared.options import LayoutOption, ParallelOption, ReduceOption, TensorRanks
from moeos.cli.slices import SliceOptions
from moeos.compile import kernel_shape
from moeos.config.config import MoEConfig, RowMap
from moeos.partition import policies
from moeos.partition.policies import Layout
from moeos.partition.rates import DeviceRates
from moeos.partition.slicing import Slicing
from moeos.world.world import Backend

_SIZE_ROWS = (
    ("symmetric heap", "heap_bytes", output.size),
    ("queues, counters, maps", "memory_bytes", output.size),
    ("between the GEMMs", "intermediate_bytes", output.size),
    ("rows of a cell", "cell_rows", output.count),
    ("chunks of a cell", "chunks", output.count),
    ("row tiles, at most", "tiles", output.count),
    ("pieces of work, at most", "parts", output.count),
)


_HEAP_PARTS = {
    "cells": "cells of tokens",
    "results": "results",
    "staged": "results until they are put",
    "sums": "sums of tokens",
    "words": "words",
}

MAX_LAYERS = 1 << 16


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the world.")] = 8,
    parallel: ParallelOption = "expert",
    tensor_ranks: TensorRanks = None,
    layout: LayoutOption = "auto",
    reduce: ReduceOption = "auto",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each rank in a call; else max_tokens.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of this config in the model.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks that write each other's memory; others get puts. Else all."),
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="GB/s that a rank sends to ranks of other nodes.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("all numbers"))
    ] = None,
) -> None:
    """Says whether layers fit, what they need, and what a call costs, on each rank.

    Nothing is allocated. The exit code is 1 where a rank needs more memory than the smallest GPU
    here has, or an H200 where there is none.
    """
    options = PlanOptions(
        config=config,
        ranks=ranks,
        slices=SliceOptions(parallel, tensor_ranks, layout, reduce),
        tokens=tokens,
        layers=layers,
        ranks_per_node=ranks_per_node,
        network=network,
        json_file=json_file,
    )
    failures.finish(lambda: execute(options), json_file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of the command line."""

    config: Path
    ranks: int = 8
    slices: SliceOptions
    tokens: int | None = None
    layers: int = 1
    ranks_per_node: int | None = None
    network: float | None = None
    json_file: Path | None = None

    @property
    def node(self) -> int:
        """Ranks of a node."""
        return min(self.ranks, self.ranks_per_node or self.ranks)

    @property
    def network_rate(self) -> float | None:
        """bytes/s."""
        return None if self.network is None else self.network * 1e9


def execute(options: PlanOptions) -> int:
    """Runs the command; the exit code.

    Raises `OSError`, `ValueError` and `TypeError` for a file, a config or an argument.
    """
    cfg = MoEConfig.from_toml(options.config)
    output.check_writable(options.json_file)
    ranks, layers = options.ranks, options.layers
    for name, given, most in (
        ("--ranks", ranks, None),
        ("--layers", layers, MAX_LAYERS),
        ("--ranks-per-node", options.ranks_per_node, None),
    ):
        if given is not None and not 1 <= given <= (most or given):
            allowed = "at least 1" if most is None else f"1 to {most}"
            raise ValueError(f"{name} is {given}; it must be {allowed}")
    if ranks % options.node != 0:
        raise ValueError(
            f"--ranks-per-node is {options.node}, which does not divide --ranks {ranks}: all nodes "
            "have equally many"
        )
    if options.network is not None:
        if options.node == ranks:
            raise ValueError(
                f"--network is {options.network:g}, but all {ranks} ranks are on one node: give "
                "--ranks-per-node"
            )
        if not 0 < options.network < math.inf:
            raise ValueError(f"--network is {options.network:g}; it must be GB/s, above 0")
    device, rates = machine.rates()
    slicing = options.slices.slicing(ranks).by(rates)
    if slicing.sums and options.node < ranks:
        raise ValueError(
            f"--ranks-per-node is {options.node}, and --parallel {slicing.parallel} has no peers "
            "over a network: leave it out, or plan --parallel expert"
        )
    sizes = estimate.sizes_by_row_map(cfg, ranks, slicing)
    weights = estimate.weight_bytes_per_rank(cfg, ranks, slicing)
    tokens = cfg.max_tokens if options.tokens is None else options.tokens
    work = estimate.work_of(cfg, ranks, tokens, slicing)
    saved = estimate.saved_bytes(cfg, ranks, tokens, slicing)
    backend, why = _backend_of(slicing.cut(cfg))
    processors = rates.blocks - 1 if backend == "cuda" else 1
    policy = _policy_of(cfg, ranks, tokens, slicing, backend, processors)
    needed = memory.rank_memory(
        cfg,
        ranks,
        layers,
        backend=backend,
        processors=processors,
        ranks_per_node=options.ranks_per_node,
        slicing=slicing,
    )
    places = memory.GPUS | {f"here: {name}": size for name, size in machine.gpu_memory().items()}
    if options.json_file is not None:
        document = {
            "config": json.loads(cfg.digest()),
            "ranks": ranks,
            **slicing.arguments,
            "ranks_per_node": options.ranks_per_node,
            "layers": layers,
            "backend": backend,
            "weight_bytes": weights,
            "memory": needed.workspace,
            "heap": needed.heap,
            "total_without_weights": needed.without_weights,
            "total_weights": needed.weights,
            "total": needed.total,
            "gpus": [
                {"name": name, "memory_bytes": size, "fits": needed.total <= size}
                for name, size in places.items()
            ],
            "sizes": {row_map: dataclasses.asdict(found) for row_map, found in sizes.items()},
            "call": dataclasses.asdict(work),
            **policy,
            "saved_bytes": saved,
            "network_bytes": work.bytes_over_network(options.node),
            "floor_seconds": work.floors(options.node, options.network_rate, rates),
            "rates": {"here": device, "of": rates.device},
        }
        output.write_json(options.json_file, document)
    gpu, size = _judged(places)
    fits = backend == "twin" or needed.total <= size
    _print_verdict(needed, gpu, size, why)
    _print_sizes(cfg, options.config, ranks, weights, sizes, slicing)
    _print_memory(needed, backend, options, places)
    _print_work(work, options.node, saved, slicing)
    _print_policy(policy, slicing.policy.layout)
    _print_floors(work, options, rates)
    _print_rates(device, rates)
    if cfg.dtype == torch.float32:
        print("the layer is float32: its GEMMs are slower than the BF16 rate above")
    return failures.DONE if fits else failures.DOES_NOT_FIT


def _judged(places: Mapping[str, int]) -> tuple[str, int]:
    """The GPU of the verdict, and its memory: the smallest one here, else an H200."""
    here = [name for name in places if name not in memory.GPUS]
    name = min(here, key=lambda one: places[one], default="H200")
    return name, places[name]


def _print_verdict(needed: RankMemory, gpu: str, size: int, why: str) -> None:
    """The first line; `why`: no GPU has such a layer."""
    needs = f"a rank needs {output.size(needed.total)}"
    if why:
        print(f"runs on the twin alone: {needs}; no GPU: {why}", flush=True)
    elif needed.total <= size:
        print(f"fits: {needs} of {output.size(size)}, {gpu}", flush=True)
    else:
        print(
            f"does not fit: {needs} of {output.size(size)}, {gpu}; plan more --ranks, fewer "
            "--layers or a lower max_tokens",
            flush=True,
        )


def _backend_of(cfg: MoEConfig) -> tuple[Backend, str]:
    """What the memory is planned for: the GPU, or the twin, and why the GPU has no such layer."""
    try:
        kernel_shape.check_supported(cfg)
    except ValueError as error:
        return "twin", str(error)
    return "cuda", ""


def _print_sizes(
    cfg: MoEConfig,
    config: Path,
    ranks: int,
    weights: int,
    sizes: Mapping[RowMap, Sizes],
    slicing: Slicing,
) -> None:
    made = output.table(*sizes)
    for label, name, write in _SIZE_ROWS:
        made.add_row(label, *(write(getattr(found, name)) for found in sizes.values()))
    print(
        f"{config}: {_holders(cfg, ranks, slicing)}, {output.size(weights)} of weights a rank\n\n"
        f"what a rank needs for up to {cfg.max_tokens} tokens and any routing, by row map:",
        flush=True,
    )
    output.tables(len(sizes)).print(made)


def _holders(cfg: MoEConfig, ranks: int, slicing: Slicing) -> str:
    """How many experts ranks hold, in words."""
    holders = slicing.holders(ranks)
    if holders == 1 and slicing.cuts:
        return f"{ranks} ranks with a slice of each of {cfg.experts} experts"
    who = f"{holders} groups of {slicing.slices} ranks" if slicing.cuts else f"{ranks} ranks"
    slices_of = "slices of " if slicing.cuts else ""
    held = collections.Counter(len(cfg.experts_of(one, holders)) for one in range(holders))
    if len(held) == 1:
        return f"{who} with {slices_of}{max(held)} of {cfg.experts} experts each"
    each = ", ".join(f"{number} with {experts}" for experts, number in held.items())
    return f"{who} with {slices_of}at most {max(held)} of {cfg.experts} experts ({each})"


def _print_memory(
    needed: RankMemory,
    backend: Backend,
    options: PlanOptions,
    places: Mapping[str, int],
) -> None:
    made = output.table("a rank", "a layer of it")
    for kind, label in (
        ("heap", "symmetric heap"),
        ("queues", "queues, counters, maps"),
        ("between", "between the GEMMs"),
    ):
        made.add_row(label, output.size(needed.workspace[kind]), "shared")
        for part, size in needed.heap.items() if kind == "heap" else ():
            if size > 0:
                made.add_row(f"  {_HEAP_PARTS[part]}", output.size(size), "")
    records = needed.workspace["records"]
    made.add_row("records of calls", output.size(records), output.size(records / needed.layers))
    made.add_section()
    made.add_row("without weights", output.size(needed.without_weights), "")
    weights = needed.weights
    made.add_row("weights", output.size(weights), output.size(weights / needed.layers))
    made.add_row("in all", output.size(needed.total), "")
    apart = "" if options.node == options.ranks else f", {options.node} ranks a node"
    where = "on a GPU" if backend == "cuda" else "on the twin"
    print(
        f"\nmemory of {output.plural(needed.layers, 'layer')} {where}{apart}, which share a "
        "workspace:",
        flush=True,
    )
    output.tables(2).print(made)
    if backend == "twin":
        return
    for name, size in places.items():
        share = f"{100 * needed.total / size:.3g} % of {output.size(size)}"
        verdict = "fits" if needed.total <= size else "does not fit"
        print(f"{name}: {verdict}, {share}", flush=True)


def _print_work(work: Work, node: int, saved: Mapping[str, int], slicing: Slicing) -> None:
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
    if work.shared_flops > 0:
        made.add_row("shared experts' FLOPs", f"{work.shared_flops:.4g}")
    made.add_row("weights read", output.size(work.weight_bytes))
    made.add_section()
    made.add_row("dispatched to peers", output.size(work.dispatch_bytes))
    sent = "sums of tokens to peers" if slicing.sums else "returned to peers"
    made.add_row(sent, output.size(work.combine_bytes))
    made.add_row("counts to peers", output.size(work.count_bytes))
    made.add_row("flags to peers", output.size(work.flag_bytes))
    far, all_bytes = work.bytes_over_network(node), sum(work.bytes_by_peer)
    if far > 0:
        made.add_row("over the network", f"{output.size(far)}, {100 * far / all_bytes:.3g} %")
    if saved:
        made.add_section()
    for save, size in saved.items():
        made.add_row(f"save={save!r}", output.size(size))
    what = (
        "the same on all ranks, and even routing:"
        if slicing.sums
        else "a rank and even routing; a token's experts are neighbours,\n"
        "so that the least is dispatched:"
    )
    print(f"\na call with {work.tokens} tokens {what}", flush=True)
    output.tables(1).print(made)


def _policy_of(
    cfg: MoEConfig, ranks: int, tokens: int, slicing: Slicing, backend: Backend, processors: int
) -> dict[str, Any]:
    """How a call is computed, and the costs by which that is chosen unless it is forced: of slices
    all, of whole experts where own rows are read, and nothing where slices have other tokens each.
    Raises `ValueError` for a layout that the layer cannot have.
    """
    if slicing.apart:
        return {}
    cut, holders, rates = slicing.cut(cfg), slicing.holders(ranks), slicing.policy.rates

    def sizes_of(layout: Layout) -> _runtime.Sizes:
        policy = dataclasses.replace(slicing.policy, layout=layout)
        forced = dataclasses.replace(slicing, policy=policy)
        return memory.sizes_of(cfg, ranks, backend, processors, slicing=forced)

    sizes, gathered = sizes_of(slicing.policy.layout), sizes_of("gathered")
    slicing.policy.require_fits(sizes)
    costs = {"expert_major_persistent": policies.copies(rates, cut, tokens, holders)}
    if gathered.reads_in_place(tokens):
        costs["gathered"] = policies.boxes(rates, cut, tokens)
    elif gathered.gathers_own_rows:
        costs["gathered"] = policies.gathered_rows(rates, cut, tokens, holders)
    if sizes_of("token_major").between_by_pairs:
        costs["token_major"] = policies.token_major(rates, cut, tokens)
    layout: Layout = "expert_major_persistent"
    if sizes.between_by_pairs:
        layout = "token_major"
    elif sizes.reads_in_place(tokens) or sizes.gathers_own_rows:
        layout = "gathered"
    found: dict[str, Any] = {
        "layout": layout,
        "seconds_by_layout": costs,
    }
    if slicing.sums:
        left = slicing.leaves_partials(cut, tokens, counted=False)
        found["reduce"] = "after" if left else "fused"
        found["seconds_by_reduce"] = {
            "fused": policies.fused(rates, cut, tokens, slicing.slices),
            "after": policies.after(rates, cut, tokens, slicing.slices),
        }
    return found


def _print_policy(found: Mapping[str, Any], chosen: Layout) -> None:
    for name, what in (("layout", "beside the products"), ("reduce", "with the products")):
        if name in found:
            costs = found[f"seconds_by_{name}"].items()
            each = ", ".join(f"{policy} {output.duration(cost)}" for policy, cost in costs)
            print(f"{name} {found[name]}; the costs' model, {what}: {each}")
    costs = found.get("seconds_by_layout", {})
    if chosen == "auto" and costs and costs[found["layout"]] > min(costs.values()):
        print(
            "auto gathers rows of more than a few tokens on a rank alone, if that gains more in "
            "some calls than it loses in others; --layout gathered always does"
        )


def _products(work: Work, rates: DeviceRates) -> tuple[str, str]:
    """The rate at which a GPU computes a call's GEMMs, and the kind of these."""
    plain, experts = f"{rates.bf16_flops / 1e12:.0f}", f"{work.expert_rate / 1e12:.0f}"
    if plain == experts:
        return f"{plain} TFLOP/s", "dense BF16 GEMM"
    return f"{experts}, {plain} TFLOP/s", "dense FP8, BF16 GEMM"


def _print_floors(work: Work, options: PlanOptions, rates: DeviceRates) -> None:
    far = work.bytes_over_network(options.node) > 0
    network = options.network
    limits = {
        "compute": ("FLOPs", *_products(work, rates)),
        "link": (
            "bytes within a node" if far else "bytes to peers",
            f"{rates.link_bytes / 1e9:.0f} GB/s",
            "NVLink, out",
        ),
        "memory": ("weights", f"{rates.memory_bytes / 1e12:.1f} TB/s", "memory, read"),
    }
    if network is not None:
        limits["network"] = ("over the network", f"{network:g} GB/s", "--network, out")
    made = output.table("time", "at", "of")
    for limit, seconds in work.floors(options.node, options.network_rate, rates).items():
        label, rate, what = limits[limit]
        made.add_row(label, output.duration(seconds), rate, what)
    if far and network is None:
        made.add_row("over the network", "", "not known", "--network GB/s")
    print(f"\nno call can be faster than each of these, with an {rates.device} a rank:", flush=True)
    output.tables(3).print(made)


def _print_rates(device: str | None, rates: DeviceRates) -> None:
    """The GPU whose rates the costs and limits use, where it is another one."""
    if device not in (None, rates.device):
        print(
            f"the GPU here is an {device}, of which no rates are known: those of an {rates.device} "
            "stand for them. `moeos doctor --measure` measures them"
        )
