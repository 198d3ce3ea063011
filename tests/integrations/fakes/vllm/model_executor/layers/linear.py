# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: what a quantisation config tells apart."""

from __future__ import annotations

from torch import nn


class LinearBase(nn.Module):
    pass


class UnquantizedLinearMethod:
    pass
