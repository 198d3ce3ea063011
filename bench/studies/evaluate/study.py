# SPDX-License-Identifier: Apache-2.0
"""The command behind `launch/evaluate`: one rank of the evaluation.

In each case moeos and a bulk-synchronous layer (`bench.gpu.all_to_all`: NCCL on GPUs, gloo on
the twin) make the same calls in turn, with the same tokens and weights, once their outputs agree.
Started by mpirun, torchrun or srun, each process is a rank; rank 0 writes each case's results when
it is done, and prints the tables. It knows nothing of what the thesis measured but the sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import moeos
from bench.gpu.results import timing
from bench.gpu.suite import require_even
from bench.report import evaluation_tables, report, thesis
from bench.studies import ranks
from bench.studies.contestants import Baseline, clock_of, compare, tokens_of
from bench.studies.evaluate.document import Case, Document
from moeos.cli.shared import failures, machine, output, process_group, provenance
from moeos.cli.shared.options import Backend

MOST_ROUNDS = 100_000

_PATIENCE = 60.0  # seconds in which a call must end


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What the command line says."""

    out: Path
    tokens: tuple[int, ...] = thesis.TOKENS
    scaling_experts: int = thesis.TOKEN_SCALING_EXPERTS
    experts: tuple[int, ...] = thesis.EXPERTS
    scaling_tokens: int = thesis.EXPERT_SCALING_TOKENS
    hidden: int = thesis.HIDDEN
    intermediate: int = thesis.INTERMEDIATE
    rounds: int = 20
    warm_up: int = 5
    backend: str = "auto"
    seed: int = 0


def main(
    out: Annotated[
        Path, typer.Option(help="Where the results go, as JSON; continued if it is there.")
    ],
    tokens: Annotated[
        str, typer.Option(help="Of each rank, with --scaling-experts; commas between.")
    ] = ",".join(map(str, thesis.TOKENS)),
    scaling_experts: Annotated[
        int, typer.Option(help="Experts of the token scaling.")
    ] = thesis.TOKEN_SCALING_EXPERTS,
    experts: Annotated[
        str, typer.Option(help="Of all ranks, with --scaling-tokens; commas between.")
    ] = ",".join(map(str, thesis.EXPERTS)),
    scaling_tokens: Annotated[
        int, typer.Option(help="Tokens of each rank in the expert scaling.")
    ] = thesis.EXPERT_SCALING_TOKENS,
    hidden: Annotated[int, typer.Option(help="Elements of a token.")] = thesis.HIDDEN,
    intermediate: Annotated[
        int, typer.Option(help="Elements between an expert's GEMMs.")
    ] = thesis.INTERMEDIATE,
    rounds: Annotated[int, typer.Option(help="Measured calls of each layer in a case.")] = 20,
    warm_up: Annotated[int, typer.Option(help="Calls of each before them.")] = 5,
    backend: Backend = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
) -> None:
    """Measures moeos and a bulk-synchronous layer in the cases of the thesis' evaluation."""

    def command() -> int:
        options = EvaluationOptions(
            out=out,
            tokens=_numbers("--tokens", tokens),
            scaling_experts=scaling_experts,
            experts=_numbers("--experts", experts),
            scaling_tokens=scaling_tokens,
            hidden=hidden,
            intermediate=intermediate,
            rounds=rounds,
            warm_up=warm_up,
            backend=backend,
            seed=seed,
        )
        return execute(options)

    failures.finish(command)


def execute(options: EvaluationOptions) -> int:
    """Runs one rank of the evaluation; the exit code.

    Raises what `moeos.init` and a call of the layer raise, and `RuntimeError` if the two layers'
    results differ.
    """
    # The baseline has a small function to compile: no pool of processes for that.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with moeos.init(options.backend, deadline=_PATIENCE) as world:
        return failures.together(world, lambda: _run(world, options))


