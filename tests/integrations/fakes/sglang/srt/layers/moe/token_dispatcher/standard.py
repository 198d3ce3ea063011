# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: tokens stay where they are, and ids become those of this rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.runtime_context import get_parallel


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any
    hidden_states_pre_quant: Any = None


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


def _keeps_global_expert_ids(backend: Any) -> bool:
    return backend is not None and backend.is_flashinfer_cutlass()


class StandardDispatcher:
    def __init__(self, moe_runner_config: MoeRunnerConfig) -> None:
        self.moe_ep_size = get_parallel().moe_ep_size
        self.moe_ep_rank = get_parallel().moe_ep_rank
        self.num_local_experts = moe_runner_config.num_local_experts
        self.skip_local_expert_mapping = _keeps_global_expert_ids(moe_runner_config.runner_backend)

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        mapped = self.moe_ep_size > 1 and not self.skip_local_expert_mapping
        if mapped and TopKOutputChecker.format_is_standard(topk_output):
            ids = topk_output.topk_ids - self.moe_ep_rank * self.num_local_experts
            here = (ids >= 0) & (ids < self.num_local_experts)
            topk_output = topk_output._replace(topk_ids=torch.where(here, ids, -1))
        return StandardDispatchOutput(hidden_states, None, topk_output)

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        (hidden_states,) = combine_input
        return hidden_states
