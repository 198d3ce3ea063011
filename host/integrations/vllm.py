# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM: `--quantization moeos` runs the routed experts of a model on moeos.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. A
quantisation config is where vLLM lets a plugin choose how a layer computes; nothing is quantised.
This file chooses and refuses; `moeos.integrations.vllm_experts` computes. It was written for the
version below and is imported before vLLM's layers are, so it imports none of them itself.
"""

from __future__ import annotations

from typing import Any

import torch

from moeos.integrations import shared

VERSION = "0.32.0"
"""The version of vLLM whose interfaces this was written for."""

NAME = shared.NAME
"""What the quantisation is called."""

try:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import (
        QuantizationConfig,
        QuantizeMethodBase,
    )
except ImportError as error:
    raise shared.missing("vllm", "vllm", VERSION) from error


class MoeosConfig(QuantizationConfig):
    """Routed experts by moeos, all else as without a quantisation.

    `--additional-config '{"moeos": {...}}'` has its options: see `vllm_experts.Options`.
    """

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MoeosConfig:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Refuses a checkpoint that is quantised, where moeos was asked for."""
        if user_quant == NAME:
            raise shared.refusal(
                "vLLM",
                "the checkpoint's quant_method",
                hf_quant_cfg.get("quant_method"),
                "serve the model's bfloat16, float16 or float32 checkpoint",
            )
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer computes; None leaves it to vLLM."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        if isinstance(layer, RoutedExperts):
            from moeos.integrations.vllm_experts import MoeosMethod

            return MoeosMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def register() -> None:
    """Makes vLLM know `--quantization moeos`. May be called again."""
    register_quantization_config(NAME)(MoeosConfig)
