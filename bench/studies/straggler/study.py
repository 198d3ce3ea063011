# SPDX-License-Identifier: Apache-2.0
"""The command behind `launch/straggler`: one rank of a study.

In each scenario moeos and a bulk-synchronous layer (`bench.gpu.all_to_all`: NCCL on GPUs,
gloo on the twin) make the same steps in turn, under the same delays. Started by mpirun, torchrun or
srun, each process is a rank; rank 0 writes the results, prints the tables and draws the plots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import moeos
from bench.gpu.suite import require_even
from bench.report import report, straggler_plots
from bench.studies import ranks
from bench.studies.contestants import Baseline, clock_of, compare, tokens_of
from bench.studies.straggler import scenarios
from bench.studies.straggler.links import LimitedAllToAll, Nodes
from bench.studies.straggler.scenarios import Scenario
from moeos.cli import drawing
from moeos.cli.shared import failures, machine, output, process_group, provenance
from moeos.cli.shared.options import Backend
from moeos.cli.shared.settings import check_tokens, read_settings
from moeos.cli.timeline import gathering, picture
from moeos.cli.timeline.call import CallTrace
from moeos.engines.twin.engine import sizes_of
from moeos.world.faults import SlowProcessor

MOST_STEPS = 100_000

_PATIENCE = 60.0  # seconds beyond the delays in which a step must end
_EVENTS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What the command line says."""

    config: Path
    out: Path
    scenarios: tuple[str, ...] = ()
    steps: int = 50
    warm_up: int = 5
    tokens: int | None = None
    backend: str = "auto"
    nodes: int = 1
    link_latency: float = 0.0
    link_rate: float | None = None
    seed: int = 0
    plots: Path | None = None


def main(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer, without biases.")],
    out: Annotated[Path, typer.Option(help="Where the results go, as JSON.")],
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; one of: {scenarios.FORMS}.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each scenario.")] = 50,
    warm_up: Annotated[int, typer.Option(help="Steps before them.")] = 5,
    tokens: Annotated[
        int | None, typer.Option(help="Of each rank and step; else as the config says.")
    ] = None,
    backend: Backend = "auto",
    nodes: Annotated[
        int, typer.Option(help="Nodes of equally many ranks; other nodes are reached by puts.")
    ] = 1,
    link_latency: Annotated[
        float, typer.Option(help="Seconds of a link between nodes; on the twin.")
    ] = 0.0,
    link_rate: Annotated[
        float | None, typer.Option(help="Bytes per second of such a link; on the twin.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and delays.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Folder for plots and a timeline; needs matplotlib.")
    ] = None,
) -> None:
    """Compares moeos with a bulk-synchronous layer where ranks are late or slow."""
    options = StudyOptions(
        config=config,
        out=out,
        scenarios=tuple(scenario or ()),
        steps=steps,
        warm_up=warm_up,
        tokens=tokens,
        backend=backend,
        nodes=nodes,
        link_latency=link_latency,
        link_rate=link_rate,
        seed=seed,
        plots=plot,
    )
    failures.finish(lambda: execute(options))


