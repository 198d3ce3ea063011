"""Finds out how this process was started, and makes its world.

The only file that reads launchers' environment variables. It knows nothing of layers or heaps.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from moeos.control import (
    ControlPlane,
    MpiControl,
    SoloControl,
    StoreControl,
    name_ranks,
    require_equal,
)
from moeos.faults import FaultPlan, plan_of
from moeos.world import (
    Backend,
    TwinOptions,
    World,
    check_deadline,
    check_ranks_per_node,
    check_trace_events,
)

BACKENDS = ("auto", "twin", "cuda")
"""What `init` and `virtual.run` take as a backend."""

DEFAULT_TWIN = TwinOptions()

_MAX_DIGITS = 20  # of a variable: Python refuses to read thousands, in words of its own
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports that Linux hands out by itself


def init(
    backend: str = "auto",
    *,
    deadline: float = 30.0,
    twin: TwinOptions = DEFAULT_TWIN,
    ranks_per_node: int | None = None,
    trace_events: int = 0,
    faults: FaultPlan | None = None,
) -> World:
    """This process's world. Collective over all processes that the launcher started.

    mpirun, torchrun and srun are recognised by the environment that they set; without one of them
    the world has one rank. With mpirun, MPI itself first waits for every process to start MPI.

    Args:
        backend: "twin" (CPU threads), "cuda", or "auto": the GPU where one can be used, or the
            twin.
        deadline: seconds after which a wait for another rank raises `PeerTimeout`, here and in
            every call.
        twin: how the twin uses this machine.
        ranks_per_node: None finds out which peers' memory can be written directly. A number makes
            nodes of so many consecutive ranks, and reaches ranks of other nodes by puts even where
            there is a direct way, on the twin and on the GPU: 1 for all peers. It is there to test
            that path on one host; it changes no result.
        trace_events: events that each actor notes of a call, at most, for `MoELayer.trace`; 0 notes
            none, and compiles nothing of it into the kernel. A part of a task is an event.
        faults: what is to go wrong, for tests (`moeos.faults`); None for what the file says that
            the environment variable MOEOS_FAULTS names, or for nothing.

    Raises:
        ValueError, TypeError: an argument, what the launcher set or a fault plan is not allowed.
        OSError: the fault plan cannot be read.
        ConfigMismatch: the ranks run different versions or backends, or differ in ranks_per_node.
        RuntimeError: a host has fewer GPUs than ranks, or the twin's ranks are on several hosts.
        PeerTimeout: a rank did not call it before the deadline.
    """
    chosen = choose_backend(backend)
    check_deadline(deadline)
    check_ranks_per_node(ranks_per_node)
    check_trace_events(trace_events)
    if not isinstance(twin, TwinOptions):
        raise TypeError(f"twin is {twin!r}; it must be a moeos.TwinOptions")
    plan = plan_of(faults)
    control = _connect(detect(os.environ), deadline)
    try:
        if plan is not None:
            plan.check_ranks(control.size, processes=True)
        version = importlib.metadata.version("moeos")
        same = (version, chosen, ranks_per_node)
        require_equal(control, same, "the version of moeos, its backend and ranks_per_node")
        if chosen == "cuda":
            _choose_device(os.environ)
        else:
            _require_one_host(control)
        return World(
            control,
            backend=chosen,
            deadline=deadline,
            twin=twin,
            ranks_per_node=ranks_per_node,
            trace_events=trace_events,
            faults=plan,
        )
    except BaseException as error:
        control.abort(f"{type(error).__name__}: {error}")
        control.close()
        raise


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


def _choose_device(environment: Mapping[str, str]) -> None:
    """Makes the GPU of this process's place on its host the current one.

    Raises `RuntimeError` if the host has fewer GPUs than ranks.
    """
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    place = next((int(environment[name]) for name in names if name in environment), 0)
    count = torch.cuda.device_count()
    if place >= count:
        raise RuntimeError(
            f"local rank {place} needs a GPU of its own and this host has {count}; "
            'start fewer ranks, or use backend="twin"'
        )
    torch.cuda.set_device(place)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: "mpirun" (also srun with PMIx), "torchrun", "srun" (without PMIx), or "none".
        rank, size: as the launcher says; None where only MPI knows.
        host, port: of the store, for torchrun and srun.
        serve: whether this rank holds that store.
    """

    launcher: Literal["mpirun", "torchrun", "srun", "none"]
    rank: int | None = 0
    size: int | None = 1
    host: str = ""
    port: int = 0
    serve: bool = False


