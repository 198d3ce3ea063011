# SPDX-License-Identifier: Apache-2.0
"""Token rounding: each expert gets a whole number of tiles of tokens (SonicMoE, section 5).

A product computes whole tiles, so rows that fill no tile cost as much as one. Here each expert
drops the tokens beyond its last whole tile, or takes more to fill one. This file must not depend on
layers or ranks.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from moeos.config.config import Rounding


def round_tokens(
    scores: Tensor,
    topk_ids: Tensor,
    rounding: Rounding,
    tile: int = 128,
    *,
    slots: int | None = None,
    tokens: Tensor | None = None,
    summed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The experts of each token, so that each expert has a multiple of `tile` tokens (SonicMoE,
    arXiv:2512.14080, algorithm 4).

    An expert with f tokens gets the multiple below f or the one above it, and so differs by less
    than a tile. Below, its tokens with the lowest scores are dropped. Above, the tokens with the
    highest scores among all others are added. Among equal scores the lower token is kept or added.

    How it is decided, with f' the multiple above:
        NR-f: above if f' is nearer.
        SR-f: above with a probability of (f mod tile) / tile.
        NR-s: above with a probability of (s - s0) / (s1 - s0): s is the sum of the scores of its
            tokens, and s0 and s1 are those with the multiple below and above. So s is what the sum
            is afterwards, in the mean.
        Balance-f: so that the sum over experts 0 to e differs by at most half a tile, for each e,
            but for experts that cannot get f'.
        UP: above.
        DOWN: below.

    An expert gets the multiple below where the one above cannot be: there are too few tokens, or
    too few with a free slot. With fewer tokens than a tile all choices stay as they are. All is
    deterministic but SR-f and NR-s, which draw E numbers a call. Nothing waits for a GPU.

    With fewer than E slots experts take tokens one after the other, the lowest first, which costs
    some 15 operations of PyTorch an expert. With E it is some 30 in all. Both sort [S, E] numbers.

    Args:
        scores: [S, E], floating point, finite: what experts are chosen by.
        topk_ids: int32 or int64 [S, k], the choice that is rounded; all of a token's differ, and
            what is no expert, such as -1, is an unused slot.
        rounding: how.
        tile: tokens of a tile, at least 1.
        slots: the most experts of a token afterwards, k to E. None: E.
        tokens: int32 or int64, one element: only this many tokens, from the first on, take part,
            and the others get no expert. None: all.
        summed: like `scores`, what NR-s sums up: those without a selection bias, where `scores`
            have one. Negative numbers count as 0. None: `scores`.
        generator: draws the numbers; on the device of `scores`. None: PyTorch's own.

    Returns:
        like `topk_ids`, [S, slots]: a token's experts, the highest score first, then -1.

    Raises:
        TypeError: scores or ids have another kind of dtype.
        ValueError: a value or a shape is not as above.
    """
    slots = _checked(scores, topk_ids, rounding, tile, slots, summed)
    count, experts = scores.shape
    summed = scores if summed is None else summed
    ids = topk_ids.long()
    scores = scores.detach().masked_fill(scores == 0, 0.0)  # 0 and -0 are equal
    device = scores.device
    rows = torch.arange(count, device=device)
    takes_part = torch.ones(count, 1, dtype=torch.bool, device=device)
    if tokens is not None:
        takes_part = (rows < tokens.reshape(())).unsqueeze(1)
    some = torch.where((ids >= 0) & (ids < experts), ids, experts)
    chosen = torch.zeros(count, experts + 1, dtype=torch.bool, device=device)
    chosen = chosen.scatter(1, some, True)[:, :experts] & takes_part

    # Each expert's tokens in its order: its own, then all that could be added, then none.
    order = scores.sort(dim=0, descending=True, stable=True).indices
    own_first = chosen.byte() * 2 + (~chosen & takes_part).byte()
    later = own_first.gather(0, order).sort(dim=0, descending=True, stable=True).indices
    order = order.gather(0, later)

    most = takes_part.sum()
    found = chosen.sum(dim=0)
    below = found - found % tile
    above = below + tile * (found != below)
    can_rise = (above <= most) & (above != below)
    rises = _rises(rounding, tile, found, below, above, can_rise, summed, order, generator)
    position = rows.unsqueeze(1)
    lower = _by_token(order, position < below)
    if slots == experts:
        rounded = _by_token(order, position < torch.where(rises, above, below))
    else:
        rounded = _within_slots(chosen, lower, order, takes_part, above - found, rises, slots)
    rounded = torch.where(most < tile, chosen, rounded)

    by_score = scores.sort(dim=1, descending=True, stable=True).indices
    used_first = rounded.gather(1, by_score).byte().sort(dim=1, descending=True, stable=True)
    best = by_score.gather(1, used_first.indices)[:, :slots]
    return torch.where(used_first.values[:, :slots] > 0, best, -1).to(topk_ids.dtype)


