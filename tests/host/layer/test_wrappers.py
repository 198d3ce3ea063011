# SPDX-License-Identifier: Apache-2.0
"""Wrappers of a whole model make all else equal, or cut it up, and leave experts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moeos
from moeos import MoELayer, World
from moeos.layer import wrappers
from moeos.world import virtual
from tests.layers import assert_matches, config, draw_call, draw_weights
from tests.nightly import all_but
from tests.process_group import ranks_of_torch

CFG = config(max_tokens=64, bias=True, selection_bias=True)
ALL_WEIGHTS = [draw_weights(CFG, seed) for seed in range(2)]


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.Linear(CFG.hidden, CFG.hidden)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.mlp(x)
        return y + self.norm(x)


class Model(nn.Module):
    """Layers deep inside; what is not a layer differs by rank before it is wrapped."""

    def __init__(self, world: World) -> None:
        super().__init__()
        torch.manual_seed(world.rank)
        self.layers = nn.ModuleList(Block(weights.layer(world)) for weights in ALL_WEIGHTS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def experts_are_right(model: nn.Module, world: World) -> None:
    """Asserts that each layer in `model` computes with its own weights. Collective."""
    call = draw_call(CFG, 20, world.rank)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert len(layers) == len(ALL_WEIGHTS)
    with torch.no_grad(), whole(model):
        for weights, layer in zip(ALL_WEIGHTS, layers, strict=True):
            assert_matches(weights, call, layer(call.x), f"rank {world.rank}")


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Layers inside of what FSDP has wrapped may be called by themselves, as any module."""
    cut = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in cut:
        module.unshard()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        yield
    for module in cut:
        module.reshard()


def equal_on_all_ranks(tensor: Tensor) -> bool:
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    return torch.equal(first, tensor)


def wrapped_by_ddp(model: nn.Module) -> nn.Module:
    wrapped: nn.Module = DistributedDataParallel(model)
    return wrapped


def wrapped_by_replicate(model: nn.Module) -> nn.Module:
    from torch.distributed._composable import replicate

    replicate(model)
    return model


