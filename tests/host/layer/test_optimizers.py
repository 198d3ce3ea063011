# SPDX-License-Identifier: Apache-2.0
"""Where torch.distributed runs an optimizer's state dict holds all ranks' experts, as a layer's."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import moeos
from moeos import MoELayer, World
from moeos.world import virtual
from tests.layers import config
from tests.nightly import all_but
from tests.process_group import ranks_of_torch

CFG = config(max_tokens=64, bias=True)


class Model(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.norm = nn.Linear(CFG.hidden, CFG.hidden)
        self.mlp = MoELayer(CFG, world)


def stepped(model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    """An optimizer that has taken a step with gradients of its own for each expert."""
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    for local, expert in enumerate(CFG.experts_of(layer.world.rank, layer.world.size)):
        for name in ("w1", "w2", "b1", "b2"):
            layer.get_parameter(name).grad[local].fill_(expert + 1)  # type: ignore[index]
    optimizer.step()
    return optimizer


def moments(
    optimizer: torch.optim.Optimizer, layer: MoELayer, *, is_cut: bool = False
) -> dict[str, Tensor]:
    """A layer's first moments, which name the experts to whom they belong. `is_cut`: whether a
    wrapper has cut the gate.
    """
    return {
        name: optimizer.state[layer.get_parameter(name)]["exp_avg"]
        for name in ("w1", "w2", "b1", "b2", "gate.weight")
        if name != "gate.weight" or not is_cut
    }


def forget(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert type(found[name]) is Tensor
        assert torch.equal(found[name], tensor), name


def wrapped_by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("wrapped", all_but([fully_shard], [None, fully_shard, wrapped_by_fsdp1]))
def test_a_checkpoint_has_the_moments_of_all_experts(tmp_path: Path, wrapped: Any) -> None:
    def rank_main(world: World) -> bool:
        plain = Model(world)
        model = plain if wrapped is None else wrapped(plain)
        optimizer = stepped(model)
        found = functools.partial(moments, optimizer, plain.mlp, is_cut=wrapped is not None)
        wanted = {name: one.clone() for name, one in found().items()}
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "saved")
        forget(optimizer)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        assert_equal(found(), wanted)
        optimizer.step()
        return True

    assert all(ranks_of_torch(rank_main, 2))
    if wrapped is not None:
        return

    def other_main(world: World) -> bool:
        model = Model(world)
        optimizer = torch.optim.AdamW(model.parameters())
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path / "saved")
        set_optimizer_state_dict(model, optimizer, state)
        found = moments(optimizer, model.mlp)["w1"]
        for local, expert in enumerate(CFG.experts_of(world.rank, world.size)):
            assert torch.allclose(found[local], torch.tensor((expert + 1) * 0.1))
        return True

    assert all(ranks_of_torch(other_main, 3))
    shutil.rmtree(tmp_path / "saved")


def test_a_full_state_dict_has_the_moments_of_all_experts_and_is_read_back() -> None:
    def rank_main(world: World) -> bool:
        model = Model(world)
        optimizer = stepped(model)
        wanted = {name: one.clone() for name, one in moments(optimizer, model.mlp).items()}
        options = StateDictOptions(full_state_dict=True)
        # What is whole on every rank is the optimizer's own, which is forgotten below.
        full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        every = full["state"]["mlp.w1"]["exp_avg"]  # type: ignore[index,call-overload]
        assert type(every) is Tensor
        assert every.shape == (CFG.experts, *model.mlp.w1.shape[1:])
        for expert, one in enumerate(every):
            assert torch.allclose(one, torch.tensor((expert + 1) * 0.1))
        forget(optimizer)
        set_optimizer_state_dict(model, optimizer, full, options=options)
        assert_equal(moments(optimizer, model.mlp), wanted)
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("form", ["sharded", "replicated", "columns", "whole", "local"])
def test_every_form_of_a_moment_is_loaded_as_this_ranks_part(form: str) -> None:
    def rank_main(world: World) -> bool:
        model = Model(world)
        optimizer = stepped(model)
        wanted = {name: one.clone() for name, one in moments(optimizer, model.mlp).items()}
        state = optimizer.state_dict()
        forms = {"replicated": [Replicate()], "columns": [Shard(1)]}
        numbers = list(map(id, model.parameters()))
        for parameter in (model.mlp.w1, model.mlp.w2, model.mlp.b1, model.mlp.b2):
            kept = state["state"][numbers.index(id(parameter))]
            for name, value in kept.items():
                if name != "step":
                    assert isinstance(value, DTensor)
                    assert value.placements == (Shard(0),)
                    assert len(value) == CFG.experts
                    if form in forms:
                        kept[name] = value.redistribute(placements=forms[form])
                    elif form == "whole":
                        kept[name] = value.full_tensor()
                    elif form == "local":
                        kept[name] = value.to_local()
        fresh = torch.optim.AdamW(model.parameters())
        fresh.load_state_dict(state)
        found = moments(fresh, model.mlp)
        assert_equal(found, wanted)
        for tensor in found.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_state_dict_shares_memory_changes_nothing_and_is_copied() -> None:
    def rank_main(world: World) -> bool:
        model = Model(world)
        optimizer = stepped(model)
        state = copy.deepcopy(optimizer.state_dict())
        held = [
            value.to_local().data_ptr()
            for kept in optimizer.state_dict()["state"].values()
            for value in kept.values()
            if isinstance(value, DTensor)
        ]
        own = [
            value.data_ptr()
            for name in ("w1", "w2", "b1", "b2")
            for key, value in optimizer.state[model.mlp.get_parameter(name)].items()
            if key != "step"
        ]
        assert sorted(held) == sorted(own)
        wanted = {name: one.clone() for name, one in moments(optimizer, model.mlp).items()}
        forget(optimizer)
        optimizer.load_state_dict(state)
        assert_equal(moments(optimizer, model.mlp), wanted)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_moment_of_another_shape_is_warned_of_and_kept() -> None:
    class Counts(torch.optim.SGD):
        """Keeps for each parameter what has nothing to do with its shape."""

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["table"] = torch.arange(7)

    def rank_main(world: World) -> bool:
        model = MoELayer(CFG, world)
        optimizer = stepped(model, Counts)
        with pytest.warns(UserWarning, match=r"w1\.table in an optimizer's state has shape \[7\]"):
            state = optimizer.state_dict()
        assert torch.equal(state["state"][1]["table"], torch.arange(7))
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_without_torch_distributed_a_state_dict_holds_plain_tensors() -> None:
    def rank_main(world: World) -> None:
        model = Model(world)
        state = stepped(model).state_dict()
        assert all(type(v) is Tensor for kept in state["state"].values() for v in kept.values())

    virtual.run(rank_main, ranks=2)


def test_a_compiled_step_is_taken() -> None:
    with moeos.init("twin") as world:
        model = Model(world)
        optimizer = stepped(model, torch.optim.SGD)
        before = model.norm.weight.detach().clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(model.norm.weight, before)
