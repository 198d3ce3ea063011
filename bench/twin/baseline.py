# SPDX-License-Identifier: Apache-2.0
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
    added to their tokens while they are in the cache, in buffers that are kept from call to call.
    Gathering and adding all pairs at once is slower, and so are fresh buffers. No token is dropped.

    Args:
        gate: [E, H].
        w1: [E, 2I, H], gate rows and then up rows.
        w2: [E, H, I].
        top_k: k.
        max_tokens: the most tokens of a call.
    """

    def __init__(self, gate: Tensor, w1: Tensor, w2: Tensor, top_k: int, max_tokens: int) -> None:
        self._gate = gate
        self._w1 = w1
        self._w2 = w2
        self._top_k = top_k
        self._rows = torch.empty(max_tokens, w1.shape[2])
        self._hidden = torch.empty(max_tokens, w1.shape[1])
        self._results = torch.empty(max_tokens, w1.shape[2])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, H] -> [S, H]."""
        experts, intermediate = len(self._gate), self._w2.shape[2]
        weights, ids = (x @ self._gate.T).softmax(dim=1).topk(self._top_k, dim=1)
        weights /= weights.sum(dim=1, keepdim=True)
        pairs_of = ids.flatten()
        order = pairs_of.argsort()
        counts = torch.bincount(pairs_of, minlength=experts).tolist()
        tokens_of = (order // self._top_k).split(counts)
        weights_of = weights.flatten()[order, None].split(counts)
        y = torch.zeros_like(x)
        for expert, (tokens, scale) in enumerate(zip(tokens_of, weights_of, strict=True)):
            count = counts[expert]
            if count == 0:
                continue
            rows = torch.index_select(x, 0, tokens, out=self._rows[:count])
            hidden = torch.mm(rows, self._w1[expert].T, out=self._hidden[:count])
            gated = functional.silu(hidden[:, :intermediate], inplace=True)
            gated *= hidden[:, intermediate:]
            results = torch.mm(gated, self._w2[expert].T, out=self._results[:count])
            y.index_add_(0, tokens, results.mul_(scale))
        return y
