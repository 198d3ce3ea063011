# SPDX-License-Identifier: Apache-2.0
"""A tiny model of transformers in bfloat16 on the GPU answers with moeos as with "eager"."""

from __future__ import annotations

import pytest
import torch

from moeos.config import reference
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
LIMIT = 2e-2
"""Relative error of logits in bfloat16."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_on_the_gpu_answers_as_eager_does(name: str) -> None:
    from moeos.integrations import transformers as adapter
    from tests.integrations.test_transformers import answer, experts_modules, prompt, tiny

    model = tiny(name).to("cuda", torch.bfloat16)
    ids = prompt().cuda()
    logits, _ = answer(model, ids)
    adapter.register(max_tokens=256)
    model.set_experts_implementation("moeos")
    ours, _ = answer(model, ids)
    assert reference.relative_error(ours, logits) <= LIMIT
    for module in experts_modules(model):
        assert module._moeos_ready.experts.world.backend == "cuda"
        module._moeos_ready.experts.check()
