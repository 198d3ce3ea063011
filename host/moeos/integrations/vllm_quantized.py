# SPDX-License-Identifier: Apache-2.0
"""vLLM's quantised checkpoints whose routed experts moeos computes: FP8, and gpt-oss in MXFP4.

Each is vLLM's own config of that checkpoint, so that its models, its loaders and all other layers
find what they know. The experts' weights are made by vLLM's own method, and used where they lie.
This file must not depend on how experts compute.
"""

from __future__ import annotations

from typing import Any

import torch

from moeos.config.element_formats import BLOCK, WeightFormat
from moeos.integrations import shared
from moeos.integrations.vllm_experts import WHERE, MoeosMethod, OnMoeos

try:
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEQuantConfig,
        fp8_w8a16_moe_quant_config,
        mxfp4_w4a16_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.base_config import (
        QuantizationConfig,
        QuantizeMethodBase,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from vllm.model_executor.layers.quantization.mxfp4 import (
        GptOssMxfp4Config,
        GptOssMxfp4MoEMethod,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
except ImportError as error:
    raise shared.missing("vllm", "vllm", shared.VLLM) from error


def config_of(config: dict[str, Any]) -> QuantizationConfig:
    """The config of experts for a checkpoint's `quantization_config`; `ValueError` for what moeos
    does not compute.
    """
    if config["quant_method"] == "fp8":
        return MoeosFp8Config.from_config(config)
    return MoeosMxfp4Config()


class MoeosFp8Config(Fp8Config):
    """FP8 in blocks of 128x128 or with a scale a matrix; tokens stay in their dtype."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        block = config.get("weight_block_size")
        cases: list[tuple[bool, str, str]] = [
            (
                config.get("activation_scheme") == "static",
                "activation_scheme",
                "'dynamic' does: an input_scale is not used, as activations are not quantised",
            ),
            (
                block is not None and [*block] != [BLOCK, BLOCK],
                "weight_block_size",
                f"{[BLOCK, BLOCK]} and none do",
            ),
            (config.get("store_dtype") is not None, "store_dtype", "none does"),
            (config.get("fmt") not in (None, "e4m3"), "fmt", "'e4m3' does"),
        ]
        for refused, field, works in cases:
            if refused:
                where = f"{WHERE}, the checkpoint's quantization_config"
                raise shared.refusal(where, field, config[field], works)
        made: Fp8Config = super().from_config(config)
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer computes, as vLLM's own config says it but for routed experts."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        if is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        ):
            return MoeosMethod(layer.moe_config)
        return MoeosFp8Method(self, layer)


class MoeosFp8Method(OnMoeos, Fp8MoEMethod):
    """Weights as vLLM's FP8 method has them before it makes them some kernel's."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.weight_scale_refine = None
        self.block_quant = self.weight_block_size is not None
        self.weight_scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"
        self.weight_format: WeightFormat = "fp8_block128" if self.block_quant else "fp8_tensor"
        self.start(layer.moe_config)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        w1_scale, w2_scale = (
            getattr(layer, f"{name}_{self.weight_scale_name}") for name in ("w13", "w2")
        )
        made: FusedMoEQuantConfig = fp8_w8a16_moe_quant_config(
            w1_scale=w1_scale,
            w2_scale=w2_scale if self.block_quant else w2_scale.unsqueeze(1),
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            block_shape=self.weight_block_size,
        )
        return made


class MoeosMxfp4Config(GptOssMxfp4Config):
    """gpt-oss' experts in MXFP4."""

    def _make_moe_method(self, moe: FusedMoEConfig) -> MoeosMxfp4Method:
        return MoeosMxfp4Method(moe)


class MoeosMxfp4Method(OnMoeos, GptOssMxfp4MoEMethod):
    """Weights as vLLM's method has them before it makes them some kernel's."""

    weight_format: WeightFormat = "mxfp4"

    def __init__(self, moe: FusedMoEConfig) -> None:
        self.start(moe)
        self.weight_dtype = "gpt_oss_mxfp4"  # by which vLLM's model finds how to load it
        self.mxfp4_backend = Mxfp4MoeBackend.NONE

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        made: FusedMoEQuantConfig = mxfp4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
        )
        return made
