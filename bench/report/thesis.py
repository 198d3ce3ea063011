# SPDX-License-Identifier: Apache-2.0
"""The numbers of the FlashDMoE thesis (O. J. Aimuyo, Cornell 2025) that ours are compared with.

Nothing here was measured by moeos, and nothing is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

HIDDEN, INTERMEDIATE, TOP_K, CAPACITY_FACTOR = 1024, 4096, 2, 1.0
"""Sizes of all layers, section 6.1."""

GPUS = 8
"""H100 80G, in all but Table 6.5 and Figure 6.3; section 6.1."""

SYSTEMS = ("FlashDMoE", "Comet", "FasterMoE", "Megatron", "DeepEP")
"""The columns of Tables 6.3 to 6.5. The first computes in FP32 and the others in FP16, section
6.1."""

TOKENS = (1024, 2048, 4096, 8192)
"""Tokens of a GPU, in Table 6.3."""

TOKEN_SCALING_EXPERTS = 32
"""Experts in Table 6.3 and Table 6.5."""

EXPERTS = (16, 32, 64, 128)
"""Numbers of experts in Table 6.4."""

EXPERT_SCALING_TOKENS = 8192
"""Tokens of a GPU, in Table 6.4 and Table 6.5."""

MILLISECONDS_BY_TOKENS: Mapping[int, tuple[float, ...]] = {
    1024: (2.07, 2.87, 3.85, 2.59, 3.80),
    2048: (1.90, 5.12, 5.04, 3.83, 3.83),
    4096: (2.19, 9.54, 7.44, 5.83, 4.62),
    8192: (2.33, 19.01, 12.37, 10.32, 7.12),
}
"""Table 6.3, of `SYSTEMS`."""

MILLISECONDS_BY_EXPERTS: Mapping[int, tuple[float, ...]] = {
    16: (1.20, 19.01, 11.38, 10.47, 5.59),
    32: (2.33, 19.01, 12.37, 10.32, 7.12),
    64: (4.20, 19.21, 16.64, 10.47, 7.49),
    128: (8.20, 19.36, 22.65, 10.47, 11.30),
}
"""Table 6.4, of `SYSTEMS`."""

MILLISECONDS_BY_GPUS: Mapping[int, tuple[float, ...]] = {
    2: (6.00, 7.26, 14.28, 6.59, 9.65),
    4: (1.98, 10.98, 13.59, 7.82, 6.72),
    8: (2.33, 19.01, 12.37, 10.32, 7.12),
}
"""Table 6.5, of `SYSTEMS`."""

GPU_OPERATIONS: Mapping[str, int] = {
    "FlashDMoE": 1,
    "COMET": 33,
    "Megatron-LM CUTLASS": 85,
    "Megatron-LM TE": 261,
    "Megatron-LM + DeepEP": 432,
    "DeepSpeedMoE": 550,
}
"""Table 1.1: kernels launched in one forward pass."""

SM_UTILIZATION = 93.17
"""Percent of the cycles in which an SM has a warp in flight: section 3.2, and Figure 6.3a with 8K
tokens and 64 experts on two GPUs."""

TILE_ROWS = 128
"""bM of Table 6.2."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """A row of Table 6.2.

    Attributes:
        tokens: of a GPU.
        experts: of all GPUs.
        capacity: EC, rows of an expert.
        rows: max(bM, EC).
        bookkeeping, symmetric, total: MB, which are 2^20 bytes; `symmetric` is Size(L).
    """

    tokens: int
    experts: int
    capacity: int
    rows: int
    bookkeeping: float
    symmetric: float
    total: float


MEMORY = (
    Memory(4096, 16, 256, 256, 64.57, 64.00, 128.57),
    Memory(4096, 32, 128, 128, 64.55, 64.00, 128.55),
    Memory(4096, 64, 64, 128, 128.90, 128.01, 256.91),
    Memory(4096, 128, 32, 128, 257.96, 256.02, 513.98),
    Memory(8192, 16, 512, 512, 128.95, 128.01, 256.95),
    Memory(8192, 32, 256, 256, 128.90, 128.01, 256.91),
    Memory(8192, 64, 128, 128, 128.90, 128.01, 256.91),
    Memory(8192, 128, 64, 128, 258.15, 256.02, 514.17),
    Memory(16384, 16, 1024, 1024, 257.89, 256.02, 513.90),
    Memory(16384, 32, 512, 512, 257.79, 256.02, 513.81),
    Memory(16384, 64, 256, 256, 257.80, 256.02, 513.81),
    Memory(16384, 128, 128, 128, 258.53, 256.02, 514.54),
)
"""Table 6.2."""
