# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: weights as they are, and the call of a kernel with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, nn.Module):
    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        raise NotImplementedError("the stand-in has no kernels of vLLM")

    @property
    def supports_eplb(self) -> bool:
        return True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        shapes = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if self.moe.has_bias:
            shapes |= {"w13_bias": (num_experts, rows), "w2_bias": (num_experts, hidden_size)}
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else (None, None)
        return FusedMoEQuantConfig(*biases, gemm1_clamp_limit=layer.swiglu_limit)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
