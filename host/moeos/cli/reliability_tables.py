# SPDX-License-Identifier: Apache-2.0
"""What the report says of `moeos fuzz` and of the model: what was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section

NAMES = ("fuzz", "model")
"""What `moeos fuzz` and `python -m tests.model.check` call their results."""

_SCENARIOS = {
    "quiet": "nothing happens",
    "nic": "a hostile network card",
    "die": "a rank stops for good",
    "stall": "a rank stands still",
    "damage": "a word is overwritten",
    "late": "ranks begin calls late",
    "backward": "one of these, and calls are of gradients",
}


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was tried, on what machine and when."""
    machine, source = results["machine"], provenance.source(results["commit"])
    where = f"{machine['processor']}, {machine['cores']} cores; {source}"
    if results["benchmark"] == "fuzz":
        runs = sum(tally["runs"] for tally in results["scenarios"].values())
        return (
            f"{output.count(runs)} runs from seed {results['seed']} on, in "
            f"{output.duration(results['seconds'])}; {len(results['wrong'])} were wrong. {where}."
        )
    checks = results["checks"]
    broken = [check for check in checks if check["expected"]]
    states = sum(check["states"] for check in checks)
    return (
        f"{len(checks) - len(broken)} worlds in {output.count(states)} states; "
        f"{sum(check['as_expected'] for check in broken)} of {len(broken)} broken models are "
        f"noticed for the reason expected. {results['spin']}; {where}."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    if results["benchmark"] == "fuzz":
        return [_scenarios(results["scenarios"]), _endings(results["scenarios"])]
    return [_worlds(results["checks"]), _mutations(results["checks"])]


def _scenarios(scenarios: Mapping[str, Any]) -> Section:
    columns = ["runs", "calls right", "faults", "ranks failed", "latest error", "accesses"]
    rows = []
    for name, tally in scenarios.items():
        failed = tally["failed"] > 0
        rows.append(
            [
                f"{name}: {_SCENARIOS[name]}",
                *(output.count(tally[key]) for key in ("runs", "calls", "faults", "failed")),
                f"{tally['latency']:.2f} deadlines" if failed else "",
                output.count(tally["points"]),
            ]
        )
    return Section("beside the calls", columns, rows)


def _endings(scenarios: Mapping[str, Any]) -> Section:
    kinds = sorted({kind for tally in scenarios.values() for kind in tally["endings"]})
    faulty = [name for name, tally in scenarios.items() if tally["faults"]]
    rows = [
        [
            kind.lower().replace("_", " "),
            *(output.count(scenarios[name]["endings"].get(kind, 0)) for name in faulty),
        ]
        for kind in kinds
    ]
    return Section("runs that ended with", faulty, rows, "How they ended:")


def _worlds(checks: list[dict[str, Any]]) -> Section:
    rows = [
        [
            f"{check['model']}: {check['name']}",
            output.count(check["states"]),
            output.count(check["transitions"]),
            output.duration(check["seconds"]),
            "holds" if check["as_expected"] else "DOES NOT HOLD",
        ]
        for check in checks
        if not check["expected"]
    ]
    return Section("model and world", ["states", "transitions", "time", ""], rows)


def _mutations(checks: list[dict[str, Any]]) -> Section:
    rows = [
        [
            f"{check['model']}: {check['name']}",
            "`{}`".format(check["violation"].replace("|", "\\|"))
            if check["as_expected"]
            else "NOT NOTICED",
        ]
        for check in checks
        if check["expected"]
    ]
    return Section("broken in the model", ["what spin reports"], rows, "What must not hold:")
