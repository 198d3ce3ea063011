# SPDX-License-Identifier: Apache-2.0
"""Layers whose experts' results return as codes and scales: what they compute and send."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeos
from moeos import Experts, MoELayer, TwinOptions, World
from moeos.config import element_formats, reference
from moeos.engines.twin import engine as twin
from moeos.world import virtual
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    assert_all_match,
    coded_call,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import covering

pytestmark = pytest.mark.usefixtures("poisoned_output")

CODED: dict[str, Any] = {
    "hidden": 384,
    "intermediate": 192,
    "weight_format": "fp8_block128",
    "activation_format": "fp8_group128",
    "result_format": "fp8_group128",
    "max_tokens": 150,
}
RULES: dict[str, dict[str, Any]] = {
    "gated": {},
    "not gated, biases": {"activation": "relu2", "bias": True},
    "drops": {"capacity_factor": 0.5},
    "shared experts": {"shared_experts": 2, "shared_intermediate": 40, "shared_gate": True},
    "zero experts": {"zero_experts": 3, "renormalize": False},
    "weight on input": {"top_k": 1, "apply_router_weight_on_input": True, "renormalize": False},
    "one group": {"hidden": 128, "intermediate": 320, "weight_format": "fp8_channel"},
}
RANKS = [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)]


def outputs_of(weights: Weights, calls: list[list[Call]], **way: Any) -> list[list[Tensor]]:
    """What each rank's calls return."""

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=len(calls), **way)


# --- what is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "world"), covering(RULES, RANKS))
def test_results_are_what_the_reference_makes_of_their_codes(
    rule: str, world: tuple[int, torch.dtype]
) -> None:
    ranks, dtype = world
    weights = draw_weights(config(**{**CODED, "dtype": dtype, "experts": 12, **RULES[rule]}))
    calls = [
        [
            draw_given_call(weights.cfg, 0 if rank == 0 else 33, 7 * rank + 1, unused=0.4),
            draw_given_call(weights.cfg, 150, 7 * rank + 2, unused=0.1),
        ]
        for rank in range(ranks)
    ]
    if weights.cfg.capacity_factor is None:
        for rank, own in enumerate(calls):
            own.append(draw_call(weights.cfg, 70, 7 * rank + 3))
    outputs = outputs_of(weights, calls, twin=TwinOptions(processors=2))
    assert_all_match(weights, calls, outputs)


@pytest.mark.parametrize("ranks_per_node", [None, 1, 2], ids=["direct", "remote", "mixed"])
@pytest.mark.parametrize("row_map", ["ragged", "capacity"])
def test_results_are_right_over_any_links(row_map: Any, ranks_per_node: int | None) -> None:
    cfg = config(**CODED, row_map=row_map, dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    favoured = PREFERENCES["zipf"](cfg.experts, 4)
    calls = [
        [draw_given_call(cfg, tokens, 5 * rank + tokens, favoured) for tokens in (150, 3)]
        for rank in range(4)
    ]
    assert_all_match(weights, calls, outputs_of(weights, calls, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_is_rounded_before_it_is_weighed_and_adds_no_more_error_than_in_pytorch(
    dtype: torch.dtype,
) -> None:
    """One expert a token, so that its result can be told from the output."""
    cfg = config(**CODED, top_k=1, dtype=dtype)
    weights, call = draw_weights(cfg), draw_given_call(cfg, 150, 1, unused=0.0)
    call = dataclasses.replace(call, weights=torch.full((150, 1), 0.75))
    plain = dataclasses.replace(weights, cfg=dataclasses.replace(cfg, result_format=None))
    [[y]], [[unrounded]] = outputs_of(weights, [[call]]), outputs_of(plain, [[call]])
    groups = (unrounded.float() / 0.75).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scale).to(torch.float8_e4m3fn)
    steps = 0.75 * (codes.float() * scale).flatten(-2)
    own, theirs = (reference.relative_error(one, unrounded.float()) for one in (y, steps))
    assert 0.01 < own <= 1.02 * theirs
    of_plain = reference.tolerance_of(plain.cfg)
    assert reference.relative_error(y, weights.expected(call)) <= of_plain
    assert reference.relative_error(y, plain.expected(call)) > 2 * of_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_same_for_any_ranks_and_packing(dtype: torch.dtype) -> None:
    cfg = config(**CODED, experts=16, top_k=4, dtype=dtype)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 148, 3)
    assert call.ids is not None
    assert call.weights is not None
    [[alone]] = outputs_of(weights, [[call]], twin=TwinOptions(processors=1))
    for ranks, way in ((2, {}), (4, {"ranks_per_node": 1}), (4, {"twin": TwinOptions(3)})):
        parts = zip(
            *(given.chunk(ranks) for given in (call.x, call.ids, call.weights)), strict=True
        )
        outputs = outputs_of(weights, [[Call(*part)] for part in parts], **way)
        assert torch.equal(torch.cat([y for [y] in outputs]), alone), f"{ranks} ranks"


def test_codes_that_the_caller_brings_and_experts_alone_have_such_results() -> None:
    cfg = config(**CODED, dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 70 + rank, rank) for rank in range(2)]

    def rank_main(world: World) -> None:
        call, mine = calls[world.rank], weights.of_rank(world.rank, world.size)
        y = call(weights.layer(world))
        assert torch.equal(coded_call(call)(weights.layer(world)), y)
        experts = Experts(cfg, world)
        given = (call.x, call.ids, call.weights, mine.w1, mine.w2)
        assert torch.equal(experts(*given, **mine.scales()), y)

    virtual.run(rank_main, ranks=2)


