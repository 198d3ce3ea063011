# SPDX-License-Identifier: Apache-2.0
"""Small random Mixture-of-Experts blocks, made by Hugging Face's own model code.

Each function of this file builds one family's model of one layer and returns its block together
with the `MoEConfig` that describes the same layer, so that a test can compare the two. Weights are
drawn from a seed, rounded to the layer's dtype and then kept in float64: the block computes with
exactly the values that the layer loads, and in float64 but for its router, which these families
compute in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moeos.config.config import MoEConfig

MODULE_PREFIX = "model.layers.0.mlp."


@dataclasses.dataclass(frozen=True)
class Block:
    """One family's Mixture-of-Experts block and what it computes.

    Attributes:
        config: the same layer for moeos.
        module: the block, in float64, in evaluation mode.
        state_dict: the whole model's tensors under the names that transformers' modules use.
        prefix: of the block in `state_dict`.
        ignore: what the block has beside the layer, as `from_hf` takes it.
        checkpoint_prefix: of the block in the files that `save_checkpoint` writes.
        routed_output: [S, H] of any floating dtype -> float64 [S, H], the block's output without
            that of shared experts.
        model: the model that the block is part of.
    """

    config: MoEConfig
    module: nn.Module
    state_dict: dict[str, Tensor]
    prefix: str
    ignore: tuple[str, ...]
    checkpoint_prefix: str
    routed_output: Callable[[Tensor], Tensor]
    model: PreTrainedModel

    @property
    def selection_bias(self) -> Tensor | None:
        """[E], wherever the family keeps it."""
        biases = [
            tensor.reshape(-1)
            for name, tensor in self.state_dict.items()
            if name.startswith(self.prefix) and name.endswith("e_score_correction_bias")
        ]
        return biases[0] if biases else None

    def save_checkpoint(self, folder: Path) -> dict[str, Tensor]:
        """The tensors of a checkpoint that the model's own code writes into `folder`."""
        self.model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")


def mixtral(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Block:
    """Softmax over all experts, renormalised."""
    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
    )
    return _block(model, cfg, seed, "model.layers.0.block_sparse_moe.")


def qwen3_moe(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    renormalize: bool = True,
) -> Block:
    """Softmax over all experts; `renormalize` is the family's norm_topk_prob."""
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=renormalize,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        renormalize=renormalize,
    )
    return _block(model, cfg, seed, MODULE_PREFIX)


def olmoe(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    renormalize: bool = False,
) -> Block:
    """Softmax over all experts; `renormalize` is the family's norm_topk_prob."""
    model = OlmoeForCausalLM(
        OlmoeConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=renormalize,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        renormalize=renormalize,
    )
    return _block(model, cfg, seed, MODULE_PREFIX)


def deepseek_v3(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    renormalize: bool = True,
    expert_groups: int = 4,
    top_groups: int = 2,
    routed_scaling: float = 2.5,
) -> Block:
    """Sigmoid scores, a selection bias, group-limited top-k, scaling, and a shared expert."""
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=renormalize,
            n_group=expert_groups,
            topk_group=top_groups,
            routed_scaling_factor=routed_scaling,
            first_k_dense_replace=0,
            n_shared_experts=1,
            **_SMALL_ATTENTION,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        scoring="sigmoid",
        renormalize=renormalize,
        routed_scaling=routed_scaling,
        selection_bias=True,
        expert_groups=expert_groups,
        top_groups=top_groups,
    )
    return _block(model, cfg, seed, MODULE_PREFIX)


def deepseek_v2(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    expert_groups: int = 4,
    top_groups: int = 2,
    routed_scaling: float = 16.0,
) -> Block:
    """Softmax, not renormalised; a group's score is its best expert's; scaling; shared experts."""
    model = DeepseekV2ForCausalLM(
        DeepseekV2Config(
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            topk_method="group_limited_greedy",
            n_group=expert_groups,
            topk_group=top_groups,
            routed_scaling_factor=routed_scaling,
            n_shared_experts=2,
            **_SMALL_ATTENTION,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        renormalize=False,
        routed_scaling=routed_scaling,
        expert_groups=expert_groups,
        top_groups=top_groups,
        group_score="max",
    )
    return _block(model, cfg, seed, MODULE_PREFIX)


def minimax_m2(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Block:
    """Sigmoid scores, renormalised, and a selection bias that lies beside the gate."""
    model = MiniMaxM2ForCausalLM(
        MiniMaxM2Config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            head_dim=8,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        scoring="sigmoid",
        selection_bias=True,
    )
    return _block(model, cfg, seed, "model.layers.0.block_sparse_moe.")


def ernie4_5_moe(
    *,
    hidden: int = 64,
    intermediate: int = 96,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Block:
    """Softmax, renormalised; a selection bias [1, E] in moe_statics; shared experts."""
    model = Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            moe_num_experts=experts,
            moe_k=top_k,
            moe_num_shared_experts=1,
            moe_layer_start_index=0,
            **_SMALL_MODEL,
        )
    )
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        selection_bias=True,
    )
    return _block(model, cfg, seed, MODULE_PREFIX)


FAMILIES: dict[str, Callable[..., Block]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "minimax_m2": minimax_m2,
    "ernie4_5_moe": ernie4_5_moe,
}

# Everything around the block, as small as it can be.
_SMALL_MODEL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "experts_implementation": "eager",
}
_SMALL_ATTENTION: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def _block(model: PreTrainedModel, cfg: MoEConfig, seed: int, checkpoint_prefix: str) -> Block:
    model.train(False).requires_grad_(False)
    module = model.get_submodule(MODULE_PREFIX.rstrip("."))
    _draw_weights(module, cfg.dtype, seed)
    model.double()
    shared = dict(module.named_children()).get("shared_experts")

    def routed_output(x: Tensor) -> Tensor:
        x = x.double().unsqueeze(0)
        y: Tensor = module(x)
        if shared is not None:
            y = y - shared(x)
        return y.squeeze(0)

    return Block(
        config=cfg,
        module=module,
        state_dict=model.state_dict(),
        prefix=MODULE_PREFIX,
        ignore=() if shared is None else ("shared_experts.",),
        checkpoint_prefix=checkpoint_prefix,
        routed_output=routed_output,
        model=model,
    )


def _draw_weights(module: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Give each matrix rows of norm about 1, so that activations are neither linear nor flat."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if name.endswith("e_score_correction_bias"):
            continue
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        weight.copy_(weight.to(dtype))
    for name, bias in module.state_dict(keep_vars=True).items():  # always float32
        if name.endswith("e_score_correction_bias"):
            bias.uniform_(-0.2, 0.2, generator=generator)
