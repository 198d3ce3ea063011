# SPDX-License-Identifier: Apache-2.0
"""The estimate of a call against what a call does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeos import MoEConfig, MoELayer, World
from moeos.cli.estimate import even_routing, saved_bytes, weight_bytes_per_rank, work_of
from moeos.engines.twin.engine import sizes_of
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world import virtual
from tests.layers import config

CODES: dict[str, Any] = {
    "hidden": 256,
    "intermediate": 128,
    "weight_format": "fp8_tensor",
    "activation_format": "fp8_group128",
    "dtype": torch.bfloat16,
}


def stats_of_rank_0(cfg: MoEConfig, ranks: int, tokens: int) -> SimpleNamespace:
    """What rank 0 does in a call in which pairs go to the experts in turn."""
    pairs = torch.arange(ranks * tokens * cfg.top_k) % cfg.experts
    ids = pairs.view(ranks, tokens, cfg.top_k)

    def run(world: World) -> SimpleNamespace:
        layer = MoELayer(cfg, world)
        layer(
            torch.zeros(tokens, cfg.hidden, dtype=cfg.dtype),
            ids[world.rank],
            torch.ones(tokens, cfg.top_k),
        )
        return SimpleNamespace(**layer.stats())

    return virtual.run(run, ranks=ranks)[0]


@pytest.mark.parametrize(
    ("ranks", "tokens", "changes"),
    [
        (1, 100, {}),
        (2, 128, {}),
        (4, 77, {"top_k": 3}),
        (4, 1, {}),
        (4, 4, {"capacity_factor": 0.5}),
        (8, 128, {"dtype": torch.bfloat16, "activation": "gelu", "bias": True}),
        (2, 0, {}),
        (2, 77, {"shared_experts": 2, "shared_intermediate": 160, "shared_gate": True}),
        (4, 77, CODES),
        (3, 77, {"top_k": 3}),
        (8, 128, {"experts": 9, "top_k": 3}),
        (3, 1200, {"experts": 11, "top_k": 6, "hidden": 512, "max_tokens": 1200}),
    ],
)
def test_a_call_does_what_the_estimate_says(
    ranks: int, tokens: int, changes: dict[str, object]
) -> None:
    cfg = config(**changes)
    work, stats = work_of(cfg, ranks, tokens), stats_of_rank_0(cfg, ranks, tokens)
    assert work.pairs_sent == sum(stats.pairs_sent)
    assert work.pairs_received == sum(stats.pairs_received)
    assert work.dispatch_bytes + work.combine_bytes == stats.row_bytes_to_peers
    assert work.count_bytes == stats.count_bytes_to_peers
    assert work.tasks["route"] == stats.tasks["route"]
    assert work.tasks["dispatch"] == stats.tasks["dispatch"]
    # The runtime looks for tokens without pairs wherever the caller routes; but not in a call that
    # is planned up front, which one of few tokens is whose counts come in time.
    blocks = -(-tokens // 32)
    looks = 0 if sizes_of(cfg, ranks, processors=1).may_await(tokens) else blocks
    assert work.tasks["combine"] + looks <= stats.tasks["combine"] <= tokens + blocks
    # Tiles that are packed early, because processors idle, are more than the fewest.
    for kind in ("product0", "product1"):
        assert work.tasks[kind] <= stats.tasks[kind]
    assert work.padding_rows <= stats.padding_rows
    # Where a tile ends within a chunk, both its tiles flag that one; early tiles end elsewhere.
    assert work.flag_bytes - 4 * work.tiles <= stats.flag_bytes_to_peers
    of_kinds = work.dispatch_bytes + work.combine_bytes + work.count_bytes + work.flag_bytes
    assert sum(work.bytes_by_peer) == of_kinds
    assert len(work.bytes_by_peer) == ranks


def test_a_rank_of_a_group_with_the_same_tokens_does_what_the_estimate_says() -> None:
    cfg, slicing, tokens = config(experts=6), Slicing(2), 100
    pairs = torch.arange(3 * tokens * cfg.top_k) % cfg.experts
    ids = pairs.view(3, tokens, cfg.top_k)

    def run(world: World) -> SimpleNamespace:
        layer = MoELayer(cfg, world, **slicing.arguments)
        x, weights = torch.zeros(tokens, cfg.hidden), torch.ones(tokens, cfg.top_k)
        layer(x, ids[world.rank // 2], weights)
        return SimpleNamespace(**layer.stats())

    stats, work = virtual.run(run, 6)[0], work_of(cfg, 6, tokens, slicing)
    assert work.pairs_sent == sum(stats.pairs_sent) == tokens * cfg.top_k
    assert work.pairs_received == sum(stats.pairs_received)
    assert work.dispatch_bytes + work.combine_bytes == sum(stats.row_bytes_by_peer)
    assert sum(work.bytes_by_peer) == (
        work.dispatch_bytes + work.combine_bytes + work.count_bytes + work.flag_bytes
    )
    assert [size > 0 for size in work.bytes_by_peer] == [False, True, True, False, True, False]
    for kind in ("product0", "product1", "combine"):
        assert work.tasks[kind] <= stats.tasks[kind]


@pytest.mark.parametrize("tokens", [0, 5, 100])
@pytest.mark.parametrize("changes", [{}, {"shared_experts": 2, "shared_intermediate": 48}], ids=str)
def test_a_rank_with_slices_does_what_the_estimate_says(
    tokens: int, changes: dict[str, Any]
) -> None:
    cfg, slicing = config(**changes), Slicing(3)
    x = torch.randn(tokens, cfg.hidden)

    def run(world: World) -> SimpleNamespace:
        layer = MoELayer(cfg, world, parallel="tensor")
        layer(x)
        return SimpleNamespace(**layer.stats())

    every, work = virtual.run(run, 3), work_of(cfg, 3, tokens, slicing)
    stats = every[0]
    assert work.pairs_sent == sum(stats.pairs_sent) == stats.pairs_sent[0]
    assert work.pairs_received == sum(stats.pairs_received)
    assert work.tasks["route"] == stats.tasks["route"]
    assert work.tasks["combine"] <= stats.tasks["combine"]
    assert work.combine_bytes == stats.row_bytes_to_peers == sum(stats.row_bytes_by_peer)
    assert [s.row_bytes_by_peer[s.rank] for s in map(_with_rank, range(3), every)] == [0, 0, 0]
    of_kinds = work.combine_bytes + work.count_bytes + work.flag_bytes
    assert sum(work.bytes_by_peer) == of_kinds


@pytest.mark.parametrize("tokens", [0, 5, 100])
@pytest.mark.parametrize(("ranks", "slices"), [(3, 3), (4, 2), (6, 3)])
def test_a_rank_with_slices_and_its_own_tokens_does_what_the_estimate_says(
    tokens: int, ranks: int, slices: int
) -> None:
    cfg, slicing = config(), Slicing(slices, apart=True)
    pairs = torch.arange(ranks * tokens * cfg.top_k) % cfg.experts
    ids = pairs.view(ranks, tokens, cfg.top_k)

    def run(world: World) -> SimpleNamespace:
        layer = MoELayer(cfg, world, **slicing.arguments)
        x, weights = torch.zeros(tokens, cfg.hidden), torch.ones(tokens, cfg.top_k)
        layer(x, ids[world.rank], weights)
        return SimpleNamespace(**layer.stats())

    stats, work = virtual.run(run, ranks)[0], work_of(cfg, ranks, tokens, slicing)
    assert work.pairs_sent == sum(stats.pairs_sent) == slices * tokens * cfg.top_k
    assert work.pairs_received == sum(stats.pairs_received)
    assert work.dispatch_bytes + work.combine_bytes == stats.row_bytes_to_peers
    assert work.count_bytes == stats.count_bytes_to_peers
    for kind in ("product0", "product1", "combine"):
        assert work.tasks[kind] <= stats.tasks[kind]


def _with_rank(rank: int, stats: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, **vars(stats))


def test_without_early_tiles_even_tiles_padding_and_flags_are_exact() -> None:
    cfg = config()
    work, stats = work_of(cfg, 1, 100), stats_of_rank_0(cfg, 1, 100)
    assert work.tiles == cfg.experts == 8
    assert work.tasks["product0"] == stats.tasks["product0"]
    assert work.padding_rows == stats.padding_rows == 8 * (32 - 25)
    assert work.flag_bytes == 0


def test_tiles_of_shared_experts_are_those_of_the_tokens() -> None:
    shared = {"shared_experts": 2, "shared_intermediate": 160, "shared_gate": True}
    for tokens, tiles in ((100, 1), (300, 3), (0, 0)):
        cfg = config(max_tokens=300, **shared)
        tasks, plain = work_of(cfg, 1, tokens).tasks, work_of(config(max_tokens=300), 1, tokens)
        # Of the first product each of both has two tiles of columns, and their gate one.
        assert tasks["product0"] - plain.tasks["product0"] == tiles * 5
        assert tasks["product1"] - plain.tasks["product1"] == tiles
    assert work_of(cfg, 1, 100).tasks["product0"] == stats_of_rank_0(cfg, 1, 100).tasks["product0"]


@pytest.mark.parametrize(("tokens", "ranks"), [(0, 2), (1, 4), (77, 4), (128, 8)])
def test_even_routing_gives_experts_equally_many_rows(tokens: int, ranks: int) -> None:
    cfg = config(top_k=3)
    experts = range(cfg.experts)
    rows = [even_routing(cfg, source, experts, tokens) for source in range(ranks)]
    assert [sum(source) for source in rows] == [3 * tokens] * ranks
    by_expert = [sum(source[expert] for source in rows) for expert in range(cfg.experts)]
    assert max(by_expert) - min(by_expert) <= 1


def test_remainders_share_a_tile_until_it_is_full() -> None:
    sizes = sizes_of(config(experts=4, max_tokens=300), 4, processors=1)
    (tiles,), product0_parts, product1_parts = sizes.plan([[300, 0, 50, 60]])
    assert tiles == [
        (128, [(0, 0, 128)]),
        (128, [(0, 128, 128)]),
        (128, [(0, 256, 44), (2, 0, 50), (3, 0, 24)]),
        (40, [(3, 24, 36)]),
    ]
    assert product0_parts == 4 * sizes.product0_parts
    assert product1_parts == 4 * sizes.product1_parts


def test_a_tile_has_at_most_eight_segments() -> None:
    (tiles,), *_ = sizes_of(config(experts=11), 11, processors=1).plan([[1] * 11])
    assert [len(segments) for _, segments in tiles] == [8, 3]


def test_a_plan_has_the_counts_of_every_source_and_expert() -> None:
    sizes = sizes_of(config(experts=4), 2, processors=1)
    with pytest.raises(ValueError, match="each expert"):
        sizes.plan([[1, 2]])
    with pytest.raises(ValueError, match="each source"):
        sizes.plan([[1, 2], [3]])


def test_rows_beyond_the_capacity_are_not_sent() -> None:
    cfg = config(capacity_factor=0.5)
    assert work_of(cfg, 2, 128).pairs_sent == 128
    assert work_of(cfg, 2, 128).tasks["combine"] == 128 // 2 // 8 + 4  # top_k is 2


def test_weights_count_router_experts_and_biases() -> None:
    cfg = config(activation="gelu", bias=True)
    expert = 2 * 64 * 96 + 64 + 96
    assert weight_bytes_per_rank(cfg, 4) == 4 * (8 * 64 + 2 * expert)


def test_floors_are_work_over_the_measured_rates() -> None:
    cfg = config(hidden=4096, intermediate=4096, experts=8, max_tokens=1024, dtype=torch.bfloat16)
    work = work_of(cfg, 8, 1024)
    flops = 2 * 2048 * 3 * 4096 * 4096 + 2 * 1024 * 8 * 4096
    sent = 2 * 2048 * 7 // 8 * 4096 * 2
    floors = work.floors(8)
    assert floors["compute"] == pytest.approx(flops / 806e12)
    assert floors["link"] == pytest.approx(sent / 355e9, rel=1e-3)
    assert floors["memory"] == pytest.approx(3 * 4096 * 4096 * 2 / 4.4e12)


def test_products_of_codes_have_a_rate_and_rows_a_size_of_their_own() -> None:
    cfg = config(**CODES, shared_experts=1, shared_intermediate=64)
    plain = dataclasses.replace(cfg, activation_format=None)
    coded, other = work_of(cfg, 8, 128), work_of(plain, 8, 128)
    assert coded.combine_bytes == other.combine_bytes
    row = 256 + 2 * 4
    assert coded.dispatch_bytes * 2 * 256 == other.dispatch_bytes * -(-row // 16) * 16
    returned = work_of(dataclasses.replace(cfg, result_format="fp8_group128"), 8, 128)
    assert returned.dispatch_bytes == coded.dispatch_bytes
    assert returned.combine_bytes * 2 * 256 == coded.combine_bytes * (256 + 128)
    plain_flops = coded.router_flops + coded.shared_flops
    expected = plain_flops / 806e12 + coded.expert_flops / 1476e12
    assert coded.floors(8)["compute"] == pytest.approx(expected)


def test_bytes_to_other_nodes_are_no_links_and_take_the_networks_time() -> None:
    work = work_of(config(experts=16, max_tokens=1024), 8, 1024)
    every = sum(work.bytes_by_peer)
    near, far = work.bytes_over_links(2), work.bytes_over_network(2)
    assert near + far == every
    assert 5 / 7 * every < far < every  # to 6 of 7 peers
    assert work.bytes_over_network(8) == 0
    assert work.floors(2)["link"] == pytest.approx(near / 355e9)
    assert "network" not in work.floors(2)
    assert work.floors(2, 50e9)["network"] == pytest.approx(far / 50e9)


def test_more_tokens_than_the_layer_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 129; allowed: 0 to max_tokens, 128"):
        work_of(config(), 2, 129)


@pytest.mark.parametrize("slicing", [WHOLE, Slicing(2), Slicing(2, apart=True)], ids=str)
def test_what_a_call_keeps_for_its_backward_is_planned(slicing: Slicing) -> None:
    cfg = MoEConfig(
        **{"hidden": 32, "intermediate": 64, "experts": 8, "top_k": 2, "max_tokens": 64},
        save="preactivation",
    )

    def run(world: World) -> int:
        layer = MoELayer(cfg, world, **slicing.arguments)
        rows = layer.experts.engine.saved_rows.of_call(40, 1)
        return rows * layer.w1.shape[1] * layer.w1.itemsize + 40 * cfg.slots * 8

    kept = saved_bytes(cfg, 2, 40, slicing)
    assert virtual.run(run, 2) == [kept["preactivation"]] * 2
    assert kept["preactivation"] > kept["nothing"] == 40 * cfg.slots * 8
