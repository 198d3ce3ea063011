# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM: memory that all ranks of a world have, and puts to GPUs that this one cannot address.

The only file that calls NVSHMEM, which starts once in a process and with one set of processes, so
it serves one world at a time. Must not depend on what lies in the memory.
"""

from __future__ import annotations

import importlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeos.compile.jit import INSTALL
from moeos.system.errors import ConfigMismatch, PeerTimeout
from moeos.system.place import boot
from moeos.world.control import ControlPlane, agree
from moeos.world.world import World

_PROBE_BYTES = 128
_PAUSE = 1e-3  # seconds between two looks at whether puts have arrived

_kept: list[Tensor] = []  # cannot be freed, because a peer is gone


class _Running:
    """NVSHMEM as it runs in this process.

    Attributes:
        processes: that it runs with, in the order of their ranks.
        world: that it serves.
    """

    def __init__(self, processes: Sequence[object], world: World) -> None:
        self.processes = list(processes)
        self.world = weakref.ref(world)

    def refuses(self, processes: Sequence[object], world: World) -> str:
        """Why it cannot serve a world of these processes; "" if it can."""
        served = self.world()
        open_one = served is not None and served is not world and not served.closed
        if not open_one and list(processes) == self.processes:
            return ""
        here = f"rank {self.processes.index(_process())} of {len(self.processes)}"
        state = "an open world" if open_one else "a world of other processes"
        return (
            "NVSHMEM, by which remote peers are reached, starts once in a process and serves one "
            f"world, and this process is {here} of {state} already: make the layers in that world, "
            "or run this one in processes of its own"
        )


_running: _Running | None = None


def serve(world: World, device: torch.device, why: str) -> None:
    """Makes NVSHMEM serve a world; starts it, if it does not run. Collective.

    It is never ended, which would wait for all ranks; it ends with the process. `why`: it is
    needed, for the error that says that it is missing.

    Raises `RuntimeError`, on all ranks, if it is missing, cannot be started, or serves another
    world on some rank.
    """
    global _running
    control = world.control
    processes = control.allgather(_process(), "the processes of a world")

    def look() -> bool:
        why_not = "" if _running is None else _running.refuses(processes, world)
        if why_not:
            raise RuntimeError(why_not)
        try:
            _core()
        except RuntimeError as error:
            raise RuntimeError(f"{error} ({why})") from error
        return _running is not None

    # It runs on all of these ranks or on none: where it runs with others it refuses.
    if not agree(control, look, "a world with remote peers"):
        _start(control, device)
    _running = _Running(processes, world)


def allocate(size: int) -> Tensor:
    """uint8 [size] of anything on every rank. Collective."""
    memory: Tensor = _core().tensor((size,), dtype=torch.uint8, except_on_del=False)
    return memory


def peers_memory(own: Tensor, size: int) -> list[Tensor | None]:
    """[P] what `allocate` has made on each of `size` ranks; None where no address leads to it."""
    return [
        _core().get_peer_tensor(own, peer) if _addresses(own, peer) else None
        for peer in range(size)
    ]


def mapped_peers(control: ControlPlane) -> list[bool]:
    """[P] whether this GPU can address the rank's memory. Collective."""

    def look() -> list[bool]:
        probe = allocate(_PROBE_BYTES)
        found = [_addresses(probe, peer) for peer in range(control.size)]
        _core().free_tensor(probe)
        return found

    return agree(control, look, "looking for the peers whose memory is addressed")


def free(own: Tensor, control: ControlPlane) -> None:
    """Gives memory back, together with the peers; this process keeps it if one is gone."""
    try:
        control.barrier("the end of a heap")
    except (PeerTimeout, ConfigMismatch, RuntimeError):
        _kept.append(own)
    else:
        _core().free_tensor(own)


def put(address: int, size: int, peer: int) -> None:
    """Copies bytes of this rank's memory to the same place in a peer's, on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    _bindings().putmem_on_stream(address, address, size, peer, stream)


def finish_puts(rank: int, deadline: float) -> None:
    """Returns when all that this rank's kernels have put by NVSHMEM so far has arrived.

    Raises `PeerTimeout` if that takes longer than `deadline` seconds.
    """
    stream = torch.cuda.current_stream()
    _bindings().quiet_on_stream(stream.cuda_stream)
    arrived = stream.record_event()
    ends = time.monotonic() + deadline
    while not arrived.query():
        if time.monotonic() > ends:
            raise PeerTimeout(
                f"rank {rank} waited {deadline:g} s for its puts to arrive: a peer or the network "
                "between them is gone. Stop all ranks"
            )
        time.sleep(_PAUSE)


def fill_in_state(library: int) -> None:
    """Makes NVSHMEM, which is running, fill in its state in a loaded kernel that puts by it."""
    _bindings().culibrary_init(library)


def forget_state(library: int) -> None:
    """Undoes `fill_in_state`, before the kernel is unloaded."""
    _bindings().culibrary_finalize(library)


def _start(control: ControlPlane, device: torch.device) -> None:
    # It would set NVLink multicast up, which nothing here uses.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    # Puts are compiled into the kernel, and are those of the proxy (nvshmem_transport.hpp).
    os.environ.setdefault("NVSHMEM_IB_ENABLE_IBGDA", "0")
    first = control.rank == 0
    identity = agree(control, lambda: _core().get_unique_id(empty=not first), "NVSHMEM")
    numpy = importlib.import_module("numpy")
    words = identity._data.view(numpy.uint8)
    words[:] = numpy.frombuffer(
        control.allgather(words.tobytes(), "NVSHMEM's identity")[0], dtype=numpy.uint8
    )

    def start() -> None:
        _core().init(
            device=_device_of(device),
            uid=identity,
            rank=control.rank,
            nranks=control.size,
            initializer_method="uid",
        )

    agree(control, start, "starting NVSHMEM")


def _device_of(device: torch.device) -> Any:
    made = importlib.import_module("cuda.core").Device(device.index)
    made.set_current()
    return made


def _process() -> tuple[str, int]:
    return boot(), os.getpid()


def _addresses(memory: Tensor, peer: int) -> bool:
    return bool(_bindings().ptr(memory.data_ptr(), peer) != 0)


def _bindings() -> Any:
    return importlib.import_module("nvshmem.bindings")


def _core() -> Any:
    try:
        return importlib.import_module("nvshmem.core")
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"NVSHMEM, which reaches the GPUs of remote peers, is missing ({error}): {INSTALL}"
        ) from error
