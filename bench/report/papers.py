# SPDX-License-Identifier: Apache-2.0
"""The numbers of SonicMoE's and MoEBlaze's papers that ours are compared with.

Nothing here was measured by moeos, and nothing is computed. Both papers measured one H100.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

SONICMOE, MOEBLAZE = "sonicmoe", "moeblaze"
"""The names of the suites with their layers (configs/suites)."""

SONICMOE_TFLOPS: Mapping[str, tuple[str, str]] = {
    "30B": ("over 500", "over 500"),
    "120B": ("over 500", "over 500"),
    "DeepSeek-V3.2-Exp": ("534.8", "480.1"),
}
"""Forward and backward, by layer, from the text of SonicMoE's section 6.2. Other numbers are only
in plots, Figures 14 and 15.
"""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A row of MoEBlaze's Table 2; None: MegaBlocks ran out of memory.

    Attributes:
        blaze_ms, blocks_ms: forward and backward.
        blaze_mb, blocks_mb: of activations, by hooks of saved tensors.
    """

    blaze_ms: float
    blocks_ms: float | None
    blaze_mb: int
    blocks_mb: int | None


SCALING_LAYER = "Table 2"
"""The name of the row's layer in the suite."""

SCALING: Mapping[tuple[str, int], Scaling] = {
    ("swiglu", 8192): Scaling(1.0, 1.8, 155, 495),
    ("swiglu", 32768): Scaling(2.3, 5.9, 477, 1931),
    ("swiglu", 131072): Scaling(7.7, 22.5, 1766, 7675),
    ("swiglu", 524288): Scaling(28.7, None, 6918, None),
    ("swiglu", 2097152): Scaling(115.2, None, 27528, None),
    ("silu", 8192): Scaling(0.7, 1.4, 108, 303),
    ("silu", 32768): Scaling(1.8, 4.4, 334, 1163),
    ("silu", 131072): Scaling(6.3, 16.1, 1238, 4603),
    ("silu", 524288): Scaling(24.0, None, 4854, None),
    ("silu", 2097152): Scaling(95.3, None, 19320, None),
}
"""MoEBlaze's Table 2, by activation and tokens."""

DISPATCH_TOKENS = 1_000_000
"""Tokens of Table 3: "1M", which may as well be 2^20."""

DISPATCH_MS: Mapping[str, tuple[float, float]] = {
    "Qwen3": (5.1, 2.1),
    "DeepSeek V3": (6.8, 3.0),
    "DBRX": (1.7, 0.9),
    "Mixtral 8x22B": (1.9, 1.4),
    "gpt-oss-120b": (3.6, 1.9),
    "Granite": (3.8, 1.6),
}
"""MoEBlaze's Table 3: by a sort, and by its own steps."""
