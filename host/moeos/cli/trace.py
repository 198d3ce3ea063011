# SPDX-License-Identifier: Apache-2.0
"""`moeos trace`: what every actor did in a call, as a summary, for viewers, as a picture.

It works in one process and under every launcher that `moeos.init` knows; rank 0 speaks for all.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import moeos
from moeos.cli import drawing, trace_report, worlds
from moeos.cli.cold_start import ColdStart
from moeos.cli.shared import failures, machine, output, provenance
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
from moeos.cli.shared.settings import check_tokens, read_settings
from moeos.cli.slices import SliceOptions, may_all_reduce, ranks_of_torch
from moeos.cli.timeline import causes, chrome, files, gathering, picture
from moeos.cli.timeline.call import CallTrace
from moeos.cli.workload import Batch, RandomTokens, generator_of
from moeos.partition.slicing import Arguments, Slicing
from moeos.world.tracing import MAX_EVENTS, RankTrace

MAX_CALLS = 10_000
"""The most calls before the one that is traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of the command line; None where the config decides, or nothing is written."""

    config: Path | None = None
    load: Path | None = None
    out: Path | None = None
    png: Path | None = None
    save: Path | None = None
    json_file: Path | None = None
    summary: bool = True
    tokens: int | None = None
    experts: int | None = None
    ranks: int | None = None
    slices: SliceOptions
    backend: str = "auto"
    calls: int = 3
    cold: bool = False
    routing: str = "uniform"
    seed: int = 0
    events: int = 4096
    deadline: float = 30.0


@dataclasses.dataclass(frozen=True)
class _TracePlan:
    """This rank's part of the run.

    Attributes:
        meets: whether ranks are those of a process group, too: by it they meet before a cold call,
            and may add up partial sums.
        batch: of each call.
    """

    cfg: moeos.MoEConfig
    slicing: Slicing
    meets: bool
    batch: Batch


def trace(
    config: Annotated[Path | None, typer.Argument(help="TOML file of the layer.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Writes the call for Perfetto's or Chrome's viewer."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draws the call; needs matplotlib.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Writes the events as they were noted, for --load.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Reads what --save wrote, in place of a layer.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("the summary"))
    ] = None,
    summary: Annotated[bool, typer.Option(help="Prints the summary.")] = True,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each rank; default: as the config says.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Tokens of all ranks together; default: as the config says.")
    ] = None,
    ranks: VirtualRanks = None,
    parallel: ParallelOption = "expert",
    tensor_ranks: TensorRanks = None,
    layout: LayoutOption = "auto",
    reduce: ReduceOption = "auto",
    backend: Backend = "auto",
    calls: Annotated[
        int, typer.Option(help="Calls with the same tokens before the one that is traced.")
    ] = 3,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Empties the GPU's L2 cache before that call, as a model's others do; the ranks' "
            "kernels then begin together.",
        ),
    ] = False,
    routing: Annotated[str, typer.Option(help=f"A pattern: {PATTERNS}.")] = "uniform",
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    events: Annotated[int, typer.Option(help="Room for events of each actor.")] = 4096,
    deadline: Deadline = 30.0,
) -> None:
    """Says what each processor, the scheduler and the subscribers did in a call, and when."""
    options = TraceOptions(
        config=config,
        load=load,
        out=out,
        png=png,
        save=save,
        json_file=json_file,
        summary=summary,
        tokens=tokens,
        experts=experts,
        ranks=ranks,
        slices=SliceOptions(parallel, tensor_ranks, layout, reduce),
        backend=backend,
        calls=calls,
        cold=cold,
        routing=routing,
        seed=seed,
        events=events,
        deadline=deadline,
    )
    failures.finish(lambda: execute(options), json_file)


def execute(options: TraceOptions) -> int:
    """Runs the command in the world of this process, on virtual ranks, or on a file; the exit code.

    Raises what `worlds.run` and a call of the layer raise; `ValueError` for an argument and a trace
    that cannot be read; `OSError` for a file; `RuntimeError` if a picture is wanted and matplotlib
    is missing.
    """
    if (options.config is None) == (options.load is None):
        given = "both are given" if options.load is not None else "neither is given"
        raise ValueError(f"{given} of CONFIG, a layer to run, and --load, a trace to read")
    if options.load is not None:
        _check_files(options)
        return _conclude(options, *files.load(options.load))
    if not 1 <= options.events <= MAX_EVENTS:
        raise ValueError(f"--events is {options.events}; allowed: 1 to {MAX_EVENTS}")
    return worlds.run(
        lambda world: _run(world, options),
        options.backend,
        deadline=options.deadline,
        virtual_ranks=options.ranks,
        trace_events=options.events,
    )


def _run(world: moeos.World, options: TraceOptions) -> int:
    plan = failures.agree(world, lambda: _prepare(world, options), "the input of the call")
    with ranks_of_torch(world, wanted=plan.meets) as group:
        traces = _call(world, options, plan, group)
    if world.rank != 0:
        return failures.DONE
    return _conclude(options, traces, _about(world, options, plan, group))


@torch.no_grad()
def _call(
    world: moeos.World, options: TraceOptions, plan: _TracePlan, group: dist.ProcessGroup | None
) -> list[RankTrace]:
    """The last call's trace of all ranks on rank 0, as `gathering.gather` has it."""
    torch.manual_seed(options.seed)
    cut = plan.slicing.arguments
    layer = failures.agree(world, lambda: moeos.MoELayer(plan.cfg, world, **cut), "the layer")
    given = plan.batch.on(layer.w1.device)
    cold_start = ColdStart(group) if options.cold else None
    for _ in range(options.calls):
        layer(given.x, given.topk_ids, given.topk_weights)
    if cold_start is not None:
        cold_start.prepare()
    layer(given.x, given.topk_ids, given.topk_weights)
    layer.check()
    return gathering.gather(world.control, layer.trace())


