# SPDX-License-Identifier: Apache-2.0
"""A Mixture of Experts in stock PyTorch, with all experts in one process.

Its parameters have the names of those of `moeos.MoELayer`, so that either loads the other's. Apart
from these names this file must not depend on that layer or on moeos.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class StockMixture(nn.Module):
    """SwiGLU experts; a softmax over the k best logits weighs them.

    Parameters: gate.weight [experts, hidden], w1 [experts, 2 * intermediate, hidden] (gate rows,
    then up rows) and w2 [experts, hidden, intermediate], of `dtype`. The gate computes in float32.
    """

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.w1 = _uniform(experts, 2 * intermediate, hidden, dtype=dtype)
        self.w2 = _uniform(experts, hidden, intermediate, dtype=dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """[rows, hidden] to the same."""
        logits = rows.float() @ self.gate.weight.float().T
        best, ids = logits.topk(self.top_k, dim=1)
        weights = best.softmax(dim=1)
        result = torch.zeros_like(rows, dtype=torch.float32)
        for expert, (w1, w2) in enumerate(zip(self.w1, self.w2, strict=True)):
            places, slots = (ids == expert).nonzero(as_tuple=True)
            gates, ups = (rows[places] @ w1.T).chunk(2, dim=1)
            made = (functional.silu(gates) * ups) @ w2.T
            weight = weights[places, slots].unsqueeze(1)
            result = result.index_add(0, places, made.float() * weight)
        return result.to(rows.dtype)


def _uniform(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    bound = shape[-1] ** -0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound).to(dtype))
