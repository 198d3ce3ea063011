# SPDX-License-Identifier: Apache-2.0
"""A table of a report, before it is Markdown or text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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
