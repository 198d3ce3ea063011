# SPDX-License-Identifier: Apache-2.0
"""How many rows of GEMM0's results a call keeps for its backward.

Each source has an equal share of them, for the first of its rows in the order of sending. So both
calls know by themselves which rows are kept, and neither waits to hear it. This file knows numbers
of rows. It must not depend on tensors, nor on what keeps the rows.
"""

from __future__ import annotations

from typing import NamedTuple

from moeos.config.config import MoEConfig
from moeos.engines import calls

_SHARE = (5, 4)  # relative to the rows of even routing
_NO_CAPACITY = (1, 1)


class SavedRows(NamedTuple):
    """How many rows a rank keeps.

    Attributes:
        sources: ranks that send rows here; 0: nothing is kept.
        slots: experts of a token here, at most.
        experts: of this rank.
        capacity: slots of an expert for each token of a source, as numerator and denominator.
        even: rows of a source for each token, where routing is even, likewise.
        max_tokens: of a source.
        given: `MoEConfig.saved_rows`.
    """

    sources: int
    slots: int = 0
    experts: int = 0
    capacity: tuple[int, int] = _NO_CAPACITY
    even: tuple[int, int] = (0, 1)
    max_tokens: int = 0
    given: int | None = None

    def of_source(self, tokens: int) -> int:
        """Rows kept of each source in a call with `tokens` rows of x here."""
        if self.sources == 0:
            return 0
        # A rank that is alone knows its tokens; of others it knows only the most there may be.
        of_any = tokens if self.sources == 1 else self.max_tokens
        in_slots = self.experts * _ceiling(of_any, self.capacity)
        wanted = _ceiling(tokens, (_SHARE[0] * self.even[0], _SHARE[1] * self.even[1]))
        if self.given is not None:
            wanted = self.given // self.sources
        return min(of_any * self.slots, in_slots, wanted)

    def of_pieces(self, rows: int, pieces: int) -> list[int]:
        """Rows kept of each source, for each piece of a call with `rows` rows of x."""
        firsts = [number * self.max_tokens for number in range(pieces)]
        return [self.of_source(max(0, min(rows - first, self.max_tokens))) for first in firsts]

    def of_call(self, rows: int, pieces: int) -> int:
        """Rows kept of all sources and pieces."""
        return self.sources * sum(self.of_pieces(rows, pieces))

    def identity_of_backward(self, layer: int, pieces: int, of: int) -> int:
        """The identity of a backward (`moeos.engines.calls`). It names the forward call only where
        ranks keep rows of each other.
        """
        return calls.identity(layer, pieces, backward=True, of=of if self.sources > 1 else 0)


def saved_rows(cfg: MoEConfig, sources: int, experts: int) -> SavedRows:
    """The rule of a rank with `experts` experts, which gets rows from `sources` ranks."""
    if cfg.save == "nothing":
        return SavedRows(0)
    ratio = cfg.capacity_ratio
    return SavedRows(
        sources=sources,
        slots=min(cfg.slots, experts),
        experts=experts,
        capacity=_NO_CAPACITY if ratio is None else (ratio.numerator, ratio.denominator),
        even=(cfg.slots * experts, cfg.router_rows),
        max_tokens=cfg.max_tokens,
        given=cfg.saved_rows,
    )


def _ceiling(tokens: int, ratio: tuple[int, int]) -> int:
    numerator, denominator = ratio
    return -(-numerator * tokens // denominator)
