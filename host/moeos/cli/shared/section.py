# SPDX-License-Identifier: Apache-2.0
"""A table of a report, and how it comes to stdout. Markdown is made elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moeos.cli.shared import output

_WIDEST = 200  # characters of a table on stdout


@dataclasses.dataclass(frozen=True)
class Section:
    """A table: its title, its columns but the first, and rows that begin with a label.

    Attributes:
        title: of the first column.
        heading: a paragraph of Markdown that goes before the table; "" for none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    heading: str = ""


def print_tables(conditions: str, sections: Sequence[Section]) -> None:
    """What was measured, a paragraph, and its tables, on stdout."""
    print(conditions, flush=True)
    console = output.tables(0)
    console.width = _WIDEST  # a table takes no more than it needs
    for section in sections:
        made = output.table(*section.columns)
        made.columns[0].header = section.title
        for row in section.rows:
            made.add_row(*row)
        console.print(made)
