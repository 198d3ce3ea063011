# SPDX-License-Identifier: Apache-2.0
"""Reads files that others may have written: none of them can hang, crash or exhaust the reader.
And replaces what a file holds in one step, but no device, pipe or link, and says where this user's
cache is.

It knows how a file is opened and how TOML is read. Must not depend on what a file means.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MAX_TOML_BYTES = 1 << 18
"""The largest TOML file that is read."""
MAX_JSON_BYTES = 1 << 22
"""The largest file of JSON that is read; configs of models are some kilobytes."""
MAX_LINE_DOTS = 64
"""The most dots of one of its lines: what a dotted key costs the parser grows with their square."""

_INTEGERS = range(-(2**63), 2**63)


def cache_folder() -> Path:
    """This user's folder for what moeos keeps: `$XDG_CACHE_HOME/moeos`, or `~/.cache/moeos` where
    that is not an absolute path.

    Raises `FileNotFoundError` if it is not, for a user without a home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "moeos"
    try:
        return Path.home() / ".cache" / "moeos"
    except RuntimeError as error:  # HOME is not set, and there is no entry for the user
        raise FileNotFoundError("this user has no home directory; set XDG_CACHE_HOME") from error


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading, if it is one: a pipe may never begin, and a device never end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else than a file.
    """
    # Opening a pipe without O_NONBLOCK waits for a writer; on a file it changes nothing.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: not a regular file")
    return file


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys and values of a TOML file; integers are those of TOML, of 64 bits.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a TOML file, or larger or deeper than any that is meant.
    """
    with open_regular(path) as file:
        try:
            content = file.read(MAX_TOML_BYTES + 1)
        except OSError as error:  # which names no file when it is read
            raise OSError(error.errno, error.strerror, str(path)) from error
    if len(content) > MAX_TOML_BYTES:
        raise ValueError(f"{path}: larger than {MAX_TOML_BYTES} bytes, the most of a TOML file")
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.count(b".") > MAX_LINE_DOTS:
            raise ValueError(f"{path}: line {number} has more than {MAX_LINE_DOTS} dots; break it")
    try:
        values: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{path}: not a TOML file: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of 5000 digits
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    for key, value in values.items():
        if not _fits(value):
            raise ValueError(f"{path}: {key} has an integer of more than 64 bits")
    return values


def _fits(value: object) -> bool:
    """Whether all integers in a value have 64 bits."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, int) and found not in _INTEGERS:
            return False
    return True


def read_json(path: str | Path) -> dict[str, Any]:
    """The object that a file of JSON holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or is larger than any that is meant.
    """
    with open_regular(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {MAX_JSON_BYTES} bytes, the most of a JSON file")
    try:
        values: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}; it must hold an object")
    return values


def replace(path: str | Path, content: bytes | str) -> None:
    """Puts bytes, or a text in UTF-8, into a file in one step: a process that reads it, or has
    mapped it, finds the whole old content or the whole new one.

    A link is followed. What is no regular file, such as a pipe or a device, is written as it is. A
    new file has the mode that the umask leaves, and one that was there keeps its own.

    Raises:
        OSError: it cannot be written; names it.
    """
    if isinstance(content, str):
        content = content.encode()
    try:
        mode = None
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
        if mode is None or stat.S_ISREG(mode):
            _replace_file(Path(os.path.realpath(path)), content, mode)
        else:
            Path(path).write_bytes(content)
    except OSError as error:  # it may name no file (full disk), or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace_file(path: Path, content: bytes, mode: int | None) -> None:
    unfinished = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            file.write(content)
        if mode is not None:
            os.chmod(unfinished, stat.S_IMODE(mode))
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
