# SPDX-License-Identifier: Apache-2.0
"""The study of `launch/straggler`: what a late or slow rank costs a layer.

In each scenario moeos and a bulk-synchronous layer (`bench.gpu.all_to_all`: NCCL on GPUs, gloo on
the twin) make the same steps in turn, under the same delays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import moeos
from bench import study
from bench.clocks import measured
from bench.gpu.all_to_all import AllToAllLayer, beside, require_alike, tokens_of
from bench.report import plots, straggler_tables
from bench.studies import scenarios
from bench.studies.links import LimitedAllToAll, Nodes
from bench.studies.scenarios import Scenario
from bench.study import Case, Out, Rounds, Seed, Study, check_counts
from bench.suites import require_even
from moeos.cli import drawing
from moeos.cli.shared import failures
from moeos.cli.shared.options import Backend
from moeos.cli.shared.settings import check_tokens, read_settings
from moeos.cli.timeline import gathering, picture
from moeos.cli.timeline.call import CallTrace
from moeos.engines.twin.engine import sizes_of
from moeos.world.faults import SlowProcessor

_PATIENCE = 60.0  # seconds beyond the delays in which a step must end
_EVENTS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    config: Annotated[Path, typer.Argument(help="TOML file of the layer, without biases.")]
    out: Out
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; one of: {scenarios.FORMS}.")
    ] = None
    steps: Annotated[int, typer.Option(help="Measured steps of each scenario.")] = 50
    warm_up: Annotated[int, typer.Option(help="Steps before them.")] = 5
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each rank and step; default: as the config says.")
    ] = None
    backend: Backend = "auto"
    nodes: Annotated[
        int, typer.Option(help="Nodes of equally many ranks; other nodes are reached by puts.")
    ] = 1
    link_latency: Annotated[
        float, typer.Option(help="Seconds of a link between nodes; on the twin.")
    ] = 0.0
    link_rate: Annotated[
        float | None, typer.Option(help="Bytes per second of such a link; on the twin.")
    ] = None
    seed: Seed = 0
    plot: Annotated[
        Path | None, typer.Option(help="Folder for plots and a timeline; needs matplotlib.")
    ] = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a study does: the layer, the tokens of each rank, scenarios by name, and nodes."""

    cfg: moeos.MoEConfig
    tokens: int
    names: tuple[str, ...]
    nodes: Nodes


@dataclasses.dataclass(frozen=True)
class _Step:
    """One rank's numbers of a step of moeos."""

    seconds: float
    busy_share: float
    rows_before_counts: list[int]
    pairs_received: list[int]

    @staticmethod
    def of(stats: Mapping[str, Any], seconds: float) -> _Step:
        """Makes a step from a layer's stats and the step's length on this rank, delay included."""
        busy = stats["busy_seconds"] / (stats["processors"] * seconds)
        return _Step(seconds, busy, stats["rows_before_counts"], stats["pairs_received"])


def prepare(world: moeos.World, options: Options) -> Plan:
    """The plan of the study. Raises `ValueError`, `TypeError` or `OSError` for what cannot be."""
    cfg = moeos.MoEConfig.from_toml(options.config)
    require_even(cfg, world.size)
    settings = read_settings(options.config)
    if options.plot is not None and not options.plot.is_dir():
        raise ValueError(f"--plot is {options.plot}; it must be a folder that exists")
    if options.plot is not None:
        try:
            drawing.matplotlib()  # before minutes of measuring
        except RuntimeError as error:
            raise ValueError(f"--plot is given: {error}") from error
    check_counts(steps=(options.steps, 2), warm_up=(options.warm_up, 1))
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
    names = tuple(options.scenario or ()) or tuple(
        name.format(last=world.size - 1) for name in scenarios.DEFAULTS
    )
    for name in names:  # all refusals before the first step
        if scenarios.parse(name, world.size, 1.0).slow and world.backend != "twin":
            raise ValueError(f"{name!r}: processors are slowed one by one, which is for the twin")
    return Plan(cfg, tokens, names, nodes)


