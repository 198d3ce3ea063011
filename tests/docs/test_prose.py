# SPDX-License-Identifier: Apache-2.0
"""The pages are written in plain words: sentences, lines and pages have a greatest length.

This file knows nothing of what a page says. What a program writes into a page does not count: it
stands between markers, or in a block of code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.processes import ROOT

FOLDERS = (".", "docs", "docs/evaluation", "docs/performance", "results")
"""Where the pages lie."""

LEFT_OUT = {"docs/api.md": "written by tests/docs/reference_page.py"}
"""Pages that no person has written, and what has."""

MEAN, MOST, LONGEST = 18, 28, 40  # words: of a page's mean sentence, of nine tenths of them, of all
WIDTH = 120  # characters of a line that is no row of a table
LENGTH = 300  # lines of a page that persons have written

PAGES = sorted(
    name
    for folder in FOLDERS
    for page in (ROOT / folder).glob("*.md")
    if (name := page.relative_to(ROOT).as_posix()) not in LEFT_OUT
)

_GENERATED = re.compile(r"^<!-- (?:benchmark|table).*?^<!-- end.*?-->$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^ *```")
_ITEM = re.compile(r"^(?:[-*]|\d+\.) +")
_NO_PROSE = ("#", "|", "![", "<!--", "---")
_BETWEEN_SENTENCES = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][)*\"])|(?<=[.!?]\*\*))\s+"  # a sentence's end
    r"|(?<=[:;])\s+(?=[A-Z0-9\"'(*_])"  # a colon or a semicolon before what could stand alone
)


def written(page: str) -> str:
    """What persons have written of a page."""
    return _GENERATED.sub("", page)


def paragraphs_of(text: str) -> Iterator[str]:
    """Paragraphs and items of lists: no heading, table or picture, and no block of code."""
    lines: list[str] = []
    in_code = False
    for line in [*text.splitlines(), ""]:
        fence, words = bool(_FENCE.match(line)), line.strip()
        if fence or in_code or not words or words.startswith(_NO_PROSE) or _ITEM.match(words):
            if lines:
                yield " ".join(lines)
            lines = []
        if _ITEM.match(words) or not (fence or in_code or words.startswith(_NO_PROSE)):
            lines += [_ITEM.sub("", words)] if words and not in_code else []
        in_code ^= fence
    assert not in_code, "a block of code has no end"


def sentences_of(text: str) -> list[str]:
    """The sentences of a page, in which a span of code is one word and a link is what it shows."""
    found = []
    for paragraph in paragraphs_of(text):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        found += [part for part in _BETWEEN_SENTENCES.split(plain) if words_of(part)]
    return found


def words_of(sentence: str) -> int:
    """The number of its words; what has neither a letter nor a digit is none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def misses_of(page: str) -> list[str]:
    """What of a page is not in the style, a line each."""
    text = written(page)
    sentences = sentences_of(text)
    counts = [words_of(sentence) for sentence in sentences]
    misses = [
        f"a sentence of {count} words: {sentence}"
        for count, sentence in zip(counts, sentences, strict=True)
        if count > LONGEST
    ]
    if counts and (mean := sum(counts) / len(counts)) > MEAN:
        misses.append(f"{mean:.1f} words in a sentence on average: at most {MEAN}")
    if (long := sum(count > MOST for count in counts)) > len(counts) / 10:
        misses.append(f"{long} of {len(counts)} sentences have over {MOST} words: at most a tenth")
    misses += [
        f"a line of {len(line)} characters: {line}"
        for line in text.splitlines()
        if len(line) > WIDTH and not line.lstrip().startswith("|")
    ]
    if (length := len(text.splitlines())) > LENGTH:
        misses.append(f"{length} lines: at most {LENGTH}")
    return misses


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_in_plain_words(name: str) -> None:
    misses = misses_of((ROOT / name).read_text(encoding="utf-8"))
    assert not misses, "\n".join([f"{name} misses the style:", *misses])


def test_pages_are_found() -> None:
    assert {"README.md", "docs/sizing.md", "docs/evaluation.md"} <= set(PAGES)
    assert all((ROOT / name).exists() for name in LEFT_OUT)


SHORT = "A rank sends a row. Its peer reads it.\n"


def _of_words(count: int) -> str:
    return " ".join(["w"] * count) + ".\n"


def test_a_long_sentence_is_found() -> None:
    assert misses_of(SHORT * 9 + _of_words(40)) == []
    [found] = [miss for miss in misses_of(SHORT * 9 + _of_words(41)) if "sentence of" in miss]
    assert found.startswith("a sentence of 41 words: w w")


def test_a_sentence_may_go_over_several_lines() -> None:
    assert any("of 41 words" in miss for miss in misses_of(_of_words(41).replace(" ", "\n")))
    assert sentences_of("One of\ntwo lines. Another\n\none") == [
        "One of two lines.",
        "Another",
        "one",
    ]


def test_many_sentences_of_middling_length_are_found() -> None:
    assert misses_of(_of_words(18)) == []
    assert misses_of(_of_words(19)) == ["19.0 words in a sentence on average: at most 18"]
    page = SHORT * 5 + _of_words(29)
    assert misses_of(page) == []
    assert misses_of(page + _of_words(29)) == [
        "2 of 12 sentences have over 28 words: at most a tenth"
    ]


def test_a_wide_line_is_found() -> None:
    assert misses_of("x" * 120) == []
    assert misses_of("x" * 121) == ["a line of 121 characters: " + "x" * 121]
    assert misses_of("```text\n" + "x" * 121 + "\n```")
    assert misses_of("| " + "x" * 121 + " |") == []


def test_a_long_page_is_found() -> None:
    assert misses_of("a\n\n" * 150) == []
    assert misses_of("a\n\n" * 151) == ["302 lines: at most 300"]


@pytest.mark.parametrize(
    "page",
    [
        "# " + _of_words(41),
        "| " + _of_words(41).strip() + " |\n| --- |",
        "```sh\n" + "word\n" * 41 + "```",
        "* an item\n\n  ```python\n" + "  word\n" * 41 + "  ```",
        "A span of code: `" + _of_words(41).strip() + "`.",
        "[" + "a link" + "](to/" + "somewhere/" * 3 + ")" + " is what it shows.",
        "* " + "\n* ".join([_of_words(15).strip().rstrip(".")] * 9),
        f"{SHORT}\n<!-- benchmark a -->\n{_of_words(200)}\n<!-- end of benchmark a -->\n",
        f"{SHORT}\n<!-- table: a -->\n{_of_words(200)}\n<!-- end -->\n",
    ],
)
def test_what_is_no_prose_does_not_count(page: str) -> None:
    assert misses_of(page) == []


def test_what_stands_behind_it_counts() -> None:
    after = _of_words(41)
    for page in (
        f"# Heading\n{after}",
        f"| a |\n| --- |\n\n{after}",
        f"```sh\nls\n```\n{after}",
        f"* item\n* {after}",
        f"<!-- benchmark a -->\n<!-- end of benchmark a -->\n{after}",
    ):
        assert any("a sentence of 41 words" in miss for miss in misses_of(page)), page


def test_sentences_end_where_a_reader_pauses() -> None:
    text = (
        'It is so (it is). "Is it?" It is: It does. No: never `a`; Or 1.5 times. **Bold.** Plain.'
    )
    assert sentences_of(text) == [
        "It is so (it is).",
        '"Is it?"',
        "It is:",
        "It does.",
        "No: never code;",
        "Or 1.5 times.",
        "**Bold.**",
        "Plain.",
    ]
