# SPDX-License-Identifier: Apache-2.0
"""A layer on the GPU with the weights of a Hugging Face block computes what that block computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeos import MoELayer, World
from moeos.config import reference
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    TOLERANCE,
    Case,
    blocks,
    compile_cases,
    draw_routed_call,
    on_gpu,
    why_not,
)
from tests.layers import Weights

if not why_not():
    from tests.huggingface import FAMILIES, Block

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

RANKS = 2
TOKENS = (200, 37)
"""By rank."""

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden": 128, "intermediate": 192},
    "qwen3_moe": {"hidden": 128, "experts": 32, "top_k": 8},
    "olmoe": {"hidden": 72, "intermediate": 40, "experts": 12, "top_k": 3},
    "deepseek_v2": {"hidden": 128, "experts": 64, "expert_groups": 8, "top_groups": 3, "top_k": 6},
    "minimax_m2": {"hidden": 128},
    "ernie4_5_moe": {"hidden": 128},
    "deepseek_v3": {"hidden": 128, "experts": 64, "expert_groups": 8, "top_groups": 3, "top_k": 6},
}


def block_of(family: str) -> Block:
    """The family's block, whose weights have the values of bfloat16."""
    return FAMILIES[family](**SIZES[family], dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The kernels of all families are compiled, side by side, before the first test."""
    compile_cases([Case(RANKS, block_of(family).config) for family in SIZES], blocks())


def test_every_family_is_tested() -> None:
    assert SIZES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", SIZES)
def test_from_hf_is_the_block(family: str) -> None:
    block = block_of(family)
    cfg = block.config
    gate = block.state_dict[block.prefix + "gate.weight"]
    bias = block.selection_bias
    none = torch.empty(0)
    routed = on_gpu(Weights(cfg, gate, none, none, None, None, bias))
    x = [draw_routed_call(routed, tokens, seed).x for seed, tokens in enumerate(TOKENS)]

    def rank_main(world: World) -> torch.Tensor:
        layer = MoELayer.from_hf(cfg, world, block.state_dict, block.prefix, block.ignore)
        y: torch.Tensor = layer(x[world.rank])
        layer.check()
        return y

    outputs = virtual.run(rank_main, ranks=RANKS, backend="cuda", deadline=DEADLINE)
    for tokens, y in zip(x, outputs, strict=True):
        error = reference.relative_error(y, block.routed_output(tokens.cpu()))
        assert error <= TOLERANCE[cfg.dtype]
