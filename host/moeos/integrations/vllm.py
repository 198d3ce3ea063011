# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM: `--quantization moeos` runs the routed experts of a model on moeos.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. A
quantisation config is where vLLM lets a plugin choose how a layer computes; nothing is quantised
that the checkpoint has not. This file chooses and refuses; `moeos.integrations.vllm_experts`
computes, and `vllm_quantized` has the checkpoints that are quantised. It was written for the
version below and is imported before vLLM's layers are, so it imports none of them itself.
"""

from __future__ import annotations

from typing import Any

import torch

from moeos.integrations import shared

VERSION = shared.VLLM
"""The version of vLLM whose interfaces this was written for."""

NAME = shared.NAME
"""The name of the quantization."""

reset = shared.reset

_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
"""The names of MXFP4 in checkpoints and in vLLM."""

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
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """For a quantized checkpoint this is vLLM's own config, with experts by moeos."""
        if config.get("quant_method") is None:
            return cls()
        from moeos.integrations import vllm_quantized  # spares vLLM's layers

        return vllm_quantized.config_of(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes a quantised checkpoint where moeos was asked for, or refuses it."""
        if user_quant != NAME:
            return None
        method, model = hf_quant_cfg.get("quant_method"), getattr(hf_config, "model_type", None)
        if method not in ("fp8", *_MXFP4):
            works = "serve one of 'fp8', or the model's bfloat16, float16 or float32 checkpoint"
            raise shared.refusal("vLLM", "the checkpoint's quant_method", method, works)
        if method in _MXFP4 and model != "gpt_oss":
            works = "those of gpt_oss do"
            raise shared.refusal("vLLM", f"{method} of a model_type", model, works)
        if str(model).startswith("deepseek_v4"):  # which vLLM loads by a config of its own
            works = "those without experts in FP4 do, such as deepseek_v3"
            raise shared.refusal("vLLM", f"{method} of a model_type", model, works)
        return NAME

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer computes; None leaves it to vLLM."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        if isinstance(layer, RoutedExperts):
            from moeos.integrations.vllm_experts import MoeosMethod  # spares vLLM's layers

            return MoeosMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def register() -> None:
    """Makes vLLM know `--quantization moeos`. May be called again."""
    register_quantization_config(NAME)(MoeosConfig)
