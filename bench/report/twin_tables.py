# SPDX-License-Identifier: Apache-2.0
"""What the report says of bench.twin's results: where they come from, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

_NAMES = {
    "pytorch": "PyTorch, one process",
    "mpirun": "{ranks} ranks under mpirun",
    "virtual": "{ranks} virtual ranks, one process",
}


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
    first = run.first_run(results)
    config, machine, load = results["config"], first["machine"], results["load"]
    versions, source = first["versions"], run.source(results)
    return (
        f"{results['ranks']} ranks with S {config['max_tokens']} each, H {config['hidden']}, "
        f"I {config['intermediate']}, E {config['experts']}, k {config['top_k']}, "
        f"{config['dtype']}; {machine['processor']}, {machine['cores']} cores, of which others "
        f"used {statistics.fmean(load['cores_used_by_others']):.2f} meanwhile, "
        f"{max(load['cores_used_by_others']):.2f} in the busiest round (load average "
        f"{load['average_before'][0]:.1f} before, {load['average_after'][0]:.1f} after); "
        f"PyTorch {versions['torch']}, moeos {versions['moeos']}, {source}; medians of "
        f"{results['rounds']} interleaved rounds after {results['warm_up_rounds']} to warm up."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    return [_layer(results), _scheduling(results), _floors(results)]


def _layer(results: Mapping[str, Any]) -> Section:
    bars = {"mpirun": "mpirun_ratio", "virtual": "virtual_ratio"}
    rows = []
    for name, found in results["layer"].items():
        bar = results["bars"].get(bars.get(name, ""))
        rows.append(
            [
                _NAMES[name].format(ranks=results["ranks"]),
                output.duration(found["median_seconds"]),
                _quartiles(found["seconds"]),
                f"{found['median_cpu_seconds'] / found['median_seconds']:.2f}",
                f"{found['flops_per_second'] / 1e9:.0f} GFLOP/s",
                f"{found['ratio_to_pytorch']:.2f}",
                "" if bar is None else _verdict(bar, f"{bar['limit']:g}"),
            ]
        )
    columns = ["time, slowest rank", "quartiles", "cores used", "rate", "PyTorch's times", "bar"]
    return Section("a call of the layer", columns, rows)


def _scheduling(results: Mapping[str, Any]) -> Section:
    found, bar = results["scheduling"], results["bars"]["task_seconds"]
    tasks = [round(statistics.median(found[call]["tasks"])) for call in ("few", "many")]
    return Section(
        "outside of tasks, one rank, one processor",
        ["time", "quartiles", "bar"],
        [
            [
                f"a task, from calls with {tasks[0]} and {tasks[1]} of them",
                output.duration(found["median_task_seconds"]),
                _quartiles(found["task_seconds"]),
                _verdict(bar, output.duration(bar["limit"])),
            ],
            [
                "a call, whatever its tasks",
                output.duration(found["median_call_seconds"]),
                _quartiles(found["call_seconds"]),
                "",
            ],
            [
                "a call after a rest",
                output.duration(found["median_rested_call_seconds"]),
                _quartiles(found["rested_call_seconds"]),
                "",
            ],
        ],
    )


def _floors(results: Mapping[str, Any]) -> Section:
    floors = results["floors"]
    return Section(
        "what the machine allows",
        ["of a call", "measured rate", "time"],
        [
            [
                "arithmetic",
                f"{floors['flops'] / 1e9:.2f} GFLOP",
                f"{floors['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s, one matrix product",
                output.duration(floors["flops_seconds"]),
            ],
            [
                "memory: weights and x read, y written, once",
                output.size(floors["bytes"]),
                f"{floors['memory_bytes_per_second'] / 1e9:.1f} GB/s, a copy",
                output.duration(floors["bytes_seconds"]),
            ],
        ],
    )


def _quartiles(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{output.duration(low)} to {output.duration(high)}"


def _verdict(bar: Mapping[str, Any], limit: str) -> str:
    return f"at most {limit}: {'met' if bar['met'] else 'missed'}"
