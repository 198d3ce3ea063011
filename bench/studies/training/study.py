# SPDX-License-Identifier: Apache-2.0
"""The command behind `launch/evaluate training`: the tables of papers on training, on one rank.

    python -m bench.studies.training.study SUITE --out FILE

Each layer of a suite runs forward and backward by moeos, once for each way to save activations, and
by autograd of torch._grouped_mm, in turn. Then the index lists of its routings are built: by moeos'
Route, as a trace says; by MoEBlaze's three steps; and by a sort. What a machine does not have, or
has no memory for, is left out with the reason. The document is whole after each case. It knows none
of the papers' figures.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer

import moeos
from bench.gpu import compile_ahead
from bench.gpu.results import timing
from bench.report import report, training_tables
from bench.studies import ranks
from bench.studies.contestants import Clock, clock_of
from bench.studies.training import contestants, index_lists
from bench.studies.training.contestants import GROUPED, SAVES, Forward, Inputs
from bench.studies.training.suite import Layer, Lists, Suite, read
from moeos.cli.shared import failures, machine, output, provenance
from moeos.cli.shared.options import Backend
from moeos.cli.timeline.call import PRODUCT0, ROUTE, CallTrace
from moeos.system.files import replace

AGREES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""The largest relative distance between gradients of two contestants."""

TRACE_EVENTS = 256
"""Of each actor: the first ones, which those of Route are."""

_DEADLINE = 100.0  # seconds; what the compiler takes counts
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"saves": True},
    {"gradients": True},
    {"gradients": True, "saves": True},
)
"""Of the kernels that a layer which trains has, by what it saves."""

_LEFT_OUT = (ValueError, RuntimeError, MemoryError)  # PyTorch's of too little memory is the second
_NARROW = 128  # of a layer that routes, and does little else


def main(
    suite: Annotated[Path, typer.Argument(help="The suite's TOML file.")],
    out: Annotated[Path, typer.Option(help="Where the results go, as JSON.")],
    names: Annotated[
        str, typer.Option(help="Of layers and lists, with commas between; without it all.")
    ] = "",
    backend: Backend = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
) -> None:
    """Measures training by moeos and by torch._grouped_mm with the layers of a paper."""

    def command() -> int:
        output.check_writable(out, "--out")
        chosen = read(suite).only([name for name in names.split(",") if name])
        return execute(chosen, out, backend, seed)

    failures.finish(command)


def execute(suite: Suite, out: Path, backend: str = "auto", seed: int = 0) -> int:
    """Runs the study; the exit code.

    Raises `ValueError` with several ranks, and what `moeos.init` raises.
    """
    with moeos.init(backend, deadline=_DEADLINE) as world:
        if world.size > 1:
            raise ValueError(f"there are {world.size} ranks; these tables are of one: set RANKS=1")
        study = _Study(world, suite, out, seed)
        study.run()
    report.print_tables(study.document)
    return failures.DONE


