# SPDX-License-Identifier: Apache-2.0
"""The work that all contestants of a benchmark do: a layer, its tokens and weights, from a seed.

It knows nothing of who does the work or of how it is timed.
"""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import Tensor

from moeos.config.config import MoEConfig, digest_differences
from moeos.config.limits import DTYPES

_SEEDS_A_KIND = 1 << 20  # seeds of tokens, the gate and experts lie this far apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of a layer, or as many as one likes: each has the same tokens and weights.

    Attributes:
        cfg: the layer; S is its max_tokens.
        ranks: P, over which tokens and experts are divided.
        seed: of tokens and weights, at least 0.

    Raises:
        ValueError: `cfg` has a feature that the PyTorch side (`bench.twin.baseline`) lacks,
            or there is no rank.
    """

    cfg: MoEConfig
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        cfg = self.cfg
        cfg.experts_per_rank(self.ranks)
        plain = MoEConfig(
            hidden=cfg.hidden,
            intermediate=cfg.intermediate,
            experts=cfg.experts,
            top_k=cfg.top_k,
            dtype=torch.float32,
            max_tokens=cfg.max_tokens,
        )
        for name, (given, needed) in digest_differences(cfg.digest(), plain.digest()).items():
            raise ValueError(
                f"{name} is {given!r}; what is measured against PyTorch has {needed!r}"
            )

    def tokens(self, rank: int) -> Tensor:
        """x [S, H] of one rank: normal, with variance 1."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        return torch.randn(self.cfg.max_tokens, self.cfg.hidden, generator=generator)

    def all_tokens(self) -> Tensor:
        """x [P, S, H] of all ranks."""
        return torch.stack([self.tokens(rank) for rank in range(self.ranks)])

    def gate(self) -> Tensor:
        """The router's weight [E, H]."""
        generator = torch.Generator().manual_seed(self.seed + _SEEDS_A_KIND)
        return _weight(generator, self.cfg.experts, self.cfg.hidden)

    def experts(self, which: range) -> tuple[Tensor, Tensor]:
        """w1 [n, 2I, H] and w2 [n, H, I] of n experts."""
        cfg = self.cfg
        w1 = torch.empty(len(which), cfg.w1_rows, cfg.hidden)
        w2 = torch.empty(len(which), cfg.hidden, cfg.intermediate)
        for place, expert in enumerate(which):
            generator = torch.Generator().manual_seed(self.seed + 2 * _SEEDS_A_KIND + expert)
            w1[place] = _weight(generator, cfg.w1_rows, cfg.hidden)
            w2[place] = _weight(generator, cfg.hidden, cfg.intermediate)
        return w1, w2

    @property
    def flops(self) -> int:
        """Of one call on all ranks: 2 E H a token for the router, 2 (2I + I) H a pair."""
        cfg = self.cfg
        tokens = self.ranks * cfg.max_tokens
        router = 2 * tokens * cfg.experts * cfg.hidden
        return router + 2 * tokens * cfg.top_k * (cfg.w1_rows + cfg.intermediate) * cfg.hidden

    @property
    def least_bytes(self) -> int:
        """What a call must at least move: all weights and x read once, y written once."""
        cfg = self.cfg
        weights = cfg.experts * (cfg.w1_rows + cfg.intermediate + 1) * cfg.hidden
        return (weights + 2 * self.ranks * cfg.max_tokens * cfg.hidden) * cfg.dtype.itemsize

    def to_json(self) -> str:
        """For the command line of a contestant."""
        return json.dumps(
            {"cfg": json.loads(self.cfg.digest()), "ranks": self.ranks, "seed": self.seed}
        )

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """What `to_json` wrote."""
        fields = json.loads(text)
        cfg = fields.pop("cfg")
        return cls(cfg=MoEConfig(**{**cfg, "dtype": DTYPES[cfg["dtype"]]}), **fields)


def _weight(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)
