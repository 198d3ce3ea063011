"""The symmetric heap on GPUs: memory of equal size on every rank, which all ranks' GPUs address.

Of one rank, and of virtual ranks on one GPU, it is plain device memory; between processes it is
NVSHMEM's, and a peer whose memory this GPU cannot address is reached by NVSHMEM's puts. This file
knows nothing of what lies in a heap.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moeos import cuda_driver
from moeos.control import ControlPlane, raise_together, require_equal
from moeos.errors import PeerTimeout
from moeos.jit import INSTALL

Value = TypeVar("Value")

_PROBE_BYTES = 128
_PAUSE = 1e-3  # seconds between two looks at whether puts have arrived

_started: tuple[int, int] | None = None  # the rank and the size that NVSHMEM runs with
_unreachable: list[
    Sequence[Tensor | None]
] = []  # heaps that cannot be freed, because a peer is gone


class DeviceHeap:
    """One rank's view of the heaps of all ranks. Collective to make, with one size on all ranks.

    Attributes:
        size: bytes of each rank's heap.
        symmetric: whether it is NVSHMEM's.
        heaps: uint8 [size] for each rank, in rank order, as this rank's GPU addresses them; None
            for a rank whose memory it cannot. The memory starts as zeros.
        own: this rank's.
        put_addresses: [P] what a put to each rank's heap goes to.

    Raises:
        ConfigMismatch: ranks ask for different sizes.
        RuntimeError: NVSHMEM is missing, or there is no memory; on all ranks.
        PeerTimeout: a rank did not take part.
    """

    def __init__(self, control: ControlPlane, size: int, device: torch.device) -> None:
        require_equal(control, size, "the size of a heap")
        self.size = size
        self.symmetric = not control.shares_memory
        self._control = control
        self.heaps: list[Tensor | None]
        if self.symmetric:
            _start_nvshmem(control, device)

        def allocate() -> Tensor:
            if self.symmetric:
                memory: Tensor = _nvshmem().tensor((size,), dtype=torch.uint8, except_on_del=False)
            else:
                memory = torch.empty(size, dtype=torch.uint8, device=device)
            memory.zero_()
            torch.cuda.synchronize(device)
            return memory

        self.own = _agree(control, allocate, f"allocating a heap of {size} bytes")
        if self.symmetric:
            self.heaps = _agree(control, self._map_peers, "mapping the peers' heaps")
        else:
            self.heaps = [*control.allgather(self.own, "the addresses of a heap")]
        # NVSHMEM's puts go by the address of this rank's own copy.
        self.put_addresses = [
            self.own.data_ptr() if self.symmetric or memory is None else memory.data_ptr()
            for memory in self.heaps
        ]

    def of(self, peer: int) -> Tensor:
        """A rank's heap. Raises `RuntimeError` if this rank's GPU cannot address it."""
        memory = self.heaps[peer]
        if memory is None:
            raise RuntimeError(
                f"rank {self._control.rank} cannot address the GPU memory of rank {peer}; their "
                "GPUs must be in one host and have peer access, as over NVLink"
            )
        return memory

    def put(self, peer: int, at: int, size: int) -> None:
        """Copies bytes of this rank's heap to the same place in a peer's, on the current stream."""
        memory = self.heaps[peer]
        if memory is not None:
            memory[at : at + size].copy_(self.own[at : at + size], non_blocking=True)
        else:
            address = self.own.data_ptr() + at
            stream = torch.cuda.current_stream().cuda_stream
            _bindings().putmem_on_stream(address, address, size, peer, stream)

    def close(self) -> None:
        """Gives the memory back; idempotent. No kernel may use it any more.

        Between processes it waits for the peers to close theirs, up to the control plane's
        deadline; if one is gone, this process keeps the memory until it ends.
        """
        heaps, self.heaps = self.heaps, []
        if not heaps or not self.symmetric:
            return
        try:
            self._control.barrier()
        except (PeerTimeout, RuntimeError):
            _unreachable.append(heaps)
        else:
            _nvshmem().free_tensor(self.own)

    def _map_peers(self) -> list[Tensor | None]:
        return [
            _nvshmem().get_peer_tensor(self.own, peer) if _addresses(self.own, peer) else None
            for peer in range(self._control.size)
        ]


def addressable_peers(control: ControlPlane, device: torch.device) -> list[bool]:
    """[P] whose memory of a heap this rank's GPU will address by itself. Collective.

    NVSHMEM maps the memory of every GPU with peer access, over PCIe as well. There a credit, which
    several blocks add to, would lose some: such a peer is remote. A GPU that this process may not
    see cannot be asked about, and is taken for one on NVLink.

    Raises `RuntimeError`, on all ranks, if NVSHMEM is missing or cannot be started.
    """
    if control.shares_memory or control.size == 1:
        return [True] * control.size
    _start_nvshmem(control, device)

    def look() -> list[bool]:
        probe = _nvshmem().tensor((_PROBE_BYTES,), dtype=torch.uint8, except_on_del=False)
        found = [_addresses(probe, peer) for peer in range(control.size)]
        _nvshmem().free_tensor(probe)
        return found

    identity = _agree(control, lambda: _uuid_of(device), "the name of a GPU")
    identities = control.allgather(identity, "the names of the ranks' GPUs")
    mapped = _agree(control, look, "looking for the peers whose memory is addressed")

    def ask() -> list[bool]:
        gpus = cuda_driver.visible_gpus()
        return [
            found and _may_add(gpus, identity, other)
            for found, other in zip(mapped, identities, strict=True)
        ]

    return _agree(control, ask, "asking for atomics between GPUs")


def fill_in_state(library: int) -> None:
    """Has NVSHMEM, which is running, fill in its state in a loaded kernel that puts by it."""
    _bindings().culibrary_init(library)


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


def forget_state(library: int) -> None:
    """Undoes `fill_in_state`, before the kernel is unloaded."""
    _bindings().culibrary_finalize(library)


def _uuid_of(device: torch.device) -> str:
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).hex


def _may_add(gpus: Mapping[str, Any], mine: str, peer: str) -> bool:
    """Whether a GPU's atomics on a peer's memory are atomic, as far as `gpus` tell."""
    if peer == mine or peer not in gpus or mine not in gpus:
        return True
    return cuda_driver.has_atomics(gpus[mine], gpus[peer])


def _addresses(memory: Tensor, peer: int) -> bool:
    return bool(_bindings().ptr(memory.data_ptr(), peer) != 0)


def _bindings() -> Any:
    return importlib.import_module("nvshmem.bindings")


def _nvshmem() -> Any:
    try:
        return importlib.import_module("nvshmem.core")
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"NVSHMEM, by which GPUs of several processes share memory, is missing ({error}): "
            f"{INSTALL}"
        ) from error


def _start_nvshmem(control: ControlPlane, device: torch.device) -> None:
    """Starts NVSHMEM with the ranks of `control`, once in a process. Collective.

    It is never ended, which would wait for all ranks; it ends with the process.
    """
    global _started
    ranks = (control.rank, control.size)
    if _started is not None:
        if _started != ranks:
            raise RuntimeError(
                f"this process runs NVSHMEM as rank {_started[0]} of {_started[1]} and cannot "
                f"become rank {ranks[0]} of {ranks[1]}"
            )
        return
    # It would set NVLink multicast up, which nothing here uses.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    # Puts are compiled into the kernel, and are those of the proxy (nvshmem_transport.hpp).
    os.environ.setdefault("NVSHMEM_IB_ENABLE_IBGDA", "0")
    first = control.rank == 0
    identity = _agree(control, lambda: _nvshmem().get_unique_id(empty=not first), "NVSHMEM")
    numpy = importlib.import_module("numpy")
    words = identity._data.view(numpy.uint8)
    words[:] = numpy.frombuffer(
        control.allgather(words.tobytes(), "NVSHMEM's identity")[0], dtype=numpy.uint8
    )

    def start() -> None:
        made = importlib.import_module("cuda.core").Device(device.index)
        made.set_current()
        _nvshmem().init(
            device=made,
            uid=identity,
            rank=control.rank,
            nranks=control.size,
            initializer_method="uid",
        )

    _agree(control, start, "starting NVSHMEM")
    _started = ranks


def _agree(control: ControlPlane, do: Callable[[], Value], what: str) -> Value:
    """What `do()` returns here, if it returns on all ranks; else its error, on all ranks."""
    error: Exception | None = None
    value: Value | None = None
    try:
        value = do()
    except Exception as raised:  # NVSHMEM and CUDA have types of their own
        error = RuntimeError(f"rank {control.rank}, {what}: {raised}")
    raise_together(control, error, what)
    return value  # type: ignore[return-value]
