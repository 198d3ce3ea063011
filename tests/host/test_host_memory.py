# SPDX-License-Identifier: Apache-2.0
"""What memory a process can have: the least of the machine's and of its control groups'."""

from pathlib import Path

import pytest

from moeos import host_memory

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
