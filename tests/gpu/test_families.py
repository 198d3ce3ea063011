# SPDX-License-Identifier: Apache-2.0
"""A layer on the GPU of each family's tiny model computes what transformers' module computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig, MoELayer, World
from moeos.config import reference
from moeos.world import virtual
from tests.gpu.cases import DEADLINE, TOLERANCE, Case, blocks, compile_cases, why_not

if not why_not():
    from moeos.checkpoints import load_block
    from tests.host.checkpoints.test_checkpoint_families import sure
    from tests.tiny_models import TINY, TinyBlock, tiny

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

RANKS = 2
TOKENS = (200, 37)
"""By rank."""
NAMES = [] if why_not() else list(TINY)


def block_of(name: str) -> TinyBlock:
    """The family's block, whose weights have the values of bfloat16."""
    return tiny(name, dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The kernels of all families are compiled, side by side, before the first test."""
    configs = dict.fromkeys(
        dataclasses.replace(block_of(name).config, family=None) for name in NAMES
    )
    compile_cases([Case(RANKS, cfg) for cfg in configs], blocks())


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_each_family_computes_what_transformers_module_computes(name: str) -> None:
    block = block_of(name)
    cfg: MoEConfig = block.config
    weights = load_block(cfg, block.state_dict, block.prefix, 0, 1, block.ignore)
    x, given = [], []
    for seed, tokens in enumerate(TOKENS):
        drawn = block.draw(8 * tokens, seed).bfloat16()
        read = block.layer_input(drawn).bfloat16()
        kept = sure(block, weights, read)
        x.append(drawn[kept][:tokens])
        given.append(read[kept][:tokens])

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(cfg, world, block.state_dict, block.prefix, block.ignore)
        routing = {
            name: value.cuda() if isinstance(value, Tensor) else value
            for name, value in block.routing(x[world.rank]).items()
        }
        y: Tensor = layer(given[world.rank].cuda(), **routing)
        layer.check()
        return y

    outputs = virtual.run(rank_main, ranks=RANKS, backend="cuda", deadline=DEADLINE)
    for rows, read, y in zip(x, given, outputs, strict=True):
        error = reference.relative_error(y, block.output(rows, read))
        assert error <= TOLERANCE[cfg.dtype], f"relative error {error:.2e}"