def _run(world: moeos.World, options: EvaluationOptions) -> int:
    document = failures.agree(world, lambda: prepare(world, options), "the input of the evaluation")
    mine = None if document is None else document.open_cases()
    cases = world.control.allgather(mine, "the cases")[0]
    if cases:
        with process_group.over(world) as group:
            _Evaluation(world, options, group).run(cases, document)
    if document is not None:
        report.print_tables(document.content)
    return failures.DONE


def prepare(world: moeos.World, options: EvaluationOptions) -> Document | None:
    """What will be measured, on rank 0, which has the document; None on the others.

    Raises:
        ValueError: an option is not allowed, or the document is of another commit, of other ranks,
            another backend or other sizes.
        OSError: the document cannot be read.
    """
    output.check_writable(options.out, "--out")
    for name, given, least in (("--rounds", options.rounds, 2), ("--warm-up", options.warm_up, 1)):
        if not least <= given <= MOST_ROUNDS:
            raise ValueError(f"{name} is {given}; allowed: {least} to {MOST_ROUNDS}")
    for case in [
        *(Case(tokens, options.scaling_experts) for tokens in options.tokens),
        *(Case(options.scaling_tokens, experts) for experts in options.experts),
    ]:
        require_even(config_of(options, world.backend, case), world.size)
    if world.rank != 0:
        return None
    layer = config_of(options, world.backend, Case(options.scaling_tokens, options.scaling_experts))
    on_gpu = world.backend == "cuda"
    same = {
        "benchmark": f"{evaluation_tables.PREFIX}{world.backend}-{world.size}",
        "commit": provenance.commit(),
        "backend": world.backend,
        "device": machine.gpus()[0] if on_gpu else f"the twin, {machine.processor()}",
        "ranks": world.size,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "top_k": layer.top_k,
        "activation": layer.activation,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "scaling_experts": options.scaling_experts,
        "scaling_tokens": options.scaling_tokens,
        "rounds": options.rounds,
        "warm_up_rounds": options.warm_up,
        "seed": options.seed,
    }
    return Document(options.out, same, options.tokens, options.experts)


