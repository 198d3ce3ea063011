# SPDX-License-Identifier: Apache-2.0
"""A contestant: a process that waits until it is told to work, works, and says how long it took.

`python -m bench.twin.contestant KIND SOCKET WORKLOAD` with the kinds
    ranks: one rank of the world that mpirun started;
    virtual: all ranks of the workload as threads of this process;
    pytorch: all ranks' tokens in one PyTorch process on all cores of this machine.

Each member (a rank, or the PyTorch process) has its own connection to the conductor, a Unix socket
with a line of JSON for each command and each answer. While others work it sleeps in a read, so it
disturbs nobody. Times are those of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

import moeos
from bench.twin.baseline import PlainLayer
from bench.twin.workload import Workload
from moeos.cli.shared import machine

PATIENCE = 600.0
"""Seconds that a contestant waits for a command, and the conductor for an answer."""

MATRIX = 2048
"""Rows and columns of the matrices whose product gives the machine's GEMM rate."""

COPIED_BYTES = 1 << 27
"""Bytes that are copied to measure memory; more than any cache holds."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a member says after a job.

    Attributes:
        begin, end: seconds on the monotonic clock.
        process: the process's id.
        cpu_begin, cpu_end: seconds of processor time that the process had used by then.
        tasks: that the rank ran; 0 where there are none.
        busy_seconds: time inside them, over the rank's processors.
    """

    begin: float
    end: float
    process: int
    cpu_begin: float
    cpu_end: float
    tasks: int = 0
    busy_seconds: float = 0.0


class Member(Protocol):
    """What does the jobs of one connection."""

    def prepare(self, job: str, tokens: int) -> Callable[[], Tensor]:
        """A job, ready to be timed: "call", with so many tokens of each rank, or another of its
        own.
        """

    def work(self) -> tuple[int, float]:
        """Tasks that the last call ran, and seconds inside them."""


class RankMember:
    """One rank of the twin."""

    def __init__(self, workload: Workload, world: moeos.World) -> None:
        self._layer = moeos.MoELayer(workload.cfg, world).requires_grad_(False)
        w1, w2 = workload.experts(workload.cfg.experts_of(world.rank, world.size))
        self._layer.load_state_dict({"gate.weight": workload.gate(), "w1": w1, "w2": w2})
        self._x = workload.tokens(world.rank)

    def prepare(self, job: str, tokens: int) -> Callable[[], Tensor]:
        x = self._x[:tokens]
        return lambda: self._layer(x)

    def work(self) -> tuple[int, float]:
        stats = self._layer.stats()
        return sum(stats["tasks"].values()), stats["busy_seconds"]


class PyTorchMember:
    """The whole workload in PyTorch, and the two rates that bound it on this machine."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(machine.cores())
        cfg = workload.cfg
        w1, w2 = workload.experts(range(cfg.experts))
        most = workload.ranks * cfg.max_tokens
        self._layer = PlainLayer(workload.gate(), w1, w2, cfg.top_k, most)
        self._x = workload.all_tokens()
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._product = torch.empty_like(self._matrix)
        self._source = torch.ones(COPIED_BYTES // 4)
        self._target = torch.empty_like(self._source)

    def prepare(self, job: str, tokens: int) -> Callable[[], Tensor]:
        if job == "matmul":
            return lambda: torch.mm(self._matrix, self._matrix, out=self._product)
        if job == "copy":
            return lambda: self._target.copy_(self._source)
        x = self._x[:, :tokens].reshape(-1, self._x.shape[2])
        return lambda: self._layer(x)

    def work(self) -> tuple[int, float]:
        return 0, 0.0


def serve(address: str, rank: int, member: Member) -> None:
    """Does what the conductor asks until it closes the connection.

    Raises:
        TimeoutError: there was no command for `PATIENCE` seconds.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        with connection.makefile("rwb") as stream:
            answer: dict[str, Any] = {"rank": rank}
            while True:
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()
                line = stream.readline()
                if not line:
                    return
                answer = dataclasses.asdict(_do(member, **json.loads(line)))


def _do(member: Member, job: str, tokens: int, rehearsals: int, save: str | None) -> Measured:
    work = member.prepare(job, tokens)
    for _ in range(rehearsals):
        work()
    cpu_begin = time.process_time()
    begin = time.monotonic()
    out = work()
    end = time.monotonic()
    cpu_end = time.process_time()
    if save is not None:
        save_file({"y": out}, save)
    return Measured(begin, end, os.getpid(), cpu_begin, cpu_end, *member.work())


def main() -> None:
    """What this module runs as a program."""
    kind, address, text = sys.argv[1:]
    workload = Workload.from_json(text)

    def take_part(world: moeos.World) -> None:
        serve(address, world.rank, RankMember(workload, world))

    if kind == "ranks":
        with moeos.init("twin") as world:
            take_part(world)
    elif kind == "virtual":
        moeos.virtual.run(take_part, ranks=workload.ranks)
    elif kind == "pytorch":
        serve(address, 0, PyTorchMember(workload))
    else:
        raise ValueError(f"KIND is {kind!r}; allowed: ranks, virtual, pytorch")


if __name__ == "__main__":
    main()