def detect(environment: Mapping[str, str]) -> Launch:
    """How a process with this environment was started; the innermost launcher decides.

    Raises `ValueError` naming the variable that is missing or not a number in its range, and for a
    batch script of Slurm that starts one process where its job has several tasks.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return _detect_torchrun(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        rank, size = _rank_and_size(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        return Launch("mpirun", rank, size)
    if "PMI_SIZE" in environment:
        return Launch("mpirun", *_rank_and_size(environment, "PMI_RANK", "PMI_SIZE"))
    if "PMIX_RANK" in environment:
        return Launch("mpirun", None, None)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _detect_torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _detect_srun(environment)
    _require_no_batch_script(environment)
    return Launch("none")


def _detect_torchrun(environment: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environment, "RANK", "WORLD_SIZE")
    host = environment.get("MASTER_ADDR")
    if not host:
        raise ValueError("RANK and WORLD_SIZE are set, so MASTER_ADDR must be: start with torchrun")
    port = _integer(environment, "MASTER_PORT", 1, 65_535)
    serve = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Launch("torchrun", rank, size, host, port, serve)


def _detect_srun(environment: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or _first_host(nodes) or "localhost"
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65_535)
    else:
        job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        digits = int(re.sub(r"\D", "", job + step) or "0")
        port = _FIRST_PORT + digits % _PORTS
    return Launch("srun", rank, size, host, port, serve=rank == 0)


def _require_no_batch_script(environment: Mapping[str, str]) -> None:
    """Raises `ValueError` in a batch script's own process, if its job has several tasks.

    Slurm gives the script the place of task 0 and the number of tasks; srun alone starts them, and
    says so by SLURM_STEP_NUM_TASKS.
    """
    place, tasks = (environment.get(name, "") for name in ("SLURM_PROCID", "SLURM_NTASKS"))
    if place and tasks not in ("", "1"):
        raise ValueError(
            f"SLURM_PROCID is {place!r} and SLURM_NTASKS is {tasks!r}, but srun has not started "
            "this process, so no other task runs: start it with srun, or with srun --ntasks=1 for "
            "one rank"
        )


def _first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: "gpu[03-07,9],x" gives "gpu03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def _rank_and_size(environment: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    ranks = _integer(environment, size, 1, 1 << 20)
    return _integer(environment, rank, 0, ranks - 1), ranks


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment.get(name, "")
    digits = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not digits or not low <= int(text) <= high:
        given = f"is {text!r}" if name in environment else "is not set"
        raise ValueError(f"the environment variable {name} {given}; allowed: {low} to {high}")
    return int(text)


def _connect(launch: Launch, deadline: float) -> ControlPlane:
    if launch.size == 1:
        return SoloControl()
    if launch.launcher != "mpirun":
        assert launch.rank is not None
        assert launch.size is not None
        return StoreControl(
            launch.rank,
            launch.size,
            deadline,
            host=launch.host,
            port=launch.port,
            serve=launch.serve,
        )
    control = MpiControl(deadline)
    if launch.size not in (None, control.size):
        raise RuntimeError(
            f"the launcher started {launch.size} ranks, but mpi4py's MPI sees {control.size}: it "
            "is another MPI than the launcher's. Use the mpirun that lies beside this Python"
        )
    return control


def _require_one_host(control: ControlPlane) -> None:
    """Raises `RuntimeError`, the same on all ranks, unless all are on one host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    hosts = control.allgather((socket.gethostname(), boot), "the names of the ranks' hosts")
    if len(set(hosts)) > 1:
        where = "; ".join(
            f"{name_ranks(r for r in range(control.size) if hosts[r] == host)} on {host[0]}"
            for host in dict.fromkeys(hosts)
        )
        raise RuntimeError(f"all ranks of the twin must be on one host, but there are {where}")
