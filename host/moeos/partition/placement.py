# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which experts: a table, equal on all ranks.

Must not depend on weights, layers or how ranks talk: it knows numbers of experts and ranks alone.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
from collections.abc import Sequence
from itertools import pairwise

from moeos.config.config import MoEConfig

_TOLD = 4  # the most ranks whose experts an error names


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which experts each rank of a layer holds, in the order in which its w1 has them.

    An expert may lie on several ranks: these are its replicas. Each pair of a token and an expert
    goes to one of them, by a rule that depends on the numbers of the token and of its rank alone.
    So outputs are those of any other placement, bit for bit.

    Attributes:
        ranks: by rank, its experts: tuples of numbers from 0 on. A rank may have none.

    Raises:
        TypeError: `ranks` is no sequence of sequences of ints.
        ValueError: there is no rank or no expert, a number is negative or missing, or a rank has
            an expert twice.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if isinstance(self.ranks, (str, bytes)) or not isinstance(self.ranks, Sequence):
            raise TypeError(
                f"ranks is a {type(self.ranks).__name__}; it must be a sequence that has the "
                "experts of each rank, such as [[0, 2], [1, 3]]"
            )
        for rank, own in enumerate(self.ranks):
            if isinstance(own, (str, bytes)) or not isinstance(own, Sequence):
                raise TypeError(
                    f"the experts of rank {rank} are a {type(own).__name__}; they must be a "
                    "sequence of ints"
                )
            for expert in own:
                if type(expert) is not int:
                    raise TypeError(
                        f"an expert of rank {rank} is {expert!r}; experts are numbers from 0 on"
                    )
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        _require_table(self.ranks)

    @classmethod
    def chunk(cls, experts: int, world_size: int) -> Placement:
        """The placement of a layer that is made without one: see `MoEConfig.experts_of`.

        Raises:
            ValueError: `experts` or `world_size` is below 1.
        """
        for name, number in (("experts", experts), ("world_size", world_size)):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        most = -(-experts // world_size)
        return cls(
            tuple(
                tuple(range(min(experts, most * rank), min(experts, most * (rank + 1))))
                for rank in range(world_size)
            )
        )

    @classmethod
    def propose(cls, counts: Sequence[float], world_size: int, slots: int = 0) -> Placement:
        """A placement that spreads rows evenly over the ranks, should they come as they came.

        As DeepSeek's EPLB without groups: it gives replicas to the experts whose replicas have the
        most rows each, and then packs all replicas into ranks, the heaviest first, each into the
        rank with the fewest rows that has room. At last it swaps experts of two ranks as long as
        that helps the fullest one. Equal arguments give equal placements.

        Args:
            counts: by expert, the rows that it got, of all ranks together: sums of the
                `expert_pairs` of `MoELayer.stats`, for example. Equal on all ranks.
            world_size: P, the number of ranks.
            slots: places for replicas in all, in addition to one for each expert. A rank has
                ceil((E + slots) / P) places. An expert has at most P.

        Raises:
            ValueError: there is no count, or one is negative or not finite; there is no rank;
                `slots` is negative, or more than there are ranks for.
        """
        experts = len(counts)
        for expert, count in enumerate(counts):
            if not (math.isfinite(count) and count >= 0):
                raise ValueError(f"the count of expert {expert} is {count}; it must be at least 0")
        if experts < 1 or world_size < 1:
            raise ValueError(
                f"there are {experts} counts and {world_size} ranks; there must be at least one"
            )
        most = experts * (world_size - 1)
        if not 0 <= slots <= most:
            raise ValueError(
                f"slots is {slots}; {experts} experts on {world_size} ranks have 0 to {most}, as a "
                "rank has an expert once"
            )
        replicas = _replicas(counts, world_size, slots)
        shares = [count / number for count, number in zip(counts, replicas, strict=True)]
        rows = _pack(shares, replicas, world_size, -(-(experts + slots) // world_size))
        _swap(shares, rows)
        return cls(tuple(tuple(sorted(own)) for own in rows))

    @property
    def experts(self) -> int:
        """E, how many experts there are."""
        return 1 + max(expert for own in self.ranks for expert in own)

    @property
    def world_size(self) -> int:
        """P, how many ranks there are."""
        return len(self.ranks)

    @property
    def most(self) -> int:
        """X, the most experts of a rank."""
        return max(map(len, self.ranks))

    @property
    def replicated(self) -> bool:
        """Whether some expert lies on several ranks."""
        return sum(map(len, self.ranks)) > self.experts

    @property
    def in_order(self) -> bool:
        """Whether it is what `chunk` makes."""
        return self == Placement.chunk(self.experts, self.world_size)

    def experts_of(self, rank: int) -> Sequence[int]:
        """The experts of a rank, in order; a range where each follows the one before.

        Raises:
            ValueError: `rank` is not 0 to P - 1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; it must be at least 0 and below {self.world_size}")
        own = self.ranks[rank]
        if not own:
            return range(self.experts, self.experts) if self.in_order else range(0)
        follow = all(second == first + 1 for first, second in pairwise(own))
        return range(own[0], own[-1] + 1) if follow else own

    def holders(self) -> list[tuple[int, ...]]:
        """By expert, the ranks that hold it, in order."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, own in enumerate(self.ranks):
            for expert in own:
                found[expert].append(rank)
        return list(map(tuple, found))

    def loads(self, counts: Sequence[float]) -> list[float]:
        """Rows of each rank when an expert has `counts` rows and its replicas share them evenly.

        Raises:
            ValueError: there are not as many counts as experts.
        """
        holders = self.holders()
        if len(counts) != len(holders):
            raise ValueError(f"there are {len(counts)} counts; there are {len(holders)} experts")
        return [sum(counts[expert] / len(holders[expert]) for expert in own) for own in self.ranks]

    def table(self) -> tuple[list[int], list[int]]:
        """The runtime's table (runtime/memory/placement.hpp): where each expert's places begin, and
        the places of all experts, rank * X + local.
        """
        places: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, own in enumerate(self.ranks):
            for local, expert in enumerate(own):
                places[expert].append(rank * self.most + local)
        begins = [0]
        for its in places:
            begins.append(begins[-1] + len(its))
        return begins, [place for its in places for place in its]

    def digest(self) -> str:
        """One line of JSON: equal exactly when two placements are the same."""
        return json.dumps(self.ranks)

    def require_fits(self, cfg: MoEConfig, world_size: int) -> None:
        """Raises `ValueError` unless layers of this config on `world_size` ranks can have it."""
        if (self.experts, self.world_size) != (cfg.experts, world_size):
            raise ValueError(
                f"placement has {self.experts} experts on {self.world_size} ranks; the layer has "
                f"{cfg.experts} on {world_size}"
            )
        if self.replicated and cfg.capacity_factor is not None:
            twice = next(e for e, ranks in enumerate(self.holders()) if len(ranks) > 1)
            raise ValueError(
                f"placement has replicas of expert {twice}, and capacity_factor is "
                f"{cfg.capacity_factor}: a capacity is counted where an expert's pairs are in one "
                "place. Set capacity_factor=None, or give each expert one rank"
            )


def experts_of(
    cfg: MoEConfig, rank: int, world_size: int, placement: Placement | None
) -> Sequence[int]:
    """A rank's experts; without a placement they lie in order."""
    return cfg.experts_of(rank, world_size) if placement is None else placement.experts_of(rank)


def why_no_backward(placement: Placement | None) -> str | None:
    """Why its layers have no backward, in words that follow "has no backward"; None if they do."""
    if placement is None or not placement.replicated:
        return None
    return (
        " where several ranks hold an expert, since each would get a part of its gradient: "
        "make the layer with a placement without replicas"
    )


def differences(first: str, other: str) -> str:
    """How the placements of two digests differ; empty where they are the same."""
    if first == other:
        return ""
    here, there = (Placement(json.loads(digest)) for digest in (first, other))
    if here.world_size != there.world_size or here.experts != there.experts:
        return (
            f"{here.experts} experts on {here.world_size} ranks, and {there.experts} on "
            f"{there.world_size}"
        )
    unlike = [
        f"rank {rank} has the experts {list(mine)}, and {list(its)}"
        for rank, (mine, its) in enumerate(zip(here.ranks, there.ranks, strict=True))
        if mine != its
    ]
    return "; ".join(unlike[:_TOLD])


def _require_table(ranks: tuple[tuple[int, ...], ...]) -> None:
    """Raises `ValueError` unless each expert from 0 on is on a rank, and on none twice."""
    every = {expert for own in ranks for expert in own}
    if not every:
        raise ValueError(f"ranks is {list(map(list, ranks))}; there must be an expert")
    if min(every) < 0:
        raise ValueError(f"an expert is {min(every)}; experts are numbers from 0 on")
    if len(every) != max(every) + 1:
        missing = next(expert for expert in range(max(every)) if expert not in every)
        raise ValueError(
            f"no rank has expert {missing}, and there is an expert {max(every)}: each must lie on "
            "a rank"
        )
    for rank, own in enumerate(ranks):
        if len(set(own)) < len(own):
            twice = next(expert for at, expert in enumerate(own) if expert in own[:at])
            raise ValueError(f"rank {rank} has expert {twice} twice; once is enough")


def _replicas(counts: Sequence[float], world_size: int, slots: int) -> list[int]:
    """Replicas of each expert: one, and one more whenever its replicas have the most rows each."""
    replicas = [1] * len(counts)
    heaviest = [(-float(count), expert) for expert, count in enumerate(counts)]
    heapq.heapify(heaviest)
    for _ in range(slots if world_size > 1 else 0):
        _, expert = heapq.heappop(heaviest)
        replicas[expert] += 1
        if replicas[expert] < world_size:
            heapq.heappush(heaviest, (-counts[expert] / replicas[expert], expert))
    return replicas


def _pack(
    shares: Sequence[float], replicas: Sequence[int], world_size: int, places: int
) -> list[list[int]]:
    """The experts of each rank: at most `places`, none of them twice."""
    rows: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(replicas[expert]):
            open_ranks = [rank for rank in range(world_size) if len(rows[rank]) < places]
            fit = [rank for rank in open_ranks if expert not in rows[rank]]
            if fit:
                rank = min(fit, key=lambda rank: (loads[rank], rank))
            else:
                # All ranks with room have the expert, and some full rank has not. That rank has
                # more experts than those with room, so it has one that they lack, and gives it.
                room = open_ranks[0]
                rank = next(r for r in range(world_size) if expert not in rows[r])
                moved = next(one for one in rows[rank] if one not in rows[room])
                rows[rank].remove(moved)
                loads[rank] -= shares[moved]
                rows[room].append(moved)
                loads[room] += shares[moved]
            rows[rank].append(expert)
            loads[rank] += shares[expert]
    return rows


def _swap(shares: Sequence[float], rows: list[list[int]]) -> None:
    """Lets the fullest rank swap an expert for a lighter one of another rank, as long as the
    fuller of both then has fewer rows than the fullest had.
    """
    loads = [sum(shares[expert] for expert in own) for own in rows]
    for _ in range(16 * len(shares)):  # each swap helps; this many are enough
        full = max(range(len(rows)), key=lambda rank: loads[rank])
        best: tuple[float, int, int, int] | None = None
        for other in sorted(range(len(rows)), key=lambda rank: loads[rank]):
            gap = loads[full] - loads[other]
            for mine in rows[full]:
                if mine in rows[other]:
                    continue
                for its in rows[other]:
                    less = shares[mine] - shares[its]
                    if its in rows[full] or not 0 < less < gap:
                        continue
                    after = max(loads[full] - less, loads[other] + less)
                    if best is None or after < best[0]:
                        best = (after, other, mine, its)
        if best is None or best[0] >= loads[full] * (1 - 1e-9):
            return
        _, other, mine, its = best
        for rank, given, got in ((full, mine, its), (other, its, mine)):
            rows[rank].remove(given)
            rows[rank].append(got)
            loads[rank] += shares[got] - shares[given]
