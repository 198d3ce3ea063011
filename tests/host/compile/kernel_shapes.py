# SPDX-License-Identifier: Apache-2.0
"""A small layer's kernel, for tests of what is compiled and how."""

from __future__ import annotations

from typing import Any

import torch

from moeos import MoEConfig
from moeos.compile.kernel_shape import KernelShape

LAYER: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 64,
    "experts": 8,
    "top_k": 2,
    "max_tokens": 64,
    "dtype": torch.bfloat16,
}


def shape(**changes: Any) -> KernelShape:
    """A small layer's kernel on one of two ranks."""
    return KernelShape(cfg=MoEConfig(**(LAYER | changes)), world_size=2, processors=131)