def execute(options: StudyOptions) -> int:
    """Runs one rank of the study; the exit code.

    Raises what `moeos.init` and a call of the layer raise, `ValueError` for an argument and
    `RuntimeError` if the two layers' results differ.
    """
    with moeos.init(options.backend, deadline=_PATIENCE) as world:
        return failures.together(world, lambda: _run(world, options))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a study does: the layer, the tokens of each rank, scenarios by name, and nodes."""

    cfg: moeos.MoEConfig
    tokens: int
    names: tuple[str, ...]
    nodes: Nodes


@dataclasses.dataclass(frozen=True)
class _Step:
    """What one rank found in a step of moeos."""

    seconds: float
    busy_share: float
    rows_before_counts: list[int]
    pairs_received: list[int]

    @staticmethod
    def of(stats: Mapping[str, Any], seconds: float) -> _Step:
        """From a layer's stats, and the step's length on this rank, its delay included."""
        busy = stats["busy_seconds"] / (stats["processors"] * seconds)
        return _Step(seconds, busy, stats["rows_before_counts"], stats["pairs_received"])


def _run(world: moeos.World, options: StudyOptions) -> int:
    plan = failures.agree(world, lambda: prepare(world, options), "the input of the study")
    with process_group.over(world) as group:
        found = _Study(world, options, plan, group).run()
    if world.rank != 0:
        return failures.DONE
    document = _about(world, options, plan) | found
    output.write_json(options.out, document)
    report.print_tables(document)
    if options.plots is not None:
        straggler_plots.draw(document, options.plots)
    return failures.DONE


def prepare(world: moeos.World, options: StudyOptions) -> Plan:
    """What will be done. Raises `ValueError`, `TypeError` or `OSError` for what cannot be."""
    cfg = moeos.MoEConfig.from_toml(options.config)
    require_even(cfg, world.size)
    settings = read_settings(options.config)
    output.check_writable(options.out, "--out")
    if options.plots is not None and not options.plots.is_dir():
        raise ValueError(f"--plot is {options.plots}; it must be a folder that exists")
    if options.plots is not None:
        try:
            drawing.matplotlib()  # before minutes of measuring
        except RuntimeError as error:
            raise ValueError(f"--plot is given: {error}") from error
    for name, given, least in (
        ("--steps", options.steps, 2),
        ("--warm-up", options.warm_up, 1),
    ):
        if not least <= given <= MOST_STEPS:
            raise ValueError(f"{name} is {given}; allowed: {least} to {MOST_STEPS}")
    tokens = next(
        given for given in (options.tokens, settings.tokens, cfg.max_tokens) if given is not None
    )
    check_tokens(tokens, cfg)
    if world.size == 1:
        raise ValueError("a study needs two ranks or more; start it by mpirun, torchrun or srun")
    if cfg.bias or cfg.capacity_factor is not None or cfg.swiglu_limit is not None:
        raise ValueError(
            f"{options.config} has biases, a capacity or a SwiGLU limit, which the layer that "
            "moeos is compared with lacks"
        )
    nodes = Nodes(world.size, options.nodes, options.link_latency, options.link_rate)
    if nodes.limited and world.backend != "twin":
        raise ValueError("links are slowed on the twin; on GPUs leave them as they are")
    names = options.scenarios or tuple(
        name.format(last=world.size - 1) for name in scenarios.DEFAULTS
    )
    for name in names:  # all refusals before the first step
        if scenarios.parse(name, world.size, 1.0).slow and world.backend != "twin":
            raise ValueError(f"{name!r}: processors are slowed one by one, which is for the twin")
    return Plan(cfg, tokens, names, nodes)


class _Study:
    """All scenarios, on one rank."""

    def __init__(
        self,
        world: moeos.World,
        options: StudyOptions,
        plan: Plan,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._world = world
        self._options = options
        self._plan = plan
        self._group = group
        self._clock = clock_of(world, group)
        self._far_bytes = 0  # from ranks of other nodes, in a step of moeos, at most

    def run(self) -> dict[str, Any]:
        """What the document says of them."""
        none = Scenario("none")
        found = {"none": self._scenario(none)}
        undelayed = {
            name: statistics.median(map(max, found["none"][name]["seconds"]))
            for name in ("moeos", "baseline")
        }
        step = undelayed["moeos"]
        for name in self._plan.names:
            if name != "none":
                found[name] = self._scenario(scenarios.parse(name, self._world.size, step))
        timeline = None
        if self._options.plots is not None:
            asked = [scenarios.parse(name, self._world.size, step) for name in self._plan.names]
            timeline = self._timeline(asked)
        return {
            "undelayed_seconds": undelayed,
            "scenarios": [{"name": name, **of_it} for name, of_it in found.items()],
            "incast": self._incast(),
            "timeline": timeline,
        }

    def _incast(self) -> dict[str, int] | None:
        """What may come to one rank from ranks of other nodes; None where there are none."""
        nodes, cfg = self._plan.nodes, self._plan.cfg
        far = nodes.far(self._world.rank)
        if not far:
            return None
        row_bytes = cfg.hidden * cfg.dtype.itemsize
        received = self._world.control.allgather(self._far_bytes, "bytes from other nodes")
        local = cfg.experts_per_rank(self._world.size)
        return {
            "miv_bytes": self._plan.tokens * local * row_bytes * 2 * len(far) // cfg.experts,
            "received_bytes": max(received),
            "window_bytes": sizes_of(cfg, self._world.size, 1, remote=True).window
            * row_bytes
            * len(far),
        }

    @contextlib.contextmanager
    def _layers(
        self, scenario: Scenario, longest: float, trace_events: int = 0
    ) -> Iterator[tuple[moeos.MoELayer, Baseline]]:
        """Both layers, in a world in which the scenario's slow ranks are slow."""
        nodes, world = self._plan.nodes, self._world
        slow = tuple(
            SlowProcessor(rank=rank, processor=processor, factor=factor)
            for rank, factor in scenario.slow.items()
            for processor in range(world.processors)
        )
        with moeos.init(
            world.backend,
            deadline=_PATIENCE + longest,
            ranks_per_node=nodes.ranks_per_node,
            trace_events=trace_events,
            faults=dataclasses.replace(nodes.plan(), slow_processors=slow),
        ) as inner:
            torch.manual_seed(self._options.seed)
            layer = moeos.MoELayer(self._plan.cfg, inner)
            exchange = (
                LimitedAllToAll(nodes, world.rank) if nodes.limited else dist.all_to_all_single
            )
            baseline = Baseline(layer, self._group, self._clock, exchange)
            baseline.factor = scenario.slow.get(world.rank, 1.0)
            yield layer, baseline

    def _tokens(self) -> torch.Tensor:
        plan = self._plan
        return tokens_of(self._world, plan.cfg, plan.tokens, self._options.seed)

    def _scenario(self, scenario: Scenario) -> dict[str, Any]:
        options, rank = self._options, self._world.rank
        total = options.warm_up + options.steps
        if rank == 0:
            output.say(f"{scenario.name}: {total} steps of each layer")
        delays = [0.0] * options.warm_up + scenario.delays(options.seed, rank, options.steps)
        x = self._tokens()
        mine: list[_Step] = []
        theirs: list[float] = []
        with self._layers(scenario, max(delays)) as (layer, baseline):
            compare(self._world, layer, baseline, x)

            def step_of_moeos(delay: float) -> None:
                seconds = self._clock.measure(delay, lambda: layer(x))
                layer.check()
                stats = layer.stats()
                mine.append(_Step.of(stats, seconds))
                # As many come from a rank, rows and results, as go to it.
                far = sum(stats["row_bytes_by_peer"][peer] for peer in self._plan.nodes.far(rank))
                self._far_bytes = max(self._far_bytes, far)

            def step_of_baseline(delay: float) -> None:
                theirs.append(self._clock.measure(delay, lambda: baseline(x)))

            turns = [step_of_moeos, step_of_baseline]
            for step in range(total):
                for turn in turns if step % 2 == 0 else turns[::-1]:  # nobody always goes first
                    turn(delays[step])
        del mine[: options.warm_up], theirs[: options.warm_up], delays[: options.warm_up]
        found = self._world.control.allgather((delays, mine, theirs), "a scenario's results")
        return _document(scenario, found)

    def _timeline(self, asked: Sequence[Scenario]) -> str | None:
        """Draws a step of the scenario with the latest rank; the picture's name."""
        latest = max(
            (one for one in asked if one.late),
            key=lambda one: max(delay.seconds or 0.0 for delay in one.start_delays),
            default=None,
        )
        if latest is None:
            return None
        delays = [latest.delays(self._options.seed, rank, 1)[0] for rank in range(self._world.size)]
        delay = delays[self._world.rank]
        x = self._tokens()
        with self._layers(latest, max(delays), _EVENTS) as (layer, baseline):
            layer(x)
            self._clock.measure(delay, lambda: layer(x))
            layer.check()
            traces = gathering.gather(self._world.control, layer.trace())
            baseline(x)
            seconds = self._clock.measure(delay, lambda: baseline(x))
            theirs = self._world.control.allgather(seconds, "the all-to-all's step")
        folder = self._options.plots
        assert folder is not None
        name = f"{benchmark_of(self._world, self._plan.nodes)}-timeline.png"
        if self._world.rank == 0:
            title = f"{self._options.config.stem}, {latest.name}: a step of moeos"
            first = min(delays)  # whose rank has the first event
            marks = [
                picture.Mark(rank, 1e9 * (late - first), "the delay ends")
                for rank, late in enumerate(delays)
                if late > first
            ]
            beside = picture.OtherCall(
                "all-to-all",
                [1e9 * (late - first) for late in delays],
                [1e9 * (end - first) for end in theirs],
            )
            picture.draw(CallTrace.of(traces), title, folder / name, marks, beside)
        return name


