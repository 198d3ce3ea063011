# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: how a layer's routed experts are made and called."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe: FusedMoEConfig = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.moe_kernel: mk.FusedMoEKernel | None = None

    @property
    def topk_indices_dtype(self) -> Any:
        kernel = self.moe_kernel
        return None if kernel is None else kernel.prepare_finalize.topk_indices_dtype()

    @property
    def supports_eplb(self) -> bool:
        return False
