# SPDX-License-Identifier: Apache-2.0
"""Where a process may open few files (`ulimit -n`), a world is refused by name before it is made:
PyTorch's store would abort the process.
"""

from __future__ import annotations

import os
import resource

import pytest

import moeos
from moeos.system import open_files
from tests.processes import ForkedRanks, free_port, torchrun_environment

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def allow(more: int) -> int:
    """So many files beside those that are open; the limit."""
    most = len(os.listdir("/proc/self/fd")) - 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, HARD))
    return most


@pytest.mark.parametrize("more", [0, 2, 20])
def test_a_rank_that_may_open_few_files_says_so_before_there_is_a_store(more: int) -> None:
    port = free_port()

    def make(rank: int) -> str:
        os.environ.update(torchrun_environment(0, 4, port))
        most = allow(more)
        with pytest.raises(OSError, match="files") as raised:
            moeos.init(backend="twin", deadline=100.0)
        return str(raised.value).replace(f"this process: {most}.", "this process: LIMIT.")

    (said,) = ForkedRanks(make, 1).ended()
    assert (
        f"rank 0 of 4 may open {more} more files, and a world of so many ranks may need 40" in said
    )
    assert "RLIMIT_NOFILE (ulimit -n), open files of this process: LIMIT. Raise the limit" in said


def test_who_may_open_enough_is_let_go_on() -> None:
    def make(rank: int) -> None:
        allow(9)
        open_files.require(9, "rank 0 of 1", "a test")
        with pytest.raises(OSError, match="may open 9 more files, and a test may need 10"):
            open_files.require(10, "rank 0 of 1", "a test")

    ForkedRanks(make, 1).ended()
