# SPDX-License-Identifier: Apache-2.0
"""Where a command's results go: tables on stdout, progress on stderr, JSON into a file."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

STDOUT = Path("-")
"""The name that stands for stdout in place of a file for JSON."""
JSON_HELP = "Writes {} to this file; - is stdout, which then has nothing else."
"""The help of the option --json."""

_LABEL_WIDTH = 28
_COLUMN_WIDTH = 13


def tables(columns: int) -> Console:
    """A console on stdout, wide enough for `columns` columns, that writes plain text.

    A launcher may give its ranks a terminal of its own and send what they write to a file.
    """
    console = Console(color_system=None, highlight=False)
    console.width = max(console.width, _LABEL_WIDTH + columns * _COLUMN_WIDTH)
    return console


def table(*columns: str) -> Table:
    """An empty table whose first column has labels and whose other columns have numbers."""
    made = Table()
    made.add_column("", no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def count(number: float) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,.0f}".replace(",", " ")


def size(number: float) -> str:
    """Bytes in the binary unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that keeps the number short."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        shown = f"{seconds * factor:.3g}"
        if float(shown) < 1000:  # as rounded: 999.6 µs is 1 ms
            return f"{shown} {unit}"
    return f"{seconds:.3g} s"


def plural(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say(what: str) -> None:
    """A line of progress, on stderr."""
    print(what, file=sys.stderr, flush=True)


def tell(what: str) -> None:
    """A line of progress where no bar can be seen: stderr is no terminal."""
    if not sys.stderr.isatty():
        say(what)


class _Silence(io.TextIOBase):
    """A stdout that drops what is printed; `behind` is the stream that it replaces."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def alone(json_file: Path | None) -> Iterator[None]:
    """Keeps all but JSON from stdout, if that is where JSON goes."""
    if json_file != STDOUT:
        yield
        return
    with contextlib.redirect_stdout(_Silence(sys.stdout)):
        yield


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Raises `ValueError`, which names the option, now if a file could not be written later."""
    if path == STDOUT and option == "--json":
        return
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{option} is {path}; it must name a file in a folder that exists")


def check_folder(path: Path, option: str) -> None:
    """Raises `ValueError`, which names the option, if files could not be written there later."""
    if not path.is_dir():
        raise ValueError(f"{option} is {path}; it must be a folder that exists")


def json_text(document: dict[str, Any]) -> str:
    """A document in JSON, with null for numbers that JSON has no word for."""
    return json.dumps(_finite(document), indent=2) + "\n"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a document as `json_text` has it; see `alone`.

    Raises `OSError`, which names the file.
    """
    text = json_text(document)
    if path == STDOUT:
        stdout = sys.stdout.behind if isinstance(sys.stdout, _Silence) else sys.stdout
        stdout.write(text)
        stdout.flush()
    else:
        write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Writes a file. Raises `OSError`, which names it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # of a full disk it names none
        raise OSError(error.errno, error.strerror, str(path)) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
