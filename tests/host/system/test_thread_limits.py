# SPDX-License-Identifier: Apache-2.0
"""A system that gives no more threads: every rank raises an error that names the limits.

RLIMIT_NPROC binds no root, so a rank of root's becomes a user that nobody is.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moeos
from moeos import TwinOptions, World
from moeos.system import thread_limits
from moeos.world import virtual
from tests.layers import assert_matches, config, draw_call, draw_weights
from tests.processes import IMPORTED, ROOT, ForkedRanks, free_port, torchrun_environment

CFG = config(max_tokens=64)
WEIGHTS = draw_weights(CFG)
CALLS = [draw_call(CFG, 40 + rank, rank) for rank in range(2)]
HARD = resource.getrlimit(resource.RLIMIT_NPROC)[1]

only_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become a user of whom no other thread is"
)


@pytest.fixture(autouse=True)
def _imported() -> None:
    """A call imports some of PyTorch, which a user who is nobody may not read."""
    virtual.run(lambda world: CALLS[0](WEIGHTS.layer(world)), 1)


def become_nobody() -> None:
    """A user without another thread, if this process may. Its ranks open each other's heaps."""
    if os.getuid() == 0:
        os.setuid(60_000 + os.getppid() % 5_000)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, which setuid has taken


def allow(threads: int) -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, HARD))


def forked(function: Callable[[], Any]) -> Any:
    """What `function()` returns in a process of its own, as a user without other threads."""

    def live(rank: int) -> Any:
        become_nobody()
        return function()

    (outcome,) = ForkedRanks(live, 1).ended()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(OSError, match="cannot be started") as raised:
        make()
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert f"RLIMIT_NPROC (ulimit -u), threads of this user: {limit}" in str(raised.value)
    return str(raised.value)


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@only_root
def test_a_layer_that_gets_only_some_of_its_threads_names_the_limit_and_keeps_none() -> None:
    def make() -> str:
        with moeos.init(twin=TwinOptions(processors=4)) as world:
            allow(3)
            said = refused(lambda: WEIGHTS.layer(world))
            assert threads_of_this_process() == 1
            allow(HARD)
            assert_matches(WEIGHTS, CALLS[0], CALLS[0](WEIGHTS.layer(world)))
        return said

    said = forked(make)
    assert "rank 0, thread 3 of 4 cannot be started" in said
    assert "TwinOptions(processors=...)" in said


WITHOUT_OPENMP = """
import threading, torch, moeos
from tests.host.system import test_thread_limits as limits
from tests.layers import config, draw_call
cfg = config(hidden=256, intermediate=512, experts=16)  # PyTorch divides loops over its weights
call = draw_call(cfg, 40, 0)
moeos.virtual.run(lambda world: call(moeos.MoELayer(cfg, world)), 1)
limits.become_nobody()
def work():
    limits.allow(limits.threads_of_this_process() + 1)
    with torch.no_grad(), moeos.init(twin=moeos.TwinOptions(processors=1)) as world:
        call(moeos.MoELayer(cfg, world))
    print("right", flush=True)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@only_root
def test_with_one_openmp_thread_a_layer_needs_no_threads_but_its_own() -> None:
    """With more, libgomp ends a process that gets none, whoever it is that uses PyTorch."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED + WITHOUT_OPENMP],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "right\n", "")


def test_all_ranks_raise_when_one_gets_no_thread() -> None:
    port = free_port()

    def live(rank: int) -> str:
        become_nobody()
        os.environ.update(torchrun_environment(rank, 2, port))
        with moeos.init(deadline=100.0, twin=TwinOptions(processors=2)) as world:
            if rank == 1:
                allow(1)
            with pytest.raises(OSError, match="cannot be started") as raised:
                WEIGHTS.layer(world)
            allow(HARD)
            assert_matches(WEIGHTS, CALLS[rank], CALLS[rank](WEIGHTS.layer(world)))
            return str(raised.value)

    first, second = ForkedRanks(live, 2).ended()
    assert "rank 1, thread 1 of 2 cannot be started" in first
    assert "threads of this user: 1" in first
    assert first == second


@only_root
def test_virtual_ranks_that_get_too_few_threads_for_their_layers_all_raise() -> None:
    def make() -> list[str]:
        allow(1 + 2 + 6)  # of 1, 2 and 2 * 4
        twin = TwinOptions(processors=4)
        return virtual.run(lambda world: refused(lambda: WEIGHTS.layer(world)), 2, twin=twin)

    first, second = forked(make)
    assert first == second
    assert "thread 3 of 4" in first or "thread 4 of 4" in first


@only_root
def test_virtual_ranks_of_which_some_get_no_thread_do_not_begin() -> None:
    def make() -> tuple[str, int]:
        allow(3)
        ended: list[int] = []

        def wait(world: World) -> None:
            try:
                world.control.barrier()
            finally:
                ended.append(world.rank)

        said = refused(lambda: virtual.run(wait, 4, deadline=100.0))
        assert sorted(ended) == [0, 1]
        return said, threading.active_count()

    said, threads = forked(make)
    assert "the thread of virtual rank 2 of 4 cannot be started" in said
    assert threads == 1


def test_a_world_whose_control_plane_gets_no_thread_is_not_made() -> None:
    def make() -> str:
        os.environ.update(torchrun_environment(0, 2, free_port()))
        allow(1)
        return refused(lambda: moeos.init(deadline=100.0))

    assert "rank 0 of 2, the thread moeos-store cannot be started" in forked(make)


def test_a_limit_of_data_is_named_where_there_is_one() -> None:
    def live(rank: int) -> list[str]:
        said = [str(thread_limits.no_thread("a thread", "ask for less"))]
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))
        return [*said, str(thread_limits.no_thread("a thread", "ask for less"))]

    ((without, limited),) = ForkedRanks(live, 1).ended()
    assert "RLIMIT_DATA" not in without
    assert f"RLIMIT_DATA (ulimit -d), bytes of memory of its own: {1 << 40}; RLIMIT" in limited


def test_the_error_names_the_control_group_that_allows_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup, root = tmp_path / "cgroup", tmp_path / "sys"
    (root / "jobs" / "mine").mkdir(parents=True)
    (root / "jobs" / "mine" / "pids.max").write_text("max\n")
    (root / "jobs" / "pids.max").write_text("17\n")
    cgroup.write_text("4:memory:/other\n0::/jobs/mine\n")
    monkeypatch.setattr(thread_limits, "_OWN_GROUPS", cgroup)
    monkeypatch.setattr(thread_limits, "_GROUPS", root)
    said = str(thread_limits.no_thread("a thread", "ask for less"))
    assert f"pids.max of the control group {root}/jobs: 17" in said
    assert "memory" not in said
