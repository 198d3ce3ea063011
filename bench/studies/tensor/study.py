# SPDX-License-Identifier: Apache-2.0
"""The command behind `launch/evaluate tensor`: tables of tensor parallelism on one node.

    python -m bench.studies.tensor.study SUITE --out FILE

Two parts. "alone": each rank computes a slice by itself, by EE of stock PyTorch and by moeos with
each layout, as the paper's Tables 1 and 2a have it; stages of EE are calls of their own, and those
of moeos are read from traces. "together": all ranks compute the layer, by EE with NCCL (gloo on the
twin) and by moeos with each policy, as Table 2b has the reduction. Outputs are compared before
anything is timed. The document is whole after each case. It knows none of the paper's figures.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import moeos
from bench.gpu import compile_ahead, device_rates
from bench.gpu.in_turn import FLUSHED_TOKENS
from bench.gpu.results import timing
from bench.report import report, tensor_tables
from bench.studies import ranks
from bench.studies.contestants import clock_of
from bench.studies.tensor import contestants
from bench.studies.tensor.contestants import Baseline, Inputs, moeos_call, replayed
from bench.studies.tensor.suite import Suite, read
from moeos.cli.shared import failures, machine, output, process_group, provenance
from moeos.cli.shared.device_reader import Reader
from moeos.cli.shared.options import Backend
from moeos.cli.timeline.call import (
    COMBINE,
    DISPATCH,
    PRODUCT0,
    PRODUCT1,
    ROUTE,
    CallTrace,
    work_time,
)
from moeos.partition.policies import Layout, Reduce
from moeos.partition.slicing import slicing_of
from moeos.system.files import replace

AGREES = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""The largest relative distance between two contestants' outputs."""

EE = "EE"
LAYOUTS: tuple[Layout, ...] = ("auto", "expert_major_persistent", "gathered", "token_major")

STAGES = {
    "align": ROUTE,
    "permute": DISPATCH,
    "up/gate": PRODUCT0,
    "down": PRODUCT1,
    "combine": COMBINE,
}
"""Of moeos, by the paper's names; the activation is part of the first product."""

TRACE_EVENTS = 2048
"""Of each actor."""

_DEADLINE = 240.0  # seconds; the compiler's time counts


def main(
    suite: Annotated[Path, typer.Argument(help="The suite's TOML file.")],
    out: Annotated[Path, typer.Option(help="Where the results go, as JSON.")],
    backend: Backend = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
) -> None:
    """Measures layers in slices by moeos and by stock PyTorch."""

    def command() -> int:
        output.check_writable(out, "--out")
        return execute(read(suite), out, backend, seed)

    failures.finish(command)


def execute(suite: Suite, out: Path, backend: str = "auto", seed: int = 0) -> int:
    """Runs one rank of the study; the exit code. Raises what `moeos.init` and calls raise."""
    # The baseline has small functions to compile: no pool of processes for that.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with moeos.init(backend, deadline=_DEADLINE) as world, torch.no_grad():
        return failures.together(world, lambda: _run(world, suite, out, seed))


def _run(world: moeos.World, suite: Suite, out: Path, seed: int) -> int:
    with process_group.over(world) as group:
        study = _Study(world, suite, out, seed, group)
        study.run()
    if world.rank == 0:
        report.print_tables(study.document)
    return failures.DONE


