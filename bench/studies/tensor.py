# SPDX-License-Identifier: Apache-2.0
"""The study of `launch/evaluate tensor`: tables of tensor parallelism on one node.

Two parts. "alone": each rank computes a slice by itself, by EE of stock PyTorch and by moeos with
each layout, as the paper's Tables 1 and 2a have it; stages of EE are calls of their own, and those
of moeos are read from traces. "together": all ranks compute the layer, by EE with NCCL (gloo on the
twin) and by moeos with each policy, as Table 2b has the reduction. Outputs are compared before
anything is timed. Must not depend on the paper's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import moeos
from bench import study, suites
from bench.clocks import DeviceClock, timing
from bench.gpu import device_rates
from bench.report import tensor_tables
from bench.studies import expert_major
from bench.studies.expert_major import ExpertMajor, Inputs, moeos_call, replayed
from bench.study import Case, Out, Rounds, Seed, Study, SuiteFile
from bench.suites import Slices
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
"""Stages of moeos, by the paper's names; the activation is part of the first product."""

TRACE_EVENTS = 2048
"""Events that each actor notes."""

_DEADLINE = 240.0  # seconds; the compiler's time counts


def main(suite: SuiteFile, out: Out, backend: Backend = "auto", seed: Seed = 0) -> None:
    """Measures layers in slices by moeos and by stock PyTorch."""

    def body(world: moeos.World) -> Study:
        with torch.no_grad():
            return Tensors(world, suites.slices(suite), out, seed).measure_all()

    study.run(body, backend, _DEADLINE)


