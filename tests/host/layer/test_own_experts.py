# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters of their own for `Experts`, in wrappers for data parallelism that are
told to leave these alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moeos
from moeos import Experts, World
from tests.layers import config
from tests.nightly import all_but
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


@pytest.mark.parametrize(
    "wrapped",
    all_but([by_ddp, by_fully_shard], [by_ddp, by_ddp_of_itself, by_fully_shard, by_fsdp]),
)
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


class Passed(nn.Module):
    """A module that does not show what it passes its weights to."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.w1, self.w2 = mlp.w1, mlp.w2
        self.call = lambda *arguments: mlp.experts(*arguments)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.call(x, ids, weights, self.w1, self.w2)
        return y


def untold_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def untold_fully_shard(model: Model) -> nn.Module:
    return fully_shard(model)


def untold_fsdp(model: Model) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def of_experts(told: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in told if "mixture of different experts" in str(one.message)]


@pytest.mark.parametrize("wrapped", [untold_ddp, untold_fully_shard, untold_fsdp])
def test_a_wrapper_that_is_told_nothing_warns_of_experts_of_a_module_by_name(
    wrapped: Callable[[Model], nn.Module],
) -> None:
    def rank_main(world: World) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            wrapped(Model(world))
        return of_experts(told)

    for [said] in ranks_of_torch(rank_main, 2):
        assert "takes mlp.w1, mlp.w2 for what all ranks have alike" in said


@pytest.mark.parametrize(
    "wrapped",
    all_but([by_ddp, by_fully_shard], [by_ddp, by_ddp_of_itself, by_fully_shard, by_fsdp]),
)
def test_a_wrapper_that_is_told_so_does_not_warn(wrapped: Callable[[Model], nn.Module]) -> None:
    def rank_main(world: World) -> list[str]:
        x = torch.randn(20, CFG.hidden)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            wrapped(Model(world))(x).square().sum().backward()
        return of_experts(told)

    assert ranks_of_torch(rank_main, 2) == [[], []]


def test_a_call_with_weights_that_a_wrapper_averages_warns_once() -> None:
    def rank_main(world: World) -> int:
        routing = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        mlp = Mlp(world)
        mlp.experts = Experts(dataclasses.replace(CFG, top_k=1), world)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = DistributedDataParallel(Passed(mlp))
            assert of_experts(told) == []
            for _ in range(2):
                model(torch.randn(4, CFG.hidden), *routing).sum().backward()
        return len(of_experts(told))

    assert ranks_of_torch(rank_main, 2) == [1, 1]


def test_a_wrapper_over_ranks_that_hold_the_same_experts_does_not_warn() -> None:
    def rank_main(world: World) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        x = torch.randn(20, CFG.hidden)
        with (
            moeos.init("twin", group=mesh["ep"], deadline=60.0) as part,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            model = DistributedDataParallel(Model(part), process_group=mesh["dp"].get_group())
            model(x).square().sum().backward()
        return of_experts(told)

    assert ranks_of_torch(rank_main, 4) == [[]] * 4
