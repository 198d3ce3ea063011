# SPDX-License-Identifier: Apache-2.0
"""What a page links to is there: the file, and the heading in it.

Must not depend on what a page says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_prose import LEFT_OUT, PAGES
from tests.processes import ROOT

_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The names by which links call a page's headings: letters, digits and hyphens."""
    headings = [_LINKED.sub(r"\1", heading) for heading in _HEADING.findall(_CODE.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for file, anchor in _LINK.findall(_CODE.sub("", text)):
        target = page.parent / file if file else page
        if not target.exists():
            yield f"{file}: no such file"
        elif anchor and anchor not in anchors_of(text if not file else target.read_text("utf-8")):
            yield f"{file}#{anchor}: no such heading"


@pytest.mark.parametrize("name", [*PAGES, *LEFT_OUT])
def test_links_of_a_page_resolve(name: str) -> None:
    page = ROOT / name
    assert list(broken_links(page, page.read_text("utf-8"))) == []


def test_a_broken_link_is_noticed() -> None:
    page = ROOT / "docs" / "lessons.md"
    text = "# A `b`, c\n[x](#a-b-c) [y](#d) [z](lessons.md) [w](gone.md)\n```\n[v](gone.md)\n```\n"
    assert list(broken_links(page, text)) == ["#d: no such heading", "gone.md: no such file"]
