# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: the weights of a layer's experts, and their method."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager


class RoutedExperts(nn.Module):
    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: Any,
        expert_map_manager: ExpertMapManager,
        swiglu_limit: float | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.moe_config = moe_config
        self.expert_map_manager = expert_map_manager
        self.global_num_experts = moe_config.num_experts
        self.local_num_experts = moe_config.num_local_experts
        self.register_buffer("_expert_map", expert_map_manager.expert_map, persistent=False)
        self.activation = moe_config.activation
        self.swiglu_limit = swiglu_limit
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.quant_method = quant_config.get_quant_method(self, layer_name)
        sizes = self.quant_method.maybe_roundup_sizes(
            moe_config.hidden_dim,
            moe_config.intermediate_size_per_partition,
            moe_config.in_dtype,
            moe_config.moe_parallel_config,
        )
        moe_config.hidden_dim, moe_config.intermediate_size_per_partition = sizes
        self.quant_method.create_weights(
            layer=self,
            num_experts=moe_config.num_local_experts,
            hidden_size=sizes[0],
            unpadded_hidden_size=sizes[0],
            intermediate_size_per_partition=sizes[1],
            params_dtype=params_dtype,
            weight_loader=None,
            global_num_experts=moe_config.num_experts,
        )

    @property
    def expert_map(self) -> torch.Tensor | None:
        return self._expert_map

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
