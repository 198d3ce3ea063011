# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: the quantisations that are known, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_known: dict[str, type[QuantizationConfig]] = {}


def register_quantization_config(quantization: str) -> Callable[[Any], Any]:
    def registered(config: Any) -> Any:
        if not issubclass(config, QuantizationConfig):
            raise ValueError(f"{config} is no QuantizationConfig")
        _known[quantization] = config
        return config

    return registered


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    return _known[quantization]