def config_of(options: EvaluationOptions, backend: str, case: Case) -> moeos.MoEConfig:
    """A case's layer: dropless and without biases, since the all-to-all layer has neither.

    Raises `ValueError` for sizes that are not allowed.
    """
    return moeos.MoEConfig(
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=case.experts,
        top_k=thesis.TOP_K,
        activation="gelu",
        dtype=torch.bfloat16 if backend == "cuda" else torch.float32,
        max_tokens=case.tokens,
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """What one rank found in a case.

    Attributes:
        seconds: of each round, by contestant.
        busy_shares: of each round of moeos.
        pairs_to_peers, row_bytes_to_peers, bytes_to_peers: what it sent in one call of moeos.
        counts: [P][X] rows of each source for each of its experts.
        operations: what the GPU was given in one call, by contestant; None on the twin.
    """

    seconds: dict[str, list[float]]
    busy_shares: list[float]
    pairs_to_peers: int
    row_bytes_to_peers: int
    bytes_to_peers: int
    counts: list[list[int]]
    operations: dict[str, dict[str, int]] | None


class _Evaluation:
    """All cases, on one rank."""

    def __init__(
        self, world: moeos.World, options: EvaluationOptions, group: dist.ProcessGroup | None
    ) -> None:
        self._world = world
        self._options = options
        self._group = group
        self._on_gpu = world.backend == "cuda"
        self._clock = clock_of(world, group)

    def run(self, cases: Sequence[Case], document: Document | None) -> None:
        """Measures the cases; rank 0 adds each to its document. Collective."""
        if document is not None:
            document.begin_run(_about(self._world))
        calls = self._options.warm_up + self._options.rounds
        with _progress(visible=document is not None) as progress:
            # A call takes about as long as it has tokens.
            task = progress.add_task("", total=calls * sum(case.tokens for case in cases))
            for case in cases:
                words = f"{case.tokens} tokens, {case.experts} experts"
                progress.update(task, description=words)
                if document is not None:
                    output.tell(words)
                found = self._case(case, functools.partial(progress.advance, task, case.tokens))
                if document is not None:
                    document.add(case, found)
                gc.collect()  # the next case's layers may need the memory
                if self._on_gpu:
                    torch.cuda.empty_cache()

    def _case(self, case: Case, moved: Callable[[], None]) -> dict[str, Any]:
        """Measures a case; calls `moved` after each round."""
        cfg = config_of(self._options, self._world.backend, case)
        with moeos.init(self._world.backend, deadline=_PATIENCE) as inner:
            torch.manual_seed(self._options.seed)
            layer = moeos.MoELayer(cfg, inner).requires_grad_(False)
            baseline = Baseline(layer, self._group, self._clock, dist.all_to_all_single)
            x = tokens_of(self._world, cfg, case.tokens, self._options.seed)
            error = compare(self._world, layer, baseline, x)
            mine = self._measure(layer, baseline, x, moved)
        found = self._world.control.allgather(mine, "a case's results")
        return {"relative_error": error, **summary(found, cfg.hidden * cfg.dtype.itemsize)}

    def _measure(
        self,
        layer: moeos.MoELayer,
        baseline: Baseline,
        x: torch.Tensor,
        moved: Callable[[], None],
    ) -> _Found:
        contestants: dict[str, Callable[[], object]] = {
            "moeos": lambda: layer(x),
            "baseline": lambda: baseline(x),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        busy_shares = []
        names = list(contestants)
        for turn in range(self._options.warm_up + self._options.rounds):
            for name in names if turn % 2 == 0 else names[::-1]:  # nobody always goes first
                seconds[name].append(self._clock.measure(0.0, contestants[name]))
            layer.check()
            busy_shares.append(layer.stats()["busy_share"])
            moved()
        stats, received = layer.stats(), baseline.last
        assert received is not None
        return _Found(
            seconds={name: of_it[self._options.warm_up :] for name, of_it in seconds.items()},
            busy_shares=busy_shares[self._options.warm_up :],
            pairs_to_peers=sum(stats["pairs_sent"]) - stats["pairs_sent"][self._world.rank],
            row_bytes_to_peers=stats["row_bytes_to_peers"],
            bytes_to_peers=stats["bytes_to_peers"],
            counts=received.counts.tolist(),
            operations=(
                {name: _operations_of(call) for name, call in contestants.items()}
                if self._on_gpu
                else None
            ),
        )


def summary(found: Sequence[_Found], row_bytes: int) -> dict[str, Any]:
    """What the document says of a case, from what its ranks found. Bytes are of one call."""
    row_bytes_to_peers = sum(one.row_bytes_to_peers for one in found)
    padded = padded_bytes([one.counts for one in found], row_bytes)
    return {
        "times": {
            name: timing(
                [max(turn) for turn in zip(*(one.seconds[name] for one in found), strict=True)]
            )
            for name in found[0].seconds
        },
        "busy_shares": [
            statistics.fmean(turn) for turn in zip(*(one.busy_shares for one in found), strict=True)
        ],
        "pairs_to_peers": sum(one.pairs_to_peers for one in found),
        "row_bytes_to_peers": row_bytes_to_peers,
        "bytes_to_peers": sum(one.bytes_to_peers for one in found),
        "fullest_pair_rows": fullest([one.counts for one in found]),
        "padded_bytes_to_peers": padded,
        "payload_efficiency": row_bytes_to_peers / padded if padded else None,
        "operations": found[0].operations,
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


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} is {text!r}; it must be positive numbers with commas between")
    return tuple(map(int, parts))


def _progress(*, visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=1,  # ranks of the twin need the cores
        disable=not visible,
    )


def _about(world: moeos.World) -> dict[str, Any]:
    return {
        "command": provenance.command("bench.studies.evaluate.study"),
        "versions": machine.versions(),
        "machine": machine.describe(),
        "processors": machine.processors_of(world),
    }


if __name__ == "__main__":
    ranks.start(main)