def _about(
    world: moeos.World, options: TraceOptions, plan: _TracePlan, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """A full description of what ran."""
    assert options.config is not None  # execute has seen to it
    cfg, tokens = plan.cfg, len(plan.batch.x)
    device = machine.gpus()[0] if world.backend == "cuda" else f"the twin, {machine.processor()}"
    return {
        "what": (
            f"{options.config.stem}, {cfg.experts} experts, {output.plural(world.size, 'rank')} on "
            f"{device}, {tokens} tokens a rank"
        ),
        "commit": provenance.commit(),
        "config": json.loads(cfg.digest()),
        "backend": world.backend,
        **_arguments_of_call(plan, group),
        "tokens": tokens,
        "calls_before": options.calls,
        "cold": options.cold,
        "routing": options.routing,
        "seed": options.seed,
        "versions": machine.versions(),
    }


def _arguments_of_call(plan: _TracePlan, group: dist.ProcessGroup | None) -> Arguments:
    """The layer's arguments; slices get the `reduce` that the call used, whatever was asked."""
    slicing, tokens = plan.slicing, len(plan.batch.x)
    if not slicing.sums:
        return slicing.arguments
    cut = slicing.cut(plan.cfg)
    left = group is not None and slicing.leaves_partials(cut, tokens, counted=False)
    return {**slicing.arguments, "reduce": "after" if left else "fused"}


def _prepare(world: moeos.World, options: TraceOptions) -> _TracePlan:
    assert options.config is not None  # execute has seen to it
    cfg = moeos.MoEConfig.from_toml(options.config)
    if options.experts is not None:
        cfg = dataclasses.replace(cfg, experts=options.experts)
    settings = read_settings(options.config)
    _check_files(options)
    if not 0 <= options.calls <= MAX_CALLS:
        raise ValueError(f"--calls is {options.calls}; allowed: 0 to {MAX_CALLS}")
    if options.cold and world.backend != "cuda":
        raise ValueError(f"--cold empties a GPU's L2 cache, which backend {world.backend} lacks")
    pattern = parse_pattern(options.routing)
    slicing = options.slices.slicing(world.size)
    meets = may_all_reduce(world, cfg, slicing)  # which raises where a size does not divide
    meets |= options.cold and not world.control.shares_memory
    place, places = slicing.place(world.rank, world.size)
    check_pattern(pattern, cfg, places)
    tokens = settings.tokens if options.tokens is None else options.tokens
    tokens = cfg.max_tokens if tokens is None else tokens
    check_tokens(tokens, cfg)
    workload = RandomTokens(cfg, places, pattern, generator_of(options.seed, place))
    return _TracePlan(cfg, slicing, meets, workload.draw(tokens))


def _check_files(options: TraceOptions) -> None:
    output.check_writable(options.out, "--out")
    output.check_writable(options.png, "--png")
    output.check_writable(options.save, "--save")
    output.check_writable(options.json_file)
    if options.png is not None:
        drawing.matplotlib()


def _conclude(options: TraceOptions, traces: Sequence[RankTrace], about: dict[str, Any]) -> int:
    if options.save is not None:
        files.save(options.save, traces, about)
    call = CallTrace.of(traces)
    found = causes.find(call)
    report = trace_report.Report(call, found, about)
    for warning in report.warnings():
        print(f"moeos: {warning}", file=sys.stderr, flush=True)
    if options.out is not None:
        output.write_text(options.out, json.dumps(chrome.document(call, found, about)))
    if options.png is not None:
        picture.draw(call, report.title(), options.png)
    if options.json_file is not None:
        document = {"command": shlex.join(sys.argv), **report.as_json()}
        output.write_json(options.json_file, document)
    if options.summary:
        report.print()
    return failures.DONE
