# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: modules that are built from configs."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torchtitan.config.configurable import Configurable


class Module(nn.Module, Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: dict[str, Any] | None = None
        sharding_config: Any = None

    def parallelize(self, parallel_dims: Any) -> None:
        for child in self.children():
            if isinstance(child, Module):
                child.parallelize(parallel_dims)
