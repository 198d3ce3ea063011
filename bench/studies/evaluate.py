# SPDX-License-Identifier: Apache-2.0
"""The study of `launch/evaluate`: the cases of the thesis' evaluation.

In each case moeos and a bulk-synchronous layer (`bench.gpu.all_to_all`: NCCL on GPUs, gloo on the
twin) make the same calls in turn, with the same tokens and weights, once their outputs agree. The
study takes only the sizes from the thesis. The document also has:
    tokens, experts: what all runs together were asked for.
    not_measured: the cases that were asked for and are not there.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch
import typer
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import moeos
from bench import study
from bench.gpu.all_to_all import AllToAllLayer, beside, require_alike, tokens_of
from bench.report import evaluation_tables, thesis
from bench.study import Case, Out, Rounds, Seed, Study, check_counts, numbers
from bench.suites import require_even
from moeos.cli.shared.options import Backend

_PATIENCE = 60.0  # seconds in which a call must end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    out: Out
    tokens: Annotated[
        str, typer.Option(help="Tokens of each rank, with --scaling-experts; separated by commas.")
    ] = ",".join(map(str, thesis.TOKENS))
    scaling_experts: Annotated[int, typer.Option(help="Experts of the token scaling.")] = (
        thesis.TOKEN_SCALING_EXPERTS
    )
    experts: Annotated[
        str, typer.Option(help="Tokens of all ranks, with --scaling-tokens; separated by commas.")
    ] = ",".join(map(str, thesis.EXPERTS))
    scaling_tokens: Annotated[
        int, typer.Option(help="Tokens of each rank in the expert scaling.")
    ] = thesis.EXPERT_SCALING_TOKENS
    hidden: Annotated[int, typer.Option(help="Elements of a token.")] = thesis.HIDDEN
    intermediate: Annotated[int, typer.Option(help="Elements between an expert's GEMMs.")] = (
        thesis.INTERMEDIATE
    )
    rounds: Annotated[int, typer.Option(help="Measured calls of each layer in a case.")] = 20
    warm_up: Annotated[int, typer.Option(help="Calls of each before them.")] = 5
    backend: Backend = "auto"
    seed: Seed = 0

    def cases(self, tokens: Sequence[int], experts: Sequence[int]) -> list[Case]:
        """The cases with these numbers of tokens and of experts."""
        found = [(of_rank, self.scaling_experts) for of_rank in tokens]
        found += [(self.scaling_tokens, in_all) for in_all in experts]
        return [{"tokens": of_rank, "experts": of_all} for of_rank, of_all in dict.fromkeys(found)]


def config_of(options: Options, backend: str, case: Case) -> moeos.MoEConfig:
    """A case's layer: dropless and without biases, since the all-to-all layer has neither.

    Raises `ValueError` for sizes that are not allowed.
    """
    return moeos.MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=case["experts"],
        top_k=thesis.TOP_K,
        activation="gelu",
        dtype=torch.bfloat16 if backend == "cuda" else torch.float32,
        max_tokens=case["tokens"],
    )


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What one rank had to do in a call of moeos.

    Attributes:
        busy_shares: of each round of moeos.
        pairs_to_peers, row_bytes_to_peers, bytes_to_peers: what it sent.
        counts: [P][X] rows of each source for each of its experts.
    """

    busy_shares: list[float]
    pairs_to_peers: int
    row_bytes_to_peers: int
    bytes_to_peers: int
    counts: list[list[int]]


