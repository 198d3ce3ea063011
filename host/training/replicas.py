# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts beside data parallelism: sums over replicas, and the mean that others are.

What wraps a model averages gradients over ranks, and leaves experts out. Theirs are sums over the
ranks of a world, and nobody adds up those of other worlds with the same experts. This file knows
which parameters are experts, and nothing of wrappers or of how a layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moeos import sharding
from moeos.training.gradients import distinct, gradient_of, ids_of_experts
from moeos.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def reduce_expert_grads_(
    parameters: Tensor | Iterable[Tensor],
    group: ProcessGroup | None = None,
    *,
    world: World,
    average: bool = True,
    experts: Iterable[Tensor] = (),
) -> None:
    """Makes gradients of experts, in place, what data parallelism makes of all others. Collective
    for the ranks of `group`, if there is one.

    Call it once a step, behind the last backward and before gradients are clipped. Each process of
    `group` gets the same bits, in every run. No host waits for a device.

    Args:
        parameters: of the model, the same on all ranks of `group`. Those that are no experts, or
            frozen, are left alone. An expert without a gradient counts as zeros, and gets one.
            Where it has a `main_grad`, that is its gradient.
        group: the processes that hold the same experts, such as `mesh["dp"].get_group()` where the
            world is of `mesh["ep"]`. Gradients are added up over it. None: each expert lies on one
            process.
        world: of the layers.
        average: whether to divide by the number of all ranks, those of the world times those of the
            group, as `DistributedDataParallel` and `fully_shard` do: for a loss that is the mean of
            a rank's own tokens. False: for trainers that add up gradients.
        experts: as of `get_total_norm`.

    Raises:
        ValueError: ranks of `group` are of the same world, which hold other experts; or as
            `get_total_norm` says.
    """
    given = distinct(parameters)
    ours = ids_of_experts(given, world, experts)
    replicas = 1 if group is None else _replicas(group, world)
    ranks = world.size * replicas if average else 1
    with torch.no_grad():
        for parameter in given:
            if id(parameter) not in ours or not parameter.requires_grad:
                continue
            if gradient_of(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = gradient_of(parameter)
            assert gradient is not None
            if replicas > 1:
                summed = gradient.contiguous()
                dist.all_reduce(summed, group=group)
                if summed is not gradient:
                    gradient.copy_(summed)
            if ranks > 1:
                gradient.div_(ranks)


def _replicas(group: ProcessGroup, world: World) -> int:
    """How many ranks the group has. Raises `ValueError` if some are peers of this one's world."""
    ranks = dist.get_process_group_ranks(group)
    peers = sharding.ranks_of(world.group, (world.rank, world.size)) or ()
    others = [rank for rank in ranks if rank in peers and rank != dist.get_rank()]
    if others:
        raise ValueError(
            f"rank {world.rank} of {world}: group has ranks {ranks}, of which {others} are of the "
            "same world and hold other experts: pass the group of ranks that hold the same, such "
            'as mesh["dp"].get_group() beside a world of mesh["ep"], or None'
        )
    return len(ranks)
