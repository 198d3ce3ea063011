# SPDX-License-Identifier: Apache-2.0
"""Placements: which ranks hold which experts, and some of them on several."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from moeos import (
    ConfigMismatch,
    Experts,
    MoEConfig,
    MoELayer,
    Placement,
    TwinOptions,
    World,
    quantize,
    training,
)
from moeos.checkpoints import load_block
from moeos.checkpoints.state_names import state_name
from moeos.cli.shared.routing import Pattern, draw_routing
from moeos.cli.timeline import files
from moeos.cli.timeline.call import CallTrace
from moeos.layer.moving import moves
from moeos.world import virtual
from tests.host.checkpoints.test_checkpoint import config as hf_config
from tests.host.checkpoints.test_checkpoint import fused_names, mixtral_names, split_names
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    assert_all_match,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but
from tests.process_group import ranks_of_torch

pytestmark = pytest.mark.usefixtures("poisoned_output")

SHUFFLED = Placement([[6, 1, 3], [0, 8, 4], [7, 2, 5]])  # type: ignore[arg-type]
UNEVEN = Placement([[4, 0, 8, 2], [], [1, 7, 6, 3, 5]])  # type: ignore[arg-type]
COPIES = Placement([[6, 1, 3, 0], [0, 8, 4, 1], [7, 2, 5, 0]])  # type: ignore[arg-type]
EVERYWHERE = Placement([[8, 0, 1, 2, 3, 4, 5, 6, 7]] * 3)  # type: ignore[arg-type]
PLACEMENTS = {
    "shuffled": SHUFFLED,
    "uneven": UNEVEN,
    "copies": COPIES,
    "everywhere": EVERYWHERE,
}
"""Of nine experts on three ranks."""


# --- The table ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "ranks"), [(8, 4), (60, 8), (9, 8), (5, 2), (2, 5), (7, 1)])
def test_chunk_is_where_experts_lie_without_a_placement(experts: int, ranks: int) -> None:
    made = Placement.chunk(experts, ranks)
    cfg = config(experts=experts, top_k=1)
    assert made.in_order
    assert not made.replicated
    assert (made.experts, made.world_size) == (experts, ranks)
    assert made.most == cfg.experts_per_rank(ranks)
    for rank in range(ranks):
        assert list(made.experts_of(rank)) == list(cfg.experts_of(rank, ranks))
        assert isinstance(made.experts_of(rank), range)


def test_a_table_says_where_each_expert_is() -> None:
    assert COPIES.experts_of(1) == (0, 8, 4, 1)
    assert COPIES.holders()[:3] == [(0, 1, 2), (0, 1), (2,)]
    assert (COPIES.most, COPIES.replicated, COPIES.in_order) == (4, True, False)
    assert UNEVEN.experts_of(1) == range(0)
    begins, places = UNEVEN.table()
    assert begins == list(range(10))
    assert places == [1, 10, 3, 13, 0, 14, 12, 11, 2]  # X is 5
    assert Placement([(0, 1)]) == Placement([[0, 1]])  # type: ignore[arg-type]
    assert Placement(((0, 1),)).experts_of(0) == range(2)


@pytest.mark.parametrize(
    ("ranks", "error", "sentence"),
    [
        (None, TypeError, "ranks is a NoneType; it must be a sequence that has the experts"),
        ([0, 1], TypeError, "the experts of rank 0 are a int; they must be a sequence of ints"),
        ([[0], [True]], TypeError, "an expert of rank 1 is True; experts are numbers from 0 on"),
        ([[0], [1.0]], TypeError, "an expert of rank 1 is 1.0; experts are numbers"),
        ([], ValueError, "ranks is .*; there must be an expert"),
        ([[], []], ValueError, "there must be an expert"),
        ([[0], [-1]], ValueError, "an expert is -1; experts are numbers from 0 on"),
        ([[0, 3], [1]], ValueError, "no rank has expert 2, and there is an expert 3"),
        ([[0, 1], [1, 2, 1]], ValueError, "rank 1 has expert 1 twice; once is enough"),
    ],
)
def test_what_is_no_placement_is_refused(ranks: Any, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Placement(ranks)


# --- What spreads rows evenly -------------------------------------------------------------------


def imbalance(placement: Placement, counts: list[int]) -> float:
    """The rows of the rank with the most, over their mean."""
    loads = placement.loads(counts)
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (256, 8)])
def test_zipf_on_32_ranks_with_32_replicas_is_nearly_even(experts: int, top_k: int) -> None:
    cfg = config(experts=experts, top_k=top_k)
    generator = torch.Generator().manual_seed(0)
    drawn = draw_routing(Pattern("zipf", 1.2), cfg, 32, 20_000, generator)
    assert drawn is not None
    counts = torch.bincount(drawn[0].flatten(), minlength=experts).tolist()
    proposed = Placement.propose(counts, 32, 32)
    assert proposed.most == experts // 32 + 1
    assert imbalance(Placement.chunk(experts, 32), counts) > 10
    assert imbalance(proposed, counts) <= 1.05


def test_proposals_are_placements_with_all_their_slots() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(300):
        experts, ranks = draw(1, 12), draw(1, 6)
        slots = draw(0, experts * (ranks - 1))
        counts = [draw(0, 3) ** draw(1, 6) for _ in range(experts)]
        proposed = Placement.propose(counts, ranks, slots)
        assert (proposed.experts, proposed.world_size) == (experts, ranks)
        assert proposed.most <= -(-(experts + slots) // ranks)
        assert sum(map(len, proposed.ranks)) == experts + slots
        assert proposed == Placement.propose(counts, ranks, slots)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([], 2), "there are 0 counts and 2 ranks; there must be at least one"),
        (([1], 0), "there are 1 counts and 0 ranks"),
        (([1, -1], 2), "the count of expert 1 is -1; it must be at least 0"),
        (([1, math.nan], 2), "the count of expert 1 is nan"),
        (([1, 1], 2, 3), "slots is 3; 2 experts on 2 ranks have 0 to 2, as a rank has an expert"),
        (([1, 1], 2, -1), "slots is -1; 2 experts"),
    ],
)
def test_what_nothing_can_be_proposed_for_is_refused(arguments: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Placement.propose(*arguments)


def test_loads_want_a_count_of_each_expert() -> None:
    assert COPIES.loads([6, 4, 0, 0, 0, 0, 1, 0, 0]) == [5, 4, 2]
    with pytest.raises(ValueError, match="there are 2 counts; there are 9 experts"):
        COPIES.loads([1, 2])


# --- Calls --------------------------------------------------------------------------------------


def calls_of(cfg: MoEConfig, ranks: int) -> list[list[Call]]:
    """By rank: calls of the gate and of the caller, of many tokens, of few and of none."""

    def of_rank(rank: int) -> list[Call]:
        tokens = [0, 3, 40, 17][rank % 4]
        return [
            draw_call(cfg, 40, 7 * rank),
            draw_given_call(cfg, 40 - tokens, 7 * rank + 1, PREFERENCES["zipf"](cfg.experts, 1)),
            draw_given_call(cfg, tokens, 7 * rank + 2),
            draw_call(cfg, tokens, 7 * rank + 3),
            draw_call(cfg, 0, 0),
            draw_call(cfg, 1, 7 * rank + 4),
        ]

    return [of_rank(rank) for rank in range(ranks)]


Results = list[list[tuple[Tensor, dict[str, Any]]]]


def results_of(weights: Weights, placement: Placement | None, ranks: int, **way: Any) -> Results:
    """Outputs and stats, by rank and call."""
    calls = calls_of(weights.cfg, ranks)

    def rank_main(world: World) -> list[tuple[Tensor, dict[str, Any]]]:
        layer = weights.layer(world, placement=placement)
        return [(call(layer), layer.stats()) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=ranks, **way)


def assert_right(weights: Weights, placement: Placement, **way: Any) -> None:
    """Asserts that outputs are those without the placement, and the reference's; and that counts
    add up.
    """
    ranks, cfg = placement.world_size, weights.cfg
    calls, results = calls_of(cfg, ranks), results_of(weights, placement, ranks, **way)
    plain = results_of(weights, None, ranks, **way)
    for rank in range(ranks):
        for (y, _), (wanted, _) in zip(results[rank], plain[rank], strict=True):
            assert torch.equal(y, wanted), f"rank {rank}"
    assert_all_match(weights, calls, [[y for y, _ in of_rank] for of_rank in results])
    for number in range(len(calls[0])):
        stats = [of_rank[number][1] for of_rank in results]
        found = [0] * cfg.experts
        for rank, of in enumerate(stats):
            assert len(of["expert_pairs"]) == len(placement.ranks[rank])
            assert of["pairs_received"] == [other["pairs_sent"][rank] for other in stats]
            for expert, pairs in zip(placement.ranks[rank], of["expert_pairs"], strict=True):
                found[expert] += pairs
        without = [n for of_rank in plain for n in of_rank[number][1]["expert_pairs"]]
        assert found == without


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("row_map", ["ragged", "capacity"])
def test_outputs_are_bitwise_those_of_experts_in_order(name: str, row_map: Any) -> None:
    cfg = config(experts=9, top_k=4, max_tokens=40, bias=True, row_map=row_map)
    assert_right(draw_weights(cfg), PLACEMENTS[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True},
        {"zero_experts": 3},
        {"weight_format": "fp8_block128", "hidden": 128, "intermediate": 128},
        {"router_dtype": torch.float32, "scoring": "sigmoid", "selection_bias": True},
        {"expert_groups": 3, "top_groups": 2, "router_bias": True, "expert_scale": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("name", ["uneven", "copies"])
def test_layers_of_other_kinds_are_right(name: str, changes: dict[str, Any]) -> None:
    cfg = config(**{"experts": 9, "top_k": 3, "max_tokens": 40, **changes})
    assert_right(draw_weights(cfg), PLACEMENTS[name])


@pytest.mark.parametrize("name", ["shuffled", "uneven"])
def test_the_pairs_beyond_a_capacity_are_the_same(name: str) -> None:
    cfg = config(experts=9, top_k=3, max_tokens=40, capacity_factor=0.7)
    weights, placement = draw_weights(cfg), PLACEMENTS[name]
    plain, results = (results_of(weights, one, 3) for one in (None, placement))
    for own, wanted in zip(results, plain, strict=True):
        for (y, stats), (y_wanted, without) in zip(own, wanted, strict=True):
            assert torch.equal(y, y_wanted)
            assert stats["drops"] == without["drops"]
    assert sum(stats["drops"] for own in results for _, stats in own) > 0


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_remote_peers_are_served_alike(ranks_per_node: int) -> None:
    cfg = config(experts=9, top_k=3, max_tokens=40)
    assert_right(draw_weights(cfg), COPIES, ranks_per_node=ranks_per_node)


def test_actors_on_threads_of_their_own_are_right() -> None:
    twin = TwinOptions(processors=3, split_os=True, jitter_us=30.0)
    assert_right(draw_weights(config(experts=9, top_k=2, max_tokens=40)), COPIES, twin=twin)


def test_a_rank_alone_has_its_experts_in_any_order() -> None:
    cfg = config(experts=5, top_k=2, max_tokens=40)
    assert_right(draw_weights(cfg), Placement([[3, 0, 4, 1, 2]]))  # type: ignore[arg-type]


def test_a_token_crosses_once_to_a_rank_with_several_of_its_experts() -> None:
    cfg = config(experts=9, top_k=6, max_tokens=600, hidden=512, intermediate=16)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 600, rank, unused=0.0) for rank in range(3)]

    def rank_main(world: World) -> tuple[Tensor, dict[str, Any]]:
        layer = weights.layer(world, placement=COPIES)
        return calls[world.rank](layer), layer.stats()

    for rank, (y, stats) in enumerate(virtual.run(rank_main, ranks=3)):
        assert_matches(weights, calls[rank], y, f"rank {rank}")
        others = [peer for peer in range(3) if peer != rank]
        sent, crossed = (
            sum(stats[name][peer] for peer in others) for name in ("pairs_sent", "rows_sent")
        )
        assert crossed < sent


def test_layers_of_one_config_may_have_several_placements() -> None:
    cfg = config(experts=9, top_k=3, max_tokens=40)
    weights, others = draw_weights(cfg), draw_weights(cfg, seed=1)
    twisted = Placement(COPIES.ranks[::-1])  # of the same shape

    def rank_main(world: World) -> None:
        layers = [
            (weights, weights.layer(world, placement=COPIES)),
            (others, others.layer(world, placement=twisted)),
            (weights, weights.layer(world)),
            (others, others.layer(world, placement=SHUFFLED)),
        ]
        for number in range(3):
            for its, layer in layers:
                call = draw_call(cfg, 20, 10 * number + world.rank)
                assert_matches(its, call, call(layer), f"rank {world.rank}")
        layer.reset()
        for its, layer in layers:
            call = draw_call(cfg, 20, world.rank)
            assert_matches(its, call, call(layer), f"rank {world.rank}")

    virtual.run(rank_main, ranks=3)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("apart", [1, 2, 3, 4])
def test_an_expert_on_several_ranks_has_even_parts_of_its_rows(tokens: int, apart: int) -> None:
    """Whichever tokens choose it: each, or those so far apart."""
    ranks = 4
    placement = Placement([[0, 1], [0, 2], [0, 3], [0, 4]])  # type: ignore[arg-type]
    cfg = config(experts=5, top_k=1, max_tokens=tokens * apart)
    x = torch.zeros(tokens * apart, cfg.hidden)
    ids = torch.full((tokens * apart, 1), -1)
    ids[::apart] = 0
    weights = draw_weights(cfg)

    def rank_main(world: World) -> int:
        layer = weights.layer(world, placement=placement)
        layer(x, topk_ids=ids, topk_weights=torch.ones(len(ids), 1))
        return int(layer.stats()["expert_pairs"][0])

    pairs = virtual.run(rank_main, ranks=ranks)
    assert sum(pairs) == ranks * tokens
    # Each rank's own share is even to within some rows, so the sum is to within as many a rank.
    assert max(pairs) - min(pairs) <= max(2, 0.2 * tokens * ranks)


def test_experts_take_weights_in_the_order_of_the_placement() -> None:
    weights = draw_weights(config(experts=9, top_k=2, max_tokens=40))
    calls = [draw_given_call(weights.cfg, 10, rank) for rank in range(3)]

    def rank_main(world: World) -> Tensor:
        mine, call = weights.of_rank(world.rank, 3, UNEVEN), calls[world.rank]
        experts = Experts(weights.cfg, world, placement=UNEVEN)
        assert call.ids is not None
        assert call.weights is not None
        return experts(call.x, call.ids, call.weights, mine.w1, mine.w2)

    for rank, y in enumerate(virtual.run(rank_main, ranks=3)):
        assert_matches(weights, calls[rank], y, f"rank {rank}")


def test_an_expert_starts_the_same_wherever_it_lies() -> None:
    cfg = config(experts=9)

    def started(placement: Placement | None, ranks: int) -> list[Tensor]:
        def rank_main(world: World) -> Tensor:
            torch.manual_seed(3)
            return MoELayer(cfg, world, placement=placement).w1.detach().clone()

        return virtual.run(rank_main, ranks=ranks)

    [alone] = started(None, 1)
    for rank, own in enumerate(started(COPIES, 3)):
        assert torch.equal(own, alone[list(COPIES.ranks[rank])])


def test_the_trace_names_experts_by_their_numbers(tmp_path: Path) -> None:
    weights = draw_weights(config(experts=9, top_k=2, max_tokens=40))

    def rank_main(world: World) -> Any:
        layer = weights.layer(world, placement=UNEVEN)
        draw_given_call(weights.cfg, 40, world.rank)(layer)
        return layer.trace()

    ranks = virtual.run(rank_main, ranks=3, trace_events=1000)
    files.save(tmp_path / "trace.npz", ranks, {})
    for traces in (ranks, files.load(tmp_path / "trace.npz")[0]):
        call = CallTrace.of(traces)
        assert [call.expert(0, local) for local in range(4)] == [4, 0, 8, 2]
        assert call.expert(2, 4) == 5
        assert call.chunk_experts(0, 2, 0, 1)[0] in UNEVEN.ranks[2]


# --- What cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "placement", "error", "sentence"),
    [
        ({}, [[0]], TypeError, "placement is a list; it must be a moeos.Placement, or None"),
        (
            {"experts": 8},
            SHUFFLED,
            ValueError,
            "placement has 9 experts on 3 ranks; the layer has 8 on 3",
        ),
        (
            {},
            Placement.chunk(9, 2),
            ValueError,
            "placement has 9 experts on 2 ranks; the layer has 9 on 3",
        ),
        (
            {"capacity_factor": 1.0},
            COPIES,
            ValueError,
            "placement has replicas of expert 0, and capacity_factor is 1.0: .* Set "
            "capacity_factor=None, or give each expert one rank",
        ),
    ],
)
def test_what_a_layer_cannot_have_is_refused_on_all_ranks(
    changes: dict[str, Any], placement: Any, error: Any, sentence: str
) -> None:
    cfg = config(**{"experts": 9, **changes})

    def rank_main(world: World) -> None:
        for kind in (MoELayer, Experts):
            with pytest.raises(error, match=sentence):
                kind(cfg, world, placement=placement)

    virtual.run(rank_main, ranks=3)


def test_ranks_with_unlike_placements_are_told_so() -> None:
    cfg = config(experts=9)
    others = Placement([[1, 6, 3], *SHUFFLED.ranks[1:]])  # type: ignore[list-item]

    def rank_main(world: World) -> None:
        for placement in (others, None):
            sentence = (
                "the same placement. By those of rank 0 and of rank 2: rank 0 has the experts"
            )
            with pytest.raises(ConfigMismatch, match=sentence):
                MoELayer(cfg, world, placement=placement if world.rank == 2 else SHUFFLED)

    virtual.run(rank_main, ranks=3)


# --- State dicts, checkpoints, copies -----------------------------------------------------------

CFG = config(experts=9, max_tokens=64, bias=True)
WEIGHTS = draw_weights(CFG)


def right(layer: MoELayer, weights: Weights = WEIGHTS) -> None:
    """Asserts that the layer computes with `weights` on this rank. Collective."""
    call = draw_call(weights.cfg, 20, layer.world.rank)
    assert_matches(weights, call, layer(call.x), f"rank {layer.world.rank}")


def tensors(weights: Weights) -> dict[str, Tensor]:
    """What a state dict holds of them, experts in order."""
    found = {"gate.weight": weights.gate, "w1": weights.w1, "w2": weights.w2}
    found |= {name: part for name in ("b1", "b2") if (part := getattr(weights, name)) is not None}
    return found | {name: part for name, part in weights.scales().items() if part is not None}


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_state_dict_names_each_expert(name: str, assign: bool) -> None:
    placement = PLACEMENTS[name]

    def rank_main(world: World) -> dict[str, Tensor]:
        layer = WEIGHTS.layer(world, placement=placement)
        state = {name: part.clone() for name, part in layer.state_dict().items()}
        own = placement.ranks[world.rank]
        assert {key for key in state if key.startswith("w1.")} == {f"w1.{e}" for e in own}
        for expert in own:
            assert torch.equal(state[f"w1.{expert}"], WEIGHTS.w1[expert])
            assert torch.equal(state[f"b2.{expert}"], WEIGHTS.b2[expert])  # type: ignore[index]
        other = MoELayer(CFG, world, placement=placement)
        other.load_state_dict(state, assign=assign)
        right(other)
        if own:
            missing = {key: part for key, part in state.items() if key != f"w2.{own[0]}"}
            with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*w2"):
                other.load_state_dict(missing)
        return state

    every: dict[str, Tensor] = {}
    for state in virtual.run(rank_main, ranks=3):
        every |= state

    def load(world: World) -> None:
        for wanted in (None, COPIES, UNEVEN):
            layer = MoELayer(CFG, world, placement=wanted)
            layer.load_state_dict(every, assign=assign)
            right(layer)

    virtual.run(load, ranks=3)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_whole_tensors_are_loaded(name: str) -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world, placement=PLACEMENTS[name])
        layer.load_state_dict(tensors(WEIGHTS))
        right(layer)
        wrong = {f"w1.{expert}": torch.zeros(3) for expert in range(9)}
        sentence = r"w1\.\d has shape \[3\]; an expert needs \[192, 64"
        for _ in PLACEMENTS[name].ranks[world.rank][:1]:
            with pytest.raises(RuntimeError, match=sentence):
                layer.load_state_dict(wrong)

    virtual.run(rank_main, ranks=3)


@pytest.mark.parametrize("weight_format", all_but(["fp8_block128"], [None, "fp8_block128"]))
def test_a_checkpoint_has_each_expert_once_and_any_placement_reads_it(
    weight_format: Any, tmp_path: Path
) -> None:
    sizes = {"hidden": 128, "intermediate": 128}
    cfg = dataclasses.replace(CFG, weight_format=weight_format, **sizes)
    weights = draw_weights(cfg)

    def save(world: World) -> bool:
        dcp.save(weights.layer(world, placement=COPIES).state_dict(), checkpoint_id=tmp_path)
        return True

    def load(world: World) -> bool:
        placement = {3: UNEVEN, 2: Placement.propose([1] * 9, 2, 4)}[world.size]
        layer = MoELayer(cfg, world, placement=placement)
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        right(layer, weights)  # read into the memory of the parameters
        layer.load_state_dict(state)
        right(layer, weights)
        return True

    assert all(ranks_of_torch(save, 3))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    once = sum(part.nbytes for part in tensors(weights).values())
    assert once < stored < 1.5 * once
    for ranks in (3, 2):
        assert all(ranks_of_torch(load, ranks))


def test_functions_that_would_lose_experts_are_refused_by_name() -> None:
    def rank_main(world: World) -> bool:
        for placement in (SHUFFLED, None):
            layer = WEIGHTS.layer(world, placement=placement)
            model = torch.nn.Sequential(layer)
            right(layer)
            if placement is None:
                assert "0.w1" in get_model_state_dict(model)
                continue
            with pytest.raises(RuntimeError, match="would keep one rank's experts of a MoELayer"):
                get_model_state_dict(model)
        return True

    assert all(ranks_of_torch(rank_main, 3))


def test_dtensors_are_loaded_wherever_experts_lie() -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        state: dict[str, Any] = {
            name: distribute_tensor(tensor.clone(), mesh, [Shard(0)])
            for name, tensor in tensors(WEIGHTS).items()
        }
        for placement in (SHUFFLED, COPIES):
            layer = MoELayer(CFG, world, placement=placement)
            layer.load_state_dict(state)
            right(layer)
        return True

    assert all(ranks_of_torch(rank_main, 3))


@pytest.mark.parametrize(
    ("names", "biased"),
    [(lambda: fused_names(True), True), (lambda: split_names(True), True), (mixtral_names, False)],
    ids=["fused", "split", "mixtral"],
)
def test_a_block_of_a_checkpoint_is_read_by_every_rank(
    names: Any, biased: bool, tmp_path: Path
) -> None:
    cfg, whole = hf_config(bias=biased), names()
    prefix = next(name for name in whole if "gate.weight" in name).split("gate.")[0]
    every = load_block(cfg, whole, prefix, 0, 1)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file)
    numbers = list(range(cfg.experts))
    anywhere = (numbers[::-2], numbers[::3], numbers[::-1], [2, 0])
    placement = Placement(anywhere)  # type: ignore[arg-type]

    for rank in range(4):
        own = list(placement.ranks[rank])
        for held in (whole, file):
            block = load_block(cfg, held, prefix, rank, 4, placement=placement)
            for name, tensor in every.items():
                wanted = tensor if name.startswith("gate.") else tensor[own]
                assert torch.equal(block[name], wanted), name

    def rank_main(world: World) -> None:
        plain = MoELayer.from_hf(cfg, world, whole, prefix)
        layer = MoELayer.from_hf(cfg, world, file, prefix, placement=placement)
        x = torch.randn(10, cfg.hidden, generator=torch.Generator().manual_seed(world.rank))
        assert torch.equal(plain(x.to(cfg.dtype)), layer(x.to(cfg.dtype)))

    virtual.run(rank_main, ranks=4)


def test_copies_pickles_and_quantised_layers_keep_it() -> None:
    weights = draw_weights(config(experts=9, max_tokens=64))

    def rank_main(world: World) -> None:
        layer = weights.layer(world, placement=COPIES)
        right(copy.deepcopy(layer), weights)
        memory = io.BytesIO(pickle.dumps(layer))
        right(pickle.load(memory).bind(world), weights)
        coded = quantize(layer, "int4_group32")
        assert coded.placement == COPIES
        assert "w1_scale_int4_group32.0" in coded.state_dict()
        call = draw_call(weights.cfg, 20, world.rank)
        y, wanted = coded(call.x), layer(call.x)
        assert (y - wanted).norm() < 0.3 * wanted.norm()

    virtual.run(rank_main, ranks=3)


# --- Experts that move --------------------------------------------------------------------------

MOVED = Placement([[0, 2, 5, 8], [7, 1, 0, 3], [4, 6, 1, 0]])  # type: ignore[arg-type]
"""As many experts on each rank as COPIES has."""


def assert_moves(world: World, weights: Weights) -> None:
    """Outputs are the same bits before and after, and parameters keep their memory. Collective."""
    layer = weights.layer(world, placement=COPIES)
    shallow, addresses = copy.copy(layer), [own.data_ptr() for own in layer.parameters()]
    calls = [draw_call(weights.cfg, 30, world.rank), draw_given_call(weights.cfg, 3, world.rank)]
    wanted = [call(layer) for call in calls]
    for placement in (MOVED, COPIES, MOVED):
        layer.replace(placement)
        own = placement.ranks[world.rank]
        assert torch.equal(layer.w2.view(torch.uint8), weights.w2[list(own)].view(torch.uint8))
        for one in (layer, shallow):
            assert one.placement == placement
            assert all(torch.equal(call(one), y) for call, y in zip(calls, wanted, strict=True))
        w1 = state_name(weights.cfg, "w1") + "."
        assert {k for k in layer.state_dict() if k.startswith(w1)} == {f"{w1}{e}" for e in own}
    assert [own.data_ptr() for own in layer.parameters()] == addresses
    right(copy.deepcopy(layer), weights)
    layer.reset()
    right(layer, weights)


@pytest.mark.parametrize("weight_format", [None, "fp8_block128", "int4_group32"])
def test_experts_of_virtual_ranks_move(weight_format: Any) -> None:
    sizes = {"hidden": 128, "intermediate": 128, "weight_format": weight_format}
    weights = draw_weights(dataclasses.replace(CFG, **sizes))
    virtual.run(lambda world: assert_moves(world, weights), ranks=3)


@pytest.mark.parametrize("weight_format", [None, "fp8_block128"])
def test_experts_of_processes_move(weight_format: Any) -> None:
    sizes = {"hidden": 128, "intermediate": 128, "weight_format": weight_format}
    weights = draw_weights(dataclasses.replace(CFG, **sizes))

    def rank_main(world: World) -> bool:
        assert_moves(world, weights)
        return True

    assert all(ranks_of_torch(rank_main, 3))


def test_who_gets_an_expert_gets_it_from_its_ranks_by_turns() -> None:
    old = Placement([[0], [0], [1], [2], [3]])  # type: ignore[arg-type]
    new = Placement([[1], [0], [0], [0], [2, 3]])  # type: ignore[arg-type]
    assert moves(old, new) == [(0, 0, 2), (0, 1, 3), (1, 2, 0), (2, 3, 4)]
    assert moves(new, new) == []


@pytest.mark.parametrize(
    ("made_with", "placement", "error", "sentence"),
    [
        (None, SHUFFLED, RuntimeError, "was made without a placement, and its kernel knows"),
        (SHUFFLED, None, TypeError, "placement is None; it must be a moeos.Placement"),
        (SHUFFLED, [[0]], TypeError, "placement is a list; it must be a moeos.Placement"),
        (SHUFFLED, COPIES, ValueError, "rank 0 has 3 experts, and would have 4: replace keeps"),
        (SHUFFLED, Placement.chunk(9, 2), ValueError, "placement has 9 experts on 2 ranks"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(
    made_with: Any, placement: Any, error: Any, sentence: str
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=made_with)
        with pytest.raises(error, match=sentence):
            layer.replace(placement)
        right(layer)

    virtual.run(rank_main, ranks=3)


def test_ranks_that_would_move_experts_elsewhere_are_told_so() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=COPIES)
        with pytest.raises(ConfigMismatch, match="the same placement"):
            layer.replace(MOVED if world.rank == 1 else COPIES)
        right(layer)

    virtual.run(rank_main, ranks=3)


def test_state_of_optimizers_is_refused_by_name() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer.w1.grad = torch.ones_like(layer.w1)
        optimizer.step()
        with pytest.raises(RuntimeError, match="the state of an optimizer of experts that a place"):
            optimizer.state_dict()

    virtual.run(rank_main, ranks=3)


def test_a_digest_is_one_line_and_says_all() -> None:
    assert json.loads(COPIES.digest()) == [list(own) for own in COPIES.ranks]
    assert "\n" not in COPIES.digest()


def test_norms_of_gradients_of_replicas_are_refused_by_name() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=COPIES)
        sentence = "w1 is of a layer with replicas of experts, whose gradients are parts"
        with pytest.raises(ValueError, match=sentence):
            training.get_total_norm([layer.w1], world=world)
        whole = WEIGHTS.layer(world, placement=SHUFFLED)
        whole.w1.grad = torch.ones_like(whole.w1)
        norm = training.get_total_norm([whole.w1], world=world)
        assert float(norm) == pytest.approx(WEIGHTS.w1.numel() ** 0.5)
        right(whole)

    virtual.run(rank_main, ranks=3)