class Evaluation(Study):
    """One rank of the evaluation."""

    def __init__(self, world: moeos.World, options: Options) -> None:
        self._options = options
        asked: dict[str, tuple[int, ...]] = {}

        def prepare() -> Case:
            check_counts(rounds=(options.rounds, 2), warm_up=(options.warm_up, 1))
            asked["tokens"] = numbers("--tokens", options.tokens)
            asked["experts"] = numbers("--experts", options.experts)
            for case in options.cases(**asked):
                require_even(config_of(options, world.backend, case), world.size)
            sizes = {"tokens": options.scaling_tokens, "experts": options.scaling_experts}
            layer = config_of(options, world.backend, sizes)
            return {
                "hidden": layer.hidden,
                "intermediate": layer.intermediate,
                "top_k": layer.top_k,
                "activation": layer.activation,
                "dtype": str(layer.dtype).removeprefix("torch."),
                "scaling_experts": options.scaling_experts,
                "scaling_tokens": options.scaling_tokens,
                "seed": options.seed,
                "tokens": [],
                "experts": [],
                "cases": [],
                "not_measured": [],
            }

        name = f"{evaluation_tables.PREFIX}{world.backend}-{world.size}"
        rounds = Rounds(options.rounds, options.warm_up)
        super().__init__(world, options.out, name, "bench.studies.evaluate", rounds, prepare)
        for field, counts in asked.items():
            self.document[field] = sorted({*counts, *self.document[field]})

    def write(self) -> None:
        measured = [(case["tokens"], case["experts"]) for case in self.document["cases"]]
        asked = self._options.cases(self.document["tokens"], self.document["experts"])
        self.document["not_measured"] = [
            case for case in asked if (case["tokens"], case["experts"]) not in measured
        ]
        super().write()

    def measure_all(self) -> Evaluation:
        """Measures all cases."""
        options = self._options
        asked = options.cases(self.document["tokens"], self.document["experts"])
        for case in self.cases(self.document["cases"], asked):
            self.add(self.document["cases"], case, self._case(case))
        return self

    def _case(self, case: Case) -> Case:
        cfg = config_of(self._options, self.world.backend, case)
        busy_shares: list[float] = []
        with moeos.init(self.world.backend, deadline=_PATIENCE) as inner:
            torch.manual_seed(self._options.seed)
            layer = moeos.MoELayer(cfg, inner).requires_grad_(False)
            baseline = beside(layer, self.group)
            x = tokens_of(self.world, cfg, case["tokens"], self._options.seed)
            error = require_alike(self.world, layer, baseline, x)

            def ended() -> None:
                layer.check()
                busy_shares.append(layer.stats()["busy_share"])

            contestants: dict[str, Callable[[], object]] = {
                "moeos": lambda: layer(x),
                "baseline": lambda: baseline(x),
            }
            times = self.timed(contestants, ended=ended)
            sent = self._sent(layer, baseline, busy_shares[self.rounds.warm_up :])
            operations = None
            if self.on_gpu:
                operations = {name: _operations_of(call) for name, call in contestants.items()}
        found = self.world.control.allgather(sent, "a case's results")
        payload = summary(found, cfg.hidden * cfg.dtype.itemsize)
        return {"relative_error": error, "times": times, **payload, "operations": operations}

    def _sent(
        self, layer: moeos.MoELayer, baseline: AllToAllLayer, busy_shares: list[float]
    ) -> _Sent:
        stats, received = layer.stats(), baseline.last
        assert received is not None
        return _Sent(
            busy_shares=busy_shares,
            pairs_to_peers=sum(stats["pairs_sent"]) - stats["pairs_sent"][self.world.rank],
            row_bytes_to_peers=stats["row_bytes_to_peers"],
            bytes_to_peers=stats["bytes_to_peers"],
            counts=received.counts.tolist(),
        )


def summary(found: Sequence[_Sent], row_bytes: int) -> dict[str, Any]:
    """What the document says of what its ranks sent. Bytes are of one call."""
    row_bytes_to_peers = sum(one.row_bytes_to_peers for one in found)
    counts = [one.counts for one in found]
    padded = padded_bytes(counts, row_bytes)
    return {
        "busy_shares": [
            statistics.fmean(turn) for turn in zip(*(one.busy_shares for one in found), strict=True)
        ],
        "pairs_to_peers": sum(one.pairs_to_peers for one in found),
        "row_bytes_to_peers": row_bytes_to_peers,
        "bytes_to_peers": sum(one.bytes_to_peers for one in found),
        "fullest_pair_rows": fullest(counts),
        "padded_bytes_to_peers": padded,
        "payload_efficiency": row_bytes_to_peers / padded if padded else None,
    }


def fullest(counts: Sequence[Sequence[Sequence[int]]]) -> int:
    """Rows of the source and the expert with most; counts [P][P][X] by rank, source and expert."""
    return max(rows for of_rank in counts for of_source in of_rank for rows in of_source)


def padded_bytes(counts: Sequence[Sequence[Sequence[int]]], row_bytes: int) -> int:
    """Bytes to peers of a call in which each source sends each expert as many rows as `fullest`,
    and has as many back; 0 of one rank.

    Args:
        counts: [P][P][X] rows by rank, source and expert of the rank.
        row_bytes: of a row.
    """
    ranks, local = len(counts), len(counts[0][0])
    return 2 * ranks * (ranks - 1) * local * fullest(counts) * row_bytes


def count_operations(names: Iterable[str]) -> dict[str, int]:
    """Kernels, and copies with fills, of what a GPU did, by the profiler's names; its notes of
    collectives ("nccl:...") lie over the collectives' kernels and are neither.
    """
    done = [name for name in names if not name.startswith("nccl:")]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in done)
    return {"kernels": len(done) - copies, "copies": copies}


def _operations_of(call: Callable[[], object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return count_operations(
        event.name for event in trace.events() if event.device_type == DeviceType.CUDA
    )


def _run(options: Options) -> None:
    study.run(lambda world: Evaluation(world, options).measure_all(), options.backend, _PATIENCE)


main = study.command_of(
    Options, "Measures moeos and an all-to-all in the cases of the thesis' evaluation.", _run
)


if __name__ == "__main__":
    study.start(main)
