# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: what a plugin's quantisation is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class QuantizeMethodBase:
    supports_pre_processed_weights: bool = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> Any: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig: ...

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return None

    @abstractmethod
    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None: ...
