# SPDX-License-Identifier: Apache-2.0
"""`launch/bench gpu`: moeos on GPUs against the best of stock PyTorch and the machine's limits.

One run measures every case of a suite on one or more GPUs of one host. Started by hand it starts
the ranks by torchrun. Contestants, all with the same tokens and weights, in turn in each round:
    moeos: `MoELayer` on backend "cuda".
    baseline: `bench.gpu.all_to_all`, stock PyTorch with NCCL; its output must be moeos's.
    grouped: the layer's two GEMMs alone, torch._grouped_mm on the rows that this rank received.
    in_numbers: of a layer with formats the same layer without, with the numbers of its codes, as
        the two before have them.
In addition to the cases (`results`) the document has `failures`: what went wrong, by shape; a later
run tries it again. Started again with the same --out, it measures what is missing there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import moeos
from bench import study, suites
from bench.clocks import FLUSHED_TOKENS, DeviceClock
from bench.gpu import device_rates
from bench.gpu.all_to_all import LARGEST_ERROR, NEAR_TIE, AllToAllLayer, beside, compare
from bench.study import Out, Rounds
from bench.suites import GATE, Call, Shape, Shapes
from moeos.call import call_checks
from moeos.cli.shared import failures
from moeos.cli.shared.device_reader import FLUSH_BYTES
from moeos.cli.shared.routing import draw_routing, parse_pattern
from moeos.config.config import MoEConfig
from moeos.config.sizes import returned_bytes, sent_bytes
from moeos.layer.quantization import numbers_of
from moeos.system import launchers

LARGEST_ROUNDED_ERROR = 8e-2
"""`LARGEST_ERROR` where one of both rounds tokens to FP8, and again between the GEMMs: each number
by up to 1/16, 2.6e-2 in the mean square.
"""

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
    f"tokens whose routing margin in float64 is above {NEAR_TIE:g}; at most "
    f"{LARGEST_ERROR[torch.bfloat16]:g}, or {LARGEST_ROUNDED_ERROR:g} of tokens in FP8",
    **device_rates.METHOD,
}
"""What the numbers of the document are."""

_CALLING = 20.0  # seconds in which a call must end
_SEED = 1 << 30


def main(
    out: Out,
    suite: Annotated[Path, typer.Option(help="TOML file of the suite.")] = Path(
        "configs/suites/gpu.toml"
    ),
    ranks: Annotated[int | None, typer.Option(help="GPUs; all by default.")] = None,
    shapes: Annotated[str, typer.Option(help="Shapes of the suite, comma between.")] = "",
    tokens: Annotated[str, typer.Option(help="Token counts of it, comma between.")] = "",
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which no case is begun.")
    ] = 86_400.0,
) -> None:
    """Measures a suite's cases on this host's GPUs and writes the results as it goes."""
    ends = time.monotonic() + time_limit

    def chosen() -> Shapes:
        counts = study.numbers("--tokens", tokens, 0) if tokens else ()
        return suites.shapes(suite).only(study.names(shapes), counts)

    if launchers.detect(os.environ).launcher == "none":
        failures.finish(lambda: _become_ranks(chosen(), ranks))

    def body(world: moeos.World) -> study.Study:
        if ranks not in (None, world.size):
            raise ValueError(f"--ranks is {ranks}, but a launcher started {world.size} ranks")
        return Benchmark(world, out, chosen(), ends).measure_all()

    study.run(body, "cuda")


def _become_ranks(chosen: Shapes, ranks: int | None) -> int:
    """Replaces this process by torchrun with `ranks` ranks; None: one for each GPU. Raises what
    `check` does.
    """
    size = torch.cuda.device_count() if ranks is None else ranks
    check(chosen, size)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node", str(size), "-m", "bench.studies.gpu"]
    os.execv(sys.executable, [*words, *sys.argv[1:]])


def check(chosen: Shapes, ranks: int) -> None:
    """Raises `ValueError` for ranks that a suite does not have, and `RuntimeError` without GPUs."""
    if torch.cuda.device_count() == 0:
        raise RuntimeError(
            "PyTorch finds no GPU on this host: `moeos doctor` says what is missing; "
            "`launch/bench twin` measures without one"
        )
    if not 1 <= ranks <= torch.cuda.device_count():
        raise ValueError(
            f"--ranks is {ranks}; allowed: 1 to {torch.cuda.device_count()}, with a GPU each"
        )
    for shape in chosen.shapes:
        chosen.layers_of(shape, ranks)


class Benchmark(study.Study):
    """One rank of the benchmark."""

    def __init__(self, world: moeos.World, out: Path, chosen: Shapes, ends: float) -> None:
        self._chosen, self._ends = chosen, ends

        def prepare() -> study.Case:
            return {
                "full_ranks": chosen.full_ranks,
                "few_tokens": chosen.few_tokens,
                "method": METHOD,
                "results": [],
                "failures": [],
            }

        super().__init__(
            world,
            out,
            f"{chosen.name}-{world.size}",
            "bench.studies.gpu",
            Rounds(chosen.rounds, chosen.warm_up_rounds),
            prepare,
        )
        self.document["failures"] = []  # for a new attempt
        self._rates: dict[str, float | None] = {}

    def measure_all(self) -> Benchmark:
        """Measures what the document lacks, until it is complete or time is up."""
        layers = [
            (shape, cfg, calls)
            for shape in self._chosen.shapes
            for cfg, calls in self._chosen.layers_of(shape, self.world.size).items()
        ]
        for shape in self._chosen.shapes:
            cfg = shape.config_on(self.world.size, self._chosen.full_ranks)
            self.describe_layer("shapes", shape.name, json.loads(cfg.digest()))
        kernels = [
            (shape.name, {"cfg": kind, "world_size": self.world.size})
            for shape, cfg, _ in layers
            for kind in dict.fromkeys((cfg, cfg.in_numbers()))
        ]
        for name, what in self.compile(kernels, required=False).items():
            self._fail(name, what)
        assert isinstance(self.clock, DeviceClock)
        mine = device_rates.measure(self.world, self.clock.reader)
        told = self.world.control.allgather(mine, "the rates of the ranks' GPUs")
        self._rates = device_rates.slowest(told)
        self.about = {"rates": self._rates, "rates_of_ranks": told}
        for shape, cfg, calls in layers:
            self._layer(shape, cfg, calls)
            self.forget()
        return self

    def _layer(self, shape: Shape, cfg: MoEConfig, calls: Sequence[Call]) -> None:
        asked = [{"shape": shape.name, **dataclasses.asdict(call)} for call in calls]
        if any(failure["shape"] == shape.name for failure in self.document["failures"]):
            return
        with moeos.init("cuda", deadline=_CALLING) as world:
            layers: dict[str, moeos.MoELayer] = {}
            for case in self.cases(self.document["results"], asked):
                if not all(self.world.control.allgather(time.monotonic() < self._ends)):
                    break
                if not layers:
                    plain = moeos.MoELayer(cfg.in_numbers(), world).requires_grad_(False)
                    bias = plain.gate.selection_bias
                    if bias is not None:
                        seeded = torch.Generator().manual_seed(_SEED)
                        bias.copy_(torch.rand(cfg.experts, generator=seeded) * 0.01)
                    layers = coded_and_plain(plain, cfg)
                    baseline = beside(plain, self.group)
                if not self._measure(case, layers, baseline):
                    break

    def _measure(
        self,
        case: study.Case,
        layers: Mapping[str, moeos.MoELayer],
        baseline: AllToAllLayer,
    ) -> bool:
        """Whether the outputs agreed, so that the case was measured."""
        call = Call(case["tokens"], case["lone"], case["routing"])
        layer = layers["moeos"]
        cfg, control = layer.cfg, self.world.control
        rounded = cfg.activation_format is not None
        x, ids, weights = self._inputs(call, cfg)
        y = layer(x, ids, weights)
        layer.check()
        found = compare(layer, x, ids, y, baseline(x, ids, weights))
        errors = control.allgather(found)
        error, near_ties = max(error for error, _ in errors), sum(ties for _, ties in errors)
        if not error <= (LARGEST_ROUNDED_ERROR if rounded else LARGEST_ERROR[torch.bfloat16]):
            self._fail(case["shape"], f"moeos and the baseline differ: relative error {error:.1e}")
            return False
        sent = layer.stats()["rows_sent"]
        load = control.allgather(_load(baseline, sent, self.world.rank))
        times = self.timed(
            {
                **{name: functools.partial(one, x, ids, weights) for name, one in layers.items()},
                "baseline": lambda: baseline(x, ids, weights),
                "grouped": baseline.grouped_gemms,
            },
            call.tokens,
        )
        for one in layers.values():
            one.check()
        self.add(
            self.document["results"],
            case,
            {
                "max_tokens": cfg.max_tokens,
                "relative_error": error,
                "near_ties": near_ties,
                "l2_flushed": call.tokens <= FLUSHED_TOKENS,
                "load": load,
                "times": times,
                "limits": limits(cfg, call.tokens, load, self._rates),
            },
        )
        return True

    def _inputs(self, call: Call, cfg: MoEConfig) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, and the routing where the gate does not make it; others on each rank."""
        rank, tokens = self.world.rank, call.tokens_of(self.world.rank)
        on_gpu = torch.Generator("cuda").manual_seed(_SEED + rank)
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=on_gpu).to(cfg.dtype)
        if call.routing == GATE:
            return x, None, None
        on_cpu = torch.Generator().manual_seed(_SEED + rank)
        drawn = draw_routing(parse_pattern(call.routing), cfg, self.world.size, tokens, on_cpu)
        if drawn is None:
            return x, None, None
        return x, drawn[0].int().cuda(), drawn[1].float().cuda()

    def _fail(self, shape: str, what: str) -> None:
        self.document["failures"].append({"shape": shape, "what": what})
        self.write()


def coded_and_plain(plain: moeos.MoELayer, cfg: MoEConfig) -> dict[str, moeos.MoELayer]:
    """The contestants that are layers: `plain`, or, where `cfg` has formats, one with quantized
    weights and `plain`, which gets the dequantized ones. Collective.
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
    """The least times, in seconds, that the rates allow: F, W and N, and the amounts that they
    follow from.

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
    """This rank's load in the last call, in rows: computed, from peers, to peers; and the experts
    that have rows. `sent`: rows that moeos sends to each rank for it, of which a pair that shares
    its token's row has none.
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


if __name__ == "__main__":
    study.start(main)
