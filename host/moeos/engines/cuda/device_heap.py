# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap on GPUs: memory of equal size on every rank, which all ranks' GPUs address.

For one rank, and for virtual ranks on one GPU, it is plain device memory. Between processes of one
host it is memory that they share through CUDA, and where there are remote peers NVSHMEM's, whose
puts reach them. Must not depend on what lies in a heap.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import abc
from typing import Any

import torch
from torch import Tensor

from moeos.engines.cuda import device_memory, nvshmem_heap
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.device_memory import Mapping
from moeos.system.errors import PeerTimeout
from moeos.world import descriptors
from moeos.world.control import ControlPlane, agree, require_equal

_PROBE_BYTES = 1
_NO_ATOMICS = "there are no atomics between the GPUs, which are joined by PCIe"


class DeviceHeap:
    """One rank's view of the heaps of all ranks. Collective to make, with one size on all ranks.

    Attributes:
        size: bytes of each rank's heap.
        symmetric: whether it is NVSHMEM's.
        heaps: uint8 [size] for each rank, in rank order, as this rank's GPU addresses them; None
            for a rank whose memory it cannot. The memory starts as zeros.
        own: this rank's.
        put_addresses: [P] the address that a put to each rank's heap goes to.

    Raises:
        ConfigMismatch: ranks ask for different sizes.
        RuntimeError: there is no memory, or without NVSHMEM a GPU cannot address a peer's; on all
            ranks.
        PeerTimeout: a rank did not take part.
    """

    def __init__(
        self, control: ControlPlane, size: int, device: torch.device, *, by_nvshmem: bool = False
    ) -> None:
        require_equal(control, size, "the size of a heap")
        self.size = size
        self.symmetric = by_nvshmem
        self._control = control
        self._device = device
        self._mappings: list[Mapping] = []
        self.heaps: list[Tensor | None]
        if control.shares_memory:
            self.heaps = [*control.allgather(self._plain(), "the addresses of a heap")]
        elif by_nvshmem:
            self.heaps = self._of_nvshmem()
        else:
            self.heaps = self._shared()
        own = self.heaps[control.rank]
        assert own is not None  # each GPU addresses its own memory
        self.own = own
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
            nvshmem_heap.put(self.own.data_ptr() + at, size, peer)

    def close(self) -> None:
        """Gives the memory back; idempotent. No kernel of this rank may use it any more.

        A peer's kernel may use memory of this rank that is shared through CUDA: it stays until the
        peer has closed its heap, too. NVSHMEM waits for the peers to close theirs, up to the
        control plane's deadline; if one is gone, this process keeps the memory until it ends.
        """
        heaps, self.heaps = self.heaps, []
        if not heaps:
            return
        if self.symmetric:
            nvshmem_heap.free(self.own, self._control)
        _unmap(self._mappings)

    def _plain(self) -> Tensor:
        return agree(
            self._control,
            lambda: self._zeroed(torch.empty(self.size, dtype=torch.uint8, device=self._device)),
            self._allocating,
        )

    def _of_nvshmem(self) -> list[Tensor | None]:
        def allocate() -> Tensor:
            return self._zeroed(nvshmem_heap.allocate(self.size))

        own = agree(self._control, allocate, self._allocating)
        return agree(
            self._control,
            lambda: nvshmem_heap.peers_memory(own, self._control.size),
            "mapping the peers' heaps",
        )

    def _shared(self) -> list[Tensor | None]:
        found = _map_all(self._control, self.size, self._device, self._allocating)
        self._mappings = [one for one in found if isinstance(one, Mapping)]

        def tensors() -> list[Tensor | None]:
            heaps: list[Tensor | None] = []
            for peer, mapping in enumerate(found):
                if isinstance(mapping, str):
                    raise RuntimeError(f"the memory of rank {peer}: {mapping}")
                heaps.append(mapping.tensor(self.size))
            self._zeroed(heaps[self._control.rank])
            return heaps

        try:
            return agree(self._control, tensors, "mapping the peers' heaps")
        except BaseException:
            _unmap(self._mappings)
            raise

    @property
    def _allocating(self) -> str:
        return f"allocating a heap of {self.size} bytes"

    def _zeroed(self, memory: Tensor | None) -> Tensor:
        assert memory is not None
        memory.zero_()
        _synchronize(self._device)
        return memory


def shareable_peers(control: ControlPlane, device: torch.device) -> list[str]:
    """[P] why this rank's GPU cannot address a rank's heap that is shared through CUDA; "" where it
    can. Collective.

    CUDA maps the memory of every GPU with peer access, over PCIe as well. There a credit, which
    several blocks add to, would lose some: such a peer is remote. A GPU that this process may not
    see cannot be asked about, and is taken for one on NVLink.
    """
    if control.shares_memory or control.size == 1:
        return [""] * control.size
    try:
        found = _map_all(control, _PROBE_BYTES, device, "sharing memory of a GPU")
    except PeerTimeout:
        raise
    except RuntimeError as error:  # all ranks raise it alike
        return ["" if peer == control.rank else str(error) for peer in range(control.size)]
    _unmap([one for one in found if isinstance(one, Mapping)])
    atomic = peers_with_atomics(control, device)
    return [
        mapping if isinstance(mapping, str) else ("" if adds else _NO_ATOMICS)
        for mapping, adds in zip(found, atomic, strict=True)
    ]


def peers_with_atomics(control: ControlPlane, device: torch.device) -> list[bool]:
    """[P] whether this GPU's atomics on a rank's memory are atomic, by the driver. Collective.

    Raises `RuntimeError`, on all ranks, if the driver does not answer.
    """
    identity = agree(control, lambda: _uuid_of(device), "the name of a GPU")
    identities = control.allgather(identity, "the names of the ranks' GPUs")

    def look() -> list[bool]:
        gpus = cuda_driver.visible_gpus()
        return [_may_add(gpus, identity, other) for other in identities]

    return agree(control, look, "asking for atomics between GPUs")


def _map_all(
    control: ControlPlane, size: int, device: torch.device, what: str
) -> list[Mapping | str]:
    """[P] memory of each rank as this rank's GPU sees it, or why it does not. Collective.

    Raises `RuntimeError`, on all ranks, if a rank cannot make or offer its own.
    """
    with contextlib.ExitStack() as made:

        def make() -> tuple[Mapping, int]:
            mapping, descriptor = device_memory.make(size, device)
            made.callback(os.close, descriptor)
            made.push(lambda kind, *_: _unmap([mapping]) if kind else None)
            return mapping, descriptor

        own, descriptor = agree(control, make, what)
        received = descriptors.exchange(control, descriptor)
        try:
            return [
                own if peer == control.rank else _map(theirs, own.size, device)
                for peer, theirs in enumerate(received)
            ]
        finally:
            descriptors.close(received)


def _map(descriptor: int | None, size: int, device: torch.device) -> Mapping | str:
    if descriptor is None:
        return "it is on another host, or in a container with another network"
    try:
        return device_memory.map_shared(descriptor, size, device)
    except RuntimeError as error:
        return str(error)


def _unmap(mappings: list[Mapping]) -> None:
    while mappings:
        mappings.pop().unmap()


def _synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def _uuid_of(device: torch.device) -> str:
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).hex


def _may_add(gpus: abc.Mapping[str, Any], mine: str, peer: str) -> bool:
    """Whether a GPU's atomics on a peer's memory are atomic, by what `gpus` say."""
    if peer == mine or peer not in gpus or mine not in gpus:
        return True
    return cuda_driver.has_atomics(gpus[mine], gpus[peer])