class _Study:
    """One rank of a run; rank 0 has the document."""

    def __init__(
        self,
        world: moeos.World,
        suite: Suite,
        out: Path,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._world, self._suite, self._out, self._seed = world, suite, out, seed
        self._group = group
        self._on_gpu = world.backend == "cuda"
        self._device = "cuda" if self._on_gpu else "cpu"
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._clock = clock_of(world, group)
        self._reader = Reader() if self._on_gpu else None
        # Groups of one rank each, which all ranks make.
        self._own = [None if group is None else dist.new_group([n]) for n in range(world.size)]
        self.document: dict[str, Any] = {
            "benchmark": f"{tensor_tables.PREFIX}{world.backend}-{world.size}",
            "commit": provenance.commit(),
            "command": provenance.command("bench.studies.tensor.study"),
            "backend": world.backend,
            "device": machine.gpus()[0] if self._on_gpu else f"the twin, {machine.processor()}",
            "machine": machine.describe(),
            "versions": machine.versions(),
            "processors": machine.processors_of(world),
            "ranks": world.size,
            "hidden": suite.hidden,
            "experts": suite.experts,
            "top_k": suite.top_k,
            "staged": suite.staged,
            "reduced": suite.reduced,
            "rounds": suite.rounds,
            "warm_up_rounds": suite.warm_up_rounds,
            "seed": seed,
            "rates": None,
            "alone": [],
            "together": [],
        }

    def run(self) -> None:
        """Measures everything. Collective."""
        if self._on_gpu:
            self._compile()
            assert self._reader is not None
            mine = device_rates.measure(self._world, self._reader)
            told = self._world.control.allgather(mine, "the rates of the ranks' GPUs")
            # The layer waits for the slowest one. Without other ranks there is no N.
            known = [[rate for one in told if (rate := one[name]) is not None] for name in mine]
            self.document["rates"] = {
                name: min(rates) if rates else None for name, rates in zip(mine, known, strict=True)
            }
        if self._world.size > 1:
            self._measure_all("together", self._together())
        for intermediate in self._suite.slices:
            self._measure_all("alone", self._alone(intermediate))

    def _measure_all(self, part: str, cases: Iterator[dict[str, Any]]) -> None:
        for case in cases:
            if self._world.rank == 0:
                output.say(f"{part}: I {case['intermediate']}, {case['tokens']} tokens")
                self.document[part].append(case)
                replace(self._out, output.json_text(self.document))

    def _compile(self) -> None:
        """Compiles all kernels side by side, on one rank; others find them."""
        size, suite = self._world.size, self._suite
        shapes: list[tuple[int, int, dict[str, int]]] = []  # I, slices, what else a kernel has
        if size > 1:
            shapes.append((suite.reduced, size, {}))
        shapes += [(intermediate, 1, {}) for intermediate in suite.slices]
        shapes.append((suite.staged, 1, {"trace_events": TRACE_EVENTS}))

        def compile_all() -> None:
            if self._world.rank != 0:
                return
            blocks = torch.cuda.get_device_properties().multi_processor_count
            with contextlib.ExitStack() as stack:
                begun = []
                for intermediate, slices, kind in shapes:
                    for layout in LAYOUTS:
                        cfg = suite.config(intermediate, self._dtype)
                        slicing = slicing_of("tensor", "replicated", slices, layout=layout)
                        kinds = ({"slicing": slicing, **kind},)
                        one = compile_ahead.started([(layout, cfg)], 1, blocks, kinds=kinds)
                        begun.append(stack.enter_context(one))
                for compiling in begun:
                    refused = compiling.wait(lambda: None)
                    if refused:
                        raise ValueError(f"the compiler refuses kernels: {refused}")

        failures.agree(self._world, compile_all, "the kernels of the study")

    def _experts(
        self, cfg: moeos.MoEConfig, world: moeos.World, layout: Layout, reduce: Reduce = "auto"
    ) -> moeos.Experts:
        return moeos.Experts(cfg, world, parallel="tensor", layout=layout, reduce=reduce)

    def _inputs(self, cfg: moeos.MoEConfig, tokens: int) -> Inputs:
        return contestants.draw(cfg, tokens, self._device, self._seed, self._world.rank)

    def _together(self) -> Iterator[dict[str, Any]]:
        """Every number of tokens of the layer that all ranks have in slices."""
        suite, ranks_ = self._suite, self._world.size
        slice_ = suite.config(suite.reduced, self._dtype)
        whole = suite.config(suite.reduced * ranks_, self._dtype)
        policies: dict[str, moeos.Experts] = {
            "auto": self._experts(whole, self._world, "auto"),
            "fused": self._experts(whole, self._world, "auto", "fused"),
            "after": self._experts(whole, self._world, "auto", "after"),
            **{it: self._experts(whole, self._world, it, "fused") for it in LAYOUTS[1:]},
        }
        for tokens in suite.tokens:
            inputs = self._inputs(slice_, tokens)
            baseline = Baseline(inputs, self._group)
            ways: dict[str, Callable[[], object]] = {EE: replayed(baseline.whole)}
            ways |= {name: replayed(moeos_call(it, inputs)) for name, it in policies.items()}
            off = self._compare(ways, tokens)
            ways |= {"products": replayed(baseline.products), "chain": replayed(baseline.chain)}
            yield {
                "intermediate": suite.reduced,
                "tokens": tokens,
                "distance": off,
                "touched": inputs.touched,
                "times": self._in_turn(ways, tokens),
            }
            del ways, baseline
            self._forget()

    def _alone(self, intermediate: int) -> Iterator[dict[str, Any]]:
        """Every number of tokens of a slice that each rank has for itself."""
        suite, own = self._suite, self._own[self._world.rank]
        cfg = suite.config(intermediate, self._dtype)
        backend = self._world.backend
        traced = intermediate == suite.staged
        events = TRACE_EVENTS if traced else 0
        with (
            moeos.init(backend, group=own, deadline=_DEADLINE) as world,
            moeos.init(backend, group=own, deadline=_DEADLINE, trace_events=events) as noting,
        ):
            experts = {it: self._experts(cfg, world, it) for it in LAYOUTS}
            noted = {it: self._experts(cfg, noting, it) for it in LAYOUTS if traced}
            for tokens in suite.tokens:
                inputs = self._inputs(cfg, tokens)
                baseline = Baseline(inputs, None)
                ways: dict[str, Callable[[], object]] = {EE: replayed(baseline.partial)}
                ways |= {it: replayed(moeos_call(experts[it], inputs)) for it in LAYOUTS}
                off = self._compare(ways, tokens)
                times = self._in_turn(ways, tokens)
                stages: dict[str, dict[str, float]] = {}
                if traced:
                    parts = {name: replayed(stage) for name, stage in baseline.stages.items()}
                    found = self._in_turn(parts, tokens)
                    stages[EE] = {name: found[name]["median"] for name in parts}
                    stages |= {it: self._stages(noted[it], inputs) for it in LAYOUTS}
                yield {
                    "intermediate": intermediate,
                    "tokens": tokens,
                    "distance": off,
                    "times": times,
                    "stages": stages,
                }
                del ways, baseline
                self._forget()

    def _stages(self, experts: moeos.Experts, inputs: Inputs) -> dict[str, float]:
        """Seconds that a rank's processors are at each stage, each on average: stages overlap, and
        couriers permute beside products. Of the slowest rank, medians.
        """
        found: dict[str, list[float]] = {name: [] for name in STAGES}
        call = moeos_call(experts, inputs)
        for turn in range(1 + self._suite.trace_rounds):
            call()
            experts.check()
            trace = CallTrace.of([experts.trace()])
            for name, kind in STAGES.items():
                parts = trace.parts[trace.parts["kind"] == kind]
                if turn > 0:
                    found[name].append(work_time(parts) * 1e-9 / trace.processors)
        mine = {name: timing(seconds)["median"] for name, seconds in found.items()}
        told = self._world.control.allgather(mine, "the stages of a call")
        return {name: max(its[name] for its in told) for name in STAGES}

    def _compare(self, ways: Mapping[str, Callable[[], object]], tokens: int) -> dict[str, float]:
        """Each contestant's distance from EE. Raises `ValueError`, alike on all ranks, if one is
        too large.
        """
        made: dict[str, torch.Tensor] = {}
        for name, call in ways.items():
            y = call()
            assert isinstance(y, torch.Tensor)
            made[name] = y.clone()  # graphs write theirs again
        mine = {name: contestants.distance(y, made[EE]) for name, y in made.items() if name != EE}
        told = self._world.control.allgather(mine, "the comparison of outputs")
        off = {name: max(its[name] for its in told) for name in mine}
        wrong = {name: value for name, value in off.items() if not value <= AGREES[self._dtype]}
        if wrong:
            raise ValueError(f"outputs of {tokens} tokens differ from those of {EE} by {wrong}")
        return off

    def _in_turn(
        self, ways: Mapping[str, Callable[[], object]], tokens: int
    ) -> dict[str, dict[str, Any]]:
        """Times of the slowest rank, contestants in turn: a clock that drifts meets all of them."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for turn in range(self._suite.warm_up_rounds + self._suite.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if self._reader is not None and tokens <= FLUSHED_TOKENS:
                    self._reader.flush()
                seconds[name].append(self._clock.measure(0.0, ways[name]))
        mine = {name: of[self._suite.warm_up_rounds :] for name, of in seconds.items()}
        told = self._world.control.allgather(mine, "a case's times")
        return {
            name: timing([max(turn) for turn in zip(*(of[name] for of in told), strict=True)])
            for name in names
        }

    def _forget(self) -> None:
        gc.collect()  # the next case may need the memory
        if self._on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    ranks.start(main)
