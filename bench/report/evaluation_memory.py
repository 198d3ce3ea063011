# SPDX-License-Identifier: Apache-2.0
"""Writes the memory table of an evaluation, which needs neither ranks nor a GPU, into a page.

`python -m bench.report.evaluation_memory` puts it into docs/evaluation.md, between the lines
`<!-- benchmark evaluation-memory -->` and `<!-- end of benchmark evaluation-memory -->`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.report import evaluation_tables, report
from moeos.cli.shared import failures

NAME = "evaluation-memory"
"""The name between whose markers the table goes."""


def main(
    document: Annotated[Path, typer.Option(help="The page with the markers.")] = Path(
        "docs/evaluation.md"
    ),
) -> None:
    """Writes the memory table into a document."""
    failures.finish(lambda: execute(document))


def execute(document: Path) -> int:
    """Runs the command; the exit code.

    Raises `OSError` for a file that cannot be read or written, and `ValueError` for one without the
    markers.
    """
    text = document.read_text(encoding="utf-8")
    written = report.between_markers(text, NAME, report.table(evaluation_tables.memory()))
    document.write_text(written, encoding="utf-8")
    return failures.DONE


if __name__ == "__main__":
    typer.run(main)
