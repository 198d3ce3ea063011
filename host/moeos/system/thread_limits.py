# SPDX-License-Identifier: Apache-2.0
"""The error for a thread that cannot be started, which names the limits.

Must not depend on what threads do.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from moeos.system import host_memory

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def no_thread(what: str, remedy: str) -> OSError:
    """The error for a thread that was refused; `what` names it, like "rank 1, thread 3 of 4"."""
    return OSError(
        errno.EAGAIN,
        f"{what} cannot be started. {_limits()}. Raise the limit that is reached, or {remedy}",
    )


def _limits() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    limits = [
        f"RLIMIT_NPROC (ulimit -u), threads of this user: {host_memory.number(soft)}",
        *(f"pids.max of the control group {group}: {most}" for group, most in _groups()),
        host_memory.limits(),
        f"RLIMIT_STACK (ulimit -s), bytes of them for a thread: {host_memory.number(stack)}",
    ]
    return "; ".join(limits)


def _groups() -> Iterator[tuple[str, str]]:
    """The control groups of this process that limit the number of its threads."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = _GROUPS / controllers
        place = root / path.strip("/")
        for group in [place, *place.parents]:
            try:
                most = (group / "pids.max").read_text().strip()
            except OSError:
                most = "max"
            if most != "max":
                yield str(group), most
            if group == root:
                break
