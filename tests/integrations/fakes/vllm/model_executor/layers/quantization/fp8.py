# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: checkpoints in FP8, and the experts' weights of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)


class Fp8Config(QuantizationConfig):
    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = True,
        activation_scheme: str = "dynamic",
        ignored_layers: list[str] | None = None,
        weight_block_size: list[int] | None = None,
        store_dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.activation_scheme = activation_scheme
        self.ignored_layers = ignored_layers or []
        self.ignored_layers_match_mode = "exact"
        self.weight_block_size = weight_block_size
        self.store_dtype = store_dtype

    @classmethod
    def get_name(cls) -> Any:
        return "fp8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(
            activation_scheme=config["activation_scheme"],
            ignored_layers=config.get("modules_to_not_convert"),
            weight_block_size=config.get("weight_block_size"),
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return Fp8LinearMethod(self) if isinstance(layer, LinearBase) else None


class Fp8LinearMethod(QuantizeMethodBase):
    def __init__(self, quant_config: Fp8Config) -> None:
        self.quant_config = quant_config


class Fp8MoEMethod(FusedMoEMethodBase):
    def __init__(self, quant_config: Fp8Config, layer: Any) -> None:
        super().__init__(layer.moe_config)
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
        assert self.weight_scale_refine is None
        halves = 2 if self.moe.is_act_and_mul else 1
        inner = intermediate_size_per_partition
        codes = {
            "w13_weight": (num_experts, halves * inner, hidden_size),
            "w2_weight": (num_experts, hidden_size, inner),
        }
        if self.block_quant:
            down, across = self.weight_block_size
            assert self.moe_block_shape == [down, across]
            assert inner % down == 0
            scales = {
                "w13_weight_scale_inv": (
                    num_experts,
                    halves * (inner // down),
                    -(-hidden_size // across),
                ),
                "w2_weight_scale_inv": (num_experts, -(-hidden_size // down), inner // across),
            }
        else:
            scales = {"w13_weight_scale": (num_experts, halves), "w2_weight_scale": (num_experts,)}
        for shapes, dtype in ((codes, torch.float8_e4m3fn), (scales, torch.float32)):
            for name, shape in shapes.items():
                made = nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)
                layer.register_parameter(name, made)
        layer.w13_input_scale = layer.w2_input_scale = None

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
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
