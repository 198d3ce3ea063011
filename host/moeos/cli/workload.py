# SPDX-License-Identifier: Apache-2.0
"""What the calls of a run compute on: tokens of this rank, and perhaps their routing.

Tokens come from one of three sources. This file must not depend on how a layer runs or is checked.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from moeos.cli.shared.routing import Pattern, draw_routing
from moeos.cli.text import ByteEmbedding
from moeos.config.config import MoEConfig

_MAX_SEED = 2**31 - 1
_RANK_SEEDS = 1_000_003  # between the seeds of consecutive ranks


def generator_of(seed: int, rank: int) -> torch.Generator:
    """What a rank draws its tokens from. Raises `ValueError` for a seed that cannot be."""
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"--seed is {seed}; allowed: 0 to {_MAX_SEED}")
    return torch.Generator().manual_seed(seed + _RANK_SEEDS * (rank + 1))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arguments of one call: x [S, H] of the config's dtype; ids and weights [S, k], or None.

    `places`: int64 [S], which of a file's rows x are, or None.
    """

    x: Tensor
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    places: Tensor | None = None

    def on(self, device: torch.device) -> Batch:
        """These arguments in a device's memory."""
        parts = (self.x, self.topk_ids, self.topk_weights)
        return Batch(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


class Workload(Protocol):
    """A source of batches."""

    def draw(self, tokens: int) -> Batch:
        """The next batch, of at most `tokens` tokens."""


class RandomTokens:
    """Normally distributed x, routed by a pattern; drawn from `generator`."""

    def __init__(
        self, cfg: MoEConfig, ranks: int, pattern: Pattern, generator: torch.Generator
    ) -> None:
        self._cfg = cfg
        self._ranks = ranks
        self._pattern = pattern
        self._generator = generator

    def draw(self, tokens: int) -> Batch:
        """See `Workload.draw`."""
        cfg = self._cfg
        x = torch.randn((tokens, cfg.hidden), generator=self._generator).to(cfg.dtype)
        routing = draw_routing(self._pattern, cfg, self._ranks, tokens, self._generator)
        return Batch(x) if routing is None else Batch(x, *routing)


class GivenTokens:
    """Rows [n, H] of any dtype, in order, and again from the first after the last."""

    def __init__(self, cfg: MoEConfig, rows: Tensor) -> None:
        self._cfg = cfg
        self._rows = rows
        self._next = 0

    def draw(self, tokens: int) -> Batch:
        """See `Workload.draw`; without rows there are no tokens."""
        if len(self._rows) == 0:
            return Batch(torch.empty((0, self._cfg.hidden), dtype=self._cfg.dtype))
        places = torch.arange(self._next, self._next + tokens) % len(self._rows)
        self._next = (self._next + tokens) % len(self._rows)
        return Batch(self._rows[places].to(self._cfg.dtype), places=places)


class TextTokens:
    """The bytes of a text, uint8 [n], through the byte embedding; as `GivenTokens` otherwise."""

    def __init__(self, cfg: MoEConfig, text: Tensor) -> None:
        self._cfg = cfg
        self._text = text
        self._embedding = ByteEmbedding(cfg.hidden)
        self._next = 0

    def draw(self, tokens: int) -> Batch:
        """See `Workload.draw`; without text there are no tokens."""
        if len(self._text) == 0:
            return Batch(torch.empty((0, self._cfg.hidden), dtype=self._cfg.dtype))
        rows = self._embedding.embed(self._text, self._next, tokens)
        self._next += tokens
        return Batch(rows.to(self._cfg.dtype))