# --- odd numbers --------------------------------------------------------------------------------


def biased(cfg: moeos.MoEConfig, b2: Tensor) -> Weights:
    """Of one expert, whose weights are 0: so that its result is b2."""
    drawn = draw_weights(cfg)
    none = torch.zeros_like(drawn.w2.view(torch.uint8)).view(drawn.w2.dtype)
    return dataclasses.replace(drawn, w2=none, b2=b2.unsqueeze(0).to(cfg.dtype))


def test_odd_results_are_right_and_disturb_no_other_group() -> None:
    cfg = config(**CODED, experts=1, top_k=1, bias=True)
    call = Call(draw_call(cfg, 5, 1).x, torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1))
    b2 = torch.linspace(-3.0, 3.0, 384)
    b2[:128] *= 2.0**-140
    b2[130] = math.nan
    b2[256:] *= 1e-3
    b2[300] = 3e38
    weights = biased(cfg, b2)
    [[y]] = outputs_of(weights, [[call]])
    assert not y[:, :128].any()
    assert y[:, 130].isnan().all()
    assert y.isnan().sum() == 5
    sizes = [(3e38 if n == 300 else 0.0) for n in range(256, 384)]
    assert torch.allclose(y[:, 256:], torch.tensor(sizes).expand(5, -1))
    rounded = element_formats.dequantize_rows(
        *element_formats.quantize_rows(b2, 128), dtype=torch.float32
    )
    assert torch.equal(y.nan_to_num(1.0), rounded.nan_to_num(1.0).expand(5, -1))
    b2[300] = math.inf
    [[y]] = outputs_of(biased(cfg, b2), [[call]])
    assert y[:, 256:].isnan().all()
    assert y[:, 128:256].isnan().sum() == 5


def test_tokens_without_experts_are_zeros() -> None:
    cfg = config(**CODED)
    call = draw_given_call(cfg, 20, 1, unused=0.0)
    assert call.ids is not None
    call.ids[3:9] = -1
    weights = draw_weights(cfg)
    outputs = outputs_of(weights, [[call], [call]])
    assert not outputs[0][0][3:9].any()
    assert_all_match(weights, [[call], [call]], outputs)