def wrapped_by_fsdp2(model: nn.Module) -> nn.Module:
    assert isinstance(model, Model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrapped_by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("wrapped", [wrapped_by_ddp, wrapped_by_fsdp1])
def test_codes_of_shared_experts_are_left_alone_as_experts_are(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    name = "fp8_channel"
    shared = {"shared_experts": 1, "shared_intermediate": 64, "shared_weight_format": name}
    weights = draw_weights(config(weight_format=name, **shared))
    call = draw_call(weights.cfg, 20, 0)

    def rank_main(world: World) -> bool:
        model = wrapped(Block(weights.layer(world)))
        model(call.x).sum().backward()
        [layer] = [module for module in model.modules() if isinstance(module, MoELayer)]
        with torch.no_grad(), whole(model):
            assert_matches(weights, call, layer(call.x))
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize(
    "wrapped",
    all_but(
        [wrapped_by_ddp, wrapped_by_fsdp2],
        [wrapped_by_ddp, wrapped_by_replicate, wrapped_by_fsdp2, wrapped_by_fsdp1],
    ),
)
def test_a_wrapped_model_keeps_each_ranks_experts_and_trains_all_else(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    def rank_main(world: World) -> bool:
        model = wrapped(Model(world))
        experts_are_right(model, world)
        x = draw_call(CFG, 20, world.rank).x
        for _ in range(2):
            model(x).sum().backward()
        experts_are_right(model, world)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        for gradient in gradients:
            if not isinstance(gradient, DTensor) and wrapped is not wrapped_by_fsdp1:
                assert equal_on_all_ranks(gradient)
        if wrapped in (wrapped_by_ddp, wrapped_by_replicate):
            assert all(
                equal_on_all_ranks(parameter)
                for name, parameter in model.named_parameters()
                if "norm" in name
            )
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("wrapped", [wrapped_by_ddp, wrapped_by_fsdp2])
def test_a_wrapped_model_is_saved_with_all_experts(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    def rank_main(world: World) -> bool:
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(wrapped(Model(world)), options=options)
        if world.rank == 0:
            for number, weights in enumerate(ALL_WEIGHTS):
                assert torch.equal(state[f"layers.{number}.mlp.w1"], weights.w1)
                assert torch.equal(state[f"layers.{number}.mlp.b2"], weights.b2)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_layer_by_itself_may_be_wrapped() -> None:
    def rank_main(world: World) -> bool:
        call = draw_call(CFG, 20, world.rank)
        for wrapper in (
            lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (world.size,))),
            lambda layer: DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), layer)).module[1],
        ):
            layer = wrapper(ALL_WEIGHTS[0].layer(world))
            assert_matches(ALL_WEIGHTS[0], call, layer(call.x))
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("wrapped", [wrapped_by_ddp, wrapped_by_fsdp1])
def test_slices_of_shared_experts_are_left_alone(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    cfg = config(shared_experts=1, shared_intermediate=64)

    def rank_main(world: World) -> bool:
        torch.manual_seed(world.rank)
        layer = MoELayer(cfg, world, parallel="tensor")
        names = ("w1", "w2", "shared_w1", "shared_w2")
        before = {name: getattr(layer, name).clone() for name in names}
        wrapped(Block(layer))
        for name, own in before.items():
            assert torch.equal(getattr(layer, name), own), name
            assert equal_on_all_ranks(own) == (world.rank == 0), name
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_what_ddp_was_told_to_ignore_is_still_ignored() -> None:
    def rank_main(world: World) -> bool:
        model = Model(world)
        kept = model.layers[0].norm.bias
        before = kept.detach().clone()
        ignored = ["layers.0.norm.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        DistributedDataParallel(model)
        assert torch.equal(kept, before)
        experts_are_right(model, world)
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "ddp"])
def test_zero_refuses_experts_before_its_step_and_takes_all_else(wrapped: bool) -> None:
    def rank_main(world: World) -> str:
        plain = Model(world)
        model = DistributedDataParallel(plain) if wrapped else plain
        parameters = list(model.parameters())
        taken = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in taken:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match="was given w1 of a MoELayer") as error:
            ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1).step()
        experts_are_right(model, world)
        ZeroRedundancyOptimizer(taken, torch.optim.SGD, lr=0.1).step()
        experts_are_right(model, world)
        assert all(equal_on_all_ranks(parameter) for parameter in taken)
        return str(error.value)

    assert len(set(ranks_of_torch(rank_main, 2))) == 1


def test_zero_takes_experts_that_lie_whole_on_each_rank() -> None:
    def rank_main(world: World) -> bool:
        with moeos.init("twin", rank=0, size=1, store=dist.HashStore()) as alone:
            layer = MoELayer(CFG, alone)
            ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1).step()
            assert equal_on_all_ranks(layer.w1)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_layer_may_be_made_while_the_parameters_of_all_are_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As another thread does."""

    def rank_main(world: World) -> None:
        layer = ALL_WEIGHTS[0].layer(world)
        to_make, made = [ALL_WEIGHTS[1]], []

        class Names(tuple[str, ...]):
            def __iter__(self) -> Iterator[str]:
                while to_make:
                    made.append(to_make.pop().layer(world))
                return super().__iter__()

        monkeypatch.setattr(wrappers, "EXPERTS", Names(wrappers.EXPERTS))
        optimizer = torch.optim.SGD(layer.gate.parameters(), lr=0.1)
        assert optimizer.state_dict()["state"] == {}
        assert len(made) == 1

    virtual.run(rank_main, ranks=1)


def test_a_layer_refuses_parameters_that_are_dtensors() -> None:
    def rank_main(world: World) -> str:
        with pytest.raises(TypeError, match="w1 would become a DTensor") as error:
            distribute_module(Model(world), init_device_mesh("cpu", (world.size,)))
        return str(error.value)

    assert len(set(ranks_of_torch(rank_main, 2))) == 1


def test_data_parallel_in_one_process_is_refused() -> None:
    def rank_main(world: World) -> None:
        layer: Any = ALL_WEIGHTS[0].layer(world)
        with pytest.raises(RuntimeError, match=r"cannot be used in nn\.DataParallel"):
            nn.Sequential(layer)[0]._replicate_for_data_parallel()

    virtual.run(rank_main, ranks=1)
