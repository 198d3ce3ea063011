# SPDX-License-Identifier: Apache-2.0
"""What one H200 does at most, as it was measured (docs/performance.md).

It knows numbers, and nothing of what is compared with them.
"""

from __future__ import annotations

from moeos.config.config import MoEConfig

H200_BLOCKS = 132
"""Streaming multiprocessors of an H100 or H200, one block each."""
H200_GEMM_FLOPS = 806e12
"""Dense BF16 GEMM of an H200, measured with cuBLAS at 8192 x 8192 x 8192; FLOP/s."""
H200_FP8_FLOPS = 1476e12
"""The same of FP8 by FP8."""
H200_LINK_BYTES = 355e9
"""What one H200 sends to peers over NVLink with plain stores, measured; bytes/s."""
H200_MEMORY_BYTES = 4.4e12
"""What one H200 reads from its memory, measured; bytes/s."""


def expert_rate(cfg: MoEConfig) -> float:
    """FLOP/s at which an H200 multiplies as a layer's experts do, dense."""
    return H200_GEMM_FLOPS if cfg.activation_format is None else H200_FP8_FLOPS
