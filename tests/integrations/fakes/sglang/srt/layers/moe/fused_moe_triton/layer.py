# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: a layer's experts, from its construction to its call."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatcher
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_parallel


class FusedMoE(torch.nn.Module):
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int | None = None,
        num_fused_shared_experts: int = 0,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        no_combine: bool = False,
        routed_scaling_factor: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_clamp_limit: float | None = None,
        swiglu_limit: float | None = None,
        with_bias: bool = False,
        is_gated: bool = True,
        quant_method: Any = None,
    ) -> None:
        super().__init__()
        assert params_dtype is not None
        parallel = get_parallel()
        self.with_bias = with_bias
        self.num_local_experts = num_experts // parallel.moe_ep_size
        self.moe_runner_config = MoeRunnerConfig(
            num_experts=num_experts,
            num_local_experts=self.num_local_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size // parallel.moe_tp_size,
            layer_id=layer_id,
            top_k=top_k,
            num_fused_shared_experts=num_fused_shared_experts,
            params_dtype=params_dtype,
            activation=activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            no_combine=no_combine,
            routed_scaling_factor=routed_scaling_factor,
            gemm1_alpha=gemm1_alpha,
            gemm1_clamp_limit=gemm1_clamp_limit,
            swiglu_limit=swiglu_limit,
            is_gated=is_gated,
            layer=self,
        )
        self.quant_method = quant_method or UnquantizedFusedMoEMethod()
        self.quant_method.create_weights(
            layer=self,
            num_experts=self.num_local_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size // parallel.moe_tp_size,
            params_dtype=params_dtype,
            weight_loader=None,
            with_bias=with_bias,
            moe_intermediate_size=intermediate_size,
        )
        self.quant_method.create_moe_runner(self, self.moe_runner_config)
        self.runner_backend = self.quant_method.get_moe_runner_backend(self)
        self.moe_runner_config.runner_backend = self.runner_backend
        self.dispatcher = StandardDispatcher(self.moe_runner_config)

    def forward_impl(
        self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None
    ) -> torch.Tensor:
        dispatch_output = self.dispatcher.dispatch(
            hidden_states=hidden_states, topk_output=topk_output
        )
        combine_input = self.quant_method.apply(layer=self, dispatch_output=dispatch_output)
        return self.dispatcher.combine(combine_input=combine_input)
