# SPDX-License-Identifier: Apache-2.0
"""Numbers of experts that ranks do not divide: the last ranks hold fewer, or none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from moeos import Experts, MoEConfig, MoELayer, TwinOptions, World
from moeos.checkpoints import load_block
from moeos.checkpoints.state_names import state_name
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
from tests.nightly import all_but, in_turn
from tests.process_group import ranks_of_torch

pytestmark = pytest.mark.usefixtures("poisoned_output")

WORLDS = [(60, 8), (9, 8), (5, 2), (7, 3), (384, 7), (2, 5)]
"""Experts and ranks. Of nine on eight three ranks hold none, and of two on five."""


def only(cfg: MoEConfig, ranks: int, place: int) -> Tensor:
    """Favours nothing but the experts of one of the ranks that hold any, counted from the last."""
    holding = [own for own in (cfg.experts_of(rank, ranks) for rank in range(ranks)) if own]
    own = holding[-1 - place]
    return torch.full((cfg.experts,), -math.inf).index_fill(0, torch.tensor(own), 0.0)


def calls_of(cfg: MoEConfig, ranks: int) -> list[list[Call]]:
    """By rank: calls of the gate, of the caller, to the last holder's experts, and without tokens;
    ranks have unlike numbers of tokens, and none now and then.
    """

    def of_rank(rank: int) -> list[Call]:
        tokens = [0, 3, 40, 17][rank % 4]
        return [
            draw_call(cfg, 20, 7 * rank),
            draw_call(cfg, tokens, 7 * rank + 1),
            draw_given_call(cfg, tokens, 7 * rank + 2),
            draw_given_call(cfg, 40 - tokens, 7 * rank + 3, PREFERENCES["zipf"](cfg.experts, 1)),
            draw_given_call(cfg, 13, 7 * rank + 4, only(cfg, ranks, 0)),
            draw_given_call(cfg, 13 if rank == 1 else 0, 7 * rank + 5, only(cfg, ranks, 1)),
            draw_call(cfg, 0, 0),
            draw_call(cfg, 20, 7 * rank + 6),
        ]

    return [of_rank(rank) for rank in range(ranks)]


def assert_right(weights: Weights, ranks: int, **way: Any) -> None:
    """Asserts that a layer on so many ranks computes what it should, and counts it."""
    cfg = weights.cfg
    calls = calls_of(cfg, ranks)
    if cfg.capacity_factor is not None:  # whom a near tie displaces nobody knows
        calls = [of_rank[2:6] for of_rank in calls]

    def rank_main(world: World) -> list[tuple[Tensor, dict[str, Any]]]:
        layer = weights.layer(world)
        return [(call(layer), layer.stats()) for call in calls[world.rank]]

    results = virtual.run(rank_main, ranks=ranks, **way)
    assert_all_match(weights, calls, [[y for y, _ in of_rank] for of_rank in results])
    for number in range(len(calls[0])):
        stats = [of_rank[number][1] for of_rank in results]
        for rank, own in enumerate(stats):
            assert len(own["expert_pairs"]) == len(cfg.experts_of(rank, ranks))
            assert sum(own["expert_pairs"]) == sum(own["pairs_received"])
            assert own["pairs_received"] == [of["pairs_sent"][rank] for of in stats]
        ids = torch.cat([weights.routing(of_rank[number]) for of_rank in calls])
        if all(bool(weights.sure(of_rank[number]).all()) for of_rank in calls):
            wanted = [int((ids == expert).sum()) for expert in range(cfg.experts)]
            assert [n for own in stats for n in own["expert_pairs"]] == wanted


@pytest.mark.parametrize(("world", "row_map"), in_turn(WORLDS, ["ragged", "capacity"]))
def test_every_rank_computes_what_its_experts_would(world: tuple[int, int], row_map: Any) -> None:
    experts, ranks = world
    cfg = config(experts=experts, top_k=min(4, experts), max_tokens=40, bias=True, row_map=row_map)
    assert_right(draw_weights(cfg), ranks)


OTHER_KINDS: list[dict[str, Any]] = [
    {"capacity_factor": 0.7},
    {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True},
    {"zero_experts": 3},
    {"weight_format": "fp8_block128", "hidden": 128, "intermediate": 128},
    {"weight_format": "mxfp4"},
    {"router_dtype": torch.float32, "scoring": "sigmoid", "selection_bias": True},
]


@pytest.mark.parametrize(("world", "changes"), in_turn([(7, 3), (9, 8)], OTHER_KINDS))
def test_layers_of_other_kinds_are_right(world: tuple[int, int], changes: dict[str, Any]) -> None:
    experts, ranks = world
    cfg = config(**{"experts": experts, "top_k": 3, "max_tokens": 40, **changes})
    assert_right(draw_weights(cfg), ranks)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_remote_peers_are_served_alike(ranks_per_node: int) -> None:
    cfg = config(experts=7, top_k=3, max_tokens=40)
    assert_right(draw_weights(cfg), 4, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("processors", [1, 3])
def test_actors_on_threads_of_their_own_are_right(processors: int) -> None:
    cfg = config(experts=9, top_k=2, max_tokens=40)
    twin = TwinOptions(processors=processors, split_os=True, jitter_us=30.0)
    assert_right(draw_weights(cfg), 8, twin=twin)


def test_a_token_crosses_once_to_a_rank_with_fewer_experts() -> None:
    cfg = config(experts=11, top_k=6, max_tokens=1200, hidden=512, intermediate=16)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 1200, rank, unused=0.0) for rank in range(3)]

    def rank_main(world: World) -> tuple[Tensor, dict[str, Any]]:
        layer = weights.layer(world)
        return calls[world.rank](layer), layer.stats()

    for rank, (y, stats) in enumerate(virtual.run(rank_main, ranks=3)):
        assert_matches(weights, calls[rank], y, f"rank {rank}")
        others = [peer for peer in range(3) if peer != rank]
        sent, crossed = (
            sum(stats[name][peer] for peer in others) for name in ("pairs_sent", "rows_sent")
        )
        assert crossed < sent


def test_experts_take_tensors_of_none_where_a_rank_has_none() -> None:
    weights = draw_weights(config(experts=2, top_k=2, max_tokens=40))
    calls = [draw_given_call(weights.cfg, 10, rank) for rank in range(4)]

    def rank_main(world: World) -> Tensor:
        mine, call = weights.of_rank(world.rank, world.size), calls[world.rank]
        assert len(mine.w1) == (world.rank < 2)
        experts = Experts(weights.cfg, world)
        assert call.ids is not None
        assert call.weights is not None
        with pytest.raises(ValueError, match=r"w1 has shape \[2, "):
            experts(call.x, call.ids, call.weights, weights.w1, weights.w2)
        return experts(call.x, call.ids, call.weights, mine.w1, mine.w2)

    for rank, y in enumerate(virtual.run(rank_main, ranks=4)):
        assert_matches(weights, calls[rank], y, f"rank {rank}")


def test_an_expert_starts_the_same_on_whichever_rank_it_lies() -> None:
    cfg = config(experts=7)

    def rank_main(world: World) -> Tensor:
        torch.manual_seed(3)
        return MoELayer(cfg, world).w1.detach().clone()

    alone = virtual.run(rank_main, ranks=1)[0]
    for ranks in (2, 5):
        assert torch.equal(torch.cat(virtual.run(rank_main, ranks=ranks)), alone)


# --- State dicts and checkpoints ----------------------------------------------------------------

CFG = config(experts=7, max_tokens=64, bias=True)
WEIGHTS = draw_weights(CFG)


def right(layer: MoELayer, weights: Weights = WEIGHTS) -> None:
    """Asserts that the layer computes with `weights` on this rank. Collective."""
    call = draw_call(weights.cfg, 20, layer.world.rank)
    assert_matches(weights, call, layer(call.x), f"rank {layer.world.rank}")


def tensors(weights: Weights) -> dict[str, Tensor]:
    """What a state dict holds of them."""
    found = {"gate.weight": weights.gate, "w1": weights.w1, "w2": weights.w2}
    found |= {name: part for name in ("b1", "b2") if (part := getattr(weights, name)) is not None}
    return found | {name: part for name, part in weights.scales().items() if part is not None}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_whole_tensors_and_a_ranks_own_are_loaded(ranks: int) -> None:
    def rank_main(world: World) -> None:
        for given in (tensors(WEIGHTS), tensors(WEIGHTS.of_rank(world.rank, world.size))):
            layer = MoELayer(CFG, world)
            layer.load_state_dict(given)
            right(layer)
        wrong = tensors(WEIGHTS) | {"w1": WEIGHTS.w1[:6]}
        sentence = rf"w1 is a tensor of shape \[6, .* of {ranks} takes all experts, \[7, 192, 64\]"
        with pytest.raises(RuntimeError, match=sentence):
            layer.load_state_dict(wrong)

    virtual.run(rank_main, ranks=ranks)


@pytest.mark.parametrize(
    ("placement", "assign"), in_turn([Shard(0), Shard(1), Replicate()], [False, True])
)
def test_dtensors_of_any_placement_are_loaded(placement: Any, assign: bool) -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        state: dict[str, Any] = {
            name: distribute_tensor(tensor.clone(), mesh, [placement])
            for name, tensor in tensors(WEIGHTS).items()
        }
        layer = MoELayer(CFG, world)
        layer.load_state_dict(state, assign=assign)
        right(layer)
        return True

    assert all(ranks_of_torch(rank_main, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("weight_format", all_but(["fp8_block128"], [None, "fp8_block128"]))
def test_a_checkpoint_is_read_by_other_numbers_of_ranks(weight_format: Any, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "intermediate": 128}
    cfg = dataclasses.replace(CFG, weight_format=weight_format, **sizes)
    weights = draw_weights(cfg)

    def save(world: World) -> bool:
        state = weights.layer(world).state_dict()
        for name, every in tensors(weights).items():
            if name != "gate.weight":
                held = state[state_name(cfg, name)]
                assert isinstance(held, DTensor)
                assert held.shape == every.shape
                assert held.stride() == every.stride()
                assert held.to_local().shape[0] == len(cfg.experts_of(world.rank, world.size))
                if every.dtype != torch.float8_e4m3fn:  # which gloo does not gather
                    assert torch.equal(held.full_tensor(), every)
        dcp.save(state, checkpoint_id=tmp_path)
        return True

    def load(world: World) -> bool:
        layer = MoELayer(cfg, world)
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        right(layer, weights)  # read into the memory of the parameters
        layer.load_state_dict(state)
        right(layer, weights)
        return True

    assert all(ranks_of_torch(save, 5))  # two experts each, one on the fourth, none on the last
    for ranks in (5, 3, 1):
        assert all(ranks_of_torch(load, ranks))


BLOCKS: dict[str, tuple[Any, bool]] = {
    "fused": (lambda: fused_names(True), True),
    "split": (lambda: split_names(True), True),
    "mixtral": (mixtral_names, False),
}


@pytest.mark.parametrize(
    ("name", "ranks"), all_but([("split", 5)], itertools.product(BLOCKS, [3, 5]))
)
def test_a_block_of_a_checkpoint_is_read_by_every_rank(
    name: str, ranks: int, tmp_path: Path
) -> None:
    names, biased = BLOCKS[name]
    cfg, whole = hf_config(bias=biased), names()
    prefix = next(name for name in whole if "gate.weight" in name).split("gate.")[0]
    every = load_block(cfg, whole, prefix, 0, 1)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file)

    def assert_own(block: dict[str, Tensor], rank: int) -> None:
        own = cfg.experts_of(rank, ranks)
        for name, tensor in every.items():
            wanted = tensor if name.startswith("gate.") else tensor[own.start : own.stop]
            assert torch.equal(block[name], wanted), name

    for rank in range(ranks):
        for held in (whole, file):
            assert_own(load_block(cfg, held, prefix, rank, ranks), rank)

    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        for placement in (Shard(0), Shard(-1), Replicate()):
            cut = {name: distribute_tensor(one, mesh, [placement]) for name, one in whole.items()}
            assert_own(load_block(cfg, cut, prefix, world.rank, world.size), world.rank)
        return True

    assert all(ranks_of_torch(rank_main, ranks))
