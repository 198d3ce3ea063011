# SPDX-License-Identifier: Apache-2.0
"""What memory a process can have: the least of the machine's and of its control groups'."""

from __future__ import annotations

import errno
import mmap
import re
import resource
from pathlib import Path

import pytest

import moeos
from moeos import PeerTimeout, _twin
from moeos.system import host_memory
from moeos.world import virtual
from tests.layers import config
from tests.processes import ForkedRanks

MEMINFO = (
    "MemTotal:       1000 kB\nMemFree:   10 kB\nMemAvailable:    800 kB\nHugePages_Total:  0\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Folders in the places of /proc and /sys/fs/cgroup."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(MEMINFO)
    return proc, groups


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_groups_it_is_what_the_machine_says(machine: tuple[Path, Path]) -> None:
    assert host_memory.total(machine[0]) == 1000 << 10
    assert host_memory.available(*machine) == 800 << 10


def test_a_limit_of_any_group_above_the_process_counts(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    write(groups / "outer", memory__max="5000\n", memory__current="4000\n")
    write(groups / "outer" / "inner", memory__max="max\n", memory__current="4000\n")
    assert host_memory.available(proc, groups) == 1000


def test_pages_of_files_that_can_be_dropped_are_left(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("0::/\n")
    stat = "anon 100\ninactive_file 3000\n"
    write(groups, memory__max="5000\n", memory__current="4000\n", memory__stat=stat)
    assert host_memory.available(proc, groups) == 4000


def test_the_first_versions_memory_controller_counts_too(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self" / "cgroup").write_text("8:pids:/\n4:memory:/job\n0::/\n")
    write(
        groups / "memory" / "job",
        memory__limit_in_bytes="9000\n",
        memory__usage_in_bytes="9500\n",
        memory__stat="total_inactive_file 100\n",
    )
    assert host_memory.available(proc, groups) == 0


def test_this_machine_has_some() -> None:
    assert 0 < host_memory.available() <= host_memory.total()


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (OSError(errno.ENOMEM, "mapping 16711680 bytes"), "16711680 bytes of "),
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 4096 bytes."), "4096 bytes of "),
        (MemoryError(), ""),
    ],
    ids=["of the system", "of PyTorch", "of Python"],
)
def test_who_gets_no_memory_is_named_with_the_limits(error: Exception, size: str) -> None:
    said = host_memory.refused(error, "rank 1 of 4", "a test")
    assert said is not None
    assert said.errno == errno.ENOMEM
    assert f"rank 1 of 4 gets no {size}memory for a test. RLIMIT_AS (ulimit -v)" in str(said)


def test_what_is_no_want_of_memory_stays_as_it_is() -> None:
    other = (OSError(errno.EPERM, "4096 bytes"), RuntimeError("shape"), PeerTimeout("rank 0"))
    assert [host_memory.refused(error, "rank 0 of 1", "a test") for error in other] == [None] * 3


def test_a_layer_whose_weights_get_no_memory_names_the_rank() -> None:
    cfg = config(hidden=4096, intermediate=8192, experts=64)

    def make(rank: int) -> str:
        with moeos.init(backend="twin") as world:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), hard))
            with pytest.raises(OSError, match="gets no") as raised:
                moeos.MoELayer(cfg, world)
        return str(raised.value)

    (said,) = ForkedRanks(make, 1).ended()
    assert re.search(r"rank 0 of 1 gets no \d+ bytes of memory for the making of a MoELayer", said)


def test_calls_of_a_layer_that_get_no_memory_name_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "mapping 16711680 bytes")

    monkeypatch.setattr(_twin, "Shared", refuse)
    with pytest.raises(OSError, match=r"rank 0 of 2 gets no 16711680 bytes of memory for the call"):
        virtual.run(lambda world: moeos.MoELayer(config(), world), ranks=2)
