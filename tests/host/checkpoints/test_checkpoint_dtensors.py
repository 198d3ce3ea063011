# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face block whose tensors are DTensors is read as one of whole tensors is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from moeos import MoELayer, World
from moeos.checkpoints import load_block
from moeos.config import reference
from tests.host.checkpoints.test_checkpoint import (
    PREFIX,
    config,
    fused_names,
    mixtral_names,
    split_names,
)
from tests.huggingface import FAMILIES
from tests.process_group import ranks_of_torch

CFG = config(bias=True)


@pytest.mark.parametrize(
    ("names", "biased"),
    [(lambda: fused_names(True), True), (lambda: split_names(True), True), (mixtral_names, False)],
    ids=["fused", "split", "mixtral"],
)
def test_dtensors_of_any_placement_are_read(
    names: Callable[[], dict[str, Tensor]], biased: bool
) -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        whole = names()
        prefix = next(name for name in whole if "gate.weight" in name).split("gate.")[0]
        cfg = config(bias=biased)
        expected = load_block(cfg, whole, prefix, world.rank, world.size)
        for placement in (Shard(0), Shard(-1), Replicate()):
            state = {
                name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in whole.items()
            }
            block = load_block(cfg, state, prefix, world.rank, world.size)
            assert block.keys() == expected.keys()
            for name, tensor in expected.items():
                assert type(block[name]) is Tensor
                assert torch.equal(block[name], tensor), (placement, name)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_experts_that_are_cut_in_part_are_named() -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        state = split_names(bias=True)
        for expert in (1, 3):
            name = f"{PREFIX}experts.{expert}.up_proj.weight"
            state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
        with pytest.raises(ValueError, match=r"experts\..\.up_proj\.weight is a DTensor that is"):
            load_block(CFG, state, PREFIX, world.rank, world.size)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_layer_is_made_from_a_model_that_fsdp_has_cut() -> None:
    def rank_main(world: World) -> bool:
        block = FAMILIES["deepseek_v3"](dtype=torch.float32)
        x = torch.randn(
            37, block.config.hidden, generator=torch.Generator().manual_seed(world.rank)
        )
        expected = block.routed_output(x)
        fully_shard(block.model, mesh=init_device_mesh("cpu", (world.size,)))
        cut = block.model.state_dict()
        layer = MoELayer.from_hf(block.config, world, cut, block.prefix, block.ignore)
        assert reference.relative_error(layer(x), expected) < 1e-5
        return True

    assert all(ranks_of_torch(rank_main, 2))
