# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: the weights of a call."""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.layers.moe.moe_runner.base import MoeQuantInfo


@dataclasses.dataclass
class TritonMoeQuantInfo(MoeQuantInfo):
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    use_fp8_w8a8: bool = False
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False
