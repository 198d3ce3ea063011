"""`moeos doctor`: what this machine has, what is missing, and the command that fixes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeos.cli import failures, output, probes
from moeos.cli.probes import Finding

_WIDTH = 110


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes all findings to this file.")
    ] = None,
) -> None:
    """Says what this machine can run. Exit code 0 if the twin works."""
    failures.finish(lambda: execute(json_file))


def execute(json_file: Path | None) -> int:
    """Runs the command; the exit code.

    Raises `ValueError` for a file that cannot be written.
    """
    output.check_writable(json_file)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    twin = [probe() for probe in probes.TWIN]
    console.print("The twin: ranks on this machine's cores", _table(twin))
    gpu = [probe() for probe in probes.GPU]
    console.print("The GPU, which the twin does not need", _table(gpu))
    console.print(_verdict(twin, gpu))
    if json_file is not None:
        document = {
            "twin": [dataclasses.asdict(finding) for finding in twin],
            "gpu": [dataclasses.asdict(finding) for finding in gpu],
        }
        output.write_json(json_file, document)
    return failures.DONE if twin[-1].works else failures.FAILURE


def _table(findings: list[Finding]) -> Table:
    made = Table()
    made.add_column("")
    made.add_column("")
    made.add_column("found", overflow="fold")
    made.add_column("to fix", overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.works else "[red]missing[/]"
        made.add_row(mark, *map(escape, (finding.what, finding.found, finding.fix)))
    return made


def _verdict(twin: list[Finding], gpu: list[Finding]) -> str:
    if not twin[-1].works:
        return "the twin does not work here, so no layer can run"
    missing = [finding.what for finding in twin if not finding.works]
    ranks = f"; without {', '.join(missing)}: virtual ranks only" if missing else ""
    if all(finding.works for finding in gpu):
        return f"layers run here on the twin and on the GPU{ranks}"
    return f'layers run here with backend="twin"{ranks}; the GPU cannot be used'