class Stragglers(Study):
    """All scenarios, on one rank."""

    def __init__(self, world: moeos.World, options: Options) -> None:
        self._options = options
        self._plan = plan = failures.agree(
            world, lambda: prepare(world, options), "the plan of the study"
        )

        def about() -> Case:
            return {
                "config_name": options.config.stem,
                "config": json.loads(plan.cfg.digest()),
                "nodes": dataclasses.asdict(plan.nodes),
                "tokens": plan.tokens,
                "steps": options.steps,
                "warm_up_steps": options.warm_up,
                "seed": options.seed,
                "scenarios": [],
            }

        name = benchmark_of(world, plan.nodes)
        rounds = Rounds(options.steps, options.warm_up)
        super().__init__(world, options.out, name, "bench.studies.straggler", rounds, about)

    def measure_all(self) -> Stragglers:
        """Measures all scenarios, "none" first: the others' delays are multiples of its step."""
        found = self.document["scenarios"]
        for case in self.cases(found, [{"name": "none"}]):
            self.add(found, case, self._scenario(Scenario("none")))
        mine = {
            name: statistics.median(map(max, none[name]["seconds"]))
            for none in found[:1]
            for name in ("moeos", "baseline")
        }
        step = self.world.control.allgather(mine, "the undelayed steps")[0]
        self.document["undelayed_seconds"] = step

        def scenario_of(name: str) -> Scenario:
            return scenarios.parse(name, self.world.size, step["moeos"])

        for case in self.cases(found, [{"name": name} for name in self._plan.names]):
            self.add(found, case, self._scenario(scenario_of(case["name"])))
        self.document["incast"] = self._incast()
        self.document["timeline"] = None
        if self._options.plot is not None:
            asked = [scenario_of(name) for name in self._plan.names]
            self.document["timeline"] = self._timeline(asked)
            if self.world.rank == 0:
                plots.draw_stragglers(self.document, self._options.plot)
        self.write()
        return self

    def _incast(self) -> dict[str, int] | None:
        """What may come to one rank from ranks of other nodes; None where there are none."""
        nodes, cfg = self._plan.nodes, self._plan.cfg
        far = nodes.far(self.world.rank)
        if not far:
            return None
        row_bytes = cfg.hidden * cfg.dtype.itemsize
        local = cfg.experts_per_rank(self.world.size)
        return {
            "miv_bytes": self._plan.tokens * local * row_bytes * 2 * len(far) // cfg.experts,
            "received_bytes": max(one["far_bytes"] for one in self.document["scenarios"]),
            "window_bytes": sizes_of(cfg, self.world.size, 1, remote=True).window
            * row_bytes
            * len(far),
        }

    @contextlib.contextmanager
    def _layers(
        self, scenario: Scenario, longest: float, trace_events: int = 0
    ) -> Iterator[tuple[moeos.MoELayer, AllToAllLayer]]:
        """Both layers, in a world in which the scenario's slow ranks are slow."""
        nodes, world = self._plan.nodes, self.world
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
            layer = moeos.MoELayer(self._plan.cfg, inner).requires_grad_(False)
            exchange = (
                LimitedAllToAll(nodes, world.rank) if nodes.limited else dist.all_to_all_single
            )
            baseline = beside(layer, self.group, exchange)
            factor = scenario.slow.get(world.rank, 1.0)
            if factor > 1:
                baseline.stretch = lambda work: cast(Tensor, self.clock.stretch(work, factor))
            yield layer, baseline

    def _tokens(self) -> Tensor:
        plan = self._plan
        return tokens_of(self.world, plan.cfg, plan.tokens, self._options.seed)

    def _scenario(self, scenario: Scenario) -> dict[str, Any]:
        options, rank = self._options, self.world.rank
        total = options.warm_up + options.steps
        delays = [0.0] * options.warm_up + scenario.delays(options.seed, rank, options.steps)
        x = self._tokens()
        mine: list[_Step] = []
        theirs: list[float] = []
        far_bytes = 0  # from ranks of other nodes, in a step of moeos, at most
        with self._layers(scenario, max(delays)) as (layer, baseline):
            require_alike(self.world, layer, baseline, x)

            def step_of_moeos(delay: float) -> None:
                nonlocal far_bytes
                seconds = measured(self.clock, lambda: layer(x), delay)
                layer.check()
                stats = layer.stats()
                mine.append(_Step.of(stats, seconds))
                # As many bytes, rows and results, come from a rank as go to it.
                far = sum(stats["row_bytes_by_peer"][peer] for peer in self._plan.nodes.far(rank))
                far_bytes = max(far_bytes, far)

            def step_of_baseline(delay: float) -> None:
                theirs.append(measured(self.clock, lambda: baseline(x), delay))

            turns = [step_of_moeos, step_of_baseline]
            for step in range(total):
                for turn in turns if step % 2 == 0 else turns[::-1]:  # none always goes first
                    turn(delays[step])
        del mine[: options.warm_up], theirs[: options.warm_up], delays[: options.warm_up]
        steps = self.world.control.allgather((delays, mine, theirs), "a scenario's results")
        bytes_ = max(self.world.control.allgather(far_bytes, "bytes from other nodes"))
        return {**_document(scenario, steps), "far_bytes": bytes_}

    def _timeline(self, asked: Sequence[Scenario]) -> str | None:
        """Draws a step of the scenario with the latest rank; the picture's name."""
        latest = max(
            (one for one in asked if one.late),
            key=lambda one: max(delay.seconds or 0.0 for delay in one.start_delays),
            default=None,
        )
        if latest is None:
            return None
        delays = [latest.delays(self._options.seed, rank, 1)[0] for rank in range(self.world.size)]
        delay = delays[self.world.rank]
        x = self._tokens()
        with self._layers(latest, max(delays), _EVENTS) as (layer, baseline):
            layer(x)
            measured(self.clock, lambda: layer(x), delay)
            layer.check()
            traces = gathering.gather(self.world.control, layer.trace())
            baseline(x)
            seconds = measured(self.clock, lambda: baseline(x), delay)
            theirs = self.world.control.allgather(seconds, "the all-to-all's step")
        folder = self._options.plot
        assert folder is not None
        name = f"{benchmark_of(self.world, self._plan.nodes)}-timeline.png"
        if self.world.rank == 0:
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
    """The name of the results."""
    suffix = f"-nodes-{nodes.nodes}" if nodes.nodes > 1 else ""
    return f"{straggler_tables.PREFIX}{world.backend}-{world.size}{suffix}"


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
    """The share of other ranks' rows whose results had left these ranks when the late one's row
    counts came; the lowest of the other ranks.
    """
    shares = []
    for rank, one in enumerate(step):
        others = sum(one.pairs_received) - one.pairs_received[late]
        if rank != late and others > 0:
            shares.append(one.rows_before_counts[late] / others)
    return min(shares, default=1.0)


def _run(options: Options) -> None:
    study.run(lambda world: Stragglers(world, options).measure_all(), options.backend, _PATIENCE)


main = study.command_of(
    Options, "Compares moeos with an all-to-all where ranks are late or slow.", _run
)


if __name__ == "__main__":
    study.start(main)
