# SPDX-License-Identifier: Apache-2.0
"""The experts' weights that a call's GEMMs asked for, and the part that a cache would have read.

Parts of tiles of one expert share its weights as long as a cache holds them; a trace knows in what
order they were asked for. This file must not depend on the weights' contents.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

import numpy

from moeos.cli.timeline.call import PRODUCT0, PRODUCT1, CallTrace, Parts, kind_name

Block = tuple[int, int, int]
"""A block of weights: the kind of GEMM, the expert, and which share of its columns."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights that one kind of GEMM loads, all ranks together, in bytes.

    Attributes:
        once: the weights of every expert that has a row.
        asked: the weights of every part.
        read: those of them that a cache of the given size no longer holds.
    """

    once: int
    asked: int
    read: int


def replay(call: CallTrace, expert_bytes: Mapping[int, int], cache: int) -> dict[str, Weights]:
    """The weights of Product0 and Product1: replays each rank's parts, in the order of their first
    operands, through an LRU cache that holds only weights. Shared experts are left out.

    Args:
        expert_bytes: bytes of an expert's weights, by kind, `PRODUCT0` and `PRODUCT1`.
        cache: its bytes.
    """
    once: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    read: Counter[int] = Counter()
    gemms = call.parts[numpy.isin(call.parts["kind"], (PRODUCT0, PRODUCT1))]
    for rank in range(len(call.ranks)):
        mine = gemms[gemms["rank"] == rank]
        mine = mine[mine["expert"] < call.ranks[rank].received.shape[1]]
        for kind, _ in set(mine[["kind", "expert"]].tolist()):
            once[kind] += expert_bytes[kind]
        for kind, of_part, of_memory in _replay_rank(mine, expert_bytes, cache):
            asked[kind] += of_part
            read[kind] += of_memory
    return {
        kind_name(kind): Weights(once[kind], asked[kind], read[kind])
        for kind in (PRODUCT0, PRODUCT1)
    }


def _replay_rank(
    parts: Parts, expert_bytes: Mapping[int, int], cache: int
) -> Iterator[tuple[int, int, int]]:
    """(kind, bytes asked for, bytes read) of each part of a rank."""
    cuts = {kind: _cuts(parts[parts["kind"] == kind]) for kind in (PRODUCT0, PRODUCT1)}
    finest = {kind: max(of_tile.values(), default=1) for kind, of_tile in cuts.items()}
    held: OrderedDict[Block, int] = OrderedDict()  # the one used longest ago first
    free = cache
    for part in parts[numpy.argsort(parts["work_begin"], kind="stable")]:
        kind, expert, tile = (int(part[name]) for name in ("kind", "expert", "place"))
        shares = _shares(int(part["part"]), cuts[kind][tile], finest[kind])
        size = expert_bytes[kind] // finest[kind]
        read = 0
        for block in ((kind, expert, share) for share in shares):
            if block in held:
                held.move_to_end(block)
                continue
            held[block] = size
            free -= size
            read += size
            while free < 0:
                free += held.popitem(last=False)[1]
        yield kind, size * len(shares), read


def _cuts(parts: Parts) -> dict[int, int]:
    """How many parts each tile has."""
    tiles, counts = numpy.unique(parts["place"], return_counts=True)
    return dict(zip(tiles.tolist(), counts.tolist(), strict=True))


def _shares(part: int, parts: int, finest: int) -> range:
    """Which of `finest` shares of an expert's columns part number `part` of `parts` computes."""
    first = part * finest // parts
    return range(first, max((part + 1) * finest // parts, first + 1))
