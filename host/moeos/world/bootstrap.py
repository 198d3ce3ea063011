# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of a world, by a launcher, a group or a store, and makes the world.

Must not depend on layers or heaps.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moeos.partition.rates import FILE_NAME, H200, NUMBERS, DeviceRates, rates_of
from moeos.partition.sharding import default_group, process_group_place, remembered
from moeos.system.errors import ConfigMismatch, PeerTimeout, said
from moeos.system.launchers import MAX_RANKS, Launch, detect, of_launcher, place_on_host
from moeos.system.place import boot
from moeos.world.control import ControlPlane, SoloControl, StoreControl, name_ranks, require_same
from moeos.world.faults import FaultPlan, plan_of
from moeos.world.process_groups import meet, membership
from moeos.world.rendezvous import Meeting, at_address, by_mpi, can_ask_mpi, on_this_host
from moeos.world.world import (
    Backend,
    TwinOptions,
    World,
    check_deadline,
    check_ranks_per_node,
    check_trace_events,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh

BACKENDS = ("auto", "twin", "cuda")
"""The backends that `init` and `virtual.run` take."""

DEFAULT_TWIN = TwinOptions()
DEFAULT_DEADLINE = 30.0
"""Seconds."""


def init(
    backend: str = "auto",
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    rank: int | None = None,
    size: int | None = None,
    store: Store | None = None,
    device: torch.device | str | int | None = None,
    deadline: float = DEFAULT_DEADLINE,
    twin: TwinOptions = DEFAULT_TWIN,
    ranks_per_node: int | None = None,
    trace_events: int = 0,
    faults: FaultPlan | None = None,
) -> World:
    """A world of this process and others. Collective over its ranks.

    The ranks are those of `group`, or those that give the same `store`, or all that the launcher
    has started: mpirun, torchrun and srun are recognised by the environment that they set. Without
    one of them they are those of torch.distributed's default group, if it is initialised, or else
    this process alone. A process may be in several worlds at once.

    Args:
        backend: "twin" (CPU threads), "cuda", or "auto": the GPU where one can be used, or the
            twin.
        group: any process group of torch.distributed (gloo, NCCL, a subgroup), or a DeviceMesh of
            one dimension, such as mesh["ep"]. This rank and the number of ranks are the group's.
            The ranks meet in the group's store; nothing is sent through the group where torch
            shows that store.
        rank, size: this rank and the number of ranks, with `store`.
        store: any store of torch.distributed, in which the ranks meet: keys that begin with
            "moeos/". Worlds of other ranks take a PrefixStore each.
        device: this rank's GPU; None is the group's bound device, or the current one with a group
            or a store, or the one of this process's place on its host.
        deadline: seconds after which a wait for another rank raises `PeerTimeout`, here and in
            every call.
        twin: how the twin uses this machine.
        ranks_per_node: None finds out which peers' memory can be written directly. A number makes
            nodes of that many consecutive ranks, and reaches ranks of other nodes by puts even
            where there is a direct way, on the twin and on the GPU: 1 for all peers. It is there to
            test that path on one host; it changes no result.
        trace_events: events that each actor notes of a call, at most, for `MoELayer.trace`; 0 notes
            none, and compiles nothing of it into the kernel. A part of a task is an event.
        faults: what is to go wrong, for tests (`moeos.faults`); None for what the file says that
            the environment variable MOEOS_FAULTS names, or for nothing.

    Raises:
        ValueError, TypeError: an argument, what the launcher set or a fault plan is not allowed, on
            this rank or another; this process is no member of the group; a mesh has several
            dimensions. Or nothing is given, and torch.distributed's default group has another rank
            or size here than the launcher says.
        OSError: the fault plan cannot be read.
        ConfigMismatch: the ranks run different versions or backends, or differ in ranks_per_node or
            size.
        RuntimeError: a host has fewer GPUs than ranks, or the twin's ranks are on several hosts.
        PeerTimeout: a rank did not call it before the deadline, or the store does not answer.
    """
    arguments: _Arguments | None = None
    problem: Exception | None = None
    try:
        arguments = _Arguments.checked(
            backend, deadline, twin, ranks_per_node, trace_events, plan_of(faults), device
        )
    except (TypeError, ValueError, OSError) as error:
        problem = error  # which the peers are to hear of
    waits, own_device = DEFAULT_DEADLINE, None
    if arguments is not None:
        waits, own_device = arguments.deadline, arguments.device
    nothing_given = group is None and store is None and rank is None and size is None
    if nothing_given:
        group = _default_group(os.environ)
    launched = nothing_given and group is None
    try:
        if launched:
            control = _connect(detect(os.environ), waits)
        else:
            control = _join(group, rank, size, store, waits, own_device)
    except PeerTimeout as error:
        raise problem or error from error
    try:
        _raise_on_all(control, problem)
        assert arguments is not None
        return _world(control, arguments, group, launched=launched)
    except BaseException as error:
        control.abort(said(error))
        control.close()
        raise


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arguments of `init` that do not say which processes are the ranks, as `init` has them."""

    backend: Backend
    deadline: float
    twin: TwinOptions
    ranks_per_node: int | None
    trace_events: int
    plan: FaultPlan | None
    device: torch.device | None

    @classmethod
    def checked(
        cls,
        backend: str,
        deadline: float,
        twin: TwinOptions,
        ranks_per_node: int | None,
        trace_events: int,
        plan: FaultPlan | None,
        device: torch.device | str | int | None,
    ) -> _Arguments:
        chosen = choose_backend(backend)
        check_deadline(deadline)
        check_ranks_per_node(ranks_per_node)
        check_trace_events(trace_events)
        if not isinstance(twin, TwinOptions):
            raise TypeError(f"twin is {twin!r}; it must be a moeos.TwinOptions")
        given = None if device is None else _check_device(device, chosen)
        return cls(chosen, deadline, twin, ranks_per_node, trace_events, plan, given)

    def same_on_all(self) -> dict[str, str]:
        """The values that must not differ between the ranks, by name."""
        return {
            "the version of moeos": importlib.metadata.version("moeos"),
            "backend": repr(self.backend),
            "ranks_per_node": repr(self.ranks_per_node),
        }


def _world(
    control: ControlPlane,
    arguments: _Arguments,
    group: ProcessGroup | DeviceMesh | None,
    *,
    launched: bool,
) -> World:
    if arguments.plan is not None:
        arguments.plan.check_ranks(control.size, processes=True)
    held = control.allgather(arguments.same_on_all(), "the arguments of init")
    for name in held[0]:
        require_same(name, [one.get(name, "none") for one in held])
    device = arguments.device
    if arguments.backend == "twin":
        _require_one_host(control)
    elif device is None:
        device = _default_device(group, launched=launched)
    rates = rates_on(arguments.backend, device)
    if arguments.backend == "cuda":
        require_same_rates(control.allgather(rates, "the rates of the ranks' GPUs"))
    return World(
        control,
        backend=arguments.backend,
        deadline=arguments.deadline,
        twin=arguments.twin,
        ranks_per_node=arguments.ranks_per_node,
        trace_events=arguments.trace_events,
        faults=arguments.plan,
        device=device,
        group=None if group is None else remembered(membership(group).group),
        rates=rates,
    )


def rates_on(backend: Backend, device: torch.device | None) -> DeviceRates:
    """The numbers by which layers on this GPU choose layouts; the twin chooses as an H200 would.

    Raises `OSError` or `ValueError` as `moeos.partition.rates.rates_of` does.
    """
    if backend == "twin" or not torch.cuda.is_available():  # the engine reports a missing GPU
        return H200
    return rates_of(torch.cuda.get_device_name(device))


def require_same_rates(held: Sequence[DeviceRates]) -> None:
    """Raises `ConfigMismatch`, with the same sentence on every rank, unless all ranks choose
    layouts by the same numbers.
    """
    first = held[0]
    for rank, other in enumerate(held):
        for name in NUMBERS:
            mine, its = getattr(first, name), getattr(other, name)
            if mine != its:
                raise ConfigMismatch(
                    "all ranks must choose layouts by the same rates, and "
                    f"{name} is {mine!r} on rank 0, by the entry {first.device!r}, and {its!r} on "
                    f"rank {rank}, by the entry {other.device!r}: copy {FILE_NAME} of moeos's "
                    "cache folder from one host to all, or remove it from all"
                )


def _default_device(
    group: ProcessGroup | DeviceMesh | None, *, launched: bool
) -> torch.device | None:
    """This rank's GPU where none is given; None where there is none, which the engine reports.

    Raises `RuntimeError` if this host has fewer GPUs than ranks.
    """
    if group is not None:
        bound = membership(group).group.bound_device_id
        if bound is not None and bound.type == "cuda":
            return bound
    if launched:
        _choose_device(os.environ)
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _check_device(device: torch.device | str | int, backend: Backend) -> torch.device:
    """The device, with its index. Raises `ValueError` if the backend cannot compute there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which PyTorch does not know: {error}") from error
    if backend == "twin":
        if found.type != "cpu":
            raise ValueError(
                f'device is {device!r}, but backend="twin" computes on the CPU: leave device out, '
                'or use backend="cuda"'
            )
        return found
    if found.type != "cuda":
        raise ValueError(f'device is {device!r}; with backend="cuda" it must be a GPU, "cuda:0"')
    count = torch.cuda.device_count()
    index = found.index
    if index is None and count > 0:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ValueError(f"device is {device!r}, but this process sees {count} GPUs, from cuda:0")
    return torch.device("cuda", index)


def _raise_on_all(control: ControlPlane, problem: Exception | None) -> None:
    """Raises the error of the lowest rank that has one, on all ranks, with that rank's name.

    Collective, but for a rank that has one and waits in vain for others: it raises its own.
    """
    said = None if problem is None else (type(problem), str(problem))
    try:
        errors = control.allgather(said, "the arguments of init")
    except PeerTimeout as error:
        raise problem or error from error
    for rank, first in enumerate(errors):
        if first is None:
            continue
        kind, text = first
        if problem is not None and errors.count(first) == control.size:
            raise problem
        raise (kind if kind in (TypeError, ValueError) else RuntimeError)(f"rank {rank}: {text}")


def _default_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The default group of torch.distributed, if there is one and no launcher says the place.

    Raises `ValueError` where a launcher says another place.
    """
    here = process_group_place()
    if here is None:
        return None
    launch = of_launcher(environment)
    if launch.launcher == "none" or launch.rank is None:
        return default_group()
    if (launch.rank, launch.size) == here:
        return None
    raise ValueError(
        f"torch.distributed has rank {here[0]} of {here[1]} in this process, but by the variables "
        f"of {launch.launcher} it is rank {launch.rank} of {launch.size}: pass the group whose "
        "ranks are meant, such as moeos.init(group=torch.distributed.group.WORLD)"
    )


def _join(
    group: ProcessGroup | DeviceMesh | None,
    rank: int | None,
    size: int | None,
    store: Store | None,
    deadline: float,
    device: torch.device | None,
) -> ControlPlane:
    """The control plane among the ranks of a group or of a store."""
    if group is not None:
        given = {"rank": rank, "size": size, "store": store}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {value!r}, but group is given too, which tells it: leave {name} out"
                )
        member = membership(group)
        if member.size == 1:
            return SoloControl()
        device = device or member.group.bound_device_id
        meeting = meet(member, deadline, device)
        known = remembered(member.group)
        job = () if known is None else known.ranks
        return _over(meeting, member.rank, member.size, deadline, job)
    rank, size = _check_place(rank, size, store)
    if size == 1:
        return SoloControl()
    assert store is not None
    meeting = Meeting(store, f"the store that is given, {type(store).__name__}", serves=False)
    return _over(meeting, rank, size, deadline)


def _check_place(rank: int | None, size: int | None, store: Store | None) -> tuple[int, int]:
    """Raises `TypeError` or `ValueError` unless all three define a rank's place."""
    from torch.distributed import Store  # type: ignore[attr-defined]

    for name, value in (("rank", rank), ("size", size), ("store", store)):
        if value is None:
            raise ValueError(
                f"{name} is None; rank, size and store are given together, or none of them"
            )
    if not isinstance(store, Store):
        raise TypeError(
            f"store is {store!r}; it must be a store of torch.distributed, such as a TCPStore"
        )
    for name, number in (("rank", rank), ("size", size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} is {number!r}; it must be an integer")
    assert rank is not None
    assert size is not None
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"size is {size}; allowed: 1 to {MAX_RANKS}")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; allowed with size {size}: 0 to {size - 1}")
    return rank, size


def _over(
    meeting: Meeting, rank: int, size: int, deadline: float, job: tuple[int, ...] = ()
) -> StoreControl:
    return StoreControl(
        rank, size, deadline, meeting.store, where=meeting.where, serves=meeting.serves, job=job
    )


def choose_backend(backend: str) -> Backend:
    """The backend that a name means on this machine: "auto" is the GPU where there is a Hopper.

    Raises `ValueError` for an unknown name. Whether the GPU can really be used, the engine finds
    out when a layer is made.
    """
    if backend not in BACKENDS:
        nearest = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        allowed = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend is {backend!r}; allowed: {allowed}{hint}")
    if backend == "twin" or (backend == "auto" and not _sees_hopper()):
        return "twin"
    return "cuda"


def _sees_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


_TWIN = 'use backend="twin" (on the command line --backend twin)'


def require_gpu() -> None:
    """Raises `RuntimeError` if PyTorch sees no GPU on this host."""
    if torch.cuda.device_count() == 0:
        raise RuntimeError(f'backend is "cuda", and PyTorch sees no GPU on this host: {_TWIN}')


def _choose_device(environment: Mapping[str, str]) -> None:
    """Makes the GPU of this process's place on its host the current one.

    Raises `RuntimeError` if the host has fewer GPUs than ranks.
    """
    require_gpu()
    place = place_on_host(environment)
    count = torch.cuda.device_count()
    if place >= count:
        raise RuntimeError(
            f"local rank {place} needs a GPU of its own and this host has {count}; "
            f"start fewer ranks, or {_TWIN}"
        )
    torch.cuda.set_device(place)


def _connect(launch: Launch, deadline: float) -> ControlPlane:
    """The control plane among the ranks that a launcher has started."""
    rank, size = launch.rank, launch.size
    if size == 1:
        return SoloControl()
    if launch.host:
        assert rank is not None
        assert size is not None
        meeting = at_address(
            rank, size, deadline, host=launch.host, port=launch.port, serve=launch.serve
        )
    elif not can_ask_mpi():
        raise ValueError(_no_address(launch))
    elif launch.job and launch.here == size and rank is not None and size is not None:
        meeting = on_this_host(rank, size, deadline, job=launch.job)  # MPI need not be started
    else:
        rank, size, meeting = _ask_mpi(launch, deadline)
        if size == 1:
            return SoloControl()
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"moeos/{launch.job}", meeting.store)
    return _over(meeting._replace(store=store), rank, size, deadline)


