# SPDX-License-Identifier: Apache-2.0
"""Slow links between nodes: as a fault plan for moeos, and as a wait for an all-to-all.

Both delay the same bytes by the same rule: on each link from a rank to a rank of another node
everything comes later by a latency, and its bytes pass one after the other at a rate.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moeos.world.faults import FaultPlan, SlowLink


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Ranks on several nodes.

    Attributes:
        ranks: P.
        nodes: how many; each has the same number of consecutive ranks.
        latency: seconds of a link between nodes; 0 for as fast as it is.
        rate: bytes per second of such a link, or None for as many as it takes.

    Raises:
        ValueError: the ranks cannot be divided so.
    """

    ranks: int
    nodes: int
    latency: float = 0.0
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks % self.nodes != 0:
            raise ValueError(f"--nodes is {self.nodes}; it must divide {self.ranks} ranks equally")
        if self.nodes == 1 and (self.latency or self.rate is not None):
            raise ValueError("a link's latency or rate is given, and --nodes is 1: there is none")

    @property
    def ranks_per_node(self) -> int | None:
        """The argument for `moeos.init`."""
        return None if self.nodes == 1 else self.ranks // self.nodes

    @property
    def limited(self) -> bool:
        """Whether links between nodes are slower than they are by themselves."""
        return self.latency > 0 or self.rate is not None

    def far(self, rank: int) -> list[int]:
        """The ranks of other nodes."""
        each = self.ranks // self.nodes
        return [peer for peer in range(self.ranks) if peer // each != rank // each]

    def plan(self) -> FaultPlan:
        """The links as moeos gets them."""
        links = [
            SlowLink(rank=rank, peer=peer, seconds=self.latency, bytes_per_second=self.rate)
            for rank in range(self.ranks)
            for peer in self.far(rank)
        ]
        return FaultPlan(slow_links=tuple(links) if self.limited else ())


class LimitedAllToAll:
    """`torch.distributed.all_to_all_single`, begun when the slowest of this rank's links is done.

    For tensors in the host's memory.
    """

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self._nodes = nodes
        self._far = nodes.far(rank)

    def __call__(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        **options: Any,
    ) -> Any:
        if self._nodes.limited:
            each = len(given) // self._nodes.ranks
            rows = [each] * self._nodes.ranks if input_splits is None else input_splits
            row_bytes = given.element_size() * (given.shape[1] if given.dim() > 1 else 1)
            longest = max((rows[peer] * row_bytes for peer in self._far), default=0)
            seconds = 0.0 if self._nodes.rate is None else longest / self._nodes.rate
            time.sleep(self._nodes.latency + seconds)
        return dist.all_to_all_single(output, given, output_splits, input_splits, **options)
