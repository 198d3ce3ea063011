# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank by torch._grouped_mm, of which autograd knows the gradients.

What layers are compared with in training. It knows tensors, and nothing of how it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional


def _swiglu(hidden: Tensor) -> Tensor:
    gates, ups = hidden.chunk(2, dim=1)
    return functional.silu(gates) * ups


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "silu": functional.silu,
    "relu": functional.relu,
}
"""Those that papers train with, [n, 2I or I] -> [n, I]."""


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, activation: str = "swiglu"
) -> Tensor:
    """[S, H] -> [S, H]: the weighted sum of each token's experts, without biases.

    Args:
        x: [S, H].
        ids: [S, k] of all experts, which are this rank's.
        weights: [S, k].
        w1: [E, 2I or I, H].
        w2: [E, H, I].
        activation: of `ACTIVATIONS`.
    """
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=len(w1)).cumsum(0).to(torch.int32)
    tokens = order // ids.shape[1]
    hidden = torch._grouped_mm(x[tokens], w1.transpose(1, 2), offs=ends)
    inner = ACTIVATIONS[activation](hidden)
    made = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    terms = made * weights.flatten()[order].to(made.dtype).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, terms)
