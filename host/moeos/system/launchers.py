# SPDX-License-Identifier: Apache-2.0
"""How this process was started: what a launcher's environment variables say.

The only file that reads them. Must not depend on worlds, nor on how ranks meet.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Literal

MAX_RANKS = 1 << 20

_MAX_DIGITS = 20  # a variable has no more: Python refuses thousands, in words of its own
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports that Linux hands out by itself
_JOBS_OF_MPIRUN = ("PMIX_NAMESPACE", "PMI_JOBID")
_RANKS_HERE_OF_MPIRUN = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_PLACES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: "mpirun", "torchrun", "srun", or "none".
        rank, size: as the launcher says; None where only MPI knows.
        host, port: of the store; no host where the ranks meet otherwise.
        serve: whether this rank holds the store at that address.
        job: distinguishes the ranks of this start from others at the same store or host.
        here: how many of the ranks are on this host, where the launcher says so.
    """

    launcher: Literal["mpirun", "torchrun", "srun", "none"]
    rank: int | None = 0
    size: int | None = 1
    host: str = ""
    port: int = 0
    serve: bool = False
    job: str = ""
    here: int | None = None


def detect(environment: Mapping[str, str]) -> Launch:
    """How a process with this environment was started; the innermost launcher decides.

    Raises `ValueError` as `of_launcher` does, and where no launcher says that this is one rank
    alone: for a batch script of Slurm that starts one process where its job has several tasks, and
    for one of torchrun's two numbers without the other.
    """
    launch = of_launcher(environment)
    if launch.launcher == "none":
        _require_no_batch_script(environment)
        _require_no_half(environment)
    return launch


def of_launcher(environment: Mapping[str, str]) -> Launch:
    """What the innermost launcher says, if there is one.

    Raises `ValueError` naming the variable that is missing or not a number in its range.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return _detect_torchrun(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _detect_mpirun(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if _is_a_task_of_srun(environment):
        return _detect_srun(environment)
    if "PMI_SIZE" in environment:
        return _detect_mpirun(environment, "PMI_RANK", "PMI_SIZE")
    if "PMIX_RANK" in environment:
        return Launch("mpirun", None, None)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _detect_torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _detect_srun(environment)
    return Launch("none")


def _is_a_task_of_srun(environment: Mapping[str, str]) -> bool:
    """Whether PMI or PMIx is Slurm's own, and not that of a launcher that srun has started."""
    place, tasks = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    if place is None or tasks is None:
        return False
    by_pmi = (environment.get("PMI_RANK"), environment.get("PMI_SIZE")) == (place, tasks)
    return by_pmi or environment.get("PMIX_RANK") == place


def _detect_mpirun(environment: Mapping[str, str], rank_name: str, size_name: str) -> Launch:
    rank, size = _rank_and_size(environment, rank_name, size_name)
    job = next((environment[name] for name in _JOBS_OF_MPIRUN if environment.get(name)), "")
    here = None
    for name in _RANKS_HERE_OF_MPIRUN:
        if name in environment:
            here = _integer(environment, name, 1, size)
            break
    host = environment.get("MASTER_ADDR", "")
    if not host:
        return Launch("mpirun", rank, size, job=job, here=here)
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65_535)
    return Launch("mpirun", rank, size, host, port, serve=rank == 0, job=job, here=here)


def _detect_torchrun(environment: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environment, "RANK", "WORLD_SIZE")
    host = environment.get("MASTER_ADDR")
    if not host:
        raise ValueError(
            "RANK and WORLD_SIZE are set, so MASTER_ADDR must be: start with torchrun, or pass "
            "moeos.init a process group (group=torch.distributed.group.WORLD)"
        )
    port = _integer(environment, "MASTER_PORT", 1, 65_535)
    serve = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch("torchrun", rank, size, host, port, serve, job=f"restart {restarts}")


def _detect_srun(environment: Mapping[str, str]) -> Launch:
    rank, size = _rank_and_size(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or _first_host(nodes) or "localhost"
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65_535)
    else:
        digits = int(re.sub(r"\D", "", job + step) or "0")
        port = _FIRST_PORT + digits % _PORTS
    return Launch("srun", rank, size, host, port, serve=rank == 0, job=f"{job}.{step}")


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


def _require_no_half(environment: Mapping[str, str]) -> None:
    """Raises `ValueError` for one of torchrun's two numbers that is no world's of one rank."""
    for name, other, of_one in (("WORLD_SIZE", "RANK", "1"), ("RANK", "WORLD_SIZE", "0")):
        found = environment.get(name, "")
        if found not in ("", of_one):
            raise ValueError(
                f"{name} is {found!r} and {other} is not set, so no launcher says which rank of a "
                f"world this is: start with torchrun, set {other}, or unset {name} for one rank"
            )


def _first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: "gpu[03-07,9],x" gives "gpu03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def _rank_and_size(environment: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    ranks = _integer(environment, size, 1, MAX_RANKS)
    return _integer(environment, rank, 0, ranks - 1), ranks


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment.get(name, "")
    digits = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not digits or not low <= int(text) <= high:
        given = f"is {text!r}" if name in environment else "is not set"
        raise ValueError(f"the environment variable {name} {given}; allowed: {low} to {high}")
    return int(text)


def place_on_host(environment: Mapping[str, str]) -> int:
    """Which of its host's ranks this process is, from 0 on; 0 where no launcher says it."""
    return next((int(environment[name]) for name in _PLACES if name in environment), 0)
