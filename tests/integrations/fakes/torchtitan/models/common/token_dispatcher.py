# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: tokens of one rank, put in the order of their experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.config.configurable import Configurable


class LocalTokenDispatcher(Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts = config.num_experts
        self.top_k = config.top_k

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        return
