# SPDX-License-Identifier: Apache-2.0
"""`moeos run`: makes a layer, calls it, checks it against the reference and reports.

It works in one process and under every launcher that `moeos.init` knows; rank 0 speaks for all.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress

import moeos
from moeos.checkpoints.files import Tensors, open_tensors
from moeos.cli import estimate, memory, report, worlds
from moeos.cli.check import Checker, CheckResult
from moeos.cli.outputs import Outputs
from moeos.cli.report import RankReport
from moeos.cli.shared import failures, machine, output
from moeos.cli.shared.options import (
    Backend,
    Deadline,
    LayoutOption,
    ParallelOption,
    ReduceOption,
    TensorRanks,
    VirtualRanks,
)
from moeos.cli.shared.routing import PATTERNS, check_pattern, parse_pattern
from moeos.cli.shared.settings import RunSettings, check_tokens, read_settings
from moeos.cli.slices import SliceOptions, may_all_reduce, ranks_of_torch
from moeos.cli.tensors import piece, read_rows
from moeos.cli.text import read_documents
from moeos.cli.totals import Totals
from moeos.cli.workload import GivenTokens, RandomTokens, TextTokens, Workload, generator_of
from moeos.config import reference
from moeos.integrations.metrics import Metrics
from moeos.partition.slicing import Slicing
from moeos.system import host_memory

MAX_ITERATIONS = 10_000
"""The most calls of one run: each rank reports the numbers of each."""

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the command line; None where the config decides."""

    config: Path
    slices: SliceOptions
    tokens: int | None = None
    iterations: int | None = None
    routing: str | None = None
    weights: Path | None = None
    prefix: str = ""
    ignore: Sequence[str] = ()
    input_file: Path | None = None
    output_file: Path | None = None
    input_text: tuple[str, ...] = ()
    deadline: float = 30.0
    backend: str = "auto"
    ranks: int | None = None
    seed: int = 0
    json_file: Path | None = None
    prometheus: Path | None = None
    check: bool = True


@dataclasses.dataclass(frozen=True)
class _RunPlan:
    """This rank's part of the run.

    Attributes:
        tokens: of each call, or the most where they vary.
        calls: how many.
        varies: whether the tokens of each call are drawn from 0 to `tokens`.
        source: the workload in words.
        rows: of --input on this rank, or None.
        weights: of a Hugging Face block, or None for those that the layer draws.
        slicing: how experts are cut. Ranks with slices of the same ones have the same tokens.
        all_reduces: whether the layer may leave partial sums to torch.distributed.
    """

    cfg: moeos.MoEConfig
    slicing: Slicing
    all_reduces: bool
    tokens: int
    calls: int
    varies: bool
    workload: Workload
    source: str
    generator: torch.Generator
    rows: int | None
    weights: Tensors | None


def run(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer, with a table [run].")],
    parallel: ParallelOption = "expert",
    tensor_ranks: TensorRanks = None,
    layout: LayoutOption = "auto",
    reduce: ReduceOption = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each rank and call, the most with vary_tokens; else the config says."
        ),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Calls of the layer; else as the config says.")
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help=f"Random tokens, routed by a pattern: {PATTERNS}.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Safetensors file, *.index.json or folder with a Hugging Face model."),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Prefix of the block's names in it, like model.layers.0.mlp.")
    ] = "",
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Prefix of names below it that are not used, like shared_experts.; repeatable."
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='Safetensors file with tokens "x" [tokens, H], split over the ranks.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help='Writes tokens "x" and the layer\'s "y" [tokens, H] of all ranks to this '
            "safetensors file: of the last call, or each row of --input.",
        ),
    ] = None,
    input_text: Annotated[
        list[str] | None,
        typer.Option(help="A document whose bytes are the tokens, or a pattern; repeatable."),
    ] = None,
    deadline: Deadline = 30.0,
    backend: Backend = "auto",
    ranks: VirtualRanks = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, random tokens and token counts.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help=output.JSON_HELP.format("configuration, machine and results")),
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(help="Writes each rank's counters to moeos-rank-R.prom in this folder."),
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare with the float64 reference.")] = True,
) -> None:
    """Runs a layer and checks it.

    Exit code 0 if the error is within the tolerance, 1 if not, 2 for bad input, 3 for a failure.
    """
    options = RunOptions(
        config=config,
        slices=SliceOptions(parallel, tensor_ranks, layout, reduce),
        tokens=tokens,
        iterations=iterations,
        routing=routing,
        weights=weights,
        prefix=prefix,
        ignore=ignore or (),
        input_file=input_file,
        output_file=output_file,
        input_text=tuple(input_text or ()),
        deadline=deadline,
        backend=backend,
        ranks=ranks,
        seed=seed,
        json_file=json_file,
        prometheus=prometheus,
        check=check,
    )
    failures.finish(lambda: execute(options), json_file)


