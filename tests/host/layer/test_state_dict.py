# SPDX-License-Identifier: Apache-2.0
"""Where torch.distributed runs a state dict holds all ranks' experts; all forms are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import moeos
from moeos import MoELayer, World
from moeos.world import virtual
from tests.layers import assert_matches, config, draw_call, draw_weights
from tests.nightly import all_but, in_turn
from tests.process_group import ranks_of_torch

CFG = config(max_tokens=64, bias=True, selection_bias=True)
WEIGHTS = draw_weights(CFG)
EXPERTS = {"w1": WEIGHTS.w1, "w2": WEIGHTS.w2, "b1": WEIGHTS.b1, "b2": WEIGHTS.b2}
GATE = {"gate.weight": WEIGHTS.gate, "gate.selection_bias": WEIGHTS.selection_bias}


def right(layer: MoELayer) -> None:
    """Asserts that the layer computes with `WEIGHTS` on this rank. Collective."""
    call = draw_call(CFG, 20, layer.world.rank)
    assert_matches(WEIGHTS, call, layer(call.x), f"rank {layer.world.rank}")


class Model(nn.Module):
    """A layer deep inside a model, between others."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CFG.hidden)
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": layer})])

    @property
    def layer(self) -> MoELayer:
        layer = self.blocks[0]["mlp"]
        assert isinstance(layer, MoELayer)
        return layer


def test_without_torch_distributed_a_state_dict_holds_this_ranks_plain_tensors() -> None:
    def rank_main(world: World) -> None:
        state = WEIGHTS.layer(world).state_dict()
        mine = WEIGHTS.of_rank(world.rank, world.size)
        assert type(state["w1"]) is Tensor
        assert torch.equal(state["w1"], mine.w1)

    virtual.run(rank_main, ranks=2)


def test_a_state_dict_holds_all_experts_in_the_memory_of_the_parameters() -> None:
    def rank_main(world: World) -> bool:
        layer = WEIGHTS.layer(world)
        for keep_vars in (False, True):
            state = layer.state_dict(prefix="m.", keep_vars=keep_vars)
            for name, every in EXPERTS.items():
                held = state[f"m.{name}"]
                assert isinstance(held, DTensor)
                assert held.placements == (Shard(0),)
                assert held.to_local().data_ptr() == getattr(layer, name).data_ptr()
                assert torch.equal(held.full_tensor(), every)
            assert type(state["m.gate.weight"]) in (Tensor, nn.Parameter)
        assert type(layer.w1) is nn.Parameter
        assert layer.w1.shape[0] == CFG.experts // world.size
        return True

    assert all(ranks_of_torch(rank_main, 2))


FORMS = ("sharded", "replicated", "columns", "whole", "local")


@pytest.mark.parametrize(("form", "assign"), in_turn(FORMS, [False, True]))
def test_every_form_of_the_experts_is_loaded_as_this_ranks_part(form: str, assign: bool) -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        mine = WEIGHTS.of_rank(world.rank, world.size)

        def made(name: str, every: Tensor) -> Tensor:
            if form == "local":
                local: Tensor = getattr(mine, name)
                return local.clone()
            if form == "whole":
                return every.clone()
            placement = {"sharded": Shard(0), "replicated": Replicate(), "columns": Shard(1)}[form]
            return distribute_tensor(every.clone(), mesh, [placement])

        state: dict[str, Any] = {name: made(name, every) for name, every in EXPERTS.items()}
        state |= {name: tensor.clone() for name, tensor in GATE.items()}
        if form != "local":
            state["gate.weight"] = distribute_tensor(state["gate.weight"], mesh, [Shard(0)])
        model = Model(MoELayer(CFG, world))
        before = {f"blocks.0.mlp.{name}": tensor for name, tensor in state.items()}
        before |= nn.ModuleDict({"norm": model.norm}).state_dict()
        model.load_state_dict(before, assign=assign)
        right(model.layer)
        for name in EXPERTS:
            tensor = getattr(model.layer, name)
            assert type(tensor) is nn.Parameter
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_what_cannot_be_loaded_is_named_with_the_shapes_that_can() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        state = layer.state_dict()
        wrong = state | {"w1": torch.zeros(3, CFG.w1_rows, CFG.hidden)}
        sentence = r"w1 is a tensor of shape \[3, 192, 64\]; rank . of 2 takes all experts, \[8, "
        with pytest.raises(RuntimeError, match=sentence) as error:
            layer.load_state_dict(wrong)
        assert "Missing" not in str(error.value)
        with pytest.raises(RuntimeError, match=sentence):
            layer.load_state_dict(wrong, strict=False)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"w2\""):
            layer.load_state_dict({name: state[name] for name in state if name != "w2"})
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"w3\""):
            layer.load_state_dict(state | {"w3": state["w1"]})
        right(layer)

    virtual.run(rank_main, ranks=2)


def test_a_checkpoint_of_a_model_is_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    def save(world: World) -> bool:
        dcp.save(Model(WEIGHTS.layer(world)).state_dict(), checkpoint_id=tmp_path)
        return True

    def load(world: World) -> bool:
        model = Model(MoELayer(CFG, world))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        right(model.layer)  # read into the memory of the parameters
        model.load_state_dict(state)
        right(model.layer)
        return True

    assert all(ranks_of_torch(save, 4))
    for ranks in (4, 2, 1):
        assert all(ranks_of_torch(load, ranks))


