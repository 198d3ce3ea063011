# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: which core runs a layer, and its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
from sglang.srt.layers.moe.utils import register_moe_runner_backend_name

_factories: dict[str, Callable[[MoeRunnerConfig], DispatchMoeRunnerCore]] = {}


def register_moe_runner_core(
    backend_name: str, factory: Callable[[MoeRunnerConfig], DispatchMoeRunnerCore]
) -> None:
    if backend_name in _factories:
        raise ValueError(f"{backend_name} is registered already")
    register_moe_runner_backend_name(backend_name)
    _factories[backend_name] = factory


class MoeRunner:
    def __init__(
        self, runner_backend: Any, config: MoeRunnerConfig, lora_enabled: bool = False
    ) -> None:
        self.runner_backend = runner_backend
        self.config = config
        factory = _factories.get(runner_backend.value)
        self.runner_core = None if factory is None else factory(config)

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        assert isinstance(self.runner_core, DispatchMoeRunnerCore), "no kernels of SGLang are here"
        return self.runner_core.run_from_dispatch(
            dispatch_output, quant_info, self.config, hooks=None
        )
