# SPDX-License-Identifier: Apache-2.0
"""Layers whose experts are cut into slices, on the twin: tensor parallelism."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import Experts, MoEConfig, MoELayer, PeerTimeout, TwinOptions, Workspace, World
from moeos.partition.slicing import Output, Slicing, digest, slicing_of
from moeos.system.errors import ConfigMismatch
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan
from tests.layers import (
    Call,
    Weights,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn

SIZES = {"intermediate": 192, "max_tokens": 300, "bias": True}
SHARED = {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True}


def outputs_of(
    weights: Weights, calls: list[Call], ranks: int, output: Output, **options: Any
) -> list[list[Tensor]]:
    """By rank, what it returns of each call."""

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel="tensor", output=output)
        return [layer(call.x, call.ids, call.weights) for call in calls]

    return virtual.run(run, ranks, **options)


def whole(outputs: list[list[Tensor]], number: int, output: Output) -> Tensor:
    """All tokens of a call, which ranks must agree upon."""
    of_ranks = [mine[number] for mine in outputs]
    if output == "scattered":
        return torch.cat(of_ranks)
    assert all(torch.equal(y, of_ranks[0]) for y in of_ranks)
    return of_ranks[0]


@pytest.mark.parametrize(("ranks", "output"), in_turn(range(1, 9), ["replicated", "scattered"]))
def test_outputs_are_those_of_the_reference(ranks: int, output: Output) -> None:
    size = 24 * ranks
    cfg = config(**{**SIZES, "intermediate": size, "max_tokens": 70})
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (70, 1, 0, 5)]
    calls += [draw_given_call(cfg, tokens, tokens, unused=0.5) for tokens in (3, 64)]
    outputs = outputs_of(weights, calls, ranks, output)
    for number, call in enumerate(calls):
        assert_matches(weights, call, whole(outputs, number, output), f"call {number}")


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"activation": "relu2"},
        {"activation": "swiglu", **SHARED},
        {"dtype": torch.bfloat16},
        {"capacity_factor": 1.0, "bias": False},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"router_dtype": torch.float32, "selection_bias": True, "scoring": "sigmoid"},
        {"hidden": 128, "intermediate": 256, "bias": False, "weight_format": "fp8_block128"},
        {"bias": False, "weight_format": "fp8_channel"},
        {"bias": False, "weight_format": "fp8_tensor"},
        {"bias": False, "weight_format": "mxfp4"},
        {"bias": False, "weight_format": "nvfp4"},
        {"bias": False, "weight_format": "int4_group32"},
        {
            **{"hidden": 128, "intermediate": 256, "bias": False, "dtype": torch.bfloat16},
            **{"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
        },
    ],
    ids=str,
)
def test_layers_of_all_kinds_may_be_cut(changes: dict[str, Any]) -> None:
    cfg = config(**(SIZES | changes))
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (130, 4)]
    outputs = outputs_of(weights, calls, 2, "replicated")
    for number, call in enumerate(calls):
        assert_matches(weights, call, whole(outputs, number, "replicated"), f"call {number}")


def test_bits_do_not_depend_on_processors_or_timing() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (300, 7)]
    found = []
    for processors, split, jitter in ((1, False, 0.0), (3, True, 0.0), (2, True, 200.0)):
        options = TwinOptions(processors=processors, split_os=split, jitter_us=jitter)
        outputs = outputs_of(weights, calls, 3, "replicated", twin=options)
        found.append([whole(outputs, number, "replicated") for number in range(len(calls))])
    for other, number in itertools.product(found[1:], range(len(calls))):
        assert torch.equal(other[number], found[0][number])


def test_each_rank_has_a_slice_of_the_layer_that_one_rank_has() -> None:
    cfg = config(**SIZES, **SHARED)

    def made(world: World, parallel: str) -> dict[str, Tensor]:
        torch.manual_seed(3)
        layer = MoELayer(cfg, world, parallel=parallel)  # type: ignore[arg-type]
        return {name: own.detach() for name, own in layer.named_parameters()}

    [alone] = virtual.run(lambda world: made(world, "expert"), 1)
    torch.manual_seed(3)
    parts = virtual.run(lambda world: made(world, "tensor"), 2)
    assert parts[1]["w1"].shape == (8, 192, 64)
    assert parts[1]["w2"].shape == (8, 64, 96)
    gate, up = alone["w1"][:, 96:192], alone["w1"][:, 288:]
    assert torch.equal(parts[1]["w1"], torch.cat([gate, up], 1))
    assert torch.equal(parts[1]["w2"], alone["w2"][:, :, 96:])
    assert torch.equal(parts[1]["b2"], alone["b2"])
    assert torch.equal(parts[0]["shared_w2"], alone["shared_w2"][:, :, :24])


def test_experts_take_slices_and_a_whole_b2() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 33, 0)

    def run(world: World) -> Tensor:
        experts = Experts(cfg, world, parallel="tensor")
        mine = weights.of_slice(experts.slicing, world.rank, world.size)
        return experts(call.x, call.ids, call.weights, mine.w1, mine.w2, mine.b1, weights.b2)

    for y in virtual.run(run, 2):
        assert_matches(weights, call, y)


def test_layers_of_both_kinds_alternate_in_one_world() -> None:
    cfg = config(**SIZES)
    other = dataclasses.replace(cfg, hidden=128)
    weights, others = draw_weights(cfg), draw_weights(other)
    call, its = draw_call(cfg, 40, 1), draw_call(other, 9, 2)

    def run(world: World) -> list[Tensor]:
        cut = weights.layer(world, parallel="tensor")
        second = others.layer(world, parallel="tensor", output="scattered")
        experts = weights.layer(world)
        made = []
        for _ in range(3):
            made += [cut(call.x), experts(call.x), second(its.x)]
        return made

    outputs = virtual.run(run, 3, twin=TwinOptions(processors=2))
    for number in range(0, 9, 3):
        assert_matches(weights, call, whole(outputs, number, "replicated"))
        assert_matches(weights, call, outputs[1][number + 1])
        assert_matches(others, its, whole(outputs, number + 2, "scattered"))


def test_a_workspace_is_of_one_kind() -> None:
    cfg = config(**SIZES)

    def run(world: World) -> None:
        workspace = Workspace(world)
        MoELayer(cfg, world, workspace)
        MoELayer(cfg, world, workspace, parallel="tensor")

    with pytest.raises(ValueError, match="parallel='expert', and this one has parallel='tensor'"):
        virtual.run(run, 2)


@pytest.mark.parametrize("what", ["x", "ids", "tokens", "gate"])
def test_ranks_whose_tokens_differ_are_named(what: str) -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    given = draw_given_call(cfg, 20, 0) if what == "ids" else draw_call(cfg, 20, 0)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor")
        x, ids, chosen = given.x.clone(), given.ids, given.weights
        if world.rank == 1:
            if what == "x":
                x[3, 5] += 1
            elif what == "tokens":
                x = x[:-1]
            elif what == "gate":
                layer.gate.weight.data[0, 0] += 1
            else:
                assert ids is not None
                ids = ids.flip(0)
        layer(x, ids, chosen)

    with pytest.raises(
        ValueError, match=r"rank [01] differ from those on rank [01] in call 1: "
    ) as raised:
        virtual.run(run, 2)
    rows = given.x.shape[0]
    found = re.findall(r"(\d+) (?:tokens )?on rank (\d)", str(raised.value))
    assert {int(rank): int(count) for count, rank in found[-2:]} == {
        0: rows,
        1: rows - (what == "tokens"),
    }


def test_inputs_are_compared_without_a_call() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    given = draw_given_call(cfg, 20, 0)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor")
        layer.check_inputs(given.x, given.ids, given.weights)
        layer.check_inputs(given.x)
        with pytest.raises(
            ValueError, match=r"rank 2 differ from those of rank 0; .*: 20 and 20 tok"
        ):
            layer.check_inputs(given.x + world.rank // 2)
        if world.rank == 1:
            layer.gate.weight.data[0, 0] += 1
        with pytest.raises(ValueError, match="the gate of rank 1 differ from those of rank 0"):
            layer.check_inputs(given.x)

    virtual.run(run, 3)


def test_a_late_rank_is_named() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 20, 0)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor")
        layer(call.x)
        if world.rank != 2:
            layer(call.x)

    with pytest.raises(PeerTimeout, match="for rank 2, which owes word of its call"):
        virtual.run(run, 3, deadline=0.5)


@pytest.mark.parametrize("output", ["replicated", "scattered"])
def test_a_rank_that_computes_late_is_named(output: Output) -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 20, 0)
    plan = FaultPlan(faults=(Fault(kind="stall", rank=1, call=1, stage="combine"),))

    def run(world: World) -> None:
        weights.layer(world, parallel="tensor", output=output)(call.x)

    named = "for rank 1, which owes its partial sums of tokens|rank 1 .* for its own processors"
    with pytest.raises(PeerTimeout, match=named):
        virtual.run(run, 2, deadline=0.5, faults=plan)


def test_each_rank_counts_what_it_sends_to_all() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 20, 0)

    def run(world: World) -> dict[str, Any]:
        layer = weights.layer(world, parallel="tensor", output="scattered")
        layer(call.x)
        return layer.stats()

    for rank, stats in enumerate(virtual.run(run, 3)):
        assert stats["pairs_sent"] == [40 if peer == rank else 0 for peer in range(3)]
        rows = [0 if peer == rank else (7, 7, 6)[peer] for peer in range(3)]
        assert stats["row_bytes_by_peer"] == [4 * cfg.hidden * n for n in rows]
        assert stats["row_bytes_to_peers"] == sum(stats["row_bytes_by_peer"])
        assert len(stats["counts_after"]) == len(stats["waited_for"]) == 3


def test_layers_are_usable_after_a_reset() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 20, 0)

    def run(world: World) -> Tensor:
        layer = weights.layer(world, parallel="tensor")
        with pytest.raises((ValueError, PeerTimeout)):
            layer(call.x[world.rank :])
        layer.reset()
        return layer(call.x)

    for y in virtual.run(run, 2):
        assert_matches(weights, call, y)


def test_state_dicts_have_slices_and_whole_tensors_are_cut() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 11, 0)

    def saved(world: World) -> dict[str, Tensor]:
        return dict(weights.layer(world, parallel="tensor").state_dict())

    parts = virtual.run(saved, 2)
    assert parts[0].keys() & {"w1", "w1.0of2", "b2"} == {"w1.0of2", "b2"}
    every = parts[0] | parts[1]

    def run(world: World, parallel: str) -> Tensor:
        layer = MoELayer(cfg, world, parallel=parallel)  # type: ignore[arg-type]
        layer.load_state_dict(every)
        return layer(call.x)

    for ranks, parallel in ((1, "expert"), (3, "tensor"), (2, "expert")):
        y = virtual.run(functools.partial(run, parallel=parallel), ranks)[0]
        assert_matches(weights, call, y, f"{parallel}, {ranks} ranks")

    def own(world: World) -> Tensor:
        layer = MoELayer(cfg, world, parallel="tensor")
        layer.load_state_dict(parts[world.rank])
        return layer(call.x)

    for y in virtual.run(own, 2):
        assert_matches(weights, call, y)


def test_whole_tensors_that_are_assigned_are_cut_into_memory_of_their_own() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 11, 0)
    [whole] = virtual.run(lambda world: dict(weights.layer(world).state_dict()), 1)

    def run(world: World) -> Tensor:
        layer = MoELayer(cfg, world, parallel="tensor")
        layer.load_state_dict(whole, assign=True)
        for name in ("w1", "w2", "shared_w1", "shared_w2"):
            own = layer.get_parameter(name)
            assert own.is_contiguous()
            assert own.untyped_storage().nbytes() == own.nbytes, name
        return layer(call.x)

    for y in virtual.run(run, 2):
        assert_matches(weights, call, y)


def test_slices_that_make_no_whole_are_named_with_the_rank_and_the_remedy() -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)

    def saved(world: World) -> dict[str, Tensor]:
        return dict(weights.layer(world, parallel="tensor").state_dict())

    first = virtual.run(saved, 2)[0]

    def refused(world: World, parallel: str) -> str:
        layer = MoELayer(cfg, world, parallel=parallel)  # type: ignore[arg-type]
        before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
        if parallel == "tensor" and world.rank == 0:
            layer.load_state_dict(first)  # which is its own
            return ""
        with pytest.raises(RuntimeError) as raised:
            layer.load_state_dict(first)
        for name in ("w1", "shared_w1"):
            assert torch.equal(layer.get_parameter(name), before[name])
        return str(raised.value)

    whole = "the state dict has w1.0of2; rank 1 needs all of w1.0of2 to w1.1of2: each is in"
    own = "the state dict has w1.0of2; rank 1 needs all of w1.0of2 to w1.1of2, or w1.1of2: each"
    for parallel, told in (("expert", whole), ("tensor", own)):
        words = virtual.run(functools.partial(refused, parallel=parallel), 2, deadline=20)[1]
        assert told in words
        assert "Load their union" in words
        assert "Missing key" not in words
        assert "Unexpected key" not in words


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"parallel": "pipeline"}, "it must be 'expert' or 'tensor' or 'sharded_tokens'"),
    ({}, {"parallel": "tensor", "output": "summed"}, "'replicated' or 'scattered'"),
    ({}, {"output": "scattered"}, "with parallel='expert' each rank returns its own tokens"),
    ({"zero_experts": 2}, {"parallel": "tensor"}, "set zero_experts=0"),
    ({"intermediate": 104}, {"parallel": "tensor"}, "intermediate is 104; 2 ranks .* of 16"),
    (
        {"intermediate": 192, "hidden": 128, "weight_format": "fp8_block128"},
        {"parallel": "tensor"},
        "in blocks of 128: it must be a multiple of 256",
    ),
]


@pytest.mark.parametrize(("changes", "arguments", "match"), REFUSED, ids=str)
def test_what_does_not_work_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], match: str
) -> None:
    cfg = config(**changes)
    with pytest.raises(ValueError, match=match):
        virtual.run(lambda world: MoELayer(cfg, world, **arguments), 2)


def test_ranks_must_agree_on_the_output() -> None:
    cfg = config(**SIZES)

    def run(world: World) -> None:
        output: Output = "scattered" if world.rank == 1 else "replicated"
        MoELayer(cfg, world, parallel="tensor", output=output)

    with pytest.raises(ConfigMismatch, match="output='scattered'"):
        virtual.run(run, 2)


@pytest.mark.parametrize("name", ["tokens", "out", "pieces"])
def test_a_scattered_call_refuses(name: str) -> None:
    cfg = config(**SIZES)
    x = torch.zeros(4, cfg.hidden)
    given = {
        "tokens": torch.tensor([2], dtype=torch.int32),
        "out": torch.empty_like(x),
        "pieces": 2,
    }

    def run(world: World) -> None:
        MoELayer(cfg, world, parallel="tensor", output="scattered")(x, **{name: given[name]})

    with pytest.raises(ValueError, match=f"{name} is given, and output is 'scattered'"):
        virtual.run(run, 2)


def test_few_of_the_rows_are_tokens() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 9, 0)
    padded = torch.cat([call.x, torch.full((5, cfg.hidden), torch.nan)])
    count = torch.tensor([9], dtype=torch.int32)

    def run(world: World) -> Tensor:
        return weights.layer(world, parallel="tensor")(padded, tokens=count)

    for y in virtual.run(run, 2):
        assert_matches(weights, call, y[:9])
        assert torch.equal(y[9:], torch.zeros(5, cfg.hidden))


def test_pieces_are_calls_of_their_own() -> None:
    cfg = config(**{**SIZES, "max_tokens": 16})
    weights = draw_weights(cfg)
    call = draw_call(cfg, 40, 0)

    def run(world: World) -> Tensor:
        return weights.layer(world, parallel="tensor")(call.x, pieces=3)

    for y in virtual.run(run, 2):
        assert_matches(weights, call, y)


def test_owners_and_parts() -> None:
    slicing = Slicing(3, everywhere=False)
    assert [len(slicing.tokens_of(rank, 7)) for rank in range(3)] == [3, 3, 1]
    assert [len(slicing.tokens_of(rank, 1)) for rank in range(3)] == [1, 0, 0]
    assert slicing_of("tensor", "replicated", 1) == Slicing()
    assert Slicing(2).peers(3, 4) == [1, 3, 0, 2]
    assert digest({"x": torch.zeros(2)}) != digest({"x": torch.zeros(3)})
    w1 = torch.arange(2 * 8 * 3).view(2, 8, 3)
    shapes = torch.Size((2, 8, 3)), torch.Size((2, 4, 3))
    parts = [Slicing(2).part(w1, *shapes, 2, rank) for rank in range(2)]
    assert torch.equal(parts[1][0, :, 0], torch.tensor([6, 9, 18, 21]))
    assert torch.equal(Slicing(2).joined(parts, shapes[0], 2), w1)


def test_a_config_that_is_cut_is_that_of_a_slice() -> None:
    cfg = MoEConfig(hidden=64, intermediate=96, experts=4, top_k=2, max_tokens=8)
    assert Slicing(3).cut(cfg).intermediate == 32
    assert Slicing().cut(cfg) is cfg


def test_slices_with_remote_peers_are_refused_with_what_works() -> None:
    def make(world: World) -> None:
        MoELayer(config(**SIZES), world, parallel="tensor")

    with pytest.raises(ValueError, match=r"may have none: leave ranks_per_node out.*'expert'"):
        virtual.run(make, 2, ranks_per_node=1)