def execute(options: RunOptions) -> int:
    """Runs the command in the world of this process, or on virtual ranks; the exit code.

    Raises what `worlds.run` and a call of the layer raise.
    """
    return worlds.run(
        lambda world: _run(world, options),
        options.backend,
        deadline=options.deadline,
        virtual_ranks=options.ranks,
    )


def _run(world: moeos.World, options: RunOptions) -> int:
    plan = failures.agree(world, lambda: _prepare(world, options), "the input of the run")
    speaks = world.rank == 0
    if speaks:
        _introduce(world, plan)
    failures.agree(world, lambda: _require_memory(world, plan, options), "the memory of the run")
    with ranks_of_torch(world, wanted=plan.all_reduces):
        return _call(world, options, plan)


@torch.no_grad()
def _call(world: moeos.World, options: RunOptions, plan: _RunPlan) -> int:
    """Makes the layer, calls it, compares and reports; the exit code."""
    speaks = world.rank == 0
    torch.manual_seed(options.seed)
    layer = failures.agree(world, lambda: _make_layer(plan, world, options), "the layer")

    totals = Totals(layer.placement.experts_of(world.rank))
    metrics = None if options.prometheus is None else Metrics(world.rank)
    checker = Checker(layer, plan.calls) if options.check else None
    outputs = None
    if options.output_file is not None:
        first = plan.slicing.apart or plan.slicing.slice_of(world.rank) == 0
        outputs = Outputs(plan.rows, speaks=first)
    for _ in _progress(range(plan.calls), "calls of the layer", visible=speaks):
        tokens = plan.tokens
        if plan.varies:
            tokens = int(torch.randint(plan.tokens + 1, (), generator=plan.generator))
        batch = plan.workload.draw(tokens)
        given = batch.on(layer.w1.device)
        begin = time.perf_counter()
        out = layer(given.x, given.topk_ids, given.topk_weights)
        layer.check()  # waits for the GPU, where a call only launches
        seconds = time.perf_counter() - begin
        stats = layer.stats()
        totals.add(stats, seconds)
        if metrics is not None:
            metrics.add(stats)
        if checker is not None:
            checker.keep(batch, out)
        if outputs is not None:
            outputs.keep(batch, out)

    if metrics is not None and options.prometheus is not None:
        metrics.write(options.prometheus)
    if outputs is not None and options.output_file is not None:
        outputs.write(world, options.output_file)
    result: CheckResult | None = checker.compare() if checker is not None else None
    reports = world.control.allgather(RankReport(totals, result), "the results of the run")
    error = report.largest_error(reports) if options.check else None
    tolerance = reference.tolerance_of(plan.cfg)
    if speaks:
        _conclude(world, options, plan, reports, error, tolerance)
    return failures.ABOVE_TOLERANCE if error is not None and error > tolerance else failures.DONE


