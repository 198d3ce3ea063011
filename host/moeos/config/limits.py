# SPDX-License-Identifier: Apache-2.0
"""The values that fields of a config may hold, for code that reads or makes one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MAX_EXPERTS = 1 << 16
"""The most experts of a layer, over all ranks."""