def _checked(
    scores: Tensor,
    topk_ids: Tensor,
    rounding: object,
    tile: int,
    slots: int | None,
    summed: Tensor | None,
) -> int:
    """The slots of a token. Raises for wrong arguments."""
    if not scores.is_floating_point():
        raise TypeError(f"scores have dtype {scores.dtype}; it must be a floating point type")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"topk_ids have dtype {topk_ids.dtype}; it must be torch.int32 or torch.int64"
        )
    if scores.dim() != 2 or scores.shape[1] < 1:
        raise ValueError(f"scores is {list(scores.shape)}; it must be [S, E]")
    count, experts = scores.shape
    if topk_ids.dim() != 2 or len(topk_ids) != count or topk_ids.shape[1] > experts:
        raise ValueError(
            f"topk_ids is {list(topk_ids.shape)}; it must be [{count}, k], k at most {experts}"
        )
    if summed is not None and summed.shape != scores.shape:
        raise ValueError(
            f"summed is {list(summed.shape)}; it must be as scores, {list(scores.shape)}"
        )
    if rounding not in get_args(Rounding):
        allowed = ", ".join(get_args(Rounding))
        raise ValueError(f"rounding is {rounding!r}; it must be one of {allowed}")
    if tile < 1:
        raise ValueError(f"tile is {tile}; it must be at least 1")
    if slots is None:
        return experts
    if not topk_ids.shape[1] <= slots <= experts:
        raise ValueError(
            f"slots is {slots}; it must be {topk_ids.shape[1]}, those of topk_ids, to {experts}"
        )
    return slots


def _rises(
    rounding: Rounding,
    tile: int,
    found: Tensor,
    below: Tensor,
    above: Tensor,
    can_rise: Tensor,
    summed: Tensor,
    order: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Which experts are to get the multiple above: bool [E]."""
    if rounding == "DOWN":
        return torch.zeros_like(can_rise)
    if rounding == "UP":
        return can_rise
    rest = found - below
    if rounding == "NR-f":
        return can_rise & (2 * rest > tile)
    if rounding == "Balance-f":
        # The sum given so far is always the multiple nearest to the sum asked for.
        asked = torch.where(can_rise, rest, 0).cumsum(dim=0)
        given = (2 * asked + tile) // (2 * tile)
        before = torch.cat((given.new_zeros(1), given[:-1]))
        return can_rise & (given > before)
    drawn = torch.rand(len(found), dtype=torch.float64, device=found.device, generator=generator)
    if rounding == "SR-f":
        return can_rise & (drawn * tile < rest)
    best_first = summed.detach().double().clamp_min(0.0).gather(0, order)
    position = torch.arange(len(summed), device=summed.device).unsqueeze(1)

    def total(first: Tensor, end: Tensor) -> Tensor:
        among = (position >= first) & (position < end)
        return best_first.masked_fill(~among, 0.0).sum(dim=0)

    return can_rise & (drawn * total(below, above) < total(below, found))


def _by_token(order: Tensor, takes: Tensor) -> Tensor:
    """`takes`, which is in each expert's order, by token: bool [S, E]."""
    return torch.zeros_like(takes).scatter(0, order, takes)


def _within_slots(
    chosen: Tensor,
    lower: Tensor,
    order: Tensor,
    takes_part: Tensor,
    needed: Tensor,
    rises: Tensor,
    slots: int,
) -> Tensor:
    """Which expert takes which token, [S, E], where a token has `slots` slots.

    What is dropped is dropped first. Then experts that rise take tokens, the lowest expert first;
    one for which too few are left is rounded down instead.
    """
    rounded = torch.where(rises, chosen, lower)
    used = rounded.sum(dim=1)
    columns = []
    for expert in range(chosen.shape[1]):
        own, places = rounded[:, expert], order[:, expert]
        free = (takes_part.squeeze(1) & ~own & (used < slots)).gather(0, places)
        nth = free.cumsum(dim=0)
        taken = _by_token(places, free & (nth <= needed[expert]))
        enough = free.sum() >= needed[expert]
        risen = torch.where(enough, own | taken, lower[:, expert])
        column = torch.where(rises[expert], risen, own)
        used = used + column.long() - own.long()
        columns.append(column)
    return torch.stack(columns, dim=1)
