# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters of their own for `Experts`, in wrappers for data parallelism that are
told to leave these alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moeos import Experts, World
from tests.layers import config
from tests.process_group import ranks_of_torch

CFG = config(experts=4, max_tokens=32, top_k=2)


class Mlp(nn.Module):
    """A router, and experts whose weights are this module's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(world.rank)
        own = len(CFG.experts_of(world.rank, world.size))
        self.experts = Experts(CFG, world)
        self.gate = nn.Linear(CFG.hidden, CFG.experts, bias=False)
        self.w1 = nn.Parameter(
            torch.randn(own, 2 * CFG.intermediate, CFG.hidden, generator=drawn) / 8
        )
        self.w2 = nn.Parameter(torch.randn(own, CFG.hidden, CFG.intermediate, generator=drawn) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(CFG.top_k)
        y: Tensor = self.experts(x, ids, weights, self.w1, self.w2)
        return y


class Model(nn.Module):
    """What holds such a module, and is wrapped."""

    def __init__(self, world: World) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(CFG.hidden, CFG.hidden)
        self.mlp: Any = Mlp(world)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.first(x))
        return y


def by_ddp(model: Model) -> nn.Module:
    names = ["mlp.w1", "mlp.w2"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def by_ddp_of_itself(model: Model) -> nn.Module:
    """The module that has the weights is what is wrapped: DDP looks for two names of each."""
    names = ["w1", ".w1", "w2", ".w2"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model.mlp, names)
    model.mlp = DistributedDataParallel(model.mlp)
    return model


def by_fully_shard(model: Model) -> nn.Module:
    fully_shard(model, ignored_params={model.mlp.w1, model.mlp.w2})
    return model


def by_fsdp(model: Model) -> nn.Module:
    ignored = [model.mlp.w1, model.mlp.w2]
    return FullyShardedDataParallel(model, ignored_states=ignored, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrapped", [by_ddp, by_ddp_of_itself, by_fully_shard, by_fsdp])
def test_a_wrapper_that_is_told_so_leaves_experts_of_a_module_alone(
    wrapped: Callable[[Model], nn.Module],
) -> None:
    def rank_main(world: World) -> bool:
        x = torch.randn(20, CFG.hidden, generator=torch.Generator().manual_seed(9 + world.rank))
        plain, model = Model(world), Model(world)
        mlp = model.mlp
        experts = {"w1": plain.mlp.w1, "w2": plain.mlp.w2}
        plain(x).square().sum().backward()
        wrapped(model)(x).square().sum().backward()
        for name, right in experts.items():
            own = getattr(mlp, name)
            assert torch.equal(own, right), name
            assert torch.equal(own.grad, right.grad), name
        return True

    assert all(ranks_of_torch(rank_main, 2))
