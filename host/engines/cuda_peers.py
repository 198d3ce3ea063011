"""Which peers a rank's kernel writes to directly, and how it reaches the others.

The only file that decides it. It knows nothing of heaps' contents or of launches.
"""

from __future__ import annotations

import dataclasses

import torch

from moeos.device_heap import DeviceHeap, addressable_peers
from moeos.kernel_shape import Transport
from moeos.world import World


@dataclasses.dataclass(frozen=True)
class Peers:
    """How one rank reaches all ranks.

    Attributes:
        direct: [P] whether this rank's kernel writes into the rank's memory; true for itself. A
            pair of ranks is direct in both directions or in none.
        transport: of the kernel: "none" where all ranks of the world are direct to each other, so
            it is the same on all ranks.
    """

    direct: tuple[bool, ...]
    transport: Transport

    @staticmethod
    def find(world: World, device: torch.device) -> Peers:
        """How the ranks of a world reach each other. Collective.

        Raises what `addressable_peers` raises.
        """
        addressable = addressable_peers(world.control, device)
        mine = [found and world.near(peer) for peer, found in enumerate(addressable)]
        ways = world.control.allgather(mine, "the peers whose memory is addressed")
        if all(map(all, ways)):
            transport: Transport = "none"
        else:
            transport = "mapped" if world.control.shares_memory else "nvshmem"
        both = tuple(mine[peer] and ways[peer][world.rank] for peer in range(world.size))
        return Peers(both, transport)

    def table(self, heap: DeviceHeap) -> list[int]:
        """What the kernel is given of each rank [2 P]: the address of its heap that it stores to, 0
        where it must not, and then the address that its transport puts to."""
        stores = [
            memory.data_ptr() if near and memory is not None else 0
            for near, memory in zip(self.direct, heap.heaps, strict=True)
        ]
        return stores + heap.put_addresses
