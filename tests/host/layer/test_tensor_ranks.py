# SPDX-License-Identifier: Apache-2.0
"""Experts in slices over groups of ranks, which share out the experts: a mesh, on the twin."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from moeos import (
    ConfigMismatch,
    Experts,
    MoEConfig,
    MoELayer,
    PeerTimeout,
    TwinOptions,
    World,
    quantize,
)
from moeos.partition.slicing import Output, Slicing, slicing_of
from moeos.world import virtual
from tests.gradients import assert_match, gradients_of
from tests.host.checkpoints.test_checkpoint import PREFIX, split_names
from tests.host.checkpoints.test_checkpoint import config as hf_config
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but, in_turn
from tests.process_group import ranks_of_torch

pytestmark = pytest.mark.usefixtures("poisoned_output")

PARALLEL = "sharded_tokens"
MESHES = [
    (ranks, slices) for ranks in range(2, 9) for slices in range(2, ranks) if ranks % slices == 0
]
"""Ranks and slices: neither whole experts nor slices of all."""
SHARED = {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True}


def only(experts: int, wanted: Sequence[int]) -> Tensor:
    """Favours nothing else."""
    return torch.full((experts,), -math.inf).index_fill(0, torch.tensor(wanted), 0.0)


def calls_of(cfg: MoEConfig, ranks: int) -> list[list[Call]]:
    """By call, then by rank: of the gate, of the caller, to one expert alone, to the last experts
    alone, and without tokens; some ranks have none.
    """
    tokens = [[40, 1, 0, 5, 33][rank % 5] for rank in range(ranks)]
    one, last = only(cfg.experts, [0]), only(cfg.experts, [cfg.experts - 1])
    zipf = PREFERENCES["zipf"](cfg.experts, ranks)
    given = [(tokens, zipf, 0.1), ([40] * ranks, one, 0.0), ([0, 13] * ranks, last, 0.0)]
    calls = [[draw_call(cfg, tokens[rank], rank) for rank in range(ranks)]]
    for number, (many, favoured, unused) in enumerate(given):
        seed = 100 * number
        calls.append(
            [draw_given_call(cfg, many[r], seed + r, favoured, unused) for r in range(ranks)]
        )
    calls.append([draw_call(cfg, 0, 0)] * ranks)
    calls.append([draw_call(cfg, 40, 50 + rank) for rank in range(ranks)])
    return calls


def outputs_of(
    weights: Weights, calls: Sequence[Sequence[Call]], how: dict[str, Any], **way: Any
) -> list[list[Tensor]]:
    """By call, then by rank."""

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, **how)
        return [of_ranks[world.rank](layer) for of_ranks in calls]

    outputs = virtual.run(run, len(calls[0]), **way)
    return [list(of_call) for of_call in zip(*outputs, strict=True)]


def assert_right(weights: Weights, ranks: int, slices: int, **way: Any) -> None:
    calls = calls_of(weights.cfg, ranks)
    if weights.cfg.capacity_factor is not None:  # whom a near tie displaces nobody knows
        calls = calls[1:4]
    how = {"parallel": PARALLEL, "tensor_ranks": slices}
    for number, outputs in enumerate(outputs_of(weights, calls, how, **way)):
        for rank, (call, y) in enumerate(zip(calls[number], outputs, strict=True)):
            assert_matches(weights, call, y, f"call {number}, rank {rank}")


@pytest.mark.parametrize(("mesh", "experts"), in_turn(MESHES, [8, 9]), ids=str)
def test_each_rank_returns_its_own_tokens(mesh: tuple[int, int], experts: int) -> None:
    ranks, slices = mesh
    """Nine experts of four groups: the last has none."""
    cfg = config(
        **{"intermediate": 24 * slices, "experts": experts, "top_k": 3},
        **{"max_tokens": 40, "bias": True},
    )
    assert_right(draw_weights(cfg), ranks, slices)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"row_map": "capacity"},
        {"dtype": torch.bfloat16, **SHARED},
        {"capacity_factor": 0.7},
        {"apply_router_weight_on_input": True, "top_k": 1},
        {"router_dtype": torch.float32, "selection_bias": True, "scoring": "sigmoid"},
        {"hidden": 128, "intermediate": 256, "weight_format": "fp8_block128"},
        {"weight_format": "mxfp4"},
        {
            **{"hidden": 128, "intermediate": 256, "dtype": torch.bfloat16},
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
        },
    ],
    ids=str,
)
def test_layers_of_all_kinds_may_be_cut(changes: dict[str, Any]) -> None:
    cfg = config(**{"intermediate": 192, "experts": 7, "top_k": 3, "max_tokens": 40, **changes})
    assert_right(draw_weights(cfg), 4, 2)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_peers_of_other_nodes_are_served_alike(ranks_per_node: int) -> None:
    cfg = config(experts=7, top_k=3, max_tokens=40, bias=True)
    assert_right(draw_weights(cfg), 4, 2, ranks_per_node=ranks_per_node)


def test_calls_of_many_tokens_are_right() -> None:
    cfg = config(experts=7, top_k=4, max_tokens=300)
    weights = draw_weights(cfg)

    def run(world: World) -> tuple[Tensor, dict[str, Any]]:
        layer = weights.layer(world, parallel=PARALLEL, tensor_ranks=2)
        return layer(draw_call(cfg, 300, world.rank).x), layer.stats()

    results = virtual.run(run, 4)
    for rank, (y, _) in enumerate(results):
        assert_matches(weights, draw_call(cfg, 300, rank), y)
    ids = torch.cat([weights.routing(draw_call(cfg, 300, rank)) for rank in range(4)])
    for rank, (_, stats) in enumerate(results):
        own = cfg.experts_of(rank // 2, 2)
        assert stats["expert_pairs"] == [int((ids == expert).sum()) for expert in own]
        assert stats["pairs_received"] == [of["pairs_sent"][rank] for _, of in results]
        assert sum(stats["pairs_sent"]) == 2 * 4 * 300
        # Deduplicated: a token has a row at a rank, but for those of the first chunk.
        others = [n for peer, n in enumerate(stats["rows_sent"]) if peer != rank]
        assert all(n < 300 + 2 * 32 for n in others)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_slice_is_expert_parallel_and_as_many_as_ranks_are_all(ranks: int) -> None:
    cfg = config(experts=9, top_k=3, max_tokens=40, bias=True)
    weights, calls = draw_weights(cfg), calls_of(cfg, ranks)
    for slices, same in ((1, {}), (ranks, {"parallel": PARALLEL})):
        how = {"parallel": PARALLEL, "tensor_ranks": slices}
        wanted = outputs_of(weights, calls, same)
        for mine, its in zip(outputs_of(weights, calls, how), wanted, strict=True):
            assert all(map(torch.equal, mine, its))


def test_bits_do_not_depend_on_processors_or_timing() -> None:
    cfg = config(experts=7, top_k=3, max_tokens=40, bias=True, **SHARED)
    weights, calls = draw_weights(cfg), calls_of(cfg, 4)
    how = {"parallel": PARALLEL, "tensor_ranks": 2}
    found = []
    for processors, split, jitter in ((1, False, 0.0), (3, True, 0.0), (2, True, 200.0)):
        options = TwinOptions(processors=processors, split_os=split, jitter_us=jitter)
        outputs = outputs_of(weights, calls, how, twin=options)
        found.append([y for of_ranks in outputs for y in of_ranks])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize(
    ("mesh", "given"), in_turn([*MESHES, (4, 4), (2, 1)], [False, True]), ids=str
)
def test_gradients_are_those_of_the_reference(mesh: tuple[int, int], given: bool) -> None:
    ranks, slices = mesh
    cfg = config(experts=9, top_k=3, bias=True, **SHARED)
    weights = draw_weights(cfg)
    draw = draw_given_call if given else draw_call
    calls = [draw(cfg, (77, 0, 128, 5)[rank % 4], rank) for rank in range(ranks)]
    slicing = slicing_of(PARALLEL, "replicated", ranks, slices)
    found = gradients_of(weights, calls, slicing=slicing)
    assert_match(weights, calls, found, slicing=slicing)


def test_gradients_of_bfloat16_and_of_one_expert_alone() -> None:
    cfg = config(intermediate=48, experts=7, top_k=2, dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 9 * rank, rank, only(7, [6])) for rank in range(4)]
    slicing = Slicing(2, apart=True)
    assert_match(weights, calls, gradients_of(weights, calls, slicing=slicing), slicing=slicing)


def test_experts_take_slices_of_their_groups() -> None:
    cfg = config(experts=7, bias=True)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 33 - rank, rank) for rank in range(4)]

    def run(world: World) -> Tensor:
        experts = Experts(cfg, world, parallel=PARALLEL, tensor_ranks=2)
        own = experts.placement.experts_of(world.rank)
        mine = weights.of_slice(experts.slicing, world.rank, world.size)
        assert weights.b2 is not None
        call, b2 = calls[world.rank], weights.b2[own.start : own.stop]
        return experts(call.x, call.ids, call.weights, mine.w1, mine.w2, mine.b1, b2)

    for call, y in zip(calls, virtual.run(run, 4), strict=True):
        assert_matches(weights, call, y)


def test_each_rank_starts_with_its_part_of_the_layer_that_one_rank_has() -> None:
    cfg = config(experts=7, bias=True)

    def made(world: World) -> dict[str, Tensor]:
        layer = MoELayer(cfg, world, parallel=PARALLEL, tensor_ranks=2 if world.size > 1 else 1)
        return {name: own.detach() for name, own in layer.named_parameters()}

    torch.manual_seed(3)
    [alone] = virtual.run(made, 1)
    torch.manual_seed(3)
    parts = virtual.run(made, 4)
    gate, up = alone["w1"][4:, 48:96], alone["w1"][4:, 144:]
    assert torch.equal(parts[3]["w1"], torch.cat([gate, up], 1))
    assert torch.equal(parts[3]["w2"], alone["w2"][4:, :, 48:])
    assert torch.equal(parts[0]["w2"], alone["w2"][:4, :, :48])
    assert parts[3]["b2"].shape == (3, cfg.hidden)


# --- The same tokens on the ranks of a group ------------------------------------------------------


def tensor_outputs_of(
    weights: Weights, ranks: int, slices: int, output: Output, **way: Any
) -> list[tuple[Call, Tensor]]:
    """All calls of all groups, of which each has tokens of its own, with what its ranks return."""
    calls = calls_of(weights.cfg, ranks // slices)

    def run(world: World) -> list[Tensor]:
        how: dict[str, Any] = {"parallel": "tensor", "tensor_ranks": slices, "output": output}
        layer = weights.layer(world, **how)
        return [of_groups[world.rank // slices](layer) for of_groups in calls]

    outputs = virtual.run(run, ranks, **way)
    found = []
    for number, of_groups in enumerate(calls):
        for group, call in enumerate(of_groups):
            mine = [of[number] for of in outputs[group * slices : (group + 1) * slices]]
            if output == "replicated":
                assert all(torch.equal(y, mine[0]) for y in mine)
            found.append((call, mine[0] if output == "replicated" else torch.cat(mine)))
    return found


@pytest.mark.parametrize("parallel", ["tensor", PARALLEL])
def test_a_placement_says_of_whose_experts_ranks_have_slices(parallel: Any) -> None:
    def run(world: World) -> tuple[tuple[int, ...], ...]:
        return MoELayer(config(experts=5), world, parallel=parallel, tensor_ranks=2).placement.ranks

    assert virtual.run(run, 4)[3] == ((0, 1, 2), (0, 1, 2), (3, 4), (3, 4))


@pytest.mark.parametrize(("mesh", "output"), in_turn(MESHES, ["replicated", "scattered"]), ids=str)
def test_a_group_returns_its_tokens(mesh: tuple[int, int], output: Output) -> None:
    ranks, slices = mesh
    cfg = config(
        **{"intermediate": 24 * slices, "experts": 9, "top_k": 3},
        **{"max_tokens": 40, "bias": True},
    )
    weights = draw_weights(cfg)
    for call, y in tensor_outputs_of(weights, ranks, slices, output):
        assert_matches(weights, call, y)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16, **SHARED},
        {"row_map": "capacity"},
        {"hidden": 128, "intermediate": 256, "weight_format": "fp8_block128"},
        {"router_dtype": torch.float32, "selection_bias": True, "scoring": "sigmoid"},
    ],
    ids=str,
)
def test_groups_compute_layers_of_all_kinds(changes: dict[str, Any]) -> None:
    cfg = config(**{"intermediate": 192, "experts": 7, "top_k": 3, "max_tokens": 40, **changes})
    weights = draw_weights(cfg)
    for call, y in tensor_outputs_of(weights, 4, 2, "replicated"):
        assert_matches(weights, call, y)


def test_calls_of_many_tokens_of_a_group_are_right() -> None:
    cfg = config(experts=7, top_k=3, max_tokens=300, bias=True)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 300 - group, group) for group in range(2)]

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel="tensor", tensor_ranks=2)
        return [calls[world.rank // 2](layer) for _ in range(2)]

    for rank, outputs in enumerate(virtual.run(run, 4)):
        for y in outputs:
            assert_matches(weights, calls[rank // 2], y, f"rank {rank}")


def test_bits_of_a_group_do_not_depend_on_processors_or_timing() -> None:
    cfg = config(experts=7, top_k=3, max_tokens=40, bias=True, **SHARED)
    weights = draw_weights(cfg)
    found = []
    for processors, split, jitter in ((1, False, 0.0), (3, True, 0.0), (2, True, 200.0)):
        options = TwinOptions(processors=processors, split_os=split, jitter_us=jitter)
        found.append([y for _, y in tensor_outputs_of(weights, 6, 2, "replicated", twin=options)])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_group_has_the_bits_of_whole_experts_and_of_slices_of_all() -> None:
    cfg = config(experts=9, top_k=3, max_tokens=40, bias=True)
    weights, calls = draw_weights(cfg), calls_of(cfg, 2)
    same = [[of_ranks[0]] * 2 for of_ranks in calls]
    for slices, drawn, how in ((1, calls, {}), (2, same, {"parallel": "tensor"})):
        mesh = {"parallel": "tensor", "tensor_ranks": slices}
        wanted = outputs_of(weights, drawn, how)
        for mine, its in zip(outputs_of(weights, drawn, mesh), wanted, strict=True):
            assert all(map(torch.equal, mine, its))


def test_a_rank_of_a_group_counts_what_it_sends_to_all() -> None:
    cfg = config(experts=8, top_k=2, max_tokens=40)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 20, group) for group in range(3)]

    def run(world: World) -> dict[str, Any]:
        layer = weights.layer(world, parallel="tensor", tensor_ranks=2, output="scattered")
        layer(calls[world.rank // 2].x)
        return layer.stats()

    every = virtual.run(run, 6)
    ids = torch.cat([weights.routing(call) for call in calls])
    for rank, stats in enumerate(every):
        its = [peer for peer in range(6) if peer % 2 == rank % 2]
        assert sum(stats["pairs_sent"]) == sum(stats["pairs_sent"][peer] for peer in its) == 40
        assert stats["pairs_received"] == [of["pairs_sent"][rank] for of in every]
        own = cfg.experts_of(rank // 2, 3)
        assert stats["expert_pairs"] == [int((ids == expert).sum()) for expert in own]
        partner = rank ^ 1
        assert stats["row_bytes_by_peer"][partner] == 10 * cfg.hidden * 4


@pytest.mark.parametrize("what", ["x", "tokens", "gate"])
def test_ranks_of_a_group_whose_tokens_differ_are_named(what: str) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 20, group) for group in range(3)]

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor", tensor_ranks=2)
        x = calls[world.rank // 2].x.clone()
        layer.check_inputs(x)
        if world.rank == 3:
            if what == "x":
                x[3, 5] += 1
            elif what == "tokens":
                x = x[:-1]
            else:
                layer.gate.weight.data[0, 0] += 1
        with pytest.raises(ValueError, match="of rank 3 differ from those of rank 2"):
            layer.check_inputs(x)
        layer(x)

    with pytest.raises(ValueError, match=r"rank [23] differ from those on rank [23] in call 1"):
        virtual.run(run, 6)


def test_a_late_rank_of_a_group_is_named() -> None:
    cfg = config()
    weights = draw_weights(cfg)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor", tensor_ranks=2)
        x = draw_call(cfg, 20, world.rank // 2).x
        layer(x)
        if world.rank != 3:
            layer(x)

    with pytest.raises(PeerTimeout, match="for rank 3, which"):
        virtual.run(run, 4, deadline=2.0)


def test_layers_of_all_meshes_alternate_in_one_world() -> None:
    cfg = config(intermediate=192, experts=7)
    weights = draw_weights(cfg)
    own = [draw_call(cfg, 9 * rank, rank) for rank in range(4)]

    def run(world: World) -> list[Tensor]:
        ways: list[dict[str, Any]] = [
            {"parallel": "tensor", "tensor_ranks": 2},
            {"parallel": PARALLEL, "tensor_ranks": 2},
            {"parallel": PARALLEL},
            {},
        ]
        layers = [weights.layer(world, **how) for how in ways]
        calls = [own[world.rank // 2], *[own[world.rank]] * 3]
        pairs = list(zip(layers, calls, strict=True))
        return [call(layer) for _ in range(3) for layer, call in pairs]

    for rank, outputs in enumerate(virtual.run(run, 4)):
        for number, y in enumerate(outputs):
            assert_matches(weights, own[rank // 2 if number % 4 == 0 else rank], y)


def test_a_workspace_has_layers_of_one_kind_of_groups() -> None:
    cfg = config(intermediate=192)

    def run(world: World) -> None:
        MoELayer(cfg, world, parallel="tensor", tensor_ranks=2)
        MoELayer(cfg, world, parallel="tensor")

    with pytest.raises(ValueError, match=r"tensor_ranks=2, and this one has .*tensor_ranks=4"):
        virtual.run(run, 4)


# --- Weights that come and go ---------------------------------------------------------------------

WAYS: list[tuple[int, dict[str, Any]]] = [
    (4, {"parallel": PARALLEL, "tensor_ranks": 2}),
    (6, {"parallel": "tensor", "tensor_ranks": 3}),
    (8, {"parallel": PARALLEL, "tensor_ranks": 2}),  # whose last group has no expert
    (2, {"parallel": PARALLEL}),
    (2, {"parallel": "tensor"}),
    (3, {}),
    (1, {}),
]
KINDS: list[dict[str, Any]] = [
    {"bias": True, **SHARED},
    {"weight_format": "fp8_tensor", "intermediate": 192},
]


def loaded(
    weights: Weights, ranks: int, how: dict[str, Any], state: Sequence[dict[str, Tensor]]
) -> None:
    """Asserts that a layer with a state dict, of each rank or of all, computes what it should."""
    call = draw_call(weights.cfg, 11, 0)

    def run(world: World) -> Tensor:
        layer = MoELayer(weights.cfg, world, init=False, **how)
        layer.load_state_dict(state[world.rank % len(state)])
        return layer(call.x)

    for rank, y in enumerate(virtual.run(run, ranks)):
        assert_matches(weights, call, y, f"{how}, rank {rank} of {ranks}")


@pytest.mark.parametrize("changes", all_but(KINDS[-1:], KINDS), ids=str)
def test_state_dicts_have_each_expert_in_slices_and_any_layer_reads_them(
    changes: dict[str, Any],
) -> None:
    cfg = config(experts=9, **{"intermediate": 96, **changes})
    weights = draw_weights(cfg)

    def saved(world: World, how: dict[str, Any]) -> dict[str, Tensor]:
        return dict(weights.layer(world, **how).state_dict())

    for ranks, how in WAYS[:3]:
        parts = virtual.run(lambda world, how=how: saved(world, how), ranks)
        loaded(weights, ranks, how, parts)
        every = {name: part for of_rank in parts for name, part in of_rank.items()}
        name = "w1" if cfg.weight_format is None else "w1_fp8_tensor"
        slices = how["tensor_ranks"]
        assert name not in every
        assert every[f"{name}.8.0of{slices}"].shape == (192 * cfg.intermediate // 96 // slices, 64)
        if cfg.bias:
            assert torch.equal(every["b2.8"], weights.b2[8])  # type: ignore[index]
        else:
            assert "w2_scale_fp8_tensor.8" in every
        for others, its in WAYS:
            loaded(weights, others, its, [every])
    parts = virtual.run(lambda world: saved(world, {"parallel": PARALLEL}), 2)
    every = {name: part for of_rank in parts for name, part in of_rank.items()}
    for others, its in WAYS[:3]:
        loaded(weights, others, its, [every])


def test_a_state_dict_without_a_slice_says_so() -> None:
    cfg = config(experts=5)
    weights = draw_weights(cfg)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel=PARALLEL, tensor_ranks=2)
        state = dict(layer.state_dict())
        own = layer.placement.experts_of(world.rank)[0]
        cut = state.pop(f"w2.{own}.{world.rank % 2}of2")
        with pytest.raises(RuntimeError, match=r'Missing key.*"w2"'):
            layer.load_state_dict(state)
        other = {f"w2.{own}.{1 - world.rank % 2}of2": cut}
        told = rf"state dict has w2.{own}.[01]of2; rank {world.rank} needs all of w2.{own}.0of2 to"
        with pytest.raises(RuntimeError, match=told) as raised:
            layer.load_state_dict(state | other)
        assert not re.search("Missing|Unexpected", str(raised.value))
        state[f"w2.{own}"] = cut[:-1]
        with pytest.raises(RuntimeError, match=rf"w2.{own} has shape \[63, 48\].*or whole"):
            layer.load_state_dict(state)

    virtual.run(run, 4)


def test_a_distributed_checkpoint_has_all_slices_once(tmp_path: Path) -> None:
    cfg = config(experts=9, bias=True)
    weights = draw_weights(cfg)
    how: dict[str, Any] = {"parallel": PARALLEL, "tensor_ranks": 2}

    def save(world: World) -> bool:
        dcp.save(weights.layer(world, **how).state_dict(), checkpoint_id=tmp_path)
        return True

    def load(world: World) -> bool:
        layer = MoELayer(cfg, world, **how)
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        layer.load_state_dict(state)
        call = draw_call(cfg, 11, world.rank)
        assert_matches(weights, call, layer(call.x))
        return True

    assert all(ranks_of_torch(save, 4))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    parts = (weights.gate, weights.w1, weights.w2, weights.b1, weights.b2)
    once = sum(part.nbytes for part in parts if part is not None)
    assert once < stored < 1.5 * once
    assert all(ranks_of_torch(load, 4))


def test_hugging_face_blocks_are_cut(tmp_path: Path) -> None:
    cfg = hf_config(max_tokens=16)
    save_file(split_names(), tmp_path / "model.safetensors")
    x = torch.randn(11, cfg.hidden)

    def run(world: World) -> Tensor:
        how: dict[str, Any] = {"parallel": PARALLEL, "tensor_ranks": 3} if world.size > 1 else {}
        return MoELayer.from_hf(cfg, world, tmp_path, PREFIX, **how)(x)

    [alone] = virtual.run(run, 1)
    for y in virtual.run(run, 6):
        torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-5)


# --- What does not work ---------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"tensor_ranks": 3}, "tensor_ranks is 3; it must be a number that divides the 4 ranks"),
    ({}, {"tensor_ranks": 0}, "tensor_ranks is 0; it must be a number that divides"),
    ({}, {"tensor_ranks": 2.0}, "tensor_ranks is 2.0; it must be a number that divides"),
    ({}, {"tensor_ranks": 8}, "tensor_ranks is 8; it must be a number that divides the 4 ranks"),
    ({}, {"parallel": "expert", "tensor_ranks": 2}, "with parallel='expert' an expert is whole"),
    ({"intermediate": 104}, {"tensor_ranks": 2}, "2 ranks with .* a multiple of 16.*tensor_ranks"),
    ({"zero_experts": 2}, {"tensor_ranks": 2}, "a layer with parallel='sharded_tokens' has none"),
    ({}, {"tensor_ranks": 2, "output": "scattered"}, "each rank returns its own tokens"),
]


@pytest.mark.parametrize(("changes", "arguments", "match"), REFUSED, ids=str)
def test_what_does_not_work_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], match: str
) -> None:
    cfg = config(**changes)
    with pytest.raises(ValueError, match=match):
        virtual.run(lambda world: MoELayer(cfg, world, **({"parallel": PARALLEL} | arguments)), 4)


@pytest.mark.parametrize("parallel", ["tensor", PARALLEL])
def test_slices_are_not_quantized(parallel: Any) -> None:
    def run(world: World) -> None:
        layer = MoELayer(config(), world, parallel=parallel, tensor_ranks=2)
        with pytest.raises(ValueError, match=rf"parallel='{parallel}', and codes of slices"):
            quantize(layer, "fp8_channel")

    virtual.run(run, 4)


def test_ranks_must_agree_on_the_slices() -> None:
    cfg = config()

    def run(world: World) -> None:
        slices = 4 if world.rank == 1 else 2
        MoELayer(cfg, world, parallel=PARALLEL, tensor_ranks=slices)

    with pytest.raises(ConfigMismatch, match=r"tensor_ranks=2 and rank 1 .* tensor_ranks=4"):
        virtual.run(run, 4)
