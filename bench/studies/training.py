# SPDX-License-Identifier: Apache-2.0
"""The study of `launch/evaluate training`: the tables of papers on training, on one rank.

Each layer of a suite runs forward and backward by moeos, once for each way to save activations, and
by autograd of torch._grouped_mm, in turn. Then the index lists of its routings are built: by moeos'
Route, as a trace says; by MoEBlaze's three steps; and by a sort. What a machine does not have, or
has no memory for, is left out with the reason. Must not depend on the papers' figures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer

import moeos
from bench import study, suites
from bench.clocks import timing
from bench.report import training_tables
from bench.studies import index_lists, trained
from bench.studies.trained import GROUPED, SAVES, Forward, Inputs
from bench.study import Case, Out, Rounds, Seed, Study, SuiteFile
from bench.suites import Layer, Lists, Training
from moeos.cli.shared.options import Backend
from moeos.cli.timeline.call import PRODUCT0, ROUTE, CallTrace

AGREES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""The largest relative distance between gradients of two trained."""

TRACE_EVENTS = 256
"""Events that each actor notes: the first ones, which those of Route are."""

_DEADLINE = 100.0  # seconds; what the compiler takes counts
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"saves": True},
    {"gradients": True},
    {"gradients": True, "saves": True},
)
"""The fields that differ between kernels of a training layer, by what it saves."""

_LEFT_OUT = (ValueError, RuntimeError, MemoryError)  # PyTorch's of too little memory is the second
_NARROW = 128  # of a layer that routes, and does little else


def main(
    suite: SuiteFile,
    out: Out,
    names: Annotated[
        str, typer.Option(help="Names of layers and lists, separated by commas; default: all.")
    ] = "",
    backend: Backend = "auto",
    seed: Seed = 0,
) -> None:
    """Measures training by moeos and by torch._grouped_mm with the layers of a paper."""

    def body(world: moeos.World) -> Study:
        chosen = suites.training(suite).only(study.names(names))
        return Trainings(world, chosen, out, seed).measure_all()

    study.run(body, backend, _DEADLINE)