class Tensors(Study):
    """One rank of the study."""

    def __init__(self, world: moeos.World, suite: Slices, out: Path, seed: int) -> None:
        def about() -> Case:
            return {
                "hidden": suite.hidden,
                "experts": suite.experts,
                "top_k": suite.top_k,
                "staged": suite.staged,
                "reduced": suite.reduced,
                "seed": seed,
                "alone": [],
                "together": [],
            }

        name = f"{tensor_tables.PREFIX}{world.backend}-{world.size}"
        rounds = Rounds(suite.rounds, suite.warm_up_rounds)
        super().__init__(world, out, name, "bench.studies.tensor", rounds, about)
        self._suite, self._seed = suite, seed
        self._dtype = torch.bfloat16 if self.on_gpu else torch.float32
        # Groups of one rank each, which all ranks make.
        self._own = [None if self.group is None else dist.new_group([n]) for n in range(world.size)]

    def measure_all(self) -> Tensors:
        """Measures everything."""
        self.compile(self._kernels())
        self.document["rates"] = None
        if isinstance(self.clock, DeviceClock):
            mine = device_rates.measure(self.world, self.clock.reader)
            told = self.world.control.allgather(mine, "the rates of the ranks' GPUs")
            self.document["rates"] = device_rates.slowest(told)
        if self.world.size > 1:
            self._together()
        for intermediate in self._suite.slices:
            self._alone(intermediate)
        return self

    def _asked(self, intermediate: int) -> list[Case]:
        return [{"intermediate": intermediate, "tokens": n} for n in self._suite.tokens]

    def _kernels(self) -> list[tuple[str, Case]]:
        size, suite = self.world.size, self._suite
        shapes: list[tuple[int, int, Case]] = []  # I, slices, what else a kernel has
        if size > 1:
            shapes.append((suite.reduced, size, {}))
        shapes += [(intermediate, 1, {}) for intermediate in suite.slices]
        shapes.append((suite.staged, 1, {"trace_events": TRACE_EVENTS}))
        found: list[tuple[str, Case]] = []
        for intermediate, slices, kind in shapes:
            cfg = suite.config(intermediate, self._dtype)
            for layout in LAYOUTS:
                slicing = slicing_of("tensor", "replicated", slices, layout=layout)
                found.append((layout, {"cfg": cfg, "slicing": slicing, **kind}))
        return found

    def _experts(
        self, cfg: moeos.MoEConfig, world: moeos.World, layout: Layout, reduce: Reduce = "auto"
    ) -> moeos.Experts:
        return moeos.Experts(cfg, world, parallel="tensor", layout=layout, reduce=reduce)

    def _inputs(self, cfg: moeos.MoEConfig, tokens: int) -> Inputs:
        return expert_major.draw(cfg, tokens, self.device, self._seed, self.world.rank)

    def _together(self) -> None:
        """Every number of tokens of the layer that all ranks have in slices."""
        suite = self._suite
        slice_ = suite.config(suite.reduced, self._dtype)
        whole = suite.config(suite.reduced * self.world.size, self._dtype)
        policies: dict[str, moeos.Experts] = {
            "auto": self._experts(whole, self.world, "auto"),
            "fused": self._experts(whole, self.world, "auto", "fused"),
            "after": self._experts(whole, self.world, "auto", "after"),
            **{it: self._experts(whole, self.world, it, "fused") for it in LAYOUTS[1:]},
        }
        for case in self.cases(self.document["together"], self._asked(suite.reduced)):
            tokens = case["tokens"]
            inputs = self._inputs(slice_, tokens)
            baseline = ExpertMajor(inputs, self.group)
            ways: dict[str, Callable[[], object]] = {EE: replayed(baseline.whole)}
            ways |= {name: replayed(moeos_call(it, inputs)) for name, it in policies.items()}
            off = self._compare(ways, tokens)
            ways |= {"products": replayed(baseline.products), "chain": replayed(baseline.chain)}
            found = {"distance": off, "touched": inputs.touched, "times": self.timed(ways, tokens)}
            self.add(self.document["together"], case, found)
            del ways, baseline

    def _alone(self, intermediate: int) -> None:
        """Every number of tokens of a slice that each rank has for itself."""
        suite, own = self._suite, self._own[self.world.rank]
        cfg = suite.config(intermediate, self._dtype)
        backend = self.world.backend
        traced = intermediate == suite.staged
        events = TRACE_EVENTS if traced else 0
        with (
            moeos.init(backend, group=own, deadline=_DEADLINE) as world,
            moeos.init(backend, group=own, deadline=_DEADLINE, trace_events=events) as noting,
        ):
            experts = {it: self._experts(cfg, world, it) for it in LAYOUTS}
            noted = {it: self._experts(cfg, noting, it) for it in LAYOUTS if traced}
            for case in self.cases(self.document["alone"], self._asked(intermediate)):
                tokens = case["tokens"]
                inputs = self._inputs(cfg, tokens)
                baseline = ExpertMajor(inputs, None)
                ways: dict[str, Callable[[], object]] = {EE: replayed(baseline.partial)}
                ways |= {it: replayed(moeos_call(experts[it], inputs)) for it in LAYOUTS}
                off = self._compare(ways, tokens)
                times = self.timed(ways, tokens)
                stages: dict[str, dict[str, float]] = {}
                if traced:
                    parts = {name: replayed(stage) for name, stage in baseline.stages.items()}
                    found = self.timed(parts, tokens)
                    stages[EE] = {name: found[name]["median"] for name in parts}
                    stages |= {it: self._stages(noted[it], inputs) for it in LAYOUTS}
                found = {"distance": off, "times": times, "stages": stages}
                self.add(self.document["alone"], case, found)
                del ways, baseline

    def _stages(self, experts: moeos.Experts, inputs: Inputs) -> dict[str, float]:
        """Seconds that a rank's processors are at each stage, each on average: stages overlap, and
        couriers permute during GEMMs. Medians of the slowest rank.
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
        told = self.world.control.allgather(mine, "the stages of a call")
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
        off = {
            name: self.worst(study.distance(y, made[EE])) for name, y in made.items() if name != EE
        }
        wrong = {name: value for name, value in off.items() if not value <= AGREES[self._dtype]}
        if wrong:
            raise ValueError(f"outputs of {tokens} tokens differ from those of {EE} by {wrong}")
        return off


if __name__ == "__main__":
    study.start(main)
