# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: what a layer's experts are, and how they lie on ranks."""

from __future__ import annotations

import dataclasses

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation


@dataclasses.dataclass
class FusedMoEParallelConfig:
    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    tp_rank: int
    pcp_rank: int
    dp_rank: int
    ep_rank: int
    sp_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sp_size > 1


@dataclasses.dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    activation: MoEActivation
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    max_num_tokens: int
    has_bias: bool = False
    is_lora_enabled: bool = False
    skip_final_all_reduce: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    intermediate_size_per_partition: int = -1

    def __post_init__(self) -> None:
        tp_size = self.moe_parallel_config.tp_size
        assert self.intermediate_size % tp_size == 0
        self.intermediate_size_per_partition = self.intermediate_size // tp_size

    @property
    def is_act_and_mul(self) -> bool:
        return self.activation.is_gated


@dataclasses.dataclass
class FusedMoEQuantConfig:
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


def fp8_w8a16_moe_quant_config(
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig(w1_bias, w2_bias, w1_scale, w2_scale)


def mxfp4_w4a16_moe_quant_config(
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig(w1_bias, w2_bias, w1_scale, w2_scale)
