# SPDX-License-Identifier: Apache-2.0
"""What the report says of a straggler study."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

PREFIX = "straggler-"
"""The prefix of the name of a study's results."""

DONE_BAR, STEP_BAR = 0.9, 1.15
"""The bars: the least share of their work that others have done before a late rank comes; the
latest end of the step, in undelayed steps after the delay.
"""

_PERCENTILES = (50, 95, 99)


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was done, on what machine and when."""
    nodes = results["nodes"]
    where = ""
    if nodes["nodes"] > 1:
        links = [] if nodes["rate"] is None else [f"{nodes['rate'] / 1e9:g} GB/s"]
        links += [output.duration(nodes["latency"])] if nodes["latency"] else []
        limits = f" with links of {' and '.join(links)} between them" if links else ""
        where = f" of {nodes['nodes']} nodes{limits}"
    undelayed, first = results["undelayed_seconds"], run.first_run(results)
    return (
        f"{results['config_name']}, {output.plural(results['ranks'], 'rank')}{where}, "
        f"{output.plural(first['processors'], 'processor')} each, {results['tokens']} tokens a "
        f"rank, {results['steps']} steps of each scenario; {results['device']}, "
        f"{first['machine']['cores']} cores; {run.source(results)}. "
        f"Undelayed, a step takes moeos {output.duration(undelayed['moeos'])} and the "
        f"all-to-all {output.duration(undelayed['baseline'])} (medians)."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    made = [_steps(results), _idle(results)]
    if any(scenario["late"] for scenario in results["scenarios"]):
        made.append(_late(results))
    if results["incast"] is not None:
        made.append(_incast(results["incast"]))
    return made


def step_seconds(scenario: Mapping[str, Any], contestant: str) -> list[float]:
    """The time of the rank that ends last, of each step."""
    return [max(step) for step in scenario[contestant]["seconds"]]


def percentile(values: Sequence[float], percent: int) -> float:
    """The percentile, interpolated between values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def idle_shares(results: Mapping[str, Any], contestant: str, scenario: int) -> list[float]:
    """The mean share of a step in which a rank does nothing, of each rank.

    A step is as long as its slowest rank takes. moeos's processors are busy inside tasks; the
    baseline counts as busy for as long as its undelayed step takes, its waits there included.
    """
    found = results["scenarios"][scenario]
    lengths = step_seconds(found, contestant)
    if contestant == "baseline":
        busy = results["undelayed_seconds"]["baseline"]
        by_step = [[min(1.0, busy / length)] * results["ranks"] for length in lengths]
    else:
        by_step = [
            [share * own / length for share, own in zip(shares, seconds, strict=True)]
            for shares, seconds, length in zip(
                found["moeos"]["busy_shares"], found["moeos"]["seconds"], lengths, strict=True
            )
        ]
    return [1 - statistics.fmean(of_rank) for of_rank in zip(*by_step, strict=True)]


def _steps(results: Mapping[str, Any]) -> Section:
    rows = []
    for scenario in results["scenarios"]:
        of = {name: step_seconds(scenario, name) for name in ("moeos", "baseline")}
        points = {
            name: [percentile(values, percent) for percent in _PERCENTILES]
            for name, values in of.items()
        }
        ratios = [b / a for a, b in zip(points["moeos"], points["baseline"], strict=True)]
        rows.append(
            [
                f"`{scenario['name']}`",
                output.duration(percentile([max(step) for step in scenario["delays"]], 50)),
                *(output.duration(value) for value in points["moeos"]),
                *(output.duration(value) for value in points["baseline"]),
                " / ".join(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    columns = ["latest rank, P50"]
    for name in ("moeos", "all-to-all"):
        columns += [f"{name} P{percent}" for percent in _PERCENTILES]
    return Section("scenario", [*columns, "all-to-all / moeos"], rows, "Time of a step:")


def _idle(results: Mapping[str, Any]) -> Section:
    rows = []
    for index, scenario in enumerate(results["scenarios"]):
        for contestant, name in (("moeos", "moeos"), ("baseline", "all-to-all")):
            shares = idle_shares(results, contestant, index)
            rows.append(
                [f"`{scenario['name']}`, {name}", *(f"{100 * share:.0f} %" for share in shares)]
            )
    columns = [f"rank {rank}" for rank in range(results["ranks"])]
    return Section("idle share of a step", columns, rows, "What the ranks do not do:")


def _late(results: Mapping[str, Any]) -> Section:
    undelayed = results["undelayed_seconds"]["moeos"]
    rows = []
    for scenario in results["scenarios"]:
        if not scenario["late"]:
            continue
        done = statistics.median(scenario["moeos"]["done_before"])
        delay = max(scenario["delays"][0])
        after = (percentile(step_seconds(scenario, "moeos"), 50) - delay) / undelayed
        # The share of an undelayed step that does not depend on the late ranks, by even routing.
        independent = 1 - len(scenario["late"]) / results["ranks"]
        verdict = "met" if done >= DONE_BAR else "missed"
        if delay < DONE_BAR * independent * undelayed:
            verdict = "no time for it"
        rows.append(
            [
                f"`{scenario['name']}`",
                output.duration(delay),
                f"{100 * done:.1f} %: {verdict}",
                f"{after:.2f}: {'met' if after <= STEP_BAR else 'missed'}",
            ]
        )
    return Section(
        "a rank is late",
        [
            "by",
            f"others' work done before, at least {100 * DONE_BAR:.0f} %",
            f"end of the step, undelayed steps after the delay, at most {STEP_BAR}",
        ],
        rows,
        "What the others do before a late rank comes (rows that are not its own, whose results "
        "have left; the lowest rank's, medians over steps), and when the step ends:",
    )


def _incast(incast: Mapping[str, int]) -> Section:
    named = {
        "maximal incast volume, by the thesis' formula": incast["miv_bytes"],
        "bytes that came from other nodes in a step, both rounds, most of a rank": incast[
            "received_bytes"
        ],
        "bytes under way to a rank at any time, at most: its peers' windows": incast[
            "window_bytes"
        ],
    }
    rows = [[name, output.size(value)] for name, value in named.items()]
    return Section("from other nodes", ["bytes"], rows, "What may come to one rank at once:")
