# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap: what it looks like, that all ranks see it, and that nothing of it is left."""

import ctypes
import errno
import mmap
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeos.system import host_memory
from moeos.system.errors import ConfigMismatch
from moeos.world.control import ControlPlane, SoloControl, StoreControl
from moeos.world.heap import MAX_HEAP_BYTES, SymmetricHeap
from tests.host.world.test_control import RunRanks, in_threads, over_a_store, store_rank
from tests.processes import ForkedRanks, mpirun, shared_memory

BYTES = 3 * mmap.PAGESIZE + 40


@pytest.fixture(params=[in_threads, over_a_store], ids=["threads", "processes"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    run: RunRanks = request.param
    return run


def at(address: int, offset: int) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(address + offset)


def processes_with(mark: str) -> list[int]:
    """Living processes, zombies aside, whose command line holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_text()
            except OSError:  # it has just ended
                continue
            if mark in command:
                found.append(int(entry.name))
    return found


def test_a_heap_starts_as_zeros_on_a_page_of_its_own_on_every_rank(run_ranks: RunRanks) -> None:
    def look(control: ControlPlane) -> bool:
        heap = SymmetricHeap(control, BYTES)
        assert heap.size == BYTES
        assert len(set(heap.addresses)) == control.size
        assert all(address % mmap.PAGESIZE == 0 for address in heap.addresses)
        zero = all(ctypes.string_at(a, BYTES) == bytes(BYTES) for a in heap.addresses)
        control.barrier()  # nobody unmaps before all have looked
        heap.close()
        return zero

    assert run_ranks(look, 3) == [True] * 3


def test_what_a_rank_writes_into_a_peers_heap_the_peer_reads(run_ranks: RunRanks) -> None:
    def write_to_all(control: ControlPlane) -> list[int]:
        heap = SymmetricHeap(control, BYTES)
        for peer, address in enumerate(heap.addresses):
            at(address, BYTES - 1 - control.rank).value = 10 * peer + control.rank + 1
        control.barrier()
        mine = heap.addresses[control.rank]
        seen = [at(mine, BYTES - 1 - source).value for source in range(control.size)]
        control.barrier()
        heap.close()
        return seen

    assert run_ranks(write_to_all, 4) == [[10 * r + s + 1 for s in range(4)] for r in range(4)]


def test_heaps_of_one_world_do_not_overlap(run_ranks: RunRanks) -> None:
    def make_two(control: ControlPlane) -> int:
        first, second = SymmetricHeap(control, BYTES), SymmetricHeap(control, BYTES)
        ctypes.memset(first.addresses[control.rank], 255, BYTES)
        control.barrier()
        sum_of_second = sum(ctypes.string_at(second.addresses[control.rank], BYTES))
        control.barrier()
        first.close()
        second.close()
        return sum_of_second

    assert run_ranks(make_two, 2) == [0, 0]


def test_different_sizes_raise_the_same_error_on_all_ranks(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(lambda control: SymmetricHeap(control, 4096 + control.rank // 2), 3)
    assert [type(error) for error in outcomes] == [ConfigMismatch] * 3
    assert {str(error) for error in outcomes} == {
        "the size of a heap must be the same on all ranks, but they differ: "
        "ranks 0, 1: 4096; rank 2: 4097"
    }


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (MAX_HEAP_BYTES + 1, ValueError),
        (1.5, TypeError),
        (True, TypeError),
    ],
)
def test_a_size_that_is_no_number_of_bytes_is_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"size is .*(allowed|must be)"):
        SymmetricHeap(SoloControl(), size)


def test_closing_twice_is_closing_once() -> None:
    heap = SymmetricHeap(SoloControl(), BYTES)
    heap.close()
    heap.close()
    assert heap.addresses == ()


def test_no_file_descriptor_stays_open() -> None:
    def count(control: ControlPlane) -> tuple[int, int]:
        control.barrier()  # all connections to the store are made
        before = len(os.listdir("/proc/self/fd"))
        heap = SymmetricHeap(control, BYTES)
        after = len(os.listdir("/proc/self/fd"))
        control.barrier()
        heap.close()
        return before, after

    for before, after in over_a_store(count, 3):
        assert before == after


def test_the_memory_of_a_heap_is_its_owners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create

    def keep(name: str, flags: int) -> int:
        descriptor = create(name, flags)
        made.append(os.dup(descriptor))
        return descriptor

    monkeypatch.setattr("moeos.world.heap.os.memfd_create", keep)

    def look(control: ControlPlane) -> tuple[int, int]:
        heap = SymmetricHeap(control, BYTES)
        [descriptor] = made
        status = os.fstat(descriptor)
        os.close(descriptor)
        control.barrier()
        heap.close()
        return status.st_mode & 0o777, status.st_uid

    assert over_a_store(look, 2) == [(0o600, os.geteuid())] * 2


def test_closing_gives_back_every_mapping() -> None:
    def mapped(control: ControlPlane) -> tuple[int, int]:
        heap = SymmetricHeap(control, BYTES)
        during = Path("/proc/self/maps").read_text().count("memfd:moeos-heap")
        heap.close()
        return during, Path("/proc/self/maps").read_text().count("memfd:moeos-heap")

    assert over_a_store(mapped, 3) == [(3, 0)] * 3


def test_a_virtual_ranks_heap_stays_mapped_until_the_last_rank_closes_it() -> None:
    closed = threading.Barrier(2)

    def write_late(control: ControlPlane) -> int:
        heap = SymmetricHeap(control, BYTES)
        if control.rank == 0:
            heap.close()
            closed.wait(10)
            return 0
        closed.wait(10)
        at(heap.addresses[0], 0).value = 7
        seen = at(heap.addresses[0], 0).value
        heap.close()
        return seen

    assert in_threads(write_late, 2) == [0, 7]


class OfferedWrongly(StoreControl):
    """Rank 1 of this control plane offers what `wrong` makes of its heap's address."""

    wrong: Callable[[Any], Any]

    def allgather(self, value: Any, what: str = "an exchange", *, beyond: float = 0.0) -> list[Any]:
        if what == "the addresses of a heap" and self.rank == 1:
            value = type(self).wrong(value)
        return super().allgather(value, what, beyond=beyond)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda offer: (2**22 + 1, *offer[1:]), "No such file or directory"),
        (lambda offer: (*offer[:2], (0, 0, 0)), "there is another file"),
    ],
    ids=["no such process", "another file"],
)
def test_a_heap_that_one_rank_cannot_open_is_an_error_on_all_ranks_that_says_why(
    wrong: Callable[[Any], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfferedWrongly, "wrong", staticmethod(wrong), raising=False)
    monkeypatch.setattr("tests.host.world.test_control.StoreControl", OfferedWrongly)

    def make(control: ControlPlane) -> tuple[str, int]:
        with pytest.raises(RuntimeError) as raised:
            SymmetricHeap(control, BYTES)
        return str(raised.value), Path("/proc/self/maps").read_text().count("memfd:moeos-heap")

    outcomes = over_a_store(make, 3)
    assert len(set(outcomes)) == 1, outcomes
    message, left = outcomes[0]
    assert message.startswith("rank 0 cannot open the heap of rank 1 at /proc/")
    assert why in message
    assert "one PID namespace" in message
    assert left == 0


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (resource.RLIMIT_FSIZE, "File too large; raise the limit of this process, ulimit -f"),
        (resource.RLIMIT_NOFILE, "Too many open files; raise the limit of this process, ulimit -n"),
    ],
    ids=["file size", "open files"],
)
def test_a_limit_that_one_rank_meets_is_an_error_on_all_ranks_that_names_it(
    limit: int, message: str
) -> None:
    def make(control: ControlPlane) -> str:
        before = resource.getrlimit(limit)
        control.barrier()  # its transport has all files that it needs
        if control.rank == 1:
            next_file = os.open("/dev/null", os.O_RDONLY)
            os.close(next_file)
            resource.setrlimit(limit, (next_file, before[1]))  # of sizes: some bytes
        with pytest.raises(OSError, match="cannot make a heap") as raised:
            SymmetricHeap(control, BYTES)
        resource.setrlimit(limit, before)
        return str(raised.value)

    outcomes = over_a_store(make, 2)
    assert len(set(outcomes)) == 1, outcomes
    assert f"rank 1 cannot make a heap of {BYTES} bytes: {message}" in outcomes[0]


