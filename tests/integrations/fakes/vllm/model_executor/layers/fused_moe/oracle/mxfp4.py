# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: kernels for MXFP4, of which there are none."""

from __future__ import annotations

from enum import Enum


class Mxfp4MoeBackend(Enum):
    NONE = "None"
