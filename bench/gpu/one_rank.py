# SPDX-License-Identifier: Apache-2.0
"""What one rank does in `launch/bench gpu`: makes the layers, checks them, times the contestants.

Contestants, all with the same tokens and weights, in turn within each round:
    moeos: `MoELayer` on backend "cuda".
    baseline: `bench.gpu.all_to_all`, stock PyTorch with NCCL; its output must be moeos's.
    grouped: the layer's two GEMMs alone, torch._grouped_mm on the rows that this rank received.
    in_numbers: of a layer with formats the same layer without, with the numbers of its codes, as
        the two before have them.
How they are timed is bench.gpu.in_turn's. `python -m bench.gpu.one_rank ORDER` is one
rank that bench.gpu started; it judges no time.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import moeos
from bench.gpu import compile_ahead, device_rates, suite
from bench.gpu.all_to_all import AllToAllLayer
from bench.gpu.in_turn import FLUSHED_TOKENS, InTurn
from bench.gpu.results import Results
from bench.gpu.suite import GATE, Case, Shape, Suite
from moeos.call import call_checks
from moeos.cli.shared import machine, output
from moeos.cli.shared.device_reader import FLUSH_BYTES
from moeos.cli.shared.routing import draw_routing, parse_pattern
from moeos.config import reference
from moeos.config.config import MoEConfig
from moeos.config.sizes import returned_bytes, sent_bytes
from moeos.layer.quantization import numbers_of

LARGEST_ERROR = 1.2e-2
"""Of the difference between two bfloat16 results: each is within 8e-3 of the exact one."""

LARGEST_ROUNDED_ERROR = 8e-2
"""The same where one of both rounds tokens to FP8, and what lies between the products again: each
number by up to 1/16, 2.6e-2 in the mean square."""

NEAR_TIE = 4e-6
"""Tokens whose experts are no more certain than this may be routed otherwise in fp32."""

METHOD = {
    "moeos": "MoELayer.forward on backend cuda, one kernel; a layer for up to few_tokens tokens "
    "per rank, and one for more; max_tokens says which",
    "baseline": "NCCL all-to-all + torch._grouped_mm in PyTorch, eager; see bench.gpu.all_to_all",
    "G": "the layer's two GEMMs alone, torch._grouped_mm on exactly the rows the rank received",
    "in_numbers": "of a layer with formats: moeos' layer without, with the numbers of its codes",
    "F limit": "FLOPs of the rank with most rows (both GEMMs, and the router) / F; of FP8 by FP8 "
    "twice F",
    "W limit": "bytes of the touched experts' weights as they are stored, of the rank with most / "
    "W",
    "N limit": "bytes that the rank with most sends to peers (rows there, results back) / N; it "
    "receives as many",
    "time": "CUDA events around the call; the slowest rank of each round; medians over rounds; "
    "contestants alternate within a round. Before each: at least 1 ms of rest in which the host "
    "enqueues ahead, then an all-reduce of one number so that the ranks begin together",
    "L2": f"up to {FLUSHED_TOKENS} tokens per rank it is flushed before each contestant, by a "
    f"kernel that reads {FLUSH_BYTES >> 20} MiB, so weights come from HBM as in a "
    "model with many layers; above that it is not",
    "error": "relative Frobenius error of moeos against the baseline, of the worst rank, over "
    f"tokens whose routing margin in float64 is above {NEAR_TIE:g}; at most {LARGEST_ERROR:g}, or "
    f"{LARGEST_ROUNDED_ERROR:g} of tokens in FP8",
    **device_rates.METHOD,
}
"""What the numbers of the document are."""

_STARTING = 600.0  # seconds in which ranks meet again outside of calls, the compiler included
_CALLING = 20.0  # seconds in which a call must end
_SPARE = 8.0  # seconds that are kept before the end of the time
_SEED = 1 << 30

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What bench.gpu tells its ranks.

    Attributes:
        suite: file.
        shapes, tokens: of the suite, all if empty.
        out: file of the results.
        ends: when to be done, on the monotonic clock, which all processes of a host share.
        commit, command: for the results.
        failure: file into which a rank writes what went wrong; "" for none.
    """

    suite: str
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    out: str
    ends: float
    commit: dict[str, Any] | None
    command: str
    failure: str = ""

    def selected(self) -> Suite:
        """The part of the suite that is asked for."""
        return suite.read(Path(self.suite)).only(self.shapes, self.tokens)

    def results(self, ranks: int) -> Results:
        """The document, continued if there is one. For one process at a time."""
        return Results(Path(self.out), self.selected(), ranks, self.commit, METHOD)

    def to_json(self) -> str:
        """For the command line of a rank."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """What `to_json` wrote."""
        fields = json.loads(text)
        fields["shapes"], fields["tokens"] = tuple(fields["shapes"]), tuple(fields["tokens"])
        return cls(**fields)


def run(order: Order) -> None:
    """Measures what the document lacks, until it is complete or time is up. Collective.

    Raises what a rank cannot go on after; a wrong output is noted and ends its shape alone.
    """
    # The baseline has two small functions to compile: no pool of processes for that.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with moeos.init("cuda", deadline=_STARTING) as world:
        try:
            _Measurement(order, world).run()
        except Exception as error:  # said before the world is closed, which may wait for peers
            _tell(order, error)
            raise
        if dist.is_initialized():
            dist.destroy_process_group()


class _Measurement:
    """One rank's part of a run."""

    def __init__(self, order: Order, world: moeos.World) -> None:
        self._order = order
        self._world = world
        self._suite = order.selected()
        self._results = order.results(world.size) if world.rank == 0 else None
        if self._results is not None and not order.failure:  # nobody who started the ranks did it
            self._results.forget_failures()
        self._longest = 5.0  # seconds of the longest step so far, a layer's making or a case
        self._step_began = time.monotonic()

    def run(self) -> None:
        self._note("starting")
        layers = [
            (shape.name, kind)
            for shape in self._suite.shapes
            for cfg, cases in self._suite.layers_of(shape, self._world.size).items()
            if self._open_cases(shape, cases)
            for kind in dict.fromkeys((cfg, cfg.in_numbers()))
        ]
        if layers:
            self._measure(layers)
        if self._results is not None:
            self._results.end()

    def _measure(self, layers: Sequence[tuple[str, MoEConfig]]) -> None:
        mine = layers if self._world.rank == 0 else []
        gpu = torch.cuda.get_device_properties()
        with compile_ahead.started(mine, self._world.size, gpu.multi_processor_count) as compiling:
            self._clock = InTurn(self._world)
            measured = device_rates.measure(self._world, self._clock.reader)
            rates = self._world.control.allgather(measured)
            refused = compiling.wait(lambda: self._note("starting"))
        self._world.control.barrier()
        self._rates = {
            name: None if rates[0][name] is None else min(found[name] or 0.0 for found in rates)
            for name in rates[0]
        }
        if self._results is not None:
            about = describe(self._order.command, self._world.size)
            self._results.begin_run({**about, "rates": self._rates, "rates_of_ranks": rates})
            for name, what in refused.items():
                self._results.fail(name, what)
        self._step_began = time.monotonic()
        for shape in self._suite.shapes:
            for cfg, of_layer in self._suite.layers_of(shape, self._world.size).items():
                cases = self._open_cases(shape, of_layer)
                if cases:
                    if not self._time_is_left():
                        return
                    self._measure_layer(shape, cfg, cases)

    def _measure_layer(self, shape: Shape, cfg: MoEConfig, cases: Sequence[Case]) -> None:
        self._note(shape.name)
        with moeos.init("cuda", deadline=_CALLING) as world:
            plain = moeos.MoELayer(cfg.in_numbers(), world).requires_grad_(False)
            bias = plain.gate.selection_bias
            if bias is not None:
                drawn = torch.rand(cfg.experts, generator=torch.Generator().manual_seed(_SEED))
                bias.copy_(drawn * 0.01)
            layers = coded_and_plain(plain, cfg)
            baseline = AllToAllLayer(
                plain.cfg, plain.gate.weight, bias, plain.w1, plain.w2, self._clock.group
            )
            for case in cases:
                if not self._time_is_left() or not self._measure_case(
                    shape, case, layers, baseline
                ):
                    break
        del layers, plain, baseline, bias
        gc.collect()
        torch.cuda.empty_cache()

    def _measure_case(
        self,
        shape: Shape,
        case: Case,
        layers: Mapping[str, moeos.MoELayer],
        baseline: AllToAllLayer,
    ) -> bool:
        """Whether the outputs agreed, so that the case was measured."""
        self._note(shape.name, case)
        layer = layers["moeos"]
        cfg, control = layer.cfg, self._world.control
        most = LARGEST_ERROR if cfg.activation_format is None else LARGEST_ROUNDED_ERROR
        x, ids, weights = self._inputs(case, cfg)
        y = layer(x, ids, weights)
        layer.check()
        found = compare(layer, x, ids, y, baseline(x, ids, weights))
        errors = control.allgather(found)
        error, near_ties = max(error for error, _ in errors), sum(ties for _, ties in errors)
        if not error <= most:
            if self._results is not None:
                what = f"moeos and the baseline differ: relative error {error:.1e}"
                self._results.fail(shape.name, what, case)
            return False
        sent = layer.stats()["rows_sent"]
        load = control.allgather(_load(baseline, sent, self._world.rank))
        flushed = case.tokens <= FLUSHED_TOKENS
        times = self._clock.time(
            {
                **{name: functools.partial(one, x, ids, weights) for name, one in layers.items()},
                "baseline": lambda: baseline(x, ids, weights),
                "grouped": baseline.grouped_gemms,
            },
            flushed=flushed,
            warm_up_rounds=self._suite.warm_up_rounds,
            rounds=self._suite.rounds,
        )
        for one in layers.values():
            one.check()
        if self._results is not None:
            self._results.add(
                shape,
                case,
                {
                    "max_tokens": cfg.max_tokens,
                    "relative_error": error,
                    "near_ties": near_ties,
                    "l2_flushed": flushed,
                    "load": load,
                    "times": times,
                    "limits": limits(cfg, case.tokens, load, self._rates),
                },
            )
        return True

    def _inputs(self, case: Case, cfg: MoEConfig) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, and the routing where the gate does not make it; others on each rank."""
        rank, tokens = self._world.rank, case.tokens_of(self._world.rank)
        on_gpu = torch.Generator("cuda").manual_seed(_SEED + rank)
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=on_gpu).to(cfg.dtype)
        if case.routing == GATE:
            return x, None, None
        on_cpu = torch.Generator().manual_seed(_SEED + rank)
        drawn = draw_routing(parse_pattern(case.routing), cfg, self._world.size, tokens, on_cpu)
        if drawn is None:
            return x, None, None
        return x, drawn[0].int().cuda(), drawn[1].float().cuda()

    def _open_cases(self, shape: Shape, of_layer: Sequence[Case]) -> list[Case]:
        """On all ranks which of a layer's cases rank 0's document lacks."""
        return self._decide(
            lambda results: [case for case in results.open_cases(shape) if case in of_layer]
        )

    def _time_is_left(self) -> bool:
        """Whether another step will end in time; each call ends a step."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._step_began)
        self._step_began = now
        enough = now + self._longest * 1.5 + _SPARE < self._order.ends
        return self._decide(lambda _: enough)

    def _decide(self, decide: Callable[[Results], Value]) -> Value:
        """What rank 0, who has the document, decides."""
        mine = None if self._results is None else decide(self._results)
        decided: Value | None = self._world.control.allgather(mine, "a decision of rank 0")[0]
        return decided  # type: ignore[return-value]

    def _note(self, what: str, case: Case | None = None) -> None:
        if self._results is not None:
            self._results.measuring(what, case)
            output.say(what if case is None else f"{what}: {case.tokens} tokens, {case.routing}")


