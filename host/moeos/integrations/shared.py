# SPDX-License-Identifier: Apache-2.0
"""What the adapters have in common: worlds and experts that all layers of a model share.

This file must not depend on any library that an adapter is for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import moeos
from moeos.config.activations import Activation
from moeos.config.config import MoEConfig
from moeos.layer.experts import Experts
from moeos.partition.slicing import Output, Parallel, slicing_of
from moeos.system.process import Home
from moeos.world.world import World

VLLM = "0.32.0"
"""The version of vLLM whose interfaces the adapter was written for."""

NAME = "moeos"
"""The name of moeos in the settings of all libraries."""

SERVER_DEADLINE = 300.0
"""Seconds that a server's ranks wait for each other: one may still compile or capture graphs."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_Value = TypeVar("_Value")


class Exclusive:
    """Work that one thread does at a time, while others wait. A signal handler or a finalizer that
    interrupts this work and begins it again in the same thread would wait for itself: it gets
    `RuntimeError`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()

    def run(self, function: Callable[[], _Value]) -> _Value:
        """What `function` returns or raises."""
        if getattr(self._here, "inside", False):
            raise RuntimeError(
                "moeos prepares a model's first call, and the same thread begins another one: "
                "return from the signal handler or finalizer first"
            )
        try:
            self._here.inside = True  # before the lock is taken, and until it is free
            with self._lock:
                return function()
        finally:
            self._here.inside = False

    def free(self) -> None:
        """Frees the lock in a forked child: another thread may have held it, and does not exist
        there.

        The thread that forked is still inside if it was, and releases the lock that it took.
        """
        self._lock = threading.Lock()


preparing = Exclusive()
"""Held by the thread that makes a module's experts."""

_making = Exclusive()
os.register_at_fork(after_in_child=preparing.free)
os.register_at_fork(after_in_child=_making.free)
_worlds: dict[
    tuple[int, int, str, str], tuple[Any, World]
] = {}  # of a process, with its group, so that no other has its id
_experts: dict[tuple[int, MoEConfig, Parallel, Output], Experts] = {}


def missing(library: str, package: str, version: str) -> ImportError:
    """The error for an adapter whose library cannot be imported."""
    return ImportError(
        f"moeos.integrations.{library} needs {package}, which cannot be imported here; install it "
        f"(the adapter was written for {package} {version})"
    )


def refusal(where: str, field: str, value: object, works: str) -> ValueError:
    """The error for what an adapter does not do: the field, its value, and what works."""
    return ValueError(f"{where}: {field} is {value!r}, which moeos does not do; {works}")


def activation_of(where: str, name: str, table: Mapping[str, str]) -> Activation:
    """The activation of a config that a library's name means; `refusal` if there is none."""
    known = get_args(Activation)
    if table.get(name) not in known:
        works = ", ".join(repr(key) for key, value in table.items() if value in known)
        raise refusal(where, "activation", name, f"these work: {works}")
    return cast(Activation, table[name])


def world_of(
    group: dist.ProcessGroup | None,
    backend: str,
    deadline: float,
    device: torch.device | None = None,
) -> World:
    """The one world of a process group in this process; without a group, a world of this process
    alone. With a device, as of `moeos.init`, the one that it has there.

    Collective over the group where it is made: at the first call, and after it was closed. It lives
    until the process ends.
    """

    def made() -> World:
        key = (os.getpid(), id(group), backend, str(device))  # a fork has none of its parent's
        _, world = _worlds.get(key, (None, None))
        if world is None or world.closed:
            if group is None:
                alone = HashStore()
                world = moeos.init(
                    backend, rank=0, size=1, store=alone, device=device, deadline=deadline
                )
            else:
                world = moeos.init(backend, group=group, device=device, deadline=deadline)
            _worlds[key] = (group, world)
        return world

    return _making.run(made)


def experts_of(
    cfg: MoEConfig, world: World, parallel: Parallel = "expert", output: Output = "replicated"
) -> Experts:
    """The experts that all layers of one shape share. Collective where they are made."""

    def made() -> Experts:
        key = (id(world), cfg, parallel, output)
        found = _experts.get(key)
        if found is None or found.world is not world:
            found = _experts[key] = Experts(cfg, world, parallel=parallel, output=output)
        return found

    return _making.run(made)


def reset() -> None:
    """Makes models of this process usable after a call that failed, or that a signal ended.

    Collective over the ranks that share experts: all of them call it, and none is in a call. A
    process that computes alone on CPUs does not need it.

    Raises `PeerTimeout` as `World.reset` does, where a rank does not come or an error ended a
    world. Then start the processes again.
    """
    for (process, *_), (_, world) in list(_worlds.items()):  # made in one order on all ranks
        if process == os.getpid() and not world.closed:
            world.reset()


class OfProcess:
    """Experts that a forked child makes anew, if it is their only rank.

    Attributes:
        made: the experts of the process that asked last.
    """

    def __init__(self, make: Callable[[], Experts]) -> None:
        self._make = make
        self._home = Home()
        self.made = make()

    @property
    def ready(self) -> bool:
        """Whether the experts belong to this process."""
        return self._home.here

    def here(self) -> Experts:
        """This process's experts. Raises `RuntimeError` where ranks of a parent share them: the
        child does not have their connections.
        """
        if not self._home.here:
            if self.made.world.size > 1:
                self._home.require(f"the world of rank {self.made.world.rank}")
            self.made = self._make()
            self._home = Home()
        return self.made


def require_slices(
    where: str, cfg: MoEConfig, parallel: Parallel, ranks: int, works: str
) -> MoEConfig:
    """The config of the slice that a rank holds of each expert; `ValueError` where `ranks` ranks
    cannot cut it.
    """
    try:
        return slicing_of(parallel, "replicated", ranks).cut(cfg)
    except ValueError as error:
        raise ValueError(f"{where}: {error}: {works}") from None


def interleaved(gate_then_up: Tensor, dim: int = -1) -> Tensor:
    """[..., 2I] all gates, then all ups -> [..., 2I] gate 0, up 0, gate 1, ...; along `dim`."""
    dim %= gate_then_up.dim()
    halves: Tensor = gate_then_up.unflatten(dim, (2, -1))
    return halves.transpose(dim, dim + 1).flatten(dim, dim + 1)


def untraced(function: _Function) -> _Function:
    """A function that torch.compile does not look into, for what no graph could repeat: worlds that
    are made. A graph breaks at a call of it; where the graph must be whole, Dynamo's error has the
    function's name.
    """
    return cast(_Function, torch.compiler.disable(function))


def part(rows: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Which of `rows` equal rows of `ranks` ranks are this rank's: first, one after the last, and
    the most that a rank has.
    """
    most = -(-rows // ranks)
    first = min(rows, rank * most)
    return first, min(rows, first + most), most