def benchmark_of(world: moeos.World, nodes: Nodes) -> str:
    """What the results are called."""
    suffix = f"-nodes-{nodes.nodes}" if nodes.nodes > 1 else ""
    return f"straggler-{world.backend}-{world.size}{suffix}"


def _document(
    scenario: Scenario, found: Sequence[tuple[list[float], list[_Step], list[float]]]
) -> dict[str, Any]:
    """A scenario's results, each a list over steps of lists over ranks."""

    def by_step(of_rank: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [list(step) for step in zip(*of_rank, strict=True)]

    mine = by_step([steps for _, steps, _ in found])
    late = scenario.late
    return {
        "late": list(late),
        "slow": {str(rank): factor for rank, factor in scenario.slow.items()},
        "delays": by_step([delays for delays, _, _ in found]),
        "moeos": {
            "seconds": [[one.seconds for one in step] for step in mine],
            "busy_shares": [[one.busy_share for one in step] for step in mine],
            "done_before": [_done_before(step, late[0]) for step in mine] if late else None,
        },
        "baseline": {"seconds": by_step([seconds for _, _, seconds in found])},
    }


def _done_before(step: Sequence[_Step], late: int) -> float:
    """Of the rows that do not come from the late rank, the share whose results had left the other
    ranks when its row counts came; the lowest of these ranks.
    """
    shares = []
    for rank, one in enumerate(step):
        others = sum(one.pairs_received) - one.pairs_received[late]
        if rank != late and others > 0:
            shares.append(one.rows_before_counts[late] / others)
    return min(shares, default=1.0)


def _about(world: moeos.World, options: StudyOptions, plan: Plan) -> dict[str, Any]:
    on_gpu = world.backend == "cuda"
    return {
        "benchmark": benchmark_of(world, plan.nodes),
        "command": provenance.command("bench.studies.straggler.study"),
        "commit": provenance.commit(),
        "versions": machine.versions(),
        "machine": machine.describe(),
        "device": machine.gpus()[0] if on_gpu else f"the twin, {machine.processor()}",
        "config_name": options.config.stem,
        "config": json.loads(plan.cfg.digest()),
        "ranks": world.size,
        "processors": machine.processors_of(world),
        "nodes": dataclasses.asdict(plan.nodes),
        "tokens": plan.tokens,
        "steps": options.steps,
        "warm_up_steps": options.warm_up,
        "seed": options.seed,
    }


if __name__ == "__main__":
    ranks.start(main)
