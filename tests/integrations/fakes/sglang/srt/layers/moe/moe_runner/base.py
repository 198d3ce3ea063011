# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: what a runner core is told and given."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch


@dataclasses.dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    runner_backend: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: torch.nn.Module | None = None


class MoeQuantInfo:
    pass


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self) -> Any: ...

    @abstractmethod
    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: Any,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> Any: ...