def test_a_checkpoint_is_read_into_a_model_without_weights(tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        dcp.save({"mlp": WEIGHTS.layer(world).state_dict()}, checkpoint_id=tmp_path)
        for early in (True, False):
            with torch.device("meta"):
                layer = MoELayer(CFG, world)
            if early:
                layer.to_empty(device="cpu")
            state = {"mlp": layer.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path)
            layer.load_state_dict(state["mlp"], assign=not early)
            right(layer)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_the_state_dict_functions_of_distributed_checkpoint_move_a_model(tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        model = Model(WEIGHTS.layer(world))
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full, cpu_offload=True)
            state = get_model_state_dict(model, options=options)
            if full and world.rank > 0:
                assert not state
            elif full:
                assert torch.equal(state["blocks.0.mlp.w1"], WEIGHTS.w1)
            for broadcast in (False, True) if full else (False,):
                fresh = Model(MoELayer(CFG, world))
                whole: list[Any] = [state]
                if full and not broadcast:
                    dist.broadcast_object_list(whole)
                set_model_state_dict(
                    fresh,
                    whole[0],
                    options=StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast),
                )
                right(fresh.layer)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_what_a_rank_saves_by_itself_is_read_by_that_rank_and_refused_by_another(
    tmp_path: Path,
) -> None:
    def save(world: World) -> bool:
        torch.save(WEIGHTS.layer(world).state_dict(), tmp_path / f"{world.rank}.pt")
        return True

    def load(world: World) -> None:
        layer = MoELayer(CFG, world)
        layer.load_state_dict(torch.load(tmp_path / f"{world.rank}.pt"))
        right(layer)
        others = torch.load(tmp_path / f"{1 - world.rank}.pt")
        with pytest.raises(RuntimeError, match=r"holds the experts of rank . here, and this is"):
            layer.load_state_dict(others)

    def load_with_torch(world: World) -> bool:
        load(world)
        return True

    def load_with_fewer(world: World) -> None:
        with pytest.raises(RuntimeError, match="which moves it to other ranks"):
            MoELayer(CFG, world).load_state_dict(torch.load(tmp_path / "0.pt"))

    assert all(ranks_of_torch(save, 2))
    assert all(ranks_of_torch(load_with_torch, 2))
    virtual.run(load, ranks=2)  # without torch.distributed
    virtual.run(load_with_fewer, ranks=1)


def test_what_one_rank_saves_for_all_has_to_be_gathered(tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        layer = WEIGHTS.layer(world)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_model_state_dict(layer, options=options)
        if world.rank == 0:
            torch.save(layer.state_dict(), tmp_path / "own.pt")
            torch.save(gathered, tmp_path / "gathered.pt")
        dist.barrier()
        fresh = MoELayer(CFG, world)
        if world.rank > 0:
            with pytest.raises(RuntimeError, match="holds the experts of rank 0 here"):
                fresh.load_state_dict(torch.load(tmp_path / "own.pt"))
        fresh.load_state_dict(torch.load(tmp_path / "gathered.pt"))
        right(fresh)
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize(
    "made_of", all_but(["a dimension of a mesh"], ["a dimension of a mesh", "a group"])
)
def test_a_world_of_a_group_saves_all_experts_of_its_ranks(made_of: str, tmp_path: Path) -> None:
    def rank_main(everyone: World) -> bool:
        if made_of == "a dimension of a mesh":
            group: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"]
        else:
            group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        with moeos.init("twin", group=group, deadline=60.0) as world:
            assert world.size == 2
            model = Model(WEIGHTS.layer(world))
            state = model.state_dict()
            name = "blocks.0.mlp.w1"
            assert isinstance(state[name], DTensor)
            assert torch.equal(state[name].full_tensor(), WEIGHTS.w1)
            dcp.save({"model": state}, checkpoint_id=tmp_path)
            again = Model(MoELayer(CFG, world))
            loaded = {"model": again.state_dict()}
            dcp.load(loaded, checkpoint_id=tmp_path)
            again.load_state_dict(loaded["model"])
            right(again.layer)
            full = get_model_state_dict(again, options=StateDictOptions(full_state_dict=True))
            assert torch.equal(full[name], WEIGHTS.w1)
        return True

    assert all(ranks_of_torch(rank_main, 4))


def test_safetensors_saves_what_is_gathered_or_local(tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        state = WEIGHTS.layer(world).state_dict()
        said = r"^safetensors reads memory, and a DTensor of shape \[8, .*: save full_tensor\(\)"
        with pytest.raises(RuntimeError, match=said):
            save_file(state, tmp_path / f"refused-{world.rank}")
        for way in ("full_tensor", "to_local"):
            file = tmp_path / f"{way}-{world.rank}.safetensors"
            save_file(
                {
                    name: getattr(value, way)() if isinstance(value, DTensor) else value
                    for name, value in state.items()
                },
                file,
            )
            again = MoELayer(CFG, world)
            again.load_state_dict(load_file(file))
            right(again)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_world_whose_group_was_destroyed_holds_plain_tensors() -> None:
    def rank_main(everyone: World) -> bool:
        group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        with moeos.init("twin", group=group, deadline=60.0) as world:
            layer = WEIGHTS.layer(world)
            assert isinstance(layer.state_dict()["w1"], DTensor)
            dist.destroy_process_group(group)
            assert type(layer.state_dict()["w1"]) is Tensor
        return True

    assert all(ranks_of_torch(rank_main, 4))


def test_a_group_of_other_ranks_changes_nothing() -> None:
    def rank_main(world: World) -> bool:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        layer = WEIGHTS.layer(world)
        assert type(layer.state_dict()["w1"]) is Tensor
        return True

    assert all(ranks_of_torch(rank_main, 2))
