# SPDX-License-Identifier: Apache-2.0
"""Which peers a rank's kernel writes to directly, and how it reaches the others.

The only file that decides it. Must not depend on heaps' contents or launches.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch

from moeos.compile.kernel_shape import Transport
from moeos.engines.cuda import nvshmem_heap
from moeos.engines.cuda.device_heap import DeviceHeap, peers_with_atomics, shareable_peers
from moeos.world.world import World


@dataclasses.dataclass(frozen=True)
class Peers:
    """How one rank reaches all ranks.

    Attributes:
        direct: [P] whether this rank's kernel writes into the rank's memory; true for itself. A
            pair of ranks is direct in both directions or in none.
        transport: of the kernel: "none" where all ranks of the world are direct to each other, so
            it is the same on all ranks.
        by_nvshmem: whether heaps are NVSHMEM's; the same on all ranks.
    """

    direct: tuple[bool, ...]
    transport: Transport
    by_nvshmem: bool = False

    @staticmethod
    def find(world: World, device: torch.device) -> Peers:
        """How the ranks of a world reach each other. Collective; a world is asked once.

        Raises `RuntimeError`, on all ranks, if there are remote peers and NVSHMEM is missing,
        cannot be started or serves another world.
        """
        found = _of_world.get(world)
        if found is None:
            found = _of_world[world] = _find(world, device)
        return found

    def table(self, heap: DeviceHeap) -> list[int]:
        """[2 P] for the kernel: the address of each rank's heap that it stores to, 0 where it must
        not, and then the address that its transport puts to."""
        stores = [
            memory.data_ptr() if near and memory is not None else 0
            for near, memory in zip(self.direct, heap.heaps, strict=True)
        ]
        return stores + heap.put_addresses


def _find(world: World, device: torch.device) -> Peers:
    control = world.control
    why_not = shareable_peers(control, device)
    ways = _ways(world, [not reason for reason in why_not])
    if control.shares_memory:
        return Peers(_both(world, ways), "none" if all(map(all, ways)) else "mapped")
    if all(map(all, ways)):
        return Peers(_both(world, ways), "none")
    said = control.allgather(_why_remote(world, why_not), "why peers are remote")
    nvshmem_heap.serve(world, device, next(filter(None, said)))
    mapped = nvshmem_heap.mapped_peers(control)
    atomic = peers_with_atomics(control, device)
    ways = _ways(world, [found and adds for found, adds in zip(mapped, atomic, strict=True)])
    transport: Transport = "none" if all(map(all, ways)) else "nvshmem"
    return Peers(_both(world, ways), transport, by_nvshmem=True)


def _ways(world: World, addressable: list[bool]) -> list[list[bool]]:
    """[P] [P] whether the one rank may write into the other's memory."""
    mine = [found and world.near(peer) for peer, found in enumerate(addressable)]
    return world.control.allgather(mine, "the peers whose memory is addressed")


def _both(world: World, ways: list[list[bool]]) -> tuple[bool, ...]:
    return tuple(ways[world.rank][peer] and ways[peer][world.rank] for peer in range(world.size))


def _why_remote(world: World, why_not: list[str]) -> str:
    """Why the first peer that is remote to this rank is; "" if none is."""
    for peer, reason in enumerate(why_not):
        if reason or not world.near(peer):
            why = reason or "ranks_per_node makes them ranks of two nodes"
            return f"rank {peer} is remote to rank {world.rank}: {why}"
    return ""


_of_world: weakref.WeakKeyDictionary[World, Peers] = weakref.WeakKeyDictionary()