class _Study:
    """A run, and its document."""

    def __init__(self, world: moeos.World, suite: Suite, out: Path, seed: int) -> None:
        self._backend = world.backend
        self._on_gpu = world.backend == "cuda"
        self._device = "cuda" if self._on_gpu else "cpu"
        dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._suite = dataclasses.replace(
            suite, layers=tuple(layer.of(dtype) for layer in suite.layers)
        )
        self._out, self._seed = out, seed
        self._clock = clock_of(world, None)
        self.document: dict[str, Any] = {
            "benchmark": f"{training_tables.PREFIX}{suite.name}-{world.backend}-1",
            "commit": provenance.commit(),
            "command": provenance.command("bench.studies.training.study"),
            "backend": world.backend,
            "device": machine.gpus()[0] if self._on_gpu else f"the twin, {machine.processor()}",
            "machine": machine.describe(),
            "versions": machine.versions(),
            "processors": machine.processors_of(world),
            "rounds": suite.rounds,
            "warm_up_rounds": suite.warm_up_rounds,
            "trace_rounds": suite.trace_rounds,
            "seed": seed,
            "layers": [],
            "lists": [],
        }

    def run(self) -> None:
        """Measures everything."""
        if self._on_gpu:
            self._compile()
        for layer in self._suite.layers:
            self._measure(f"{layer.name}, {layer.cfg.activation}", self._layer, layer)
        for lists in self._suite.lists:
            for tokens in lists.tokens:
                self._measure(f"lists of {lists.name}", self._lists, lists, tokens)

    def _measure(self, what: str, measure: Callable[..., None], *arguments: Any) -> None:
        output.say(what)
        measure(*arguments)
        gc.collect()  # the next one may need the memory
        if self._on_gpu:
            torch.cuda.empty_cache()
        replace(self._out, output.json_text(self.document))

    def _compile(self) -> None:
        """Compiles all kernels side by side; what the compiler refuses is refused again later."""
        of_gpu = (1, torch.cuda.get_device_properties().multi_processor_count)
        layers = [(layer.name, layer.cfg) for layer in self._suite.layers]
        lists = [(lists.name, routing_layer(lists)) for lists in self._suite.lists]
        traced = ({"trace_events": TRACE_EVENTS},)
        output.say("compiling")
        with (
            compile_ahead.started(layers, *of_gpu, kinds=KINDS) as one,
            compile_ahead.started(lists, *of_gpu, kinds=traced) as other,
        ):
            one.wait(lambda: None)
            other.wait(lambda: None)

    def _layer(self, layer: Layer) -> None:
        cfg = layer.cfg
        with moeos.init(self._backend, deadline=_DEADLINE) as world:
            makers: dict[str, Callable[[Inputs], Forward]] = {
                GROUPED: functools.partial(contestants.grouped_forward, cfg)
            }
            refused: dict[str, str] = {}
            for save in SAVES:
                try:
                    makers[save] = contestants.moeos_forward(cfg, world, save)
                except _LEFT_OUT as error:
                    refused[save] = _reason(error)
            for tokens in layer.tokens:
                found = {
                    "layer": layer.name,
                    **contestants.describe(cfg),
                    "tokens": tokens,
                    "pieces": -(-tokens // cfg.max_tokens),
                    "forward_flops": forward_flops(cfg, tokens),
                    "contestants": {
                        **self._train(cfg, tokens, makers),
                        **{name: {"left_out": why} for name, why in refused.items()},
                    },
                }
                self.document["layers"].append(found)
                if self._on_gpu:
                    torch.cuda.empty_cache()

    def _train(
        self, cfg: moeos.MoEConfig, tokens: int, makers: Mapping[str, Callable[[Inputs], Forward]]
    ) -> dict[str, Any]:
        """Every contestant's results with so many tokens."""
        try:
            inputs = contestants.draw(cfg, tokens, self._device, self._seed)
        except _LEFT_OUT as error:
            return {name: {"left_out": _reason(error)} for name in makers}
        found: dict[str, dict[str, Any]] = {}
        calls: dict[str, Forward] = {}
        expected: contestants.Gradients | None = None
        for name, maker in makers.items():
            try:
                forward = maker(inputs)
                made = contestants.gradients(forward(), inputs)
                off = None if expected is None else contestants.distance(made, expected)
                if off is not None and not off <= AGREES[cfg.dtype]:
                    raise ValueError(f"its gradients differ by {off:.1e} from those of {GROUPED}")
                expected = made if name == GROUPED else expected
                del made
                found[name] = {
                    "distance": off,
                    "saved_bytes": contestants.saved_bytes(forward, inputs),
                    "peak_bytes": contestants.peak_bytes(forward, inputs),
                }
                calls[name] = forward
            except _LEFT_OUT as error:
                found[name] = {"left_out": _reason(error)}
        del expected
        for name, times in self._time(calls, inputs).items():
            found[name] |= times
        return found

    def _time(self, calls: Mapping[str, Forward], inputs: Inputs) -> dict[str, dict[str, Any]]:
        """Of each contestant "forward" and "backward", in turn."""
        work: dict[tuple[str, str], Callable[[], object]] = {}
        for name, forward in calls.items():
            work[name, "forward"] = forward
            work[name, "backward"] = functools.partial(contestants.gradients, forward(), inputs)
        found: dict[str, dict[str, Any]] = {name: {} for name in calls}
        for (name, step), times in _in_turn(self._clock, work, self._suite).items():
            found[name][step] = times
        return found

    def _lists(self, lists: Lists, tokens: int) -> None:
        generator = torch.Generator(self._device).manual_seed(self._seed)
        drawn = torch.rand(tokens, lists.experts, device=self._device, generator=generator)
        ids = drawn.topk(lists.top_k, dim=1).indices.contiguous()
        del drawn
        keys = ids.flatten()
        steps = (
            index_lists.Steps(tokens, lists.top_k, lists.experts)
            if self._on_gpu
            else functools.partial(index_lists.by_steps, experts=lists.experts)
        )
        if not _equal(steps(ids), index_lists.by_sort(ids, lists.experts)):
            raise RuntimeError(f"the lists of {lists.name} by three steps are not those by a sort")
        work: dict[str, Callable[[], object]] = {
            "steps": lambda: steps(ids),
            "sorted_lists": lambda: index_lists.by_sort(ids, lists.experts),
            "sort": lambda: torch.sort(keys, stable=True),
        }
        found: dict[str, Any] = {
            "name": lists.name,
            "experts": lists.experts,
            "top_k": lists.top_k,
            "tokens": tokens,
            "calls": -(-tokens // lists.call_tokens),
            **_in_turn(self._clock, work, self._suite),
        }
        try:
            found |= self._traced(routing_layer(lists), ids)
        except _LEFT_OUT as error:
            found["left_out"] = _reason(error)
        self.document["lists"].append(found)

    @torch.no_grad()
    def _traced(self, cfg: moeos.MoEConfig, ids: torch.Tensor) -> dict[str, Any]:
        """moeos' times for a routing: "map" from a call's begin until Route's last part is done,
        and "rows" until the first product has rows to load; added over the calls that it takes.
        """
        if not self._on_gpu:
            cfg = dataclasses.replace(cfg, dtype=torch.float32)
        with moeos.init(self._backend, deadline=_DEADLINE, trace_events=TRACE_EVENTS) as world:
            experts = moeos.Experts(cfg, world)
            most = min(cfg.max_tokens, len(ids))
            weights = torch.ones(most, cfg.top_k, device=self._device)
            x, w1, w2 = (
                torch.zeros(shape, dtype=cfg.dtype, device=self._device)
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


def forward_flops(cfg: moeos.MoEConfig, tokens: int) -> int:
    """Of the experts' products of a forward call; its gradients have twice as many."""
    matrices = 3 if cfg.gated else 2
    return 2 * matrices * tokens * cfg.top_k * cfg.hidden * cfg.intermediate


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
    """See `_Study._traced`; in seconds."""
    parts = call.parts
    first = parts[parts["kind"] == PRODUCT0]
    loading = numpy.where(first["loading"] >= 0, first["loading"], first["claimed"])
    return {
        "map": float(parts["visible"][parts["kind"] == ROUTE].max()) * 1e-9,
        "rows": float(loading.min()) * 1e-9,
    }


def _equal(one: index_lists.IndexLists, other: index_lists.IndexLists) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _in_turn(
    clock: Clock, work: Mapping[Any, Callable[[], object]], suite: Suite
) -> dict[Any, dict[str, Any]]:
    """Times of what is done in turn, so that a clock that drifts meets all of it."""
    seconds: dict[Any, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(suite.warm_up_rounds + suite.rounds):
        first = turn % max(1, len(names))  # nobody always follows the same one
        for name in names[first:] + names[:first]:
            seconds[name].append(clock.measure(0.0, work[name]))
    return {name: timing(of_it[suite.warm_up_rounds :]) for name, of_it in seconds.items()}


def _reason(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__


if __name__ == "__main__":
    ranks.start(main)
