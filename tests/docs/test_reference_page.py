# SPDX-License-Identifier: Apache-2.0
"""docs/api.md is what tests/docs/reference_page.py makes of the package, and leaves nothing out."""

from __future__ import annotations

import inspect
import re

import pytest

import moeos
from tests.docs import reference_page

PAGE = reference_page.PAGE.read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#{3,4} (.+)$", PAGE, re.MULTILINE)


def test_the_page_is_that_of_this_package() -> None:
    assert reference_page.page() == PAGE, "write it: python -m tests.docs.reference_page"


@pytest.mark.parametrize("name", moeos.__all__)
def test_every_exported_name_is_on_the_page(name: str) -> None:
    value = getattr(moeos, name)
    if inspect.ismodule(value):
        entries = reference_page.public_of(value)
        assert entries
        assert {entry.name for entry in entries} <= set(HEADINGS)
    elif name == "__version__":
        assert f"`moeos.{name}`" in PAGE
    else:
        assert name in HEADINGS


def test_what_the_page_leaves_out_is_there_and_has_no_underscore() -> None:
    defined = {
        reference_page.full_name(value)
        for module in (
            moeos.layer.experts,
            moeos.faults,
            moeos.layer.layer,
            moeos.reference,
            moeos.world.world,
        )
        for owner in (module, *(v for v in vars(module).values() if inspect.isclass(v)))
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, classmethod))
    }
    assert set(reference_page.NOT_FOR_CALLERS) <= defined


def test_every_link_to_a_heading_has_one() -> None:
    """As GitHub names them: in lower case, without signs."""
    anchors = {re.sub(r"[^a-z0-9_ -]", "", heading.lower()) for heading in HEADINGS}
    links = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert len(links) >= 20
    assert set(links) <= anchors


class Documented:
    """A class with everything that a docstring may hold.

    It has 5
    - 3 ways.

    Args:
        first, second: what they are, at
            some length.
        third [E]: a shape.
    And this goes on.

    Returns:
        What comes
        back.
    """


class Undocumented(Documented):
    pass


def test_a_docstring_becomes_paragraphs_and_lists() -> None:
    doc = inspect.getdoc(Documented)
    assert doc is not None
    assert reference_page.markdown(doc) == (
        "A class with everything that a docstring may hold.\n\n"
        "It has 5 - 3 ways.\n\n"
        "Args:\n\n"
        "* `first`, `second`: what they are, at some length.\n"
        "* `third` [E]: a shape.\n\n"
        "And this goes on.\n\n"
        "Returns: What comes back.\n"
    )


def test_no_line_of_a_paragraph_begins_like_a_list() -> None:
    lines = reference_page.markdown("one - two " * 50).splitlines()
    assert len(lines) > 3
    assert not any(line.startswith("-") for line in lines)


def test_a_public_name_without_a_docstring_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moeos, "World", Undocumented)
    with pytest.raises(ValueError, match=r"Undocumented has no docstring"):
        reference_page.page()