def coded_and_plain(plain: moeos.MoELayer, cfg: MoEConfig) -> dict[str, moeos.MoELayer]:
    """The contestants that are layers: `plain`, or, where `cfg` has formats, one with its weights
    in these and `plain`, which gets the numbers of the codes. Collective.
    """
    if cfg.weight_format is None:
        return {"moeos": plain}
    layer = moeos.quantize(
        plain, cfg.weight_format, cfg.activation_format, result_format=cfg.result_format
    )
    with torch.no_grad():
        for name in ("w1", "w2"):
            for expert, matrix in enumerate(getattr(plain, name)):
                matrix.copy_(numbers_of(layer, name, slice(expert, expert + 1))[0])
    return {"moeos": layer, "in_numbers": plain}


def limits(
    cfg: MoEConfig,
    tokens: int,
    load: list[dict[str, int]],
    rates: Mapping[str, float | None],
) -> dict[str, float | None]:
    """The least times, in seconds, that the rates allow: F, W and N, and what they are made of.

    Args:
        tokens: of the rank with most.
        load: of each rank, see `_load`.
        rates: FLOP/s, bytes/s, bytes/s or None without links.
    """
    weights = (cfg.w1_rows + cfg.intermediate) * cfg.hidden  # of one expert
    flops = 2 * weights * max(of["rows"] for of in load) + 2 * tokens * cfg.experts * cfg.hidden
    stored = (*call_checks.expected_weights(cfg, 1), *call_checks.expected_scales(cfg, 1))
    of_expert = sum(one.shape.numel() * one.dtype.itemsize for one in stored if one is not None)
    touched = max(of["experts"] for of in load) * of_expert
    link = max(
        of["to_peers"] * sent_bytes(cfg) + of["from_peers"] * returned_bytes(cfg) for of in load
    )
    dense, read, store = rates["F"], rates["W"], rates["N"]
    assert dense is not None
    assert read is not None
    dense *= 1 if cfg.activation_format is None else 2
    return {
        "F": flops / dense,
        "W": touched / read,
        "N": None if store is None else link / store,
    }


