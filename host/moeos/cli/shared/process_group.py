# SPDX-License-Identifier: Apache-2.0
"""A process group of torch.distributed over a world, for what moeos is compared with."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import moeos

PATIENCE = timedelta(seconds=120)
"""The time after which a collective fails."""


@contextlib.contextmanager
def over(world: moeos.World) -> Iterator[dist.ProcessGroup | None]:
    """The group that `start` makes, for as long as the block runs. Collective."""
    group = start(world)
    try:
        yield group
    finally:
        if group is not None and dist.is_initialized():
            dist.destroy_process_group()


def start(world: moeos.World) -> dist.ProcessGroup | None:
    """The group of all ranks, NCCL's on GPUs and gloo's on the twin; None where there is one rank.

    Collective. End it with `torch.distributed.destroy_process_group`.
    """
    if world.size == 1:
        return None
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # neither side uses NVLink multicast
    hosts = world.control.allgather(socket.getfqdn(), "the ranks' hosts")
    host = hosts[0]
    if len(set(hosts)) == 1:
        host = "127.0.0.1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = None
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, True, PATIENCE, wait_for_workers=False)
    port = world.control.allgather(0 if store is None else store.port)[0]
    if store is None:
        store = TCPStore(host, port, world.size, False, PATIENCE)
    dist.init_process_group(
        "nccl" if world.backend == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=PATIENCE,
    )
    return dist.group.WORLD
