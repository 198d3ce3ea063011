# SPDX-License-Identifier: Apache-2.0
"""Starts contestants, tells them when to work, one at a time, and collects their times.

It knows processes, sockets and clocks, and nothing of layers; contestant.py is the other end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bench.twin.contestant import PATIENCE, Measured

_LOOK = 0.2  # seconds between two looks whether a process that should connect still lives
_FAREWELL = 20.0  # seconds that a contestant gets to end by itself
_SETTLE = 0.02  # seconds before a job: PyTorch's threads spin for milliseconds after their last


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One job of one contestant.

    Attributes:
        seconds: from the first member's begin to the last one's end, so the slowest rank's time.
        cpu_seconds: processor time that its processes used meanwhile.
        tasks, busy_seconds: sums over its members.
    """

    seconds: float
    cpu_seconds: float
    tasks: int
    busy_seconds: float


class Contestant:
    """A running contestant; made by `started`.

    Attributes:
        name: in errors.
    """

    def __init__(self, name: str, streams: Sequence[BinaryIO]) -> None:
        self.name = name
        self._streams = streams
        self._first_cpu: dict[int, float] = {}
        self._last_cpu: dict[int, float] = {}

    @property
    def cpu_seconds(self) -> float:
        """Processor time that its processes have used from the first job to the last."""
        return sum(self._last_cpu[process] - first for process, first in self._first_cpu.items())

    def do(
        self, job: str, tokens: int, *, rehearsals: int = 0, save: Sequence[Path] | None = None
    ) -> Outcome:
        """Has all members do a job at once, with `tokens` of each rank, and time it.

        Args:
            rehearsals: how often they first do it untimed. None: what is timed follows a rest.
            save: files for the members' outputs.

        Raises:
            RuntimeError: a member ended or did not answer within `PATIENCE` seconds.
        """
        time.sleep(_SETTLE)
        for member, stream in enumerate(self._streams):
            order = {
                "job": job,
                "tokens": tokens,
                "rehearsals": rehearsals,
                "save": None if save is None else str(save[member]),
            }
            stream.write(json.dumps(order).encode() + b"\n")
            stream.flush()
        answers = [Measured(**_read(stream, self.name)) for stream in self._streams]
        begins: dict[int, float] = {}
        ends: dict[int, float] = {}
        for answer in answers:  # several members may share a process
            begin = min(answer.cpu_begin, begins.get(answer.process, answer.cpu_begin))
            begins[answer.process] = begin
            ends[answer.process] = max(answer.cpu_end, ends.get(answer.process, answer.cpu_end))
        self._first_cpu = begins | self._first_cpu  # of the first job
        self._last_cpu = ends
        return Outcome(
            seconds=max(a.end for a in answers) - min(a.begin for a in answers),
            cpu_seconds=sum(ends[process] - begin for process, begin in begins.items()),
            tasks=sum(answer.tasks for answer in answers),
            busy_seconds=sum(answer.busy_seconds for answer in answers),
        )


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], folder: Path, workload: str, members: int
) -> Iterator[Contestant]:
    """A contestant for the length of a with block.

    Args:
        name: of its socket in `folder`, and in errors.
        command: what starts it, but for its last arguments, the socket and the workload.
        folder: of sockets; its path must be short.
        members: how many connect: ranks, or 1.

    Raises:
        RuntimeError: a member ended or did not connect within `PATIENCE` seconds.
    """
    address = str(folder / name)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(members)
        listener.settimeout(_LOOK)
        # Standard output is the benchmark's own: what a contestant says goes to standard error.
        process = subprocess.Popen(
            [*command, address, workload], stdin=subprocess.DEVNULL, stdout=sys.__stderr__
        )
        stack.callback(_end, process)
        # Closed before the process is waited for: a member ends when its connection does.
        streams = [stack.enter_context(_accept(listener, process, name)) for _ in range(members)]
        by_rank = {_read(stream, name)["rank"]: stream for stream in streams}
        yield Contestant(name, [by_rank[rank] for rank in range(members)])


class LoadMeter:
    """How much of this machine was used by others than the contestants and this process.

    Others are all processor time that was not idle, by /proc/stat, less one's own; what a
    hypervisor took away counts as theirs.
    """

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self._contestants = contestants
        self._looked = time.monotonic()
        self._others = self._others_seconds()

    def others(self) -> float:
        """Cores that others kept busy since the last look, on average; the first is the making."""
        now, others = time.monotonic(), self._others_seconds()
        cores = (others - self._others) / (now - self._looked)
        self._looked, self._others = now, others
        return cores

    def _others_seconds(self) -> float:
        own = sum(contestant.cpu_seconds for contestant in self._contestants)
        return _used_seconds() - time.process_time() - own


def _used_seconds() -> float:
    """Processor time since the machine started, over its cores."""
    all_cores = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, interrupt, soft_interrupt, stolen = map(
        int, all_cores[1:9]
    )
    ticks = user + nice + system + interrupt + soft_interrupt + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _accept(
    listener: socket.socket, process: subprocess.Popen[bytes], name: str
) -> Iterator[BinaryIO]:
    ends = time.monotonic() + PATIENCE
    while True:
        if process.poll() is not None:
            raise RuntimeError(
                f"the contestant {name} ended with code {process.returncode} before it took part"
            )
        if time.monotonic() > ends:
            raise RuntimeError(f"the contestant {name} did not take part within {PATIENCE:g} s")
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            break
    with connection, connection.makefile("rwb") as stream:
        connection.settimeout(PATIENCE)
        yield stream  # type: ignore[misc]


def _read(stream: BinaryIO, name: str) -> dict[str, Any]:
    try:
        line = stream.readline()
    except TimeoutError:
        raise RuntimeError(f"the contestant {name} did not answer for {PATIENCE:g} s") from None
    if not line:
        raise RuntimeError(f"the contestant {name} ended in the middle of the benchmark")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_FAREWELL)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
