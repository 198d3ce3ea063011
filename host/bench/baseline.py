"""The layer's arithmetic in one PyTorch process, as fast as plain PyTorch computes it.

What the twin is measured against. Knows no ranks: it sees all tokens and all experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class PlainLayer:
    """Softmax routing to k renormalised experts, and SwiGLU experts in float32.

    Pairs are sorted by expert once. For each expert the rows are gathered, multiplied, weighted and
    added to their tokens while they are in the cache; that is faster than gathering and adding all
    pairs at once. No token is dropped.

    Args:
        gate: [E, H].
        w1: [E, 2I, H], gate rows and then up rows.
        w2: [E, H, I].
        top_k: k.
    """

    def __init__(self, gate: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> None:
        self._gate = gate
        self._w1 = w1
        self._w2 = w2
        self._top_k = top_k

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, H] -> [S, H]."""
        experts, intermediate = len(self._gate), self._w2.shape[2]
        weights, ids = (x @ self._gate.T).softmax(dim=1).topk(self._top_k, dim=1)
        weights /= weights.sum(dim=1, keepdim=True)
        pairs_of = ids.flatten()
        order = pairs_of.argsort()
        rows = torch.bincount(pairs_of, minlength=experts).tolist()
        tokens = (order // self._top_k).split(rows)
        scales = weights.flatten()[order, None].split(rows)
        y = torch.zeros_like(x)
        for expert in range(experts):
            if rows[expert] == 0:
                continue
            hidden = x[tokens[expert]] @ self._w1[expert].T
            gated = functional.silu(hidden[:, :intermediate]).mul_(hidden[:, intermediate:])
            y.index_add_(0, tokens[expert], (gated @ self._w2[expert].T).mul_(scales[expert]))
        return y
