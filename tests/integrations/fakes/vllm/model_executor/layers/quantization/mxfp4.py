# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: gpt-oss' checkpoints in MXFP4, and the experts' weights of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class GptOssMxfp4Config(QuantizationConfig):
    @classmethod
    def get_name(cls) -> Any:
        return "gpt_oss_mxfp4"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls()

    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        return GptOssMxfp4MoEMethod(moe)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return self._make_moe_method(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        raise NotImplementedError("the stand-in has no kernels of vLLM")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        halves = 2 if self.moe.is_act_and_mul else 1
        matrices = {
            "w13": (halves * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, (rows, columns) in matrices.items():
            for end, width in (("weight", columns // 2), ("weight_scale", columns // 32)):
                made = torch.zeros(num_experts, rows, width, dtype=torch.uint8)
                layer.register_parameter(f"{name}_{end}", nn.Parameter(made, requires_grad=False))
            if self.moe.has_bias:
                made = torch.zeros(num_experts, rows, dtype=torch.bfloat16)
                layer.register_parameter(f"{name}_bias", nn.Parameter(made, requires_grad=False))

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
            global_num_experts=layer.global_num_experts,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