def _prepare(world: moeos.World, options: RunOptions) -> _RunPlan:
    cfg = moeos.MoEConfig.from_toml(options.config)
    slicing = options.slices.slicing(world.size)
    all_reduces = may_all_reduce(world, cfg, slicing)  # raises where a size does not divide
    settings = read_settings(options.config)
    output.check_writable(options.json_file)
    output.check_writable(options.output_file, "--output")
    if options.prometheus is not None:
        output.check_folder(options.prometheus, "--prometheus")
    place = slicing.place(world.rank, world.size)
    generator = generator_of(options.seed, place[0])
    if options.prefix and options.weights is None:
        raise ValueError(f"--prefix is {options.prefix!r}; it needs --weights")
    if options.ignore and options.weights is None:
        raise ValueError(f"--ignore is {options.ignore[0]!r}; it needs --weights")
    calls = settings.iterations if options.iterations is None else options.iterations
    if not 1 <= calls <= MAX_ITERATIONS:
        raise ValueError(f"iterations is {calls}; allowed: 1 to {MAX_ITERATIONS}")
    workload, source, rows = _workload(cfg, place, options, settings, generator)
    tokens = next(
        given
        for given in (options.tokens, rows, settings.tokens, cfg.max_tokens)
        if given is not None
    )
    advice = "; give --tokens to pass fewer in each call" if options.tokens is None else ""
    check_tokens(tokens, cfg, advice)
    if options.output_file is not None and rows is not None and calls * tokens < rows:
        raise ValueError(
            f"{output.plural(calls, 'call')} of {tokens} tokens do not take the {rows} rows of "
            f"--input that --output has: give --iterations {-(-rows // tokens)}"
            if tokens
            else f"calls of 0 tokens take none of the {rows} rows of --input: raise --tokens"
        )
    varies = settings.vary_tokens and rows is None
    weights = None if options.weights is None else open_tensors(options.weights)
    return _RunPlan(
        *(cfg, slicing, all_reduces, tokens, calls, varies),
        *(workload, source, generator, rows, weights),
    )


def _workload(
    cfg: moeos.MoEConfig,
    place: tuple[int, int],
    options: RunOptions,
    settings: RunSettings,
    generator: torch.Generator,
) -> tuple[Workload, str, int | None]:
    """Where tokens come from, in words as well, and how many a file has for this rank.

    `place`: its number among the ranks that have tokens of their own, and how many they are.
    """
    chosen = [
        name
        for name, value in (
            ("--routing", options.routing),
            ("--input", options.input_file),
            ("--input-text", options.input_text),
        )
        if value
    ]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are given; choose one source of tokens")
    if options.input_file is not None:
        rows = read_rows(options.input_file, cfg.hidden, *place)
        source = f"tokens from {options.input_file}{_conversion(rows.dtype, cfg.dtype)}"
        return GivenTokens(cfg, rows), source, len(rows)
    if options.routing is None and (options.input_text or settings.text):
        if options.input_text:
            text = read_documents(options.input_text, Path())
        else:
            text = read_documents(settings.text, options.config.parent)
        mine = text[slice(*piece(len(text), *place))]
        return TextTokens(cfg, mine), f"tokens from {len(text)} bytes of text", None
    name = options.routing or "uniform"
    pattern = parse_pattern(name)
    check_pattern(pattern, cfg, place[1])
    return RandomTokens(cfg, place[1], pattern, generator), f"random tokens, {name} routing", None


def _conversion(given: torch.dtype, wanted: torch.dtype) -> str:
    """The notice that the layer takes numbers in another dtype."""
    return "" if given == wanted else f", converted from {_name(given)} to {_name(wanted)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make_layer(plan: _RunPlan, world: moeos.World, options: RunOptions) -> moeos.MoELayer:
    cut = plan.slicing.arguments
    if plan.weights is None:
        return moeos.MoELayer(plan.cfg, world, **cut)
    return moeos.MoELayer.from_hf(
        *(plan.cfg, world, plan.weights, options.prefix, options.ignore), **cut
    )