# --- what is sent and held ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_sent_as_codes_in_whole_lines(dtype: torch.dtype) -> None:
    cfg = config(**CODED, dtype=dtype)
    weights, call = draw_weights(cfg), draw_given_call(cfg, 20, 3)

    def rank_main(world: World) -> dict[str, Any]:
        layer = weights.layer(world)
        call(layer)
        return layer.stats()

    sizes = twin.sizes_of(cfg, 2, 1)
    assert (sizes.sent_bytes, sizes.returned_bytes) == (384 + 3 * 4 + 4, 512)
    for rank, stats in enumerate(virtual.run(rank_main, ranks=2)):
        other = 1 - rank
        there, back = stats["rows_sent"][other], stats["pairs_received"][other]
        assert stats["row_bytes_by_peer"][other] == 400 * there + 512 * back > 0
        assert stats["row_bytes_to_peers"] == stats["row_bytes_by_peer"][other]


def test_results_take_half_the_memory_and_shared_ones_as_much_as_before() -> None:
    shared = {"shared_experts": 1, "shared_intermediate": 64}
    coded = config(**{**CODED, "hidden": 2048}, dtype=torch.bfloat16)
    plain = dataclasses.replace(coded, result_format=None)
    for remote in (False, True):
        ours, theirs = (twin.sizes_of(cfg, 4, 1, remote=remote) for cfg in (coded, plain))
        rows = theirs.result_bytes // (2048 * 2)
        assert ours.result_bytes == rows * (2048 + 64 + 64)
        assert ours.heap_bytes < theirs.heap_bytes
        beside = twin.sizes_of(dataclasses.replace(coded, **shared), 4, 1, remote=remote)
        assert beside.result_bytes == ours.result_bytes + coded.max_tokens * 2048 * 2


def test_layers_with_and_without_it_share_a_workspace() -> None:
    every = [
        draw_weights(config(**{**CODED, **changes}, dtype=torch.bfloat16))
        for changes in ({}, {"result_format": None}, RULES["shared experts"], {"hidden": 128})
    ]
    calls = [[draw_given_call(one.cfg, 90, 3 * rank) for one in every] for rank in range(2)]

    def rank_main(world: World) -> list[list[Tensor]]:
        layers = [every[0].layer(world)]
        layers += [one.layer(world, layers[0].experts.workspace) for one in every[1:]]
        own = zip(layers, calls[world.rank], strict=True)
        return [[call(layer) for _ in range(2)] for layer, call in own]

    for rank, outputs in enumerate(virtual.run(rank_main, ranks=2)):
        for one, call, ys in zip(every, calls[rank], outputs, strict=True):
            assert torch.equal(*ys)
            assert reference.relative_error(ys[0], one.expected(call)) <= 1e-2


def test_quantize_makes_such_a_layer_and_ranks_must_agree_on_it() -> None:
    plain = draw_weights(config(hidden=256, intermediate=192))
    call = draw_given_call(plain.cfg, 40, 0)
    names = {"activation_format": "fp8_group128", "result_format": "fp8_group128"}

    def rank_main(world: World) -> None:
        layer = plain.layer(world)
        made: Callable[..., MoELayer] = moeos.quantize
        coded = made(layer, "fp8_block128", **names)
        assert coded.cfg == dataclasses.replace(plain.cfg, weight_format="fp8_block128", **names)
        assert coded.cfg.in_numbers() == plain.cfg
        without = moeos.quantize(layer, "fp8_block128", activation_format="fp8_group128")
        assert not torch.equal(call(coded), call(without))
        with pytest.raises(ValueError, match=r"^activation_format is None; it must be one of fp8"):
            moeos.quantize(layer, "fp8_block128", result_format="fp8_group128")
        own = {**CODED, "result_format": "fp8_group128" if world.rank == 0 else None}
        with pytest.raises(moeos.ConfigMismatch, match=r"result_format is 'fp8_group128' on rank"):
            MoELayer(config(**own), world)

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize("parallel", ["tensor", "sharded_tokens"])
def test_slices_of_experts_have_no_such_results(parallel: Any) -> None:
    said = (
        f"result_format is 'fp8_group128'; a layer with parallel='{parallel}' has none: set "
        "result_format=None, or make it with parallel='expert'"
    )

    def rank_main(world: World) -> None:
        for make in (MoELayer, Experts):
            with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
                make(config(**{**CODED, "intermediate": 128}), world, parallel=parallel)

    virtual.run(rank_main, ranks=2)
