# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, so that a layer of a known shape starts at once.

One file holds one entry under its key; ranks that start together make an entry once. Code that will
run is loaded from here, so the folder and its files belong to this user alone, and a folder or a
file that others can have changed is not used. Must not depend on compilers, nor on what an entry
holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock

from moeos.system import files

MAX_ENTRIES = 256
"""Entries that are kept; beyond this number the least recently used go."""
MAX_ENTRY_BYTES = 1 << 26
"""The largest entry that is stored or loaded."""
LOCK_SECONDS = 600.0
"""How long an entry that another process is making is waited for; then it is made here as well."""

_MAGIC = b"moeos kernel 2\n"
_SUFFIX = ".kernel"
_UNFINISHED = ".tmp"


def get_or_make(
    key: str, make: Callable[[], bytes], folder: Path | None = None
) -> tuple[bytes, bool]:
    """The entry `key`, and whether it was found; if it was not, `make` makes it and it is stored.

    Among processes and threads of one host that ask for the same missing entry, one makes it and
    the others wait, for at most `LOCK_SECONDS`. An entry that is damaged or another key's, a link,
    and one that another user owns or may write count as missing. Where there is no usable folder, a
    warning says why and `make` makes every entry.

    Args:
        key: hexadecimal digits.
        make: its bytes, at most `MAX_ENTRY_BYTES`; what it raises is raised here.
        folder: None for `moeos.system.files.cache_folder()`.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = files.cache_folder() if folder is None else folder
            _prepare(folder)
            found = _load(folder, key)
            if found is not None:
                return found, True
            with contextlib.suppress(filelock.Timeout):  # entries are atomic anyway
                held.enter_context(_lock(folder, key))
        except OSError as error:
            where = "" if folder is None else f" in {folder}"
            warnings.warn(f"compiled kernels are not kept{where}: {error}", stacklevel=2)
            return make(), False
        found = _load(folder, key)
        if found is not None:
            return found, True
        made = make()
        try:
            _store(folder, key, made)
        except OSError as error:
            warnings.warn(f"a compiled kernel is not kept in {folder}: {error}", stacklevel=2)
        return made, False


def _prepare(folder: Path) -> None:
    """Makes the folder this user's alone; `OSError` if it is not or cannot be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError("the folder is a link; set XDG_CACHE_HOME to where it leads")
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"the folder belongs to user {status.st_uid}, not to {os.geteuid()}; set XDG_CACHE_HOME"
        )
    if status.st_mode & 0o022:
        raise PermissionError("others may write to the folder; remove it, or set XDG_CACHE_HOME")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def _load(folder: Path, key: str) -> bytes | None:
    """An entry's bytes; None if there is no whole one that only this user can have written."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
    head = _head(key, b"")
    try:
        descriptor = os.open(folder / (key + _SUFFIX), flags)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o022
            or status.st_size > len(head) + MAX_ENTRY_BYTES
        ):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(status.st_size)
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # the order in which entries go
    finally:
        os.close(descriptor)
    entry = text[len(head) :]
    return entry if text.startswith(_head(key, entry)) else None


def _head(key: str, entry: bytes) -> bytes:
    """The head of an entry; the key is part of it, so a renamed file is no entry."""
    return _MAGIC + hashlib.sha256(key.encode() + b"\n" + entry).digest()


def _store(folder: Path, key: str, entry: bytes) -> None:
    """Puts an entry in its place, whole, in one step; old ones make room."""
    if len(entry) > MAX_ENTRY_BYTES:
        raise OSError(f"it has {len(entry)} bytes; at most {MAX_ENTRY_BYTES} are kept")
    descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, key[:16], folder)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(_head(key, entry) + entry)
        os.replace(unfinished, folder / (key + _SUFFIX))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    _prune(folder)


def _prune(folder: Path) -> None:
    """Removes the least recently used files, also those that a killed process left unfinished."""
    used: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        if path.suffix in (_SUFFIX, _UNFINISHED):
            with contextlib.suppress(OSError):  # another process has just removed it
                used.append((path.stat().st_mtime, path))
    for _, path in sorted(used)[:-MAX_ENTRIES]:
        with contextlib.suppress(OSError):
            path.unlink()


def _lock(folder: Path, key: str) -> filelock.BaseFileLock:
    """A lock on making an entry. It ends with the process that holds it.

    Files are few, because keys share them, and stay.
    """
    return filelock.FileLock(folder / f"{key[:2]}.lock", LOCK_SECONDS, mode=0o600)
