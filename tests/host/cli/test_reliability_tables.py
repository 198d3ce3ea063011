# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/reliability.md: the numbers of the JSON, and what is not as it must be is loud."""

from __future__ import annotations

from typing import Any

from bench.report import report
from moeos.cli.fuzz import document
from moeos.engines.explore import Found, Wrong

MODEL: dict[str, Any] = {
    "benchmark": "model",
    "commit": None,
    "machine": {"processor": "a processor", "cores": 2},
    "spin": "Spin Version 6.5.2",
    "checks": [
        {
            "model": "exchange",
            "name": name,
            "expected": expected,
            "as_expected": good,
            "states": 123_456,
            "transitions": 200_000,
            "seconds": 1.5,
            "violation": violation,
        }
        for name, expected, good, violation in (
            ("two ranks", "", True, ""),
            ("three ranks", "", False, "assertion violated"),
            ("a flag before its rows", "assertion violated", True, "assertion violated (x)"),
            ("no release", "assertion violated", False, ""),
        )
    ],
}


def found() -> Found:
    made = Found()
    tally = made.tallies["die"]
    tally.runs, tally.calls, tally.faults, tally.failed = 2000, 6543, 1400, 2600
    tally.latency, tally.points = 1.234, 9_876_543
    tally.endings.update({"ROWS_LATE": 77})
    return made


def test_figures_of_a_fuzz_run_are_those_of_its_document() -> None:
    text = report.markdown(document(found(), 600.0, 1))
    assert "2 000 runs from seed 1 on, in 600 s; 0 were wrong" in text
    numbers = "2 000 | 6 543 | 1 400 | 2 600 | 1.23 deadlines | 9 876 543"
    assert f"| die: a rank stops for good | {numbers} |" in text
    assert "| rows late | 77 |" in text


def test_runs_that_were_wrong_are_counted() -> None:
    made = found()
    made.wrong.append(Wrong(5, "nic", "random", "rank 0 gives a wrong result"))
    assert "; 1 were wrong" in report.markdown(document(made, 600.0, 1))


def test_a_world_that_fails_and_a_mutation_that_passes_are_loud() -> None:
    text = report.markdown(MODEL)
    assert "2 worlds in 493 824 states; 1 of 2 broken models are noticed" in text
    assert "| exchange: two ranks | 123 456 | 200 000 | 1.5 s | holds |" in text
    assert "| exchange: three ranks | 123 456 | 200 000 | 1.5 s | DOES NOT HOLD |" in text
    assert "| exchange: a flag before its rows | `assertion violated (x)` |" in text
    assert "| exchange: no release | NOT NOTICED |" in text
