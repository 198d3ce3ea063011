# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA on stacked experts that moeos computes: gradients and outputs are eager's.

PEFT makes a parametrization of a stacked parameter, so that a read of it is a computation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moeos.config import reference
from moeos.integrations.transformers import register
from tests.nightly import all_but

peft = pytest.importorskip("peft")

LIMIT = 1e-5
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 32},
}
IDS = torch.arange(24).view(2, 12)


def model(family: str, implementation: str) -> Any:
    torch.manual_seed(0)
    if family == "qwen3":
        config = transformers.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
        )
        made: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.GptOssConfig(
            **SIZES,
            **{"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
            layer_types=["full_attention"],
        )
        made = transformers.GptOssForCausalLM(config)
    made.set_experts_implementation(implementation)
    wanted = peft.LoraConfig(
        r=4,
        target_modules=[],
        init_lora_weights=False,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    torch.manual_seed(1)
    return peft.get_peft_model(made, wanted)


def gradients(made: Any) -> dict[str, Tensor]:
    made.zero_grad()
    made(input_ids=IDS, labels=IDS).loss.backward()
    return {name: one.grad for name, one in made.named_parameters() if one.requires_grad}


def check(made: Any, right: dict[str, Tensor]) -> None:
    found = gradients(made)
    assert found.keys() == right.keys()
    assert len(found) == 4
    for name, gradient in right.items():
        assert found[name] is not None, name
        assert reference.relative_error(found[name], gradient) <= LIMIT, name


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_each_step_has_the_gradients_of_eager_after_a_register_and_a_change_of_dtype_too(
    family: str,
) -> None:
    register(max_tokens=64)
    right = gradients(model(family, "eager"))
    made = model(family, "moeos")
    for _ in range(2):
        check(made, right)
    register(max_tokens=32)
    check(made, right)
    made.to(torch.bfloat16)
    gradients(made)
    made.float()
    eager = model(family, "eager").to(torch.bfloat16).float()
    check(made, gradients(eager))


@pytest.mark.parametrize(
    ("family", "reentrant"),
    all_but(
        [("qwen3", False), ("gpt_oss", False)],
        [(family, how) for family in ("qwen3", "gpt_oss") for how in (False, True)],
    ),
)
def test_a_checkpointed_first_step_has_the_gradients_of_eager(family: str, reentrant: bool) -> None:
    register(max_tokens=64)
    right = gradients(model(family, "eager"))
    made = model(family, "moeos")
    made.enable_input_require_grads()
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    made.train()
    check(made, right)
    check(made, right)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_adapters_that_are_merged_disabled_and_taken_off_answer_as_eager(family: str) -> None:
    register(max_tokens=64)

    def answers(made: Any) -> list[Tensor]:
        found = []
        with torch.no_grad():
            found.append(made(input_ids=IDS).logits)
            with made.disable_adapter():
                found.append(made(input_ids=IDS).logits)
            made.merge_adapter()
            found.append(made(input_ids=IDS).logits)
            made.unmerge_adapter()
            found.append(made(input_ids=IDS).logits)
            merged = made.merge_and_unload()
            found.append(merged(input_ids=IDS).logits)
        return found

    eager, ours = answers(model(family, "eager")), answers(model(family, "moeos"))
    for number, (found, right) in enumerate(zip(ours, eager, strict=True)):
        assert reference.relative_error(found, right) <= LIMIT, number
    assert reference.relative_error(eager[0], eager[1]) > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_compiled_model_has_the_gradients_of_eager_from_the_first_step_on(
    family: str, backend: str
) -> None:
    register(max_tokens=64)
    right = gradients(model(family, "eager"))
    torch._dynamo.reset()
    made = model(family, "moeos")
    compiled = torch.compile(made, backend=backend)
    for _ in range(2):
        made.zero_grad()
        compiled(input_ids=IDS, labels=IDS).loss.backward()
        for name, one in made.named_parameters():
            if one.requires_grad:
                assert one.grad is not None, name
                assert reference.relative_error(one.grad, right[name]) <= LIMIT, name
