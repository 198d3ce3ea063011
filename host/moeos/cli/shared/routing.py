# SPDX-License-Identifier: Apache-2.0
"""Synthetic routing: the patterns of `--routing`, as experts and weights given by the caller.

This file must not depend on tokens' contents or on layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from moeos.config.config import MoEConfig

PATTERNS = "uniform, zipf:A (A > 0), one-expert, empty-rank:R (R a rank)"

_MAX_DIGITS = 20  # of a rank: Python refuses to read thousands, in words of its own

LARGEST_EXPONENT = 100.0
"""The largest A of "zipf:A"."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A law by which tokens choose experts.

    Attributes:
        kind: "uniform": the layer routes random tokens by its own gate, which spreads them nearly
            evenly. "zipf": expert e is drawn with odds 1/(e + 1)^A, without repetition in a row.
            "one-expert": every token's one choice is expert 0. "empty-rank": even odds for all
            experts but those of one rank, which get none.
        exponent: A of "zipf".
        rank: of "empty-rank".
    """

    kind: Literal["uniform", "zipf", "one-expert", "empty-rank"]
    exponent: float = 0.0
    rank: int = 0


def parse_pattern(text: str) -> Pattern:
    """The pattern that a value of `--routing` names.

    Raises:
        ValueError: it is none of `PATTERNS`.
    """
    name, colon, value = text.partition(":")
    wrong = ValueError(f"--routing is {text!r}; allowed: {PATTERNS}")
    if not colon and name == "uniform":
        return Pattern("uniform")
    if not colon and name == "one-expert":
        return Pattern("one-expert")
    if name == "empty-rank" and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        return Pattern("empty-rank", rank=int(value))
    if name == "zipf":
        try:
            exponent = float(value)
        except ValueError:
            raise wrong from None
        if 0 < exponent <= LARGEST_EXPONENT:
            return Pattern("zipf", exponent=exponent)
    raise wrong


def check_pattern(pattern: Pattern, cfg: MoEConfig, ranks: int) -> None:
    """Raises `ValueError` if a layer of this config on `ranks` ranks cannot be routed so."""
    if pattern.kind != "empty-rank":
        return
    if pattern.rank >= ranks:
        raise ValueError(f"--routing is empty-rank:{pattern.rank}; ranks are 0 to {ranks - 1}")
    others = cfg.experts - len(cfg.experts_of(pattern.rank, ranks))
    if cfg.top_k > others:
        raise ValueError(
            f"--routing is empty-rank:{pattern.rank}; the other ranks have {others} experts, too "
            f"few for top_k {cfg.top_k}"
        )


def draw_routing(
    pattern: Pattern, cfg: MoEConfig, ranks: int, tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Experts int64 and weights float32, both [S, `cfg.slots`], of `tokens` tokens; None: the layer
    routes. Slots after the k-th are unused.

    Distinct experts with given odds are the k largest of log-odds plus Gumbel noise (Kool et al.,
    2019, arXiv:1903.06059, section 2.3). Weights are positive and sum to 1 in each row.
    """
    if pattern.kind == "uniform":
        return None
    if pattern.kind == "one-expert":
        ids = torch.full((tokens, cfg.slots), -1)
        ids[:, 0] = 0
        return ids, (ids == 0).float()
    experts = torch.arange(cfg.experts, dtype=torch.float64)
    if pattern.kind == "zipf":
        log_odds = -pattern.exponent * (experts + 1).log()
    else:
        mine = cfg.experts_of(pattern.rank, ranks)
        log_odds = torch.zeros_like(experts)
        log_odds[mine.start : mine.stop] = -math.inf
    uniform = torch.rand((tokens, cfg.experts), generator=generator, dtype=torch.float64)
    gumbel = -(-uniform.clamp_min(torch.finfo(torch.float64).tiny).log()).log()
    ids = (log_odds + gumbel).topk(cfg.top_k, dim=1).indices
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    unused = (0, cfg.slots - cfg.top_k)
    return (
        functional.pad(ids, unused, value=-1),
        functional.pad(weights / weights.sum(dim=1, keepdim=True), unused),
    )
