# SPDX-License-Identifier: Apache-2.0
"""How an input may end, and how many did so: what all fuzz tests of this folder share.

An input may be accepted, or be refused with an error that is clear: of a kind that is documented,
one line, no longer than a screen, and naming the file, key or argument that is wrong. Everything
else is a finding.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

MULTIPLE = int(os.environ.get("MOEOS_FUZZ", "1"))
"""How many times as many examples are run as in launch/test: `MOEOS_FUZZ=100 pytest tests/fuzz`."""

LONGEST = 2200
"""The most characters of a line on stderr."""

EXITS = {0: "accepted", 1: "above tolerance", 2: "refused", 3: "failed"}
"""What an exit code of `moeos` means."""

counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
"""Kind of input -> how it ended -> how many examples did, of this process."""

Test = TypeVar("Test", bound=Callable[..., Any])


def examples(number: int) -> Callable[[Test], Test]:
    """Runs a property with so many examples, the same in every run unless MOEOS_FUZZ is set."""
    return settings(
        max_examples=number * MULTIPLE,
        deadline=None,  # no test has one
        derandomize=MULTIPLE == 1,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


NO_FILES = {"device": "/dev/null", "endless device": "/dev/zero", "memory": "/proc/self/mem"}
"""What can be opened like a file and is none."""


def make_no_file(path: Path, kind: str) -> Path:
    """A path that is no file: a pipe, a folder, a loop of links, missing, or one of NO_FILES."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind != "missing":
        return Path(NO_FILES[kind])
    return path


def read_well(kind: str, read: Callable[[], object], names: Iterable[str]) -> bool:
    """Whether `read()` accepts its input; fails unless a refusal is clear and has one of `names`.

    The kinds are those that `MoEConfig.from_toml`, `suite.read` and `SafetensorsFile` document.
    """
    try:
        read()
    except (ValueError, TypeError, OSError) as error:
        text = str(error)
        assert any(name in text for name in names), f"{text!r} has none of {list(names)}"
        how = type(error).__name__
    else:
        how = "accepted"
    counts[kind][how] += 1
    return how == "accepted"


def ended_well(kind: str, code: int, err: str, names: Sequence[str]) -> int:
    """The exit code of a command; fails unless it is documented and bad input is told clearly.

    What `moeos` refuses is one line that begins with its name and has one of `names`. A command
    line that cannot be parsed is answered by typer, whose last line says what is wrong.
    """
    assert code in EXITS, f"exit code {code}: {err}"
    assert "Traceback" not in err
    if code in (2, 3):
        lines = [line for line in err.splitlines() if line.startswith(("moeos: ", "Error: "))]
        assert len(lines) == 1, err
        assert err.rstrip("\n").endswith(lines[0]), err
        if lines[0].startswith("moeos: "):
            assert len(lines[0]) <= LONGEST
            assert lines[0].isprintable()
            assert any(name in lines[0] for name in names), f"{lines[0]} has none of {names}"
    counts[kind][EXITS[code]] += 1
    return code