def test_a_heap_that_the_machine_has_no_memory_for_is_refused_on_all_ranks() -> None:
    def make(control: ControlPlane) -> str:
        with pytest.raises(OSError, match="bytes are available; lower max_tokens") as raised:
            SymmetricHeap(control, MAX_HEAP_BYTES)
        assert raised.value.errno == errno.ENOMEM
        return str(raised.value)

    outcomes = over_a_store(make, 2)
    assert len(set(outcomes)) == 1, outcomes
    assert f"rank 0 cannot make a heap of {MAX_HEAP_BYTES} bytes" in outcomes[0]


def test_a_heap_for_which_there_are_no_addresses_names_the_rank_and_what_to_lower() -> None:
    """As under `ulimit -v`; a virtual rank's is memory of the process."""
    sentence = r"rank 0 cannot map a heap of \d+ bytes: .*ulimit -v.*lower max_tokens"
    for outcome in in_threads(lambda control: SymmetricHeap(control, MAX_HEAP_BYTES), 2):
        assert isinstance(outcome, OSError)
        assert re.search(sentence, str(outcome)), outcome


def test_a_limit_of_data_that_a_heap_reaches_is_named() -> None:
    def live(rank: int) -> str:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))
        with pytest.raises(OSError, match="cannot map a heap") as raised:
            SymmetricHeap(SoloControl(), 1 << 41)
        return str(raised.value)

    (said,) = ForkedRanks(live, 1).ended()
    assert f"RLIMIT_DATA (ulimit -d), bytes of memory of its own: {1 << 40}. Raise" in said
    assert "ulimit -d" not in host_memory.limits()


def test_ranks_killed_while_they_hold_a_heap_leave_no_shared_memory() -> None:
    held = multiprocessing.get_context("fork").Semaphore(0)

    def hold(control: ControlPlane) -> None:
        heap = SymmetricHeap(control, BYTES)
        held.release()
        time.sleep(60)
        heap.close()

    before = shared_memory()
    ranks = ForkedRanks(store_rank(hold, 3), 3)
    for _ in range(3):
        assert held.acquire(timeout=60)
    assert shared_memory() == before
    for rank in range(3):
        ranks.signal(rank, signal.SIGKILL)
    assert ranks.ended() == [None] * 3
    assert shared_memory() == before


KILLED_PROGRAM = """
import os, signal, sys, time
import moeos

with moeos.init() as world:
    heap = world.allocate_heap(1 << 20)
    print("[made a heap]", flush=True)
    world.control.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
"""


@pytest.mark.nightly
def test_a_rank_of_mpirun_killed_while_it_holds_a_heap_leaves_no_memory_and_no_process() -> None:
    mark = f"moeos-test-{os.getpid()}-{time.monotonic_ns()}"
    before = shared_memory()
    ended = mpirun(2, KILLED_PROGRAM, mark)
    assert ended.stdout.count("[made a heap]") == 2, ended.stderr
    assert ended.returncode != 0
    ends = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < ends:
        time.sleep(0.05)
    assert processes_with(mark) == []
    assert shared_memory() == before
