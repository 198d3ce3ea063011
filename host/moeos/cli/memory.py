# SPDX-License-Identifier: Apache-2.0
"""What layers take of a rank's memory, and whether a machine has it.

The only file that adds buffers up. Sizes are the runtime's own arithmetic; nothing is allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moeos import _runtime
from moeos.cli import estimate
from moeos.cli.shared import output
from moeos.compile.kernel_shape import KernelShape, Transport
from moeos.config.config import MoEConfig
from moeos.engines.shared_heap import SharedHeap
from moeos.engines.twin import engine as twin
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world.world import Backend

GPUS: dict[str, int] = {"H100": 85_000_000_000, "H200": 150_109_880_320}
"""Bytes of memory of a GPU as CUDA counts them: an H100 of 80 GB, to 1 %, and an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank that hold its layers.

    Attributes:
        layers: how many.
        workspace: what all of them share, by kind, and their records, as `World.memory` has it.
        heap: the parts of its heap: cells of tokens; results of this rank's rows; results for
            ranks of other nodes until they are put, where these have places of their own; partial
            sums and sums of tokens, where experts are sliced; words, and the room for those of
            other shapes.
        weights: gates and experts, with their biases.
    """

    layers: int
    workspace: Mapping[str, int]
    heap: Mapping[str, int]
    weights: int

    @property
    def without_weights(self) -> int:
        """Bytes that moeos takes without weights."""
        return sum(self.workspace.values())

    @property
    def total(self) -> int:
        """Bytes in all, with weights."""
        return self.without_weights + self.weights


def rank_memory(
    cfg: MoEConfig,
    ranks: int,
    layers: int = 1,
    *,
    backend: Backend,
    processors: int,
    virtual: bool = False,
    ranks_per_node: int | None = None,
    slicing: Slicing = WHOLE,
) -> RankMemory:
    """What `layers` layers of one config, which share a workspace, take of one rank.

    Args:
        processors: of the rank: threads of the twin, or blocks of the GPU but the OS block.
        virtual: whether the ranks share one process, and so one GPU.
        ranks_per_node: ranks that reach each other's memory directly; None for all of them.
        slicing: how experts are cut.

    Raises:
        ValueError: the machine does not have such a layer, or a bound does not fit.
    """
    node = ranks if ranks_per_node is None else ranks_per_node
    sizes = sizes_of(cfg, ranks, backend, processors, virtual, node < ranks, slicing)
    heap = SharedHeap().with_shape(sizes).size
    cells = sizes.cells * sizes.cell_places * sizes.sent_bytes
    return RankMemory(
        layers=layers,
        workspace={
            "heap": heap,
            "queues": sizes.control_bytes + sizes.tables_bytes,
            "between": sizes.intermediate_bytes,
            "records": layers * sizes.records_bytes,
        },
        heap={
            "cells": cells,
            "results": sizes.result_bytes - sizes.staged_bytes,
            "staged": sizes.staged_bytes,
            "sums": sizes.sums_bytes,
            "words": heap - cells - sizes.result_bytes - sizes.sums_bytes,
        },
        weights=layers * estimate.weight_bytes_per_rank(cfg, ranks, slicing),
    )


def require(needed: Mapping[str, int], available: int, where: str, advice: str) -> None:
    """Raises `ValueError`, with the advice, if more bytes are needed than `where` has available.

    `needed`: bytes by what they are for.
    """
    total = sum(needed.values())
    if total > available:
        parts = ", ".join(f"{output.size(size)} of {what}" for what, size in needed.items() if size)
        raise ValueError(
            f"{output.size(total)} of memory are needed ({parts}), and {where} has "
            f"{output.size(available)} available: {advice}"
        )


def sizes_of(
    cfg: MoEConfig,
    ranks: int,
    backend: Backend,
    processors: int,
    virtual: bool = False,
    remote: bool = False,
    slicing: Slicing = WHOLE,
) -> _runtime.Sizes:
    """The sizes of a rank, with the arguments of `rank_memory`. `remote`: whether some peers get
    puts.
    """
    cut, (_, world) = slicing.cut(cfg), slicing.place(0, ranks)
    local = cfg.experts_per_rank(slicing.holders(ranks)) if slicing.apart else 0
    rows = slicing.sizes(cut, slicing.holders(ranks))
    if backend == "twin":
        return twin.sizes_of(cut, world, processors, remote, places=local, rows=rows)
    transport: Transport = "none"
    if remote:
        transport = "mapped" if virtual else "nvshmem"
    shape = KernelShape(
        cfg=cut,
        world_size=world,
        places=local,
        processors=processors,
        virtual_ranks=ranks if virtual else 1,
        transport=transport,
        slicing=slicing,
    )
    return shape.sizes
