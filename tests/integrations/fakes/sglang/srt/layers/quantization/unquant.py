# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: weights as they are."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from torch import nn


class UnquantizedFusedMoEMethod:
    runner: MoeRunner | None = None

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
        rows = intermediate_size_per_partition * (2 if layer.moe_runner_config.is_gated else 1)
        shapes = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> Any:
        return None if self.runner is None else self.runner.runner_backend

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = layer.w13_weight.flip(1)  # SGLang packs weights for some of its kernels
        layer.w13_weight = nn.Parameter(packed, requires_grad=False)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        assert self.runner is not None
        quant_info = TritonMoeQuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            b13=getattr(layer, "w13_weight_bias", None),
            b2=getattr(layer, "w2_weight_bias", None),
        )
        return self.runner.run(dispatch_output, quant_info)
