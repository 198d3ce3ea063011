# SPDX-License-Identifier: Apache-2.0
"""`launch/bench twin`: how fast the twin is, beside PyTorch, and what scheduling a task costs.

Two questions, answered in one run with interleaved rounds and medians:
    1. How much longer do the ranks of the twin take than the same arithmetic in one PyTorch process
       on the same cores? Ranks are processes under mpirun, and then virtual ranks.
    2. How much time does a task cost beside what it computes? One rank with one processor, and so
       little arithmetic that tasks are short, makes a call of few tasks and one of many. What
       passes outside of tasks is (call − inside tasks); its growth from the one call to the other,
       divided by the growth in tasks, is the cost of a task, and the rest is that of a call. Both
       calls are the last of many in a row, when each of the rank's two threads has a core to
       itself. After a rest Linux sometimes wakes both on the same core, and parts them only
       milliseconds later; so a call of few tasks after a rest is reported as well.
It writes every number as JSON and prints a summary. A bar that is missed is a result, no error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file

from bench.report import report
from bench.twin.conductor import Contestant, LoadMeter, Outcome, started
from bench.twin.contestant import COPIED_BYTES, MATRIX
from bench.twin.workload import Workload
from moeos.cli.shared import failures, machine, output, provenance
from moeos.cli.shared.settings import read_settings
from moeos.config import reference
from moeos.config.config import MoEConfig
from moeos.config.reference import tolerance_of

LARGEST_RATIO = 3.0
"""The bar: the ranks' time is at most this many times PyTorch's."""

LARGEST_TASK_SECONDS = 5e-6
"""The bar: what scheduling a task costs at most, on idle cores."""

LEAST_ROUNDS = 9
WARM_UP_ROUNDS = 3

_SEED = 20250
_FEW_TOKENS, _MANY_TOKENS = 1024, 8192
_FEW_REHEARSALS, _MANY_REHEARSALS = 20, 5  # tens of milliseconds: threads find a core each
_SHORT_TASKS = MoEConfig(
    hidden=8,
    intermediate=8,
    experts=16,
    top_k=2,
    dtype=torch.float32,
    max_tokens=_MANY_TOKENS,
)


def main(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer, with a table \\[run].")],
    ranks: Annotated[int, typer.Option(help="Ranks of the world.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes every number to this file.")
    ] = None,
) -> None:
    """Measures the twin on this machine, in as many rounds as the config has iterations."""
    failures.finish(lambda: execute(config, ranks, json_file))


def execute(config: Path, ranks: int, json_file: Path | None) -> int:
    """Runs the command; the exit code.

    Raises:
        ValueError, TypeError, OSError: a file or an argument is not as it must be.
        RuntimeError: a contestant failed, or its output is not PyTorch's.
    """
    cfg = MoEConfig.from_toml(config)
    rounds = read_settings(config).iterations
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{config}: iterations is {rounds}; allowed: at least {LEAST_ROUNDS}")
    output.check_writable(json_file)
    workload = Workload(cfg=cfg, ranks=ranks, seed=_SEED)
    load_before = os.getloadavg()
    measured = _measure(workload, rounds)
    document = {
        "benchmark": "twin",
        "command": provenance.command("bench.twin"),
        "commit": provenance.commit(),
        "versions": machine.versions(),
        "machine": machine.describe(),
        "load": {
            "average_before": load_before,
            "average_after": os.getloadavg(),
            "cores_used_by_others": measured.cores_used_by_others,
        },
        "config": json.loads(cfg.digest()),
        "ranks": ranks,
        "seed": _SEED,
        "rounds": rounds,
        "warm_up_rounds": WARM_UP_ROUNDS,
        **_results(workload, measured),
    }
    if json_file is not None:
        output.write_json(json_file, document)
    report.print_tables(document)
    return failures.DONE


@dataclasses.dataclass(frozen=True)
class _Measurements:
    """Outcomes of all rounds but the warm-up, by what was done.

    Attributes:
        outcomes: of "pytorch", "mpirun", "virtual", "matmul", "copy", "few", "many", "rested".
        errors: relative errors of "mpirun" and "virtual" against PyTorch.
        cores_used_by_others: in each round.
    """

    outcomes: Mapping[str, Sequence[Outcome]]
    errors: Mapping[str, float]
    cores_used_by_others: Sequence[float]


def _measure(workload: Workload, rounds: int) -> _Measurements:
    python = [sys.executable, "-m", "bench.twin.contestant"]
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(workload.ranks)]
    short = Workload(cfg=_SHORT_TASKS, ranks=1, seed=_SEED)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, command: list[str], work: Workload, members: int) -> Contestant:
            return stack.enter_context(started(name, command, folder, work.to_json(), members))

        pytorch = start("pytorch", [*python, "pytorch"], workload, 1)
        processes = start("mpirun", [*mpirun, *python, "ranks"], workload, workload.ranks)
        threads = start("virtual", [*python, "virtual"], workload, workload.ranks)
        alone = start("alone", [*python, "virtual"], short, 1)
        errors = _compare(workload, pytorch, {"mpirun": processes, "virtual": threads}, folder)

        tokens = workload.cfg.max_tokens
        jobs = [
            ("pytorch", pytorch, "call", tokens, 0),
            ("mpirun", processes, "call", tokens, 0),
            ("virtual", threads, "call", tokens, 0),
            ("matmul", pytorch, "matmul", 0, 0),
            ("copy", pytorch, "copy", 0, 0),
            ("few", alone, "call", _FEW_TOKENS, _FEW_REHEARSALS),
            ("many", alone, "call", _MANY_TOKENS, _MANY_REHEARSALS),
            ("rested", alone, "call", _FEW_TOKENS, 0),
        ]
        outcomes: dict[str, list[Outcome]] = {name: [] for name, *_ in jobs}
        others = []
        meter = LoadMeter([pytorch, processes, threads, alone])
        shown = track(
            range(WARM_UP_ROUNDS + rounds), description="rounds", console=Console(stderr=True)
        )
        for turn in shown:
            output.tell(f"round {turn + 1} of {WARM_UP_ROUNDS + rounds}")
            first = turn % len(jobs)  # nobody always follows the same one
            for name, contestant, job, size, rehearsals in jobs[first:] + jobs[:first]:
                outcome = contestant.do(job, size, rehearsals=rehearsals)
                if turn >= WARM_UP_ROUNDS:
                    outcomes[name].append(outcome)
            others.append(meter.others())
        return _Measurements(outcomes, errors, others[WARM_UP_ROUNDS:])


def _compare(
    workload: Workload, pytorch: Contestant, others: Mapping[str, Contestant], folder: Path
) -> dict[str, float]:
    """Relative errors of the others' outputs; tokens on the edge between two experts are left out.

    Raises `RuntimeError` where one is beyond the tolerance.
    """
    cfg, ranks = workload.cfg, workload.ranks

    def output_of(contestant: Contestant, members: int) -> torch.Tensor:
        files = [folder / f"{contestant.name}-{member}.safetensors" for member in range(members)]
        contestant.do("call", cfg.max_tokens, save=files)
        return torch.cat([load_file(file)["y"] for file in files])

    x = workload.all_tokens().flatten(0, 1)
    certain = reference.margin_in_errors(x, workload.gate(), cfg) > 1
    expected = output_of(pytorch, 1)[certain]
    errors, allowed = {}, tolerance_of(cfg)
    for name, contestant in others.items():
        error = reference.relative_error(output_of(contestant, ranks)[certain], expected)
        if error > allowed:
            raise RuntimeError(
                f"the output of {name} is not PyTorch's: its relative error is {error:.1e}, "
                f"and {allowed:.0e} is allowed"
            )
        errors[name] = error
    return errors


def _results(workload: Workload, measured: _Measurements) -> dict[str, Any]:
    """What the measurements say: times, ratios, the cost of a task, floors, and the bars."""
    outcomes = measured.outcomes
    medians = {
        name: statistics.median(outcome.seconds for outcome in found)
        for name, found in outcomes.items()
    }
    layer: dict[str, dict[str, Any]] = {}
    for name in ("pytorch", "mpirun", "virtual"):
        found = outcomes[name]
        layer[name] = {
            "seconds": [outcome.seconds for outcome in found],
            "median_seconds": medians[name],
            "median_cpu_seconds": statistics.median(o.cpu_seconds for o in found),
            "flops_per_second": workload.flops / medians[name],
            "ratio_to_pytorch": medians[name] / medians["pytorch"],
        }
    for name in ("mpirun", "virtual"):
        layer[name]["tasks"] = [outcome.tasks for outcome in outcomes[name]]
        layer[name]["relative_error"] = measured.errors[name]

    scheduling = _scheduling(outcomes["few"], outcomes["many"], outcomes["rested"])
    gemm_rate = 2 * MATRIX**3 / medians["matmul"]
    memory_rate = 2 * COPIED_BYTES / medians["copy"]
    return {
        "layer": layer,
        "scheduling": scheduling,
        "floors": {
            "flops": workload.flops,
            "gemm_flops_per_second": gemm_rate,
            "flops_seconds": workload.flops / gemm_rate,
            "bytes": workload.least_bytes,
            "memory_bytes_per_second": memory_rate,
            "bytes_seconds": workload.least_bytes / memory_rate,
        },
        "bars": {
            "mpirun_ratio": _bar(layer["mpirun"]["ratio_to_pytorch"], LARGEST_RATIO),
            "virtual_ratio": _bar(layer["virtual"]["ratio_to_pytorch"], LARGEST_RATIO),
            "task_seconds": _bar(scheduling["median_task_seconds"], LARGEST_TASK_SECONDS),
        },
    }


def _scheduling(
    few: Sequence[Outcome], many: Sequence[Outcome], rested: Sequence[Outcome]
) -> dict[str, Any]:
    """The cost of a task and of a call, in each round and the medians."""
    task_seconds, call_seconds = [], []
    for short, long in zip(few, many, strict=True):
        outside_short = short.seconds - short.busy_seconds
        outside_long = long.seconds - long.busy_seconds
        cost = (outside_long - outside_short) / (long.tasks - short.tasks)
        task_seconds.append(cost)
        call_seconds.append(outside_short - cost * short.tasks)
    task_cost = statistics.median(task_seconds)
    rested_call_seconds = [
        outcome.seconds - outcome.busy_seconds - task_cost * outcome.tasks for outcome in rested
    ]
    return {
        "config": json.loads(_SHORT_TASKS.digest()),
        "few": {"tokens": _FEW_TOKENS, "rehearsals": _FEW_REHEARSALS, **_columns(few)},
        "many": {"tokens": _MANY_TOKENS, "rehearsals": _MANY_REHEARSALS, **_columns(many)},
        "rested": {"tokens": _FEW_TOKENS, "rehearsals": 0, **_columns(rested)},
        "task_seconds": task_seconds,
        "median_task_seconds": task_cost,
        "call_seconds": call_seconds,
        "median_call_seconds": statistics.median(call_seconds),
        "rested_call_seconds": rested_call_seconds,
        "median_rested_call_seconds": statistics.median(rested_call_seconds),
    }


def _columns(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "seconds": [outcome.seconds for outcome in outcomes],
        "busy_seconds": [outcome.busy_seconds for outcome in outcomes],
        "tasks": [outcome.tasks for outcome in outcomes],
    }


def _bar(value: float, limit: float) -> dict[str, Any]:
    return {"value": value, "limit": limit, "met": value <= limit}
