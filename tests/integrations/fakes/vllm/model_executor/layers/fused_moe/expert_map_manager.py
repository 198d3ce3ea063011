# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: which rank holds which expert."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig


class ExpertMapManager:
    def __init__(
        self,
        global_num_experts: int,
        moe_parallel_config: FusedMoEParallelConfig,
        placement_strategy: str = "linear",
    ) -> None:
        self.placement_strategy = placement_strategy
        size, rank = moe_parallel_config.ep_size, moe_parallel_config.ep_rank
        local = global_num_experts // size + (rank < global_num_experts % size)
        self.local_num_experts = local
        self.expert_map: torch.Tensor | None = None
        if size > 1:
            first = rank * (global_num_experts // size) + min(rank, global_num_experts % size)
            self.expert_map = torch.full((global_num_experts,), -1, dtype=torch.int32)
            self.expert_map[first : first + local] = torch.arange(local, dtype=torch.int32)