def _load(baseline: AllToAllLayer, sent: Sequence[int], rank: int) -> dict[str, int]:
    """What the last call gave this rank to do, in rows: computed, from peers, to peers; and the
    experts that have rows. `sent`: rows that moeos sends to each rank for it, of which a pair that
    shares its token's row has none.
    """
    last = baseline.last
    assert last is not None
    rows = int(last.counts.sum())
    return {
        "rows": rows,
        "experts": int((last.counts.sum(dim=0) > 0).sum()),
        "from_peers": rows - int(last.counts[rank].sum()),
        "to_peers": sum(sent) - sent[rank],
    }


def compare(
    layer: moeos.MoELayer, x: Tensor, ids: Tensor | None, y: Tensor, expected: Tensor
) -> tuple[float, int]:
    """The relative error of this rank's output, and how many tokens are too near a tie for it."""
    if ids is None and len(x) > 0:
        gate = layer.gate
        margin = reference.route(x, gate.weight, layer.cfg, **gate.rules()).margin
        certain = margin > NEAR_TIE
        y, expected = y[certain], expected[certain]
    return reference.relative_error(y, expected), len(x) - len(y)


def describe(command: str, gpus: int) -> dict[str, Any]:
    """Where a run's numbers come from: when, what was typed, machine, GPUs, driver and versions."""
    gpu = torch.cuda.get_device_properties()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine.describe(),
        "gpus": gpus,
        "gpu": {
            "name": gpu.name,
            "multiprocessors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "l2_bytes": gpu.L2_cache_size,
        },
        "driver": next(iter(answer.stdout.split()), None),
        "versions": machine.versions()
        | {"cuda": torch.version.cuda, "nccl": nccl}
        | {name: machine.version_of(name) for name in ("nvshmem4py-cu13", "nvidia-nvshmem-cu13")},
    }


def _tell(order: Order, error: Exception) -> None:
    """Writes what went wrong where the order says, unless that has been done."""
    if order.failure and not Path(order.failure).exists():
        text = " ".join(f"{type(error).__name__}: {error}".split())
        Path(order.failure).write_text(text, encoding="utf-8")


def main() -> None:
    """Runs one rank; an error ends it with code 1."""
    order = Order.from_json(sys.argv[1])
    try:
        run(order)
    except Exception as error:
        _tell(order, error)
        raise


if __name__ == "__main__":
    main()