def _ask_mpi(launch: Launch, deadline: float) -> tuple[int, int, Meeting]:
    rank, size, meeting = by_mpi(deadline)
    if launch.size not in (None, size):
        raise RuntimeError(
            f"the launcher started {launch.size} ranks, but mpi4py's MPI sees {size}: it is "
            "another MPI than the launcher's. Use the mpirun that lies beside this Python, or set "
            "MASTER_ADDR to the address of rank 0's host"
        )
    return rank, size, meeting


def _no_address(launch: Launch) -> str:
    install = "or install mpi4py, with which it is needless: pip install 'moeos[mpi]'"
    if launch.size is None:
        return (
            "PMIX_RANK is set, so a launcher has started this process, but no variable tells how "
            "many ranks there are: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each, "
            f"{install}"
        )
    return (
        f"MASTER_ADDR is not set, mpirun has started {launch.size} ranks, and mpi4py is not "
        "installed: set it to the address of rank 0's host on all ranks, as by mpirun -x "
        f"MASTER_ADDR=..., {install}"
    )


def _require_one_host(control: ControlPlane) -> None:
    """Raises `RuntimeError`, the same on all ranks, unless all are on one host."""
    hosts = control.allgather((socket.gethostname(), boot()), "the names of the ranks' hosts")
    if len(set(hosts)) > 1:
        where = "; ".join(
            f"{name_ranks(r for r in range(control.size) if hosts[r] == host)} on {host[0]}"
            for host in dict.fromkeys(hosts)
        )
        raise RuntimeError(f"all ranks of the twin must be on one host, but there are {where}")
