# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: the weights of experts, and what routes tokens through them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.protocols.module import Module


class GroupedExperts(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.num_experts = experts
        self.w1_EFD = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2_EDF = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3_EFD = nn.Parameter(torch.empty(experts, hidden, dim))


class RoutedExperts(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_experts: GroupedExperts.Config
        token_dispatcher: LocalTokenDispatcher.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        raise NotImplementedError("the stand-in computes no experts")

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        self.token_dispatcher.wire_meshes(ep_mesh=parallel_dims.get_optional_mesh("ep"))