class Trainings(Study):
    """The study, of one rank."""

    def __init__(self, world: moeos.World, suite: Training, out: Path, seed: int) -> None:
        def about() -> Case:
            if world.size > 1:
                raise ValueError(
                    f"there are {world.size} ranks; these tables are of one: set RANKS=1"
                )
            return {"trace_rounds": suite.trace_rounds, "seed": seed, "layers": [], "lists": []}

        name = f"{training_tables.PREFIX}{suite.name}-{world.backend}-1"
        rounds = Rounds(suite.rounds, suite.warm_up_rounds)
        super().__init__(world, out, name, "bench.studies.training", rounds, about)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self._layers = [layer.of(dtype) for layer in suite.layers]
        self._suite, self._seed = suite, seed

    def measure_all(self) -> Trainings:
        """Measures everything."""
        # What the compiler refuses is refused again later.
        self.compile(
            [(one.name, {"cfg": one.cfg, **kind}) for one in self._layers for kind in KINDS]
            + [
                (one.name, {"cfg": routing_layer(one), "trace_events": TRACE_EVENTS})
                for one in self._suite.lists
            ],
            required=False,
        )
        for layer in self._layers:
            self._layer(layer)
            self.forget()
        found = self.document["lists"]
        for lists in self._suite.lists:
            sizes = {"name": lists.name, "experts": lists.experts, "top_k": lists.top_k}
            for case in self.cases(found, [{**sizes, "tokens": n} for n in lists.tokens]):
                self.add(found, case, self._lists(lists, case["tokens"]))
        return self

    def _layer(self, layer: Layer) -> None:
        cfg = layer.cfg
        about = {"layer": layer.name, **trained.describe(cfg)}
        with moeos.init(self.world.backend, deadline=_DEADLINE) as world:
            makers: dict[str, Callable[[Inputs], Forward]] = {
                GROUPED: functools.partial(trained.grouped_forward, cfg)
            }
            refused: dict[str, str] = {}
            for save in SAVES:
                try:
                    makers[save] = trained.moeos_forward(cfg, world, save)
                except _LEFT_OUT as error:
                    refused[save] = _reason(error)
            into = self.document["layers"]
            for case in self.cases(into, [{**about, "tokens": n} for n in layer.tokens]):
                tokens = case["tokens"]
                found = {
                    "pieces": -(-tokens // cfg.max_tokens),
                    "forward_flops": trained.forward_flops(cfg, tokens),
                    "contestants": {
                        **self._train(cfg, tokens, makers),
                        **{name: {"left_out": why} for name, why in refused.items()},
                    },
                }
                self.add(into, case, found)

    def _train(
        self, cfg: moeos.MoEConfig, tokens: int, makers: Mapping[str, Callable[[Inputs], Forward]]
    ) -> dict[str, Any]:
        """Every contestant's results with `tokens` tokens."""
        try:
            inputs = trained.draw(cfg, tokens, self.device, self._seed)
        except _LEFT_OUT as error:
            return {name: {"left_out": _reason(error)} for name in makers}
        found: dict[str, dict[str, Any]] = {}
        calls: dict[str, Forward] = {}
        expected: trained.Gradients | None = None
        for name, maker in makers.items():
            try:
                forward = maker(inputs)
                made = trained.gradients(forward(), inputs)
                off = None if expected is None else trained.distance(made, expected)
                if off is not None and not off <= AGREES[cfg.dtype]:
                    raise ValueError(f"its gradients differ by {off:.1e} from those of {GROUPED}")
                expected = made if name == GROUPED else expected
                del made
                found[name] = {
                    "distance": off,
                    "saved_bytes": trained.saved_bytes(forward, inputs),
                    "peak_bytes": trained.peak_bytes(forward, inputs),
                }
                calls[name] = forward
            except _LEFT_OUT as error:
                found[name] = {"left_out": _reason(error)}
        del expected
        for name, times in self._time(calls, inputs).items():
            found[name] |= times
        return found

    def _time(self, calls: Mapping[str, Forward], inputs: Inputs) -> dict[str, dict[str, Any]]:
        """The times of "forward" and "backward" of each contestant, in turn."""
        work: dict[tuple[str, str], Callable[[], object]] = {}
        for name, forward in calls.items():
            work[name, "forward"] = forward
            work[name, "backward"] = functools.partial(trained.gradients, forward(), inputs)
        found: dict[str, dict[str, Any]] = {name: {} for name in calls}
        for (name, step), times in self.timed(work).items():
            found[name][step] = times
        return found

    def _lists(self, lists: Lists, tokens: int) -> Case:
        generator = torch.Generator(self.device).manual_seed(self._seed)
        drawn = torch.rand(tokens, lists.experts, device=self.device, generator=generator)
        ids = drawn.topk(lists.top_k, dim=1).indices.contiguous()
        del drawn
        keys = ids.flatten()
        steps = (
            index_lists.Steps(tokens, lists.top_k, lists.experts)
            if self.on_gpu
            else functools.partial(index_lists.by_steps, experts=lists.experts)
        )
        if not _equal(steps(ids), index_lists.by_sort(ids, lists.experts)):
            raise RuntimeError(f"the lists of {lists.name} by three steps are not those by a sort")
        work: dict[str, Callable[[], object]] = {
            "steps": lambda: steps(ids),
            "sorted_lists": lambda: index_lists.by_sort(ids, lists.experts),
            "sort": lambda: torch.sort(keys, stable=True),
        }
        found = {"calls": -(-tokens // lists.call_tokens), **self.timed(work)}
        try:
            found |= self._traced(routing_layer(lists), ids)
        except _LEFT_OUT as error:
            found["left_out"] = _reason(error)
        return found

    @torch.no_grad()
    def _traced(self, cfg: moeos.MoEConfig, ids: torch.Tensor) -> dict[str, Any]:
        """moeos' times for a routing: "map" from a call's begin until Route's last part is done,
        and "rows" until the first product has rows to load; added over the calls that it takes.
        """
        if not self.on_gpu:
            cfg = dataclasses.replace(cfg, dtype=torch.float32)
        with moeos.init(self.world.backend, deadline=_DEADLINE, trace_events=TRACE_EVENTS) as world:
            experts = moeos.Experts(cfg, world)
            most = min(cfg.max_tokens, len(ids))
            weights = torch.ones(most, cfg.top_k, device=self.device)
            x, w1, w2 = (
                torch.zeros(shape, dtype=cfg.dtype, device=self.device)
                for shape in (
                    (most, cfg.hidden),
                    (cfg.experts, cfg.w1_rows, cfg.hidden),
                    (cfg.experts, cfg.hidden, cfg.intermediate),
                )
            )
            noted: dict[str, list[float]] = {"map": [], "rows": []}
            for turn in range(1 + self._suite.trace_rounds):
                ends = []
                for part in ids.split(most):
                    experts(x[: len(part)], part, weights[: len(part)], w1, w2)
                    experts.check()
                    ends.append(_ends(CallTrace.of([experts.trace()])))
                if turn > 0:
                    for name, seconds in noted.items():
                        seconds.append(sum(end[name] for end in ends))
        return {name: timing(seconds) for name, seconds in noted.items()}


def routing_layer(lists: Lists) -> moeos.MoEConfig:
    """A layer that has such a routing, and little else to do."""
    return moeos.MoEConfig(
        hidden=_NARROW,
        intermediate=_NARROW,
        experts=lists.experts,
        top_k=lists.top_k,
        activation="relu",
        max_tokens=lists.call_tokens,
    )


def _ends(call: CallTrace) -> dict[str, float]:
    """See `Trainings._traced`; in seconds."""
    parts = call.parts
    first = parts[parts["kind"] == PRODUCT0]
    loading = numpy.where(first["loading"] >= 0, first["loading"], first["claimed"])
    return {
        "map": float(parts["visible"][parts["kind"] == ROUTE].max()) * 1e-9,
        "rows": float(loading.min()) * 1e-9,
    }


def _equal(one: index_lists.IndexLists, other: index_lists.IndexLists) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _reason(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__


if __name__ == "__main__":
    study.start(main)
