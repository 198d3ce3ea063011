# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes, for tests: forked from this one, or started by mpirun or torchrun.

Every process is waited for with a limit and ended by its own id.
"""

import contextlib
import functools
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MOEOS = "from moeos.cli.start import main; main()"
"""A program that is the command `moeos`, with the arguments that it is given."""

_FIRST_PORT, _END_PORT, _PORTS = 20000, 32000, 50
_claims: list[socket.socket] = []

_fork = multiprocessing.get_context("fork")

_OF_OTHERS = ("sem.mp-", "sm_segment.", "vader_segment.")
"""Of Python's process pools and of Open MPI: other tests, which run beside one, make such."""


def shared_memory() -> set[str]:
    """The names in /dev/shm that a layer's ranks could have left there."""
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(_OF_OTHERS)}


def free_port() -> int:
    """A port at which nothing listens, and that no other process of tests is given meanwhile.

    It is none of those that the kernel gives to connections, such as those of tests beside this.
    Who meets at a port that another has taken waits there for ranks that never come.
    """
    mine = _ports_of(os.getpid())
    for _ in range(_PORTS):
        port = next(mine)
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As who listens binds: connections that have just ended here are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"none of {_PORTS} ports is free")


@functools.cache
def _ports_of(process: int) -> Iterator[int]:
    """Some ports, again and again, that are this process's until it and its children end."""
    for first in range(_FIRST_PORT, _END_PORT, _PORTS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0moeos-tests-{first}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return itertools.cycle(range(first, first + _PORTS))
    raise AssertionError(f"all ports from {_FIRST_PORT} to {_END_PORT} are taken")


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank, where the ranks serve the store themselves."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _begin_child() -> None:
    """What a forked process does first; its parent has stopped the collection of garbage."""
    # What is here now is never collected in a child: the end of an object with a thread would
    # wait there for one that only the parent has.
    gc.freeze()
    gc.enable()
    # Not the handlers of who runs the tests, nor what nohup has had it ignore.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class ForkedRanks:
    """`function(rank)` in a forked process for each rank; `ended` collects what came of it.

    A rank's outcome is what the function returned, the exception that it raised, or None if the
    process was killed. A forked process starts in a millisecond, with moeos imported.
    """

    def __init__(self, function: Callable[[int], Any], size: int) -> None:
        self.processes = []
        self._outcomes = []
        gc.disable()
        for rank in range(size):
            receiver, sender = _fork.Pipe(duplex=False)
            process = _fork.Process(target=self._live, args=(function, rank, sender), daemon=True)
            process.start()
            sender.close()
            self.processes.append(process)
            self._outcomes.append(receiver)
        gc.enable()

    @staticmethod
    def _abort(process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)  # on which pytest prints where all threads stand
        process.join(5.0)
        process.kill()
        process.join()

    @staticmethod
    def _live(function: Callable[[int], Any], rank: int, sender: Any) -> None:
        _begin_child()
        try:
            outcome = function(rank)
        except Exception as error:
            outcome = error
        sender.send(outcome)
        sender.close()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def ended(self, seconds: float = 30.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """The outcomes of all ranks, or of some, when they have ended.

        Raises `AssertionError` if one does not end in time. Where all threads stand then
        comes to stderr.
        """
        ends = time.monotonic() + seconds
        outcomes = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            process, receiver = self.processes[rank], self._outcomes[rank]
            outcome: Any = None
            if receiver.poll(max(0.0, ends - time.monotonic())):
                with contextlib.suppress(EOFError):
                    outcome = receiver.recv()
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                stuck = [other for other, it in enumerate(self.processes) if it.is_alive()]
                for other in stuck:
                    self._abort(self.processes[other])
                raise AssertionError(
                    f"rank {rank} did not end within {seconds} s; ranks {stuck} still ran; "
                    f"before it ended {outcomes!r}"
                )
            outcomes.append(outcome)
        return outcomes


IMPORTED = "import gc; gc.disable(); import torch; gc.freeze(); gc.enable()\n"
"""The begin of a program, which starts a quarter sooner: nobody looks through what it imports."""


def launched(
    launcher: Sequence[str],
    program: str,
    arguments: Sequence[str] = (),
    seconds: float = 200.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program under a launcher of this environment, as the scripts in launch/ do."""
    command = [str(BIN / launcher[0]), *launcher[1:], sys.executable, "-c", IMPORTED + program]
    command += arguments
    shell = 'source "$0" && exec "$@"'
    return subprocess.run(
        ["bash", "-c", shell, str(ROOT / "launch" / "environment.sh"), *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def mpirun(ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launched(["mpirun", "-n", str(ranks)], program, arguments)


def torchrun(
    ranks: int, program: str, *arguments: str, seconds: float = 200.0
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as logs:  # it leaves a folder there in any case
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--no-python"]
        return launched(["torchrun", *options], program, arguments, seconds)


def forked(
    ranks: int, program: str, *arguments: str, seconds: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program on so many ranks, forked from this one, with torchrun's environment.

    They start at once, with moeos imported; ranks of a launcher take two seconds of a core each.
    As a launcher does, it tells the first failure, and ends all ranks when one is killed.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def live(rank: int) -> None:
        _begin_child()
        os.dup2(out.fileno(), 1)
        os.dup2(complaints.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv = ["-c", *arguments]
        torch.set_num_threads(1)  # those of the parent's that work beside it are not here
        os.environ.update(torchrun_environment(rank, ranks, store.port))
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_USE_AGENT_STORE="True")
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaints:
        gc.disable()
        processes = [_fork.Process(target=live, args=(one,), daemon=True) for one in range(ranks)]
        for process in processes:
            process.start()
        gc.enable()
        status = _first_failure(processes, seconds)
        out.seek(0)
        complaints.seek(0)
        return subprocess.CompletedProcess(program, status, out.read(), complaints.read())


def _first_failure(processes: Sequence[multiprocessing.context.ForkProcess], seconds: float) -> int:
    """The first exit code of processes that is not 0, when all have ended."""
    living = {process.sentinel: process for process in processes}
    status, ends = 0, time.monotonic() + seconds
    while living:
        ended = multiprocessing.connection.wait(living, ends - time.monotonic())
        if not ended:
            for process in living.values():
                process.kill()
            raise AssertionError(f"{len(living)} ranks did not end within {seconds} s")
        for sentinel in ended:
            process = living.pop(sentinel)
            process.join()
            status = status or process.exitcode or 0
        if status < 0:
            for process in living.values():
                process.terminate()
    return status
