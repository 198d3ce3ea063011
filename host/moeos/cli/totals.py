# SPDX-License-Identifier: Apache-2.0
"""What one rank did in all calls of a run: its layer's statistics, added up."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

_SUMS = (
    "row_bytes_to_peers",
    "count_bytes_to_peers",
    "flag_bytes_to_peers",
    "padding_rows",
    "drops",
    "busy_seconds",
)


@dataclasses.dataclass
class Totals:
    """Sums over calls; `moeos.engines.counters.CallStats` says what is counted.

    Attributes:
        experts: of the rank.
        tokens: of each call.
        seconds: that each call took on this rank, waiting for the other ranks included.
    """

    experts: Sequence[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    pairs_sent: list[int] = dataclasses.field(default_factory=list)
    pairs_received: list[int] = dataclasses.field(default_factory=list)
    expert_pairs: list[int] = dataclasses.field(default_factory=list)
    tasks: dict[str, int] = dataclasses.field(default_factory=dict)
    row_bytes_to_peers: int = 0
    count_bytes_to_peers: int = 0
    flag_bytes_to_peers: int = 0
    padding_rows: int = 0
    drops: int = 0
    busy_seconds: float = 0.0

    def add(self, stats: dict[str, Any], seconds: float) -> None:
        """Adds one call: what `MoELayer.stats` returned and the time that it took."""
        self.tokens.append(stats["tokens"])
        self.seconds.append(seconds)
        for name in ("pairs_sent", "pairs_received", "expert_pairs"):
            before = getattr(self, name) or [0] * len(stats[name])
            setattr(self, name, [a + b for a, b in zip(before, stats[name], strict=True)])
        for kind, parts in stats["tasks"].items():
            self.tasks[kind] = self.tasks.get(kind, 0) + parts
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + stats[name])

    @property
    def bytes_to_peers(self) -> int:
        """All bytes written into other ranks' memory."""
        return self.row_bytes_to_peers + self.count_bytes_to_peers + self.flag_bytes_to_peers

    @property
    def median_seconds(self) -> float:
        """The median duration of a call."""
        return statistics.median(self.seconds)

    @property
    def hottest(self) -> tuple[int | None, int]:
        """The expert of this rank that computed most pairs, and how many; None if it has none."""
        if not self.experts:
            return None, 0
        pairs = max(self.expert_pairs)
        return self.experts[self.expert_pairs.index(pairs)], pairs