def _require_memory(world: moeos.World, plan: _RunPlan, options: RunOptions) -> None:
    """Raises `ValueError` if the layer does not fit into the memory that its ranks share.

    On a GPU all of it is allocated. On the twin only written memory is taken: all weights, and the
    buffers as far as the calls need them.
    """
    sharing = world.size if world.control.shares_memory or world.backend == "twin" else 1
    needed = memory.rank_memory(
        plan.cfg,
        world.size,
        backend=world.backend,
        processors=machine.processors_of(world),
        virtual=world.control.shares_memory and world.size > 1,
        ranks_per_node=world.ranks_per_node,
        slicing=plan.slicing,
    )
    if world.backend == "cuda":
        memory.require(
            {
                "weights": sharing * needed.weights,
                "symmetric heaps": sharing * needed.workspace["heap"],
                "buffers between the GEMMs": sharing * needed.workspace["between"],
                "queues and records": sharing
                * (needed.workspace["queues"] + needed.workspace["records"]),
            },
            torch.cuda.mem_get_info()[0],
            f"the GPU of {output.plural(sharing, 'rank')}",
            "lower max_tokens, or start ranks on more GPUs; `moeos plan` says what a layer takes",
        )
        return
    # The check uses dequantized weights.
    dtype = plan.cfg.dtype if plan.cfg.activation_format is None else torch.float32
    plain = dataclasses.replace(plan.cfg.in_numbers(), dtype=dtype)
    of_rank = estimate.weight_bytes_per_rank(plain, world.size, plan.slicing)
    checked = sharing * of_rank if options.check else 0
    memory.require(
        {"weights": sharing * needed.weights, "weights for the check": checked},
        host_memory.available(),
        f"the machine of {output.plural(sharing, 'rank')}",
        "take a smaller layer, or leave out the check with --no-check",
    )


def _introduce(world: moeos.World, plan: _RunPlan) -> None:
    cfg = plan.cfg
    ranks, processors = (
        output.plural(world.size, "rank"),
        output.plural(machine.processors_of(world), "processor"),
    )
    upto = "0 to " if plan.varies else ""
    calls = output.plural(plan.calls, "call")
    shared = f", {cfg.shared_experts} shared of {cfg.shared_intermediate}"
    stored = "" if cfg.weight_format is None else f", experts in {cfg.weight_format}"
    if cfg.shared_weight_format is not None:
        stored += ", shared ones too"
    if cfg.activation_format is not None:
        stored += f", tokens in {cfg.activation_format}"
    if cfg.result_format is not None:
        stored += f", results in {cfg.result_format}"
    sliced = ""
    if plan.slicing.holders(world.size) == 1 and plan.slicing.cuts:
        sliced = ", with a slice of each expert"
    elif plan.slicing.cuts:
        sliced = f", {plan.slicing.slices} with slices of the same experts"
    sliced += plan.slicing.policy.name
    print(
        f"{ranks} on the {world.backend}, {processors} each{sliced}\n"
        f"{cfg.experts} experts, top {cfg.top_k}, hidden {cfg.hidden}, intermediate "
        f"{cfg.intermediate}{shared if cfg.shared_experts else ''}, {cfg.activation}, "
        f"{_name(cfg.dtype)}{stored}\n"
        f"{calls} with {upto}{plan.tokens} tokens a rank; {plan.source}",
        flush=True,
    )


def _progress(items: Iterable[Item], what: str, *, visible: bool) -> Iterable[Item]:
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield from items
        return
    with Progress(console=console) as progress:
        yield from progress.track(list(items), description=what)


def _conclude(
    world: moeos.World,
    options: RunOptions,
    plan: _RunPlan,
    reports: list[RankReport],
    error: float | None,
    tolerance: float,
) -> None:
    if options.json_file is not None:
        document: dict[str, Any] = {
            "command": shlex.join(sys.argv),
            "versions": machine.versions(),
            "machine": machine.describe(),
            "config": json.loads(plan.cfg.digest()),
            "backend": world.backend,
            "ranks": world.size,
            **plan.slicing.arguments,
            "processors": machine.processors_of(world),
            "source": plan.source,
            "calls": plan.calls,
            "seed": options.seed,
            "max_relative_error": error,
            "tolerance": tolerance,
            "by_rank": report.as_json(reports),
        }
        output.write_json(options.json_file, document)
    print("\nsums over all calls:", flush=True)
    output.tables(world.size).print(report.rank_table(reports, plan.slicing))
    print(report.balance_line(reports, plan.slicing))
    print(report.time_line(reports, plan.slicing))
    if error is not None:
        print(report.check_line(reports, plan.slicing))
        print(report.error_line(error, tolerance), flush=True)
