# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: whether weights are as a kernel has them before they are loaded."""

from __future__ import annotations


def is_weights_pre_processed() -> bool:
    return False
