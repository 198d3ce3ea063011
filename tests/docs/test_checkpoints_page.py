# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/checkpoints.md are those of the loader, and its example is true."""

from __future__ import annotations

import re

from moeos.config.hf.families import FAMILIES
from tests.docs import checkpoints_page

PAGE = checkpoints_page.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_loader() -> None:
    assert checkpoints_page.page(PAGE) == PAGE, "write it: python -m tests.docs.checkpoints_page"
    for table in checkpoints_page.TABLES.values():
        assert table() in PAGE


def test_every_family_has_a_row_and_no_other_has() -> None:
    rows = re.findall(r"^\| [^|]+ \| (?:`\w+`(?:, )?)+ \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == ["family", *FAMILIES]  # the first is the head
