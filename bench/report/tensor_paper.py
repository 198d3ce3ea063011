# SPDX-License-Identifier: Apache-2.0
"""The numbers of the paper "Layout and Fusion Trade-offs for Mixture-of-Experts Inference under
Single-Node Tensor Parallelism" (J. Y. Yang and others, 2026) that ours are compared with.

Nothing here was measured by moeos, and nothing is computed. It measured eight H200. Milliseconds;
hidden 4096, 128 experts, top-8, BF16.
"""

from __future__ import annotations

from collections.abc import Mapping

TOKENS = (8, 128, 4096, 16384)
"""The columns of its tables."""

STAGES: Mapping[int, Mapping[str, tuple[float, ...]]] = {
    8: {
        "EE": (0.074, 0.117, 0.128, 0.009, 0.077, 0.047, 0.484),
        "EE-pers": (0.217, 0.148, 0.155, 0.009, 0.098, 0.070, 0.737),
        "TT": (0.033, 0.008, 0.110, 0.006, 0.055, 0.009, 0.249),
        "TE-pers": (0.071, 0.008, 0.112, 0.009, 0.066, 0.036, 0.335),
    },
    128: {
        "EE": (0.077, 0.168, 0.161, 0.012, 0.074, 0.015, 0.535),
        "EE-pers": (0.075, 0.169, 0.158, 0.012, 0.088, 0.015, 0.546),
        "TT": (0.034, 0.008, 0.180, 0.007, 0.082, 0.012, 0.352),
        "TE-pers": (0.070, 0.008, 0.187, 0.012, 0.085, 0.015, 0.408),
    },
    4096: {
        "EE": (0.089, 0.634, 0.289, 0.037, 0.226, 0.100, 1.406),
        "EE-pers": (0.087, 0.633, 0.284, 0.037, 0.195, 0.101, 1.368),
        "TT": (0.052, 0.004, 0.334, 0.027, 0.273, 0.095, 0.810),
        "TE-pers": (0.079, 0.009, 0.332, 0.037, 0.194, 0.102, 0.785),
    },
    16384: {
        "EE": (0.117, 2.117, 0.844, 0.098, 0.756, 0.361, 4.319),
        "EE-pers": (0.116, 2.111, 0.815, 0.098, 0.610, 0.361, 4.136),
        "TT": (0.109, 0.003, 0.949, 0.089, 0.965, 0.346, 2.486),
        "TE-pers": (0.113, 0.003, 0.957, 0.099, 0.633, 0.361, 2.190),
    },
}
"""The paper's Table 1, I 256 a rank: align, permute, up/gate, activation, down, combine, and the
total.
"""

ByTokens = Mapping[tuple[int, str], tuple[float, ...]]
"""A size and a variant, and what it takes with each of `TOKENS`."""

TOTALS: ByTokens = {
    (128, "TT"): (0.300, 0.330, 0.639, 1.778),
    (128, "TE-pers"): (0.353, 0.419, 0.621, 1.532),
    (256, "TT"): (0.249, 0.352, 0.810, 2.486),
    (256, "TE-pers"): (0.335, 0.408, 0.785, 2.190),
    (512, "TT"): (0.378, 0.541, 1.226, 3.913),
    (512, "TE-pers"): (0.385, 0.607, 1.190, 3.639),
}
"""The paper's Table 2a, by I of a rank."""

CHAINS: ByTokens = {
    (4, "FUSE"): (0.045, 0.040, 0.333, 1.195),
    (4, "NCCL"): (0.074, 0.064, 0.263, 0.908),
    (8, "FUSE"): (0.049, 0.049, 0.437, 2.101),
    (8, "NCCL"): (0.068, 0.077, 0.284, 0.858),
}
"""The paper's Table 2b, by ranks and method: combine and all-reduce."""
