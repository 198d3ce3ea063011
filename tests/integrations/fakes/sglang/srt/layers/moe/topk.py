# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: what a router gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class BypassedTopKOutput(NamedTuple):
    hidden_states: torch.Tensor
    router_logits: torch.Tensor


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return isinstance(topk_output, StandardTopKOutput)
