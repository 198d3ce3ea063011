# SPDX-License-Identifier: Apache-2.0
"""A small causal language model over bytes, with a Mixture of Experts in each block.

It is given its mixtures, and knows neither what computes them nor where their experts lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
"""Symbols."""
LENGTH = 64
"""Bytes of a sequence, of which each predicts the next."""
HEADS = 4


class Block(nn.Module):
    """Attention, then a mixture; each reads a normalised state and is added to it."""

    def __init__(self, hidden: int, mixture: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.inputs = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.mixture_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mixture = mixture
        self._dtype = dtype

    def forward(self, state: Tensor) -> Tensor:
        """[sequences, LENGTH, hidden] to the same."""
        sequences, length, hidden = state.shape
        heads = (sequences, length, 3, HEADS, hidden // HEADS)
        q, k, v = self.inputs(self.attention_norm(state)).view(heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        state = state + self.output(seen.transpose(1, 2).reshape(state.shape))
        rows = self.mixture_norm(state).reshape(-1, hidden).to(self._dtype)
        mixed: Tensor = self.mixture(rows)
        return state + mixed.to(state.dtype).view(state.shape)


class LanguageModel(nn.Module):
    """Logits of the next byte. In float32, but for its mixtures, which get rows of `dtype`.

    Args:
        hidden: elements of a state, a multiple of HEADS.
        mixtures: one for each block: modules with parameters w1 and w2, the experts', and a gate,
            which make [rows, hidden] of [rows, hidden].
        dtype: of these rows.
    """

    def __init__(self, hidden: int, mixtures: Sequence[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.symbols = nn.Embedding(BYTES, hidden)
        self.places = nn.Embedding(LENGTH, hidden)
        self.blocks = nn.ModuleList(Block(hidden, mixture, dtype) for mixture in mixtures)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.logits = nn.Linear(hidden, BYTES, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 [sequences, LENGTH] to [sequences, LENGTH, BYTES]."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        state = self.symbols(symbols) + self.places(places)
        for block in self.blocks:
            state = block(state)
        logits: Tensor = self.logits(self.norm(state))
        return logits

    def replicated(self) -> list[nn.Parameter]:
        """All parameters but those of experts: what each rank has whole."""
        experts = {
            id(getattr(block.mixture, name)) for block in self.blocks for name in ("w1", "w2")
        }
        return [one for one in self.parameters() if id(one) not in experts]
