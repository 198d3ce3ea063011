# SPDX-License-Identifier: Apache-2.0
"""What a layer needs and what one call of it does, from its config alone.

Sizes and bounds come from the runtime's own arithmetic; work is counted for even routing, by the
runtime's own plan (runtime/plan/plan.hpp). Nothing is allocated and nothing runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import numpy
import torch

from moeos import _runtime
from moeos.call.call_checks import (
    expected_scales,
    expected_shared,
    expected_shared_scales,
    expected_weights,
)
from moeos.config.config import MoEConfig, RowMap, Save
from moeos.engines.saved_rows import saved_rows
from moeos.engines.twin.engine import sizes_of
from moeos.partition import policies
from moeos.partition.rates import H200, DeviceRates
from moeos.partition.slicing import WHOLE, Slicing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Buffers and bounds of one rank, for the most tokens and the worst routing.

    Attributes:
        heap_bytes: the symmetric heap, which peers write.
        memory_bytes: queues, counters and maps of the rank's own.
        intermediate_bytes: the buffer between the two GEMMs.
        cell_rows: rows that one source may send, and those that return to it.
        chunks: transfers, each with its flag, in which these rows come.
        tiles, parts: the most row tiles and pieces of work of a call.
    """

    heap_bytes: int
    memory_bytes: int
    intermediate_bytes: int
    cell_rows: int
    chunks: int
    tiles: int
    parts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What rank 0, which has the most experts, does in one call with even routing. Ranks with as
    many differ by a few rows; those with fewer compute less.

    Attributes:
        tokens: S, of every rank; where experts are sliced the same ones.
        pairs_sent, pairs_received: to and from all ranks, this one included.
        tiles: row tiles of pairs.
        tasks: pieces of work by kind, as `CallStats.tasks` counts them.
        padding_rows: rows computed only because segments are padded to 8 rows.
        router_flops: 2 S E H.
        expert_flops: 2 (2I + I) H for each pair received, or 2 (I + I) H where there is no gate.
        expert_rate: FLOP/s at which the GPU multiplies as the experts do, dense.
        shared_flops: likewise of each token and shared expert, and 2 H of a token for their gate.
        weight_bytes: weights of the experts that have rows, read once.
        dispatch_bytes: rows to other ranks, each as long as it is sent
            (`moeos.config.sizes.sent_bytes`); of a token, one to each rank where a call has many
            for it.
        combine_bytes: result rows returned to other ranks, likewise (`returned_bytes`); where
            experts are sliced, partial sums of other ranks' tokens, too, and the sums of this
            rank's to all with the same ones, whether the kernel sends them or an all-reduce.
        count_bytes: to each other rank 8 for each of its X places of an expert, for which call the
            rank makes, and, if it has tokens, for where results go. To one with the same tokens, 8
            for which call it is and 8 for of what.
        flag_bytes: 4 for each chunk sent to another rank, for each chunk that a tile's segment of
            another rank's rows touches, and for each pair sent to a rank that gets tokens once.
            To one with the same tokens, for each group of them whose sums the kernel sends.
        bytes_by_peer: all four to each rank, and 0 to rank 0 itself.
    """

    tokens: int
    pairs_sent: int
    pairs_received: int
    tiles: int
    tasks: dict[str, int]
    padding_rows: int
    router_flops: int
    expert_flops: int
    expert_rate: float
    shared_flops: int
    weight_bytes: int
    dispatch_bytes: int
    combine_bytes: int
    count_bytes: int
    flag_bytes: int
    bytes_by_peer: tuple[int, ...]

    def bytes_over_links(self, node: int) -> int:
        """What rank 0 writes into the memory of the `node` ranks of its node."""
        return sum(self.bytes_by_peer[:node])

    def bytes_over_network(self, node: int) -> int:
        """What rank 0 sends to the ranks of other nodes."""
        return sum(self.bytes_by_peer[node:])

    def floors(
        self, node: int, network: float | None = None, rates: DeviceRates = H200
    ) -> dict[str, float]:
        """Seconds that each limit of a GPU alone would need; no call can be faster than any.

        compute: FLOPs at the dense BF16 rate, the experts' at theirs. link: bytes to peers of a
        node of this many ranks. network: those to others, where a rank sends `network` bytes/s.
        memory: reading the weights.
        """
        seconds = {
            "compute": (self.router_flops + self.shared_flops) / rates.bf16_flops
            + self.expert_flops / self.expert_rate,
            "link": self.bytes_over_links(node) / rates.link_bytes,
            "memory": self.weight_bytes / rates.memory_bytes,
        }
        if network is not None:
            seconds["network"] = self.bytes_over_network(node) / network
        return seconds


def sizes_by_row_map(cfg: MoEConfig, ranks: int, slicing: Slicing = WHOLE) -> dict[RowMap, Sizes]:
    """The sizes with each row map, for a rank with one processor.

    Raises:
        ValueError: there are too few or too many ranks, or more rows or tasks than the runtime can
            number.
    """
    found: dict[RowMap, Sizes] = {}
    for row_map in get_args(RowMap):
        cut = slicing.cut(dataclasses.replace(cfg, row_map=row_map))
        sizes = _sizes_of(cut, ranks, slicing)
        found[row_map] = Sizes(
            heap_bytes=sizes.heap_bytes,
            memory_bytes=sizes.memory_bytes,
            intermediate_bytes=sizes.intermediate_bytes,
            cell_rows=sizes.cell_rows,
            chunks=sizes.chunks,
            tiles=sizes.tiles_max,
            parts=sizes.parts_max,
        )
    return found


def saved_bytes(cfg: MoEConfig, ranks: int, tokens: int, slicing: Slicing) -> dict[str, int]:
    """By `MoEConfig.save`, what a call with `tokens` tokens keeps for its backward on rank 0: its
    routing and rows of the first product. Nothing where a layer has no backward.
    """
    if cfg.in_numbers() != cfg:
        return {}
    cfg, sources = slicing.cut(cfg), slicing.place(0, ranks)[1]
    routing = tokens * cfg.slots * (torch.int32.itemsize + torch.float32.itemsize)
    experts = cfg.experts_per_rank(slicing.holders(ranks))
    found = {}
    for save in get_args(Save):
        rows = cfg.saved_rows if save == "preactivation" else None
        kept = saved_rows(dataclasses.replace(cfg, save=save, saved_rows=rows), sources, experts)
        row_bytes = cfg.w1_rows * cfg.dtype.itemsize
        found[save] = routing + kept.of_call(tokens, 1) * row_bytes
    return found


def weight_bytes_per_rank(cfg: MoEConfig, ranks: int, slicing: Slicing = WHOLE) -> int:
    """Gate, w1 and w2 with their scales, and b1, b2 and shared experts where the layer has them, of
    a rank with the most experts, or slices of them.
    """
    cfg, ranks = slicing.cut(cfg), slicing.holders(ranks)
    router = cfg.experts * cfg.hidden * cfg.gate_dtype.itemsize
    return router + cfg.experts_per_rank(ranks) * _expert_bytes(cfg) + _shared_bytes(cfg)


def even_routing(cfg: MoEConfig, source: int, experts: range, tokens: int) -> list[int]:
    """Rows from a source to each of `experts`, when pairs go to the experts in turn.

    Pairs are numbered over the world, S·k from each rank; pair i goes to expert i mod E. So all
    experts get equally many, to within one, and the k experts of a token are different.
    """
    per_rank = tokens * cfg.top_k

    def before(pair: int, expert: int) -> int:
        return (pair - 1 - expert) // cfg.experts + 1  # pairs below `pair` that go to `expert`

    return [
        before((source + 1) * per_rank, expert) - before(source * per_rank, expert)
        for expert in experts
    ]


def work_of(cfg: MoEConfig, ranks: int, tokens: int, slicing: Slicing = WHOLE) -> Work:
    """What a call costs with even routing and S = `tokens` on every rank.

    Tiles and what follows from them are those of a call in which no tile is packed early because
    processors idle; early ones are more and have more padding. Combine tasks are the fewest: they
    are more where few tokens become complete at a time, or where counts come too late for a call
    that would be planned up front. Dispatch tasks are those of one processor of the twin; with more
    of them chunks may be sent in pieces. Rows beyond an expert's capacity are not sent. Blocks of
    tokens and N-tiles, and so the numbers of Route and GEMM tasks, are the twin's, and so is the
    number of rows from which on tokens go once to a rank.

    Raises:
        ValueError: `tokens` is not 0 to max_tokens, or there are too few or too many ranks.
    """
    if slicing.sums:
        return _work_of_slice(cfg, ranks, tokens, slicing)
    if not 0 <= tokens <= cfg.max_tokens:
        raise ValueError(f"tokens is {tokens}; allowed: 0 to max_tokens, {cfg.max_tokens}")
    cfg, holders = slicing.cut(cfg), slicing.holders(ranks)
    local = cfg.experts_per_rank(holders)
    sizes = _sizes_of(dataclasses.replace(cfg, row_map="ragged"), ranks, slicing)
    capacity = cfg.capacity(tokens)

    def rows(source: int, experts: range) -> list[int]:
        wanted = even_routing(cfg, source, experts, tokens)
        return wanted if capacity is None else [min(n, capacity) for n in wanted]

    sent = rows(0, range(cfg.experts))
    held = [cfg.experts_of(slicing.holder(peer), holders) for peer in range(ranks)]
    to_rank = [sum(sent[own.start : own.stop]) for own in held]
    chunks_to_rank = [-(-n // sizes.chunk_rows) for n in to_rank]
    if sizes.dispatches_tokens(tokens):
        dispatches = sum(to_rank)  # each row is one that tokens bring to a chunk
    else:
        dispatches = sum(sizes.dispatch_parts(sum(chunks_to_rank), n) for n in to_rank)
    once = [peer for peer in range(1, ranks) if sizes.deduplicates(to_rank[peer])]

    # The other ranks' rows are counted only where they go to rank 0: all would be P times E
    # numbers.
    by_expert = [*zip(*(rows(source, range(local)) for source in range(ranks)), strict=True)]
    planned, product0_parts, product1_parts = sizes.plan(by_expert)
    tiles = padding = received = busy_experts = replicated = 0
    flags = [0] * ranks  # of each source
    starts = [0] * ranks
    for of_source, packed in zip(by_expert, planned, strict=True):
        tiles += len(packed)
        padding += sum(padded for padded, _ in packed) - sum(of_source)
        for source, slot, n in (segment for _, segments in packed for segment in segments):
            first = starts[source] + slot
            last = first + n - 1
            if source != 0:
                flags[source] += last // sizes.chunk_rows - first // sizes.chunk_rows + 1
        starts = [start + n for start, n in zip(starts, of_source, strict=True)]
        received += sum(of_source)
        busy_experts += any(of_source)

    for rows_of_source in starts[1:]:
        if sizes.deduplicates(rows_of_source):
            replicated += sizes.chunks_replicated(rows_of_source)

    first_rows = sizes.dedup_after * sizes.chunk_rows  # which say nothing of where they are from
    origins = [max(0, n - first_rows) if peer in once else 0 for peer, n in enumerate(to_rank)]

    shared_tiles = -(-tokens // sizes.tile_rows) if cfg.shared_experts > 0 else 0
    tells_bases = int(cfg.resolved_row_map == "ragged" and tokens > 0)
    peers = range(1, ranks)
    dispatched = [
        _rows_once(cfg, sizes, held[peer], sent, tokens) if peer in once else to_rank[peer]
        for peer in peers
    ]
    # `starts` now holds how many rows each peer has sent to rank 0.
    dispatch_bytes = [rows * sizes.sent_bytes for rows in dispatched]
    combine_bytes = [starts[peer] * sizes.returned_bytes for peer in peers]
    flag_bytes = [4 * (chunks_to_rank[peer] + flags[peer] + origins[peer]) for peer in peers]
    count_bytes = 8 * (local + 1 + tells_bases)
    # Where pairs may be dropped, the runtime looks for tokens that sent nothing; but not where
    # processors wait for tokens' rows themselves, which they do for all tokens.
    may_drop = capacity is not None and capacity < cfg.max_tokens
    awaited = sizes.may_await(tokens)
    with_rows = -(-sum(to_rank) // slicing.pairs(cfg))  # tokens with a row, at least
    complete = tokens if awaited else with_rows
    looks = sizes.route_blocks(tokens) if may_drop and not awaited else 0
    return Work(
        tokens=tokens,
        pairs_sent=sum(to_rank),
        pairs_received=received,
        tiles=tiles,
        tasks={
            "route": sizes.route_parts(tokens),
            "dispatch": dispatches,
            "replicate": replicated,
            "product0": product0_parts + shared_tiles * sizes.shared0_parts,
            "product1": product1_parts + shared_tiles * sizes.product1_parts,
            "combine": -(-complete // sizes.combine_tokens(tokens)) + looks,
        },
        padding_rows=padding,
        router_flops=policies.router_flops(cfg, tokens),
        expert_flops=2 * received * (cfg.w1_rows + cfg.intermediate) * cfg.hidden,
        expert_rate=slicing.policy.rates.expert_flops(cfg),
        shared_flops=policies.shared_flops(cfg, tokens),
        weight_bytes=busy_experts * _expert_bytes(cfg) + (tokens > 0) * _shared_bytes(cfg),
        dispatch_bytes=sum(dispatch_bytes),
        combine_bytes=sum(combine_bytes),
        count_bytes=count_bytes * len(peers),
        flag_bytes=sum(flag_bytes),
        bytes_by_peer=(
            0,
            *(
                sum(kinds) + count_bytes
                for kinds in zip(dispatch_bytes, combine_bytes, flag_bytes, strict=True)
            ),
        ),
    )


def _work_of_slice(cfg: MoEConfig, ranks: int, tokens: int, slicing: Slicing) -> Work:
    """The work of a rank with slices of experts: that of a rank which divides experts among the
    ranks of its slice, and the sums it sends to the rest of its group, which come first.
    """
    cut, others = slicing.cut(cfg), slicing.slices - 1
    whole = work_of(cut, slicing.holders(ranks), tokens)
    sizes = _sizes_of(cut, ranks, slicing)
    left = slicing.leaves_partials(cut, tokens, counted=False)
    groups = [0 if left else sizes.sum_groups(tokens, owner) for owner in range(slicing.slices)]
    rows = [n * cfg.hidden * cfg.dtype.itemsize for n in slicing.sums_sent(0, ranks, tokens)]
    flags = [0, *(4 * (groups[0] + its) for its in groups[1:])]
    counts = [0] + [2 * 8] * others
    by_peer = [0] * ranks
    for peer, size in zip(slicing.same_slice(0, ranks), whole.bytes_by_peer, strict=True):
        by_peer[peer] = size
    for peer, kinds in enumerate(zip(rows[: slicing.slices], counts, flags, strict=True)):
        by_peer[peer] += sum(kinds)
    return dataclasses.replace(
        whole,
        tasks={**whole.tasks, "combine": whole.tasks["combine"] + sum(groups)},
        combine_bytes=whole.combine_bytes + sum(rows),
        count_bytes=whole.count_bytes + sum(counts),
        flag_bytes=whole.flag_bytes + sum(flags),
        bytes_by_peer=tuple(by_peer),
    )


def _sizes_of(cut: MoEConfig, ranks: int, slicing: Slicing) -> _runtime.Sizes:
    """The sizes of a rank with one processor of the twin; `cut`: the config of one slice."""
    _, world = slicing.place(0, ranks)
    places = cut.experts_per_rank(slicing.holders(ranks)) if slicing.apart else 0
    rows = slicing.sizes(cut, slicing.holders(ranks))
    return sizes_of(cut, world, processors=1, places=places, rows=rows)


def _rows_once(
    cfg: MoEConfig, sizes: _runtime.Sizes, own: range, sent: Sequence[int], tokens: int
) -> int:
    """Rows of rank 0 that cross to a peer which gets each token once: those of the first chunks,
    and after them the first of each token. `own`: the peer's experts; `sent`: rows for each of all.
    """
    rows = sent[own.start : own.stop]
    pair = numpy.arange(tokens * cfg.top_k).reshape(tokens, cfg.top_k)
    its, slot = pair % cfg.experts - own.start, pair // cfg.experts
    there = (its >= 0) & (its < len(own))
    its = numpy.where(there, its, 0)
    there &= slot < numpy.array(rows)[its]
    row = numpy.where(there, numpy.cumsum([0, *rows])[its] + slot, numpy.iinfo(numpy.int64).max)
    first_rows = sizes.dedup_after * sizes.chunk_rows
    of_token = row.min(axis=1)
    later = (of_token >= first_rows) & (of_token < sum(rows))
    return int((row < first_rows).sum() + later.sum())


def _expert_bytes(cfg: MoEConfig) -> int:
    return sum(expert_bytes_by_name(cfg).values())


def expert_bytes_by_name(cfg: MoEConfig) -> dict[str, int]:
    """The bytes of each tensor of one expert, by its name in the layer."""
    every = (*expected_weights(cfg, 1), *expected_scales(cfg, 1))
    return {
        wanted.name: wanted.shape.numel() * wanted.dtype.itemsize
        for wanted in every
        if wanted is not None
    }


def _shared_bytes(cfg: MoEConfig) -> int:
    every = (*expected_shared(cfg), *expected_shared_scales(cfg))
    return sum(one.shape.numel() * one.dtype.itemsize for one in every if one is not None)
