# SPDX-License-Identifier: Apache-2.0
"""What a call writes to peers and what it computes: exactly what the routing asks for."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moeos import MoEConfig, TwinOptions, World
from moeos.engines.shared_heap import SharedHeap
from moeos.engines.twin.engine import sizes_of
from moeos.world import virtual
from moeos.world.heap import SymmetricHeap
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    assert_matches,
    config,
    deduplicated_rows,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn

RANKS = 4
CHUNK_ROWS, TILE_ROWS, ROUTE_TOKENS, SEGMENT_ALIGN = 32, 128, 32, 8
COMBINE_TOKENS, PART_ROWS = 8, 8
Way = dict[str, Any]
"""What `virtual.run` is given."""
WAYS: dict[str, Way] = {
    "one-thread": {"twin": TwinOptions(processors=2)},
    "split-os": {"twin": TwinOptions(processors=2, split_os=True)},
    "remote": {"twin": TwinOptions(processors=1), "ranks_per_node": 1},
}

Stats = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the routing of one call of all ranks asks for.

    Attributes:
        sent: [source][destination][local expert] pairs.
        crossing: [source][destination] rows that cross where each token goes once.
        direct: ranks store into each other's memory.
    """

    cfg: MoEConfig
    sent: list[list[list[int]]]
    crossing: list[list[int]]
    tokens: list[int]
    direct: bool

    @staticmethod
    def of(weights: Weights, calls: Sequence[Call], direct: bool) -> Traffic:
        cfg, ranks = weights.cfg, len(calls)
        routing = [weights.routing(call) for call in calls]
        counts = [torch.bincount(ids[ids >= 0], minlength=cfg.experts) for ids in routing]
        local = cfg.experts // ranks
        first_rows = sizes_of(cfg, ranks, 1).dedup_after * CHUNK_ROWS
        crossing = [
            [
                deduplicated_rows(ids, range(rank * local, (rank + 1) * local), first_rows)
                for rank in range(ranks)
            ]
            for ids in routing
        ]
        sent = [count.view(ranks, -1).tolist() for count in counts]
        return Traffic(cfg, sent, crossing, [len(call.x) for call in calls], direct)

    @property
    def row_bytes(self) -> int:
        return self.cfg.hidden * self.cfg.dtype.itemsize

    def pairs(self, source: int, destination: int) -> int:
        return sum(self.sent[source][destination])

    def once(self, source: int, destination: int) -> bool:
        """Whether each token goes there once."""
        sizes = sizes_of(self.cfg, len(self.sent), 1)
        many = sizes.deduplicates(self.pairs(source, destination))
        return many and self.direct and source != destination

    def rows(self, source: int, destination: int) -> int:
        """Rows that cross: of a token one, or one for each of its pairs."""
        if self.once(source, destination):
            return self.crossing[source][destination]
        return self.pairs(source, destination)

    def rows_with_peers(self, rank: int) -> int:
        """Rows that `rank` writes into other ranks' memory: its own, and its peers' results."""
        peers = [peer for peer in range(len(self.sent)) if peer != rank]
        return sum(self.rows(rank, peer) + self.pairs(peer, rank) for peer in peers)

    def replicated(self, source: int, destination: int) -> int:
        """Chunks that the destination copies rows into."""
        first = sizes_of(self.cfg, len(self.sent), 1).dedup_after
        return max(0, self.chunks(source, destination) - first)

    def origins(self, source: int, destination: int) -> int:
        """Rows of these chunks."""
        first = sizes_of(self.cfg, len(self.sent), 1).dedup_after
        return max(0, self.pairs(source, destination) - first * CHUNK_ROWS)

    def chunks(self, source: int, destination: int) -> int:
        return -(-self.pairs(source, destination) // CHUNK_ROWS)

    def credits_least(self, source: int, destination: int) -> int:
        """A credit for each chunk that an expert's rows lie in; more only where a tile ends inside
        of a chunk."""
        first, credits_ = 0, 0
        for rows in self.sent[source][destination]:
            if rows:
                credits_ += (first + rows - 1) // CHUNK_ROWS - first // CHUNK_ROWS + 1
            first += rows
        return credits_


def run(
    weights: Weights, calls: Sequence[Sequence[Call]], way: Way
) -> list[tuple[Traffic, list[Stats]]]:
    """Makes calls [call][rank]; what each asks for, and the ranks' stats."""

    def rank_main(world: World) -> list[Stats]:
        layer = weights.layer(world)
        stats = []
        for call in calls:
            call[world.rank](layer)
            stats.append(layer.stats())
        return stats

    by_rank = virtual.run(rank_main, ranks=len(calls[0]), **way)
    return [
        (
            Traffic.of(weights, call, "ranks_per_node" not in way),
            [stats[number] for stats in by_rank],
        )
        for number, call in enumerate(calls)
    ]


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


CONFIGS = {
    "float32": config(experts=12, top_k=3, max_tokens=300),
    "bfloat16": config(experts=12, top_k=3, max_tokens=300, dtype=torch.bfloat16, hidden=72),
    "one expert a rank": config(experts=4, top_k=2, max_tokens=300, activation="relu"),
    "capacity": config(experts=12, top_k=3, max_tokens=300, capacity_factor=0.6),
    "capacity, ragged": config(
        experts=12, top_k=3, max_tokens=300, capacity_factor=0.6, row_map="ragged"
    ),
    "wide": config(hidden=600, intermediate=400, experts=8, max_tokens=300),
}


@pytest.fixture(scope="module")
def traffic(request: pytest.FixtureRequest, way: Way) -> list[tuple[Traffic, list[Stats]]]:
    """Calls of all kinds and sizes: routed and given, equal, unequal and empty."""
    cfg = CONFIGS[request.param]
    preference = PREFERENCES["zipf"](cfg.experts, RANKS)
    weights = draw_weights(cfg, 0, preference)
    sizes = [(300, 300, 300, 300), (0, 1, 33, 250), (0, 0, 0, 0), (5, 0, 7, 3), (64, 64, 0, 64)]
    calls = [
        [draw_call(cfg, tokens, 10 * number + rank) for rank, tokens in enumerate(ranks)]
        for number, ranks in enumerate(sizes)
    ] + [
        [draw_given_call(cfg, tokens, 90 + rank, preference) for rank, tokens in enumerate(ranks)]
        for ranks in sizes
    ]
    for call in calls:
        for one in call:
            assert weights.sure(one).all()  # or the counts below could rightly be others
    return run(weights, calls, way)


in_ways = pytest.mark.parametrize(
    ("way", "traffic"), in_turn(WAYS, CONFIGS), indirect=True, scope="module"
)
Results = list[tuple[Traffic, list[Stats]]]


@in_ways
def test_pairs_are_those_of_the_routing(traffic: Results) -> None:
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            assert own["tokens"] == asked.tokens[rank]
            assert own["pairs_sent"] == [asked.pairs(rank, peer) for peer in range(RANKS)]
            assert own["pairs_received"] == [asked.pairs(peer, rank) for peer in range(RANKS)]
            experts = zip(*(asked.sent[source][rank] for source in range(RANKS)), strict=True)
            assert own["expert_pairs"] == [sum(pairs) for pairs in experts]


@in_ways
def test_row_bytes_are_rows_and_results_without_padding(traffic: Results) -> None:
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            assert own["row_bytes_to_peers"] == asked.rows_with_peers(rank) * asked.row_bytes
            assert own["rows_sent"] == [asked.rows(rank, peer) for peer in range(RANKS)]


@in_ways
def test_a_token_goes_once_to_a_rank_that_gets_many_rows(traffic: Results, way: Way) -> None:
    saved = 0
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            sources = [peer for peer in range(RANKS) if asked.once(peer, rank)]
            chunks = sum(asked.replicated(peer, rank) for peer in sources)
            assert own["tasks"]["replicate"] == chunks
            saved += sum(own["pairs_sent"]) - sum(own["rows_sent"])
    one_expert = asked.cfg.experts == RANKS
    assert (saved > 0) == ("ranks_per_node" not in way and not one_expert)


@in_ways
def test_count_bytes_are_words_for_a_peers_experts_for_the_call_and_for_where_results_go(
    traffic: Results,
) -> None:
    for asked, stats in traffic:
        for own in stats:
            tells_bases = asked.cfg.resolved_row_map == "ragged" and own["tokens"] > 0
            words = (RANKS - 1) * (asked.cfg.experts // RANKS + 1 + tells_bases)
            assert own["count_bytes_to_peers"] == 8 * words


@in_ways
def test_flag_bytes_are_a_word_for_each_chunk_credit_and_origin(traffic: Results, way: Way) -> None:
    word = 8 if "ranks_per_node" in way else 4  # a signal that is put, or a flag that is stored
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            peers = [peer for peer in range(RANKS) if peer != rank]
            chunks = sum(asked.chunks(rank, peer) for peer in peers)
            credits_ = sum(asked.credits_least(peer, rank) for peer in peers)
            origins = sum(asked.origins(rank, peer) for peer in peers if asked.once(rank, peer))
            if all(pairs <= TILE_ROWS - RANKS * SEGMENT_ALIGN for pairs in own["expert_pairs"]):
                assert own["flag_bytes_to_peers"] == word * (chunks + credits_ + origins)
            else:  # a tile that ends inside of a chunk splits that chunk's credit
                tiles = own["tasks"]["product1"] // -(-asked.cfg.hidden // 256)
                extra = own["flag_bytes_to_peers"] // word - chunks - credits_ - origins
                assert 0 <= extra <= tiles
            assert own["flag_bytes_to_peers"] % word == 0


@in_ways
def test_bytes_to_peers_are_their_sum(traffic: Results) -> None:
    for _, stats in traffic:
        for own in stats:
            parts = ("row_bytes_to_peers", "count_bytes_to_peers", "flag_bytes_to_peers")
            assert own["bytes_to_peers"] == sum(own[part] for part in parts)


@in_ways
def test_tasks_cover_the_tokens_the_chunks_and_the_tiles(traffic: Results) -> None:
    for asked, stats in traffic:
        cfg = asked.cfg
        for rank, own in enumerate(stats):
            tasks = own["tasks"]
            blocks = -(-asked.tokens[rank] // ROUTE_TOKENS)
            chunks = sum(asked.chunks(rank, peer) for peer in range(RANKS))
            assert tasks["route"] == blocks
            # Of few tokens each row, else a chunk, or, where few are sent, eight rows.
            sizes = sizes_of(cfg, RANKS, own["processors"])
            pieces = sum(-(-rows // PART_ROWS) for rows in own["pairs_sent"])
            assert tasks["dispatch"] in (
                (sum(own["pairs_sent"]),)
                if sizes.dispatches_tokens(asked.tokens[rank])
                else (chunks, pieces)
            )
            # Of those who sent a row, and, a block a part, of those who sent nothing.
            fewest = -(-sum(own["pairs_sent"]) // (cfg.top_k * COMBINE_TOKENS))
            assert fewest <= tasks["combine"] <= asked.tokens[rank] + blocks
            product0_parts = -(-cfg.intermediate // (128 if cfg.gated else 256))
            product1_parts = -(-cfg.hidden // 256)
            assert tasks["product1"] % product1_parts == 0
            tiles = tasks["product1"] // product1_parts
            assert tasks["product0"] == tiles * product0_parts
            assert tiles >= sum(-(-pairs // TILE_ROWS) for pairs in own["expert_pairs"])
            arrivals = sum(asked.credits_least(peer, rank) for peer in range(RANKS))
            assert tiles <= arrivals  # never more often than something arrived for an expert


@in_ways
def test_padding_is_below_eight_rows_for_each_segment(traffic: Results) -> None:
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            arrivals = sum(asked.credits_least(peer, rank) for peer in range(RANKS))
            tiles = own["tasks"]["product1"] // -(-asked.cfg.hidden // 256)
            assert own["padding_rows"] <= (SEGMENT_ALIGN - 1) * (arrivals + tiles)
            assert (own["padding_rows"] + sum(own["pairs_received"])) % SEGMENT_ALIGN == 0


@in_ways
def test_what_is_sent_is_received(traffic: Results) -> None:
    for _, stats in traffic:
        for source, sender in enumerate(stats):
            for destination, receiver in enumerate(stats):
                sent = sender["pairs_sent"][destination]
                assert sent == receiver["pairs_received"][source]
        for own in stats:
            assert sum(own["expert_pairs"]) == sum(own["pairs_received"])


@in_ways
def test_drops_and_pairs_sent_are_all_pairs(traffic: Results) -> None:
    for asked, stats in traffic:
        for rank, own in enumerate(stats):
            if own["drops"]:
                assert asked.cfg.capacity_factor is not None
            assert own["drops"] + sum(own["pairs_sent"]) <= asked.tokens[rank] * asked.cfg.top_k


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 32])
def test_rows_that_arrive_together_make_one_tile_for_each_expert(rows: int) -> None:
    """One rank, one chunk: here nothing depends on time, so tiles and padding are exact."""
    cfg = config(experts=8, top_k=1, hidden=264)
    weights = draw_weights(cfg)
    ids = torch.arange(rows).remainder(3).square().unsqueeze(1)  # experts 0, 1 and 4
    call = Call(draw_call(cfg, rows, 0).x, ids, torch.ones(rows, 1))
    [(_, [stats])] = run(weights, [[call]], WAYS["one-thread"])
    used = ids.unique(return_counts=True)[1].tolist()
    assert stats["tasks"]["product0"] == len(used)
    assert stats["tasks"]["product1"] == 2 * len(used)
    assert stats["padding_rows"] == sum(-pairs % SEGMENT_ALIGN for pairs in used)
    assert stats["bytes_to_peers"] == 0


def test_one_source_and_one_expert_fill_whole_tiles() -> None:
    """Chunks, tiles and credits then have common borders."""
    cfg = config(experts=2, top_k=1, max_tokens=600)
    weights = draw_weights(cfg)

    def call(tokens: int) -> Call:
        ids = torch.ones(tokens, 1, dtype=torch.int64)
        return Call(draw_call(cfg, tokens, 0).x, ids, torch.ones(tokens, 1))

    [(_, stats)] = run(weights, [[call(600), call(0)]], {})
    assert stats[0]["flag_bytes_to_peers"] == 4 * 19  # chunks
    assert stats[1]["flag_bytes_to_peers"] == 4 * 19  # credits
    assert stats[1]["padding_rows"] == 0
    assert 5 <= stats[1]["tasks"]["product1"] <= 19
    assert stats[0]["tasks"]["product1"] == 0


@pytest.mark.parametrize("remote", [False, True], ids=["direct", "remote"])
@pytest.mark.parametrize("row_map", ["ragged", "capacity"])
@pytest.mark.parametrize("capacity_factor", [None, 0.6])
def test_memory_of_a_rank_changes_in_the_rows_that_it_was_sent_alone(
    remote: bool, row_map: str, capacity_factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the cells and among the results afterwards, whatever the stats say: rows by
    source, results side by side or by who computed them, nothing beside them: what is staged for
    remote peers lies in the same places. The rest is NaN, so a tile that reads beyond a segment
    shows in the results."""
    cfg = config(experts=12, top_k=3, row_map=row_map, capacity_factor=capacity_factor)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, tokens, tokens) for tokens in (128, 0, 61, 100)]
    asked = Traffic.of(weights, calls, not remote)
    sizes = sizes_of(cfg, RANKS, 1, remote)
    place = SharedHeap().with_shape(sizes).place(0)
    shape = (RANKS, place.stride_rows, cfg.hidden)
    heaps: dict[int, SymmetricHeap] = {}
    allocate = World.allocate_heap

    def allocate_and_remember(world: World, size: int) -> SymmetricHeap:
        heaps[world.rank] = allocate(world, size)
        return heaps[world.rank]

    monkeypatch.setattr(World, "allocate_heap", allocate_and_remember)

    def rank_main(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = weights.layer(world)
        heap = heaps[world.rank]
        raw = (ctypes.c_char * heap.size).from_address(heap.addresses[world.rank])
        floats = torch.frombuffer(raw, dtype=torch.float32)
        floats[place.rows_at // 4 :].fill_(torch.nan)
        cells = floats[place.rows_at // 4 :][: math.prod(shape)].view(shape)
        results = floats[place.results_at // 4 :][: sizes.result_bytes // 4].view(-1, cfg.hidden)
        world.control.barrier()
        y = calls[world.rank](layer)
        world.control.barrier()
        return y, cells.clone(), results.clone()

    for rank, (y, cells, results) in enumerate(
        virtual.run(rank_main, RANKS, ranks_per_node=1 if remote else None)
    ):
        assert_matches(weights, calls[rank], y)
        for rows in (cells, results):
            assert torch.equal(rows.isfinite().any(dim=-1), rows.isfinite().all(dim=-1))
        arrived = cells.isfinite().all(dim=-1).sum(dim=1).tolist()
        assert arrived == [asked.pairs(p, rank) for p in range(RANKS)]
        returned = results.isfinite().all(dim=-1)
        computed = [asked.pairs(rank, p) for p in range(RANKS)]
        if row_map == "ragged":
            assert len(returned) == min(cfg.max_tokens * cfg.top_k, RANKS * sizes.cell_rows)
            assert returned.tolist() == [row < sum(computed) for row in range(len(returned))]
        else:
            assert returned.view(RANKS, -1).sum(dim=1).tolist() == computed


def test_stats_are_those_of_the_last_call_alone() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [[draw_call(cfg, tokens, tokens + rank) for rank in range(2)] for tokens in (90, 90, 0)]
    calls[1] = calls[0]
    (_, first), (_, second), (_, empty) = run(weights, calls, {})
    for one, other, nothing in zip(first, second, empty, strict=True):
        assert one["row_bytes_to_peers"] == other["row_bytes_to_peers"] > 0
        assert one["pairs_sent"] == other["pairs_sent"]
        assert one["busy_seconds"] > 0
        assert nothing["row_bytes_to_peers"] == nothing["flag_bytes_to_peers"] == 0
        assert sum(nothing["tasks"].values()) == 0
        assert nothing["pairs_sent"] == nothing["pairs_received"] == [0, 0]
