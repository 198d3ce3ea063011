# SPDX-License-Identifier: Apache-2.0
"""The kernel on the emulated GPU computes what transformers' modules compute, of the families whose
routers or activations have rules that no other family has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeos.checkpoints import load_block
from moeos.config import reference
from tests.emulator.emulated import EmulatedLayer, build
from tests.host.checkpoints.test_checkpoint_families import sure
from tests.layers import TOLERANCE, Call, Weights
from tests.tiny_models import tiny

PATIENCE = 40
RANKS, PROCESSORS = 2, 3
TOKENS = (40, 7)
"""By rank."""

NAMES = [
    *("deepseek_v4", "deepseek_v4_hashed", "gpt_oss", "llama4", "minimax_m3", "longcat_flash"),
    *("nemotron_h", "nemotron_h_latent", "gemma4"),
]


@pytest.mark.nightly  # in every run the twin computes them, and kernels what the reference does
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_computes_what_transformers_module_computes(name: str, tmp_path: Path) -> None:
    block = tiny(name, dtype=torch.bfloat16)
    cfg = block.config
    loaded = load_block(cfg, block.state_dict, block.prefix, 0, 1, block.ignore)
    weights = Weights(
        cfg=cfg,
        gate=loaded["gate.weight"],
        w1=loaded["w1"],
        w2=loaded["w2"],
        b1=loaded.get("b1"),
        b2=loaded.get("b2"),
        selection_bias=loaded.get("gate.selection_bias"),
        router_bias=loaded.get("gate.bias"),
        expert_scale=loaded.get("gate.expert_scale"),
        shared_w1=loaded.get("shared_w1"),
        shared_w2=loaded.get("shared_w2"),
        shared_gate=loaded.get("shared_gate"),
    )
    calls, expected = [], []
    for seed, tokens in enumerate(TOKENS):
        x = block.draw(8 * tokens, seed).bfloat16()
        read = block.layer_input(x).bfloat16()
        kept = sure(block, loaded, read).nonzero().flatten()[:tokens]
        x, read = x[kept], read[kept]
        routing = block.routing(x)
        given = routing.get("topk_weights")
        given = None if given is None else given.float()
        calls.append(Call(read, routing.get("topk_ids"), given))
        expected.append(block.output(x, read))
    layer = EmulatedLayer(
        build(cfg, RANKS, PROCESSORS, tmp_path), weights, RANKS, patience=PATIENCE
    )
    for y, right in zip(layer(calls, seed=1), expected, strict=True):
        assert reference.relative_error(y, right) <= TOLERANCE[torch.bfloat16]
