# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: weights in FP8."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from torch import nn


class Fp8Config:
    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = False,
        activation_scheme: str = "dynamic",
        weight_block_size: list[int] | None = None,
        use_mxfp8: bool = False,
        is_fp4_experts: bool = False,
    ) -> None:
        self.is_checkpoint_fp8_serialized = is_checkpoint_fp8_serialized
        self.activation_scheme = activation_scheme
        self.weight_block_size = weight_block_size
        self.use_mxfp8 = use_mxfp8
        self.is_fp4_experts = is_fp4_experts


class Fp8MoEMethod:
    runner = None

    def __init__(self, quant_config: Fp8Config) -> None:
        self.quant_config = quant_config
        self.use_mxfp8 = quant_config.use_mxfp8
        self.is_fp4_expert = quant_config.is_fp4_experts
        self.block_quant = quant_config.weight_block_size is not None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        halves = 2 if layer.moe_runner_config.is_gated else 1
        inner = intermediate_size_per_partition
        codes = {
            "w13_weight": (num_experts, halves * inner, hidden_size),
            "w2_weight": (num_experts, hidden_size, inner),
        }
        if self.block_quant:
            down, across = self.quant_config.weight_block_size
            scales = {
                "w13_weight_scale_inv": (
                    num_experts,
                    halves * -(-inner // down),
                    -(-hidden_size // across),
                ),
                "w2_weight_scale_inv": (num_experts, -(-hidden_size // down), -(-inner // across)),
            }
        else:
            scales = {"w13_weight_scale": (num_experts, halves), "w2_weight_scale": (num_experts,)}
        for shapes, dtype in ((codes, torch.float8_e4m3fn), (scales, torch.float32)):
            for name, shape in shapes.items():
                made = nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)
                layer.register_parameter(name, made)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise NotImplementedError("the stand-in has no kernels of SGLang")

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> Any:
        return None if self.runner is None else self.runner.runner_backend

    def get_triton_quant_info(self, layer: torch.nn.Module) -> TritonMoeQuantInfo:
        end = "weight_scale_inv" if self.block_quant else "weight_scale"
        return TritonMoeQuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            use_fp8_w8a8=True,
            w13_scale=getattr(layer, f"w13_{end}"),
            w2_scale=getattr(layer, f"w2_{end}"),
            block_shape=self.quant_config.weight_block_size,
        )

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        raise NotImplementedError("the stand-in has no kernels of SGLang")
