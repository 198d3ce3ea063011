# SPDX-License-Identifier: Apache-2.0
"""`moeos fuzz`: the device OS in untried orders, with unexpected faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from moeos.cli import reliability_tables
from moeos.cli.shared import failures, machine, output, provenance, section
from moeos.engines import explore
from moeos.engines.explore import Found

FOUND = 1
"""The exit code where a run gave a wrong result, did not end, or blamed the wrong rank."""

LONGEST = 7 * 24 * 3600.0
"""Seconds of one command, at most."""


def fuzz(
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60.0,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 1,
    replay: Annotated[
        str | None,
        typer.Option(help="Runs the one seed, in this scenario and strategy: die/random."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("the figures"))
    ] = None,
) -> None:
    """Runs the twin in orders that seeds decide. Exit code 1 if a result or an error is wrong."""
    failures.finish(lambda: execute(seconds, seed, replay, json_file), json_file)


def execute(seconds: float, seed: int, replay: str | None, json_file: Path | None) -> int:
    """Runs the command; the exit code.

    Raises `ValueError` for an argument and `OSError` for the file.
    """
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"--seconds is {seconds:g}; allowed: above 0 and up to {LONGEST:g}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"--seed is {seed}; allowed: 0 to 2^63 - 1")
    output.check_writable(json_file)
    if replay is not None:
        return _replay(seed, replay)
    found = explore.explore_side_by_side(seed, seconds)
    figures = document(found, seconds, seed)
    if json_file is not None:
        output.write_json(json_file, figures)
    section.print_tables(
        reliability_tables.conditions(figures), reliability_tables.sections(figures)
    )
    for wrong in found.wrong:
        print(
            f"WRONG: {wrong.text}\n"
            f"  again: moeos fuzz --seed {wrong.seed} --replay {wrong.scenario}/{wrong.strategy}"
        )
    return FOUND if found.wrong else failures.DONE


def document(found: Found, seconds: float, seed: int) -> dict[str, Any]:
    """The figures for JSON; `python -m bench.report` makes tables of it."""
    return {
        "benchmark": "fuzz",
        "command": provenance.command("moeos.cli"),
        "commit": provenance.commit(),
        "versions": machine.versions(),
        "machine": machine.describe(),
        "seconds": seconds,
        "seed": seed,
        "scenarios": {
            name: {**vars(tally), "endings": dict(tally.endings)}
            for name, tally in found.tallies.items()
        },
        "wrong": [dataclasses.asdict(wrong) for wrong in found.wrong],
    }


def _replay(seed: int, replay: str) -> int:
    scenario, slash, strategy = replay.partition("/")
    if not slash:
        raise ValueError(f"--replay is {replay!r}; it must be SCENARIO/STRATEGY")
    outcome = explore.run(seed, scenario, strategy)
    print(
        f"seed {seed}, {scenario}, {strategy}: {outcome.world} ranks, {outcome.calls} calls right, "
        f"{outcome.failed} ranks failed, {outcome.points} accesses; {outcome.fault}"
    )
    print(f"WRONG: {outcome.wrong}" if outcome.wrong else "as it must be")
    return FOUND if outcome.wrong else failures.DONE
