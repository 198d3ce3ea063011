# SPDX-License-Identifier: Apache-2.0
"""A layer with the weights of a Hugging Face block computes what that block computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeos import MoELayer, World
from moeos.config import reference
from moeos.world import virtual
from tests.host.checkpoints import test_checkpoint as experts_one_by_one
from tests.huggingface import FAMILIES, Block
from tests.layers import NEAR_TIE, TOLERANCE
from tests.nightly import in_turn

pytestmark = pytest.mark.usefixtures("poisoned_output")

TOKENS = (200, 0, 37, 512)
"""By rank."""

SIZES: dict[str, list[dict[str, Any]]] = {
    "mixtral": [{}, {"hidden": 72, "intermediate": 40, "experts": 12, "top_k": 3}],
    "qwen3_moe": [{}, {"experts": 16, "top_k": 8, "renormalize": False}],
    "olmoe": [{}, {"experts": 16, "top_k": 8, "renormalize": True}],
    "deepseek_v2": [{}, {"experts": 32, "expert_groups": 8, "top_groups": 3, "top_k": 6}],
    "minimax_m2": [{}],
    "ernie4_5_moe": [{}],
    "deepseek_v3": [
        {},
        {"experts": 32, "expert_groups": 8, "top_groups": 3, "top_k": 6, "renormalize": False},
    ],
}

BLOCKS = [(name, number) for name, sizes in SIZES.items() for number in range(len(sizes))]


def test_every_family_is_tested() -> None:
    assert SIZES.keys() == FAMILIES.keys()


def inputs(block: Block, ranks: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = block.config.hidden, block.config.dtype
    return [torch.randn(n, hidden, generator=generator).to(dtype) for n in TOKENS[:ranks]]


def assert_is_block(block: Block, x: torch.Tensor, y: torch.Tensor) -> None:
    cfg = block.config
    gate = block.state_dict[block.prefix + "gate.weight"]
    sure = reference.route(x, gate, cfg, block.selection_bias).margin >= NEAR_TIE
    assert int((~sure).sum()) <= max(1, len(x) // 100)
    error = reference.relative_error(y[sure], block.routed_output(x)[sure])
    assert error <= TOLERANCE[cfg.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("which", "dtype", "ranks"),
    in_turn(BLOCKS, [torch.float32, torch.bfloat16], [1, 2, 4]),
    ids=str,
)
def test_from_hf_is_the_block(which: tuple[str, int], dtype: torch.dtype, ranks: int) -> None:
    name, number = which
    block = FAMILIES[name](**SIZES[name][number], dtype=dtype)
    x = inputs(block, ranks)

    def rank_main(world: World) -> torch.Tensor:
        layer = MoELayer.from_hf(block.config, world, block.state_dict, block.prefix, block.ignore)
        y: torch.Tensor = layer(x[world.rank])
        return y

    for tokens, y in zip(x, virtual.run(rank_main, ranks=ranks), strict=True):
        assert_is_block(block, tokens, y)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_a_router_in_fp32_beside_experts_of_16_bits_is_the_blocks(name: str) -> None:
    made = FAMILIES[name](dtype=torch.bfloat16, experts=32, top_k=5)
    gate = made.state_dict[made.prefix + "gate.weight"]  # in the module's memory
    generator = torch.Generator().manual_seed(5)
    gate.copy_(torch.randn(gate.shape, generator=generator) / 8)
    # Experts in pairs, of which top_k divides one; bfloat16 hardly tells them apart.
    change = 2e-2 * torch.randn(gate[::2].shape, generator=generator)
    gate[1::2] = (gate[::2] * (1 + change)).float().double()
    rounded = made.config
    block = dataclasses.replace(
        made, config=dataclasses.replace(rounded, router_dtype=torch.float32)
    )
    x = inputs(block, 2)

    def rank_main(world: World) -> list[torch.Tensor]:
        outputs = []
        for cfg in (block.config, rounded):
            layer = MoELayer.from_hf(cfg, world, block.state_dict, block.prefix, block.ignore)
            outputs.append(layer(x[world.rank]))
        return outputs

    (y, of_rounded), _ = virtual.run(rank_main, ranks=2)
    assert_is_block(block, x[0], y)
    error = reference.relative_error(of_rounded, block.routed_output(x[0]))
    assert error > 2 * TOLERANCE[torch.bfloat16]  # some tokens went elsewhere


@pytest.mark.parametrize("family", FAMILIES.values(), ids=[*FAMILIES])
def test_from_hf_takes_the_files_of_a_checkpoint(
    family: Callable[..., Block], tmp_path: Path
) -> None:
    block = family()
    checkpoint = block.save_checkpoint(tmp_path)
    x = inputs(block, 4)

    def rank_main(world: World) -> torch.Tensor:
        layer = MoELayer.from_hf(
            block.config, world, checkpoint, block.checkpoint_prefix, block.ignore
        )
        y: torch.Tensor = layer(x[world.rank])
        return y

    for tokens, y in zip(x, virtual.run(rank_main, ranks=4), strict=True):
        assert_is_block(block, tokens, y)


def test_what_one_rank_cannot_read_raises_on_all_ranks_and_names_it() -> None:
    cfg, names = experts_one_by_one.config(), experts_one_by_one.split_names()
    prefix = experts_one_by_one.PREFIX
    damaged = dict(names)
    name = next(name for name in damaged if name.endswith(f".{cfg.experts - 1}.down_proj.weight"))
    damaged[name] = damaged[name][:, :-1]

    def rank_main(world: World) -> str:
        with pytest.raises(ValueError, match="has shape") as error:
            MoELayer.from_hf(cfg, world, damaged, prefix)
        layer = MoELayer.from_hf(cfg, world, names, prefix)
        assert layer(torch.randn(3, cfg.hidden)).isfinite().all()
        return str(error.value)

    first, second = virtual.run(rank_main, ranks=2)
    assert second.startswith(name)
    what = f"the weights under {prefix!r}"
    assert first == f"rank 1 cannot take {what}: ValueError: {second}"
