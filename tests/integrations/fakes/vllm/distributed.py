# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: groups of ranks, which gloo connects."""

from __future__ import annotations

import torch
import torch.distributed as dist


class GroupCoordinator:
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.rank = dist.get_rank()
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(self.rank)
        self.cpu_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.device_group = self.cpu_group

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        assert -input_.dim() <= dim < input_.dim()
        parts = [torch.empty_like(input_) for _ in self.ranks]
        dist.all_gather(parts, input_.contiguous(), group=self.cpu_group)
        return torch.cat(parts, dim)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        output = input_.clone()
        dist.all_reduce(output, group=self.cpu_group)
        return output


_groups: dict[str, GroupCoordinator] = {}


def start_groups(tensor_parallel_size: int) -> None:
    """The groups of a job whose other ranks are data-parallel: tensor-parallel ones are neighbours.

    Of the stand-in alone. The expert-parallel group has all ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    first = rank - rank % tensor_parallel_size
    _groups["tp"] = GroupCoordinator(list(range(first, first + tensor_parallel_size)))
    _groups["ep"] = GroupCoordinator(list(range(size)))


def get_tp_group() -> GroupCoordinator:
    return _groups["tp"]


def get_ep_group() -> GroupCoordinator:
    return _groups["ep"]


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    return get_tp_group().all_reduce(input_)
