# SPDX-License-Identifier: Apache-2.0
"""The memory that this process can still have, by its machine, control groups and limits.

The only file that reads them. Must not depend on what the memory is for.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def total(proc: Path = _PROC) -> int:
    """Bytes of memory of this machine."""
    return _meminfo(proc)["MemTotal"]


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that this process can have before the system takes them from another.

    The least of what the machine has available and of what each control group above the process
    (cgroup version 2, or version 1's memory controller) leaves of its limit; pages of files that
    can be dropped count as left. A limit that cannot be read is taken for none.
    """
    return min([_meminfo(proc)["MemAvailable"], *_left(proc, groups)])


def limits() -> str:
    """The limits on what this process may map, as an error says them."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    said = f"RLIMIT_AS (ulimit -v), bytes of addresses: {number(space)}"
    if data != resource.RLIM_INFINITY:
        said += f"; RLIMIT_DATA (ulimit -d), bytes of memory of its own: {data}"
    return said


def refused(error: Exception, who: str, what: str) -> OSError | None:
    """The error for `who`, such as "rank 1 of 4", that was refused memory, with the limits.

    None if `error` says something else. `what` needs the memory.
    """
    text = str(error)
    by_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    by_torch = type(error) is RuntimeError and "DefaultCPUAllocator" in text
    if not (by_system or by_torch or isinstance(error, MemoryError)):
        return None
    size = re.search(r"\d+ bytes", text)
    bytes_of = f"{size[0]} of " if size else ""
    return OSError(
        errno.ENOMEM,
        f"{who} gets no {bytes_of}memory for {what}. {limits()}. Raise the limit that is reached, "
        "make the layer smaller or lower max_tokens, or start fewer ranks",
    )


def number(limit: int) -> str:
    """A limit of `resource`, which may be none."""
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (proc / "meminfo").read_text().splitlines()
    return {
        name: int(rest.split()[0]) << 10
        for name, _, rest in (line.partition(":") for line in lines)
        if rest
    }


def _left(proc: Path, groups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit, usage, dropped = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage, dropped = (
                groups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = root / path.strip("/")
        while True:
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                yield max(0, most - max(0, used - _statistic(group / "memory.stat", dropped)))
            if group == root:
                break
            group = group.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None  # "max" is no limit


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines]
    return next((int(words[1]) for words in found if len(words) == 2 and words[0] == name), 0)
