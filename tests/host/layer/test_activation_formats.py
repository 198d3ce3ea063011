# SPDX-License-Identifier: Apache-2.0
"""Layers whose experts get their tokens as codes and scales: what they compute and send, and what
they say of codes that the caller brings.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

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
    assert_matches,
    coded_call,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn, spread

pytestmark = pytest.mark.usefixtures("poisoned_output")

CODED: dict[str, Any] = {
    "hidden": 256,
    "intermediate": 192,
    "weight_format": "fp8_block128",
    "activation_format": "fp8_group128",
    "max_tokens": 150,
}
SHARED: dict[str, Any] = {"shared_experts": 2, "shared_intermediate": 40, "shared_gate": True}
RULES: dict[str, dict[str, Any]] = {
    "gated": {},
    "not gated, biases": {"activation": "relu2", "bias": True},
    "gated, biases": {"bias": True, "swiglu_limit": 0.5},
    "drops": {"capacity_factor": 0.5},
    "shared experts": SHARED,
    "zero experts": {"zero_experts": 3, "renormalize": False},
    "weight on input": {"top_k": 1, "apply_router_weight_on_input": True, "renormalize": False},
    "an fp32 router": {"router_dtype": torch.float32},
    "one group, wider than a tile": {"hidden": 128, "intermediate": 320},
}
WEIGHTS = draw_weights(config(**CODED))
INF, NAN = math.inf, math.nan


def outputs_of(weights: Weights, calls: list[list[Call]], **way: Any) -> list[list[Tensor]]:
    """What each rank's calls return."""

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=len(calls), **way)


def by_caller(x: Tensor, cfg: moeos.MoEConfig = WEIGHTS.cfg) -> Call:
    """A call of these tokens, which the caller routes."""
    given = draw_given_call(cfg, len(x), 0, unused=0.0)
    return dataclasses.replace(given, x=x)


# --- what is computed ---------------------------------------------------------------------------


RANKS = [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "rule", "world"), spread(17, [*itertools.product(element_formats.NAMES, RULES, RANKS)])
)
def test_every_token_has_what_the_reference_makes_of_the_codes(
    name: str, rule: str, world: tuple[int, torch.dtype]
) -> None:
    ranks, dtype = world
    changes = {**CODED, "weight_format": name, "dtype": dtype, "experts": 12, **RULES[rule]}
    weights = draw_weights(config(**changes), seed=ranks)
    calls = [
        [
            draw_given_call(weights.cfg, 1, 7 * rank),
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


@pytest.mark.parametrize(
    ("kind", "ranks_per_node", "row_map"),
    in_turn(PREFERENCES, [None, 1, 2], ["ragged", "capacity"]),
)
def test_any_routing_over_any_links_is_right(
    kind: str, row_map: Any, ranks_per_node: int | None
) -> None:
    cfg = config(**CODED, row_map=row_map, dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    favoured = PREFERENCES[kind](cfg.experts, 4)
    calls = [
        [draw_given_call(cfg, tokens, 5 * rank + tokens, favoured) for tokens in (150, 3)]
        for rank in range(4)
    ]
    assert_all_match(weights, calls, outputs_of(weights, calls, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_error_is_that_of_the_same_steps_in_pytorch(
    activation: Any, dtype: torch.dtype
) -> None:
    cfg = config(**CODED, activation=activation, dtype=dtype)
    weights, call = draw_weights(cfg), draw_given_call(cfg, 150, 1, unused=0.0)
    [[y]] = outputs_of(weights, [[call]])
    unquantised = dataclasses.replace(
        weights, cfg=dataclasses.replace(cfg, activation_format=None)
    ).expected(call)
    steps = step_by_step(weights, call)
    own, theirs = (reference.relative_error(one, unquantised) for one in (y, steps))
    assert reference.relative_error(y, steps) <= reference.tolerance_of(cfg)
    assert 0.01 < own <= 1.01 * theirs


def step_by_step(weights: Weights, call: Call) -> Tensor:
    """The layer in float32, one step of PyTorch after the other; results in the layer's dtype."""
    assert call.ids is not None
    assert call.weights is not None
    w1, w2 = weights.numbers("w1").float(), weights.numbers("w2").float()
    x, y = rounded(call.x.float(), 128), torch.zeros(call.x.shape)
    for token, (ids, shares) in enumerate(zip(call.ids, call.weights, strict=True)):
        for expert, share in zip(ids.tolist(), shares, strict=True):
            inner = functional.linear(x[token], w1[expert])
            if weights.cfg.activation == "swiglu":
                gate, up = inner.chunk(2)
                inner = functional.silu(gate) * up
            else:
                inner = functional.relu(inner).square()
            result = functional.linear(rounded(inner, 64), w2[expert]).to(weights.cfg.dtype)
            y[token] += share * result.float()
    return y.to(weights.cfg.dtype)


def rounded(values: Tensor, group: int) -> Tensor:
    """What fp32 numbers are as codes, by steps of PyTorch."""
    groups = values.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


# --- odd numbers --------------------------------------------------------------------------------


def test_odd_rows_are_right_and_disturb_no_other() -> None:
    plain = draw_call(WEIGHTS.cfg, 8, 1).x
    rows = plain.clone()
    rows[0] = 0.0
    rows[1, 5] = 1e12  # beside which all of its group is 0
    rows[2] = 1e-42  # subnormal
    rows[3] = torch.where(torch.arange(256) < 128, plain[3] * 2.0**-110, plain[3])
    rows[4, 200] = NAN
    rows[5, 3] = INF
    rows[6, 100] = -INF
    call = by_caller(rows)
    [[y]], [[apart]] = outputs_of(WEIGHTS, [[call]]), outputs_of(WEIGHTS, [[by_caller(plain)]])
    assert not y[0].any()
    assert not y[2].any()
    assert y[4:7].isnan().all()
    assert torch.equal(y[7], apart[7])
    expected = WEIGHTS.expected(call)
    assert expected[4:7].isnan().all()
    for token in (1, 3, 7):
        assert reference.relative_error(y[token], expected[token]) <= reference.tolerance_of(
            WEIGHTS.cfg
        )


def test_logits_that_are_not_finite_are_named_as_without_codes() -> None:
    x = draw_call(WEIGHTS.cfg, 3, 1).x
    x[2, 7] = NAN

    def rank_main(world: World) -> None:
        with pytest.raises(moeos.NumericalError, match=r"token 2"):
            WEIGHTS.layer(world)(x)

    virtual.run(rank_main, ranks=1)


def test_the_twin_makes_pytorchs_codes_of_all_numbers_of_16_bits() -> None:
    """Each group of a token, and of what lies between, has a 448, so that its inverse is 1."""
    every = torch.arange(1 << 16).int().short()
    numbers = torch.cat([every.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    numbers = numbers[numbers.abs() <= 448]
    numbers = functional.pad(numbers, (0, -len(numbers) % 63)).view(-1, 63)
    x = torch.cat((torch.full((len(numbers), 1), 448.0), numbers), 1)
    x = functional.pad(x.flatten(), (0, -x.numel() % 128)).view(-1, 128)
    cfg = config(
        hidden=128,
        intermediate=128,
        experts=1,
        top_k=1,
        activation="identity",
        max_tokens=len(x),
        weight_format="fp8_tensor",
        activation_format="fp8_group128",
    )
    same = torch.eye(128).to(torch.float8_e4m3fn).unsqueeze(0)
    weights = dataclasses.replace(
        draw_weights(cfg), w1=same, w2=same, w1_scale=torch.ones(1, 1), w2_scale=torch.ones(1, 1)
    )
    call = Call(x, torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1))
    [[y]] = outputs_of(weights, [[call]])
    scale = torch.tensor(448.0) * (torch.tensor(1.0) / 448.0)
    assert torch.equal(y, x.to(torch.float8_e4m3fn).float() * scale * scale)


# --- what is sent and held ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_sent_as_codes_and_results_return_as_numbers(dtype: torch.dtype) -> None:
    cfg = config(**{**CODED, "hidden": 384}, dtype=dtype)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 20, 3)

    def rank_main(world: World) -> dict[str, Any]:
        layer = weights.layer(world)
        call(layer)
        return layer.stats()

    for rank, stats in enumerate(virtual.run(rank_main, ranks=2)):
        other = 1 - rank
        there, back = stats["rows_sent"][other], stats["pairs_received"][other]
        sent = 384 + 3 * 4 + 4  # padded to a multiple of 16
        assert stats["row_bytes_by_peer"][other] == there * sent + back * 384 * dtype.itemsize
        assert stats["row_bytes_to_peers"] == stats["row_bytes_by_peer"][other]
    sizes = twin.sizes_of(cfg, 2, 1)
    assert (sizes.sent_bytes, sizes.hidden_bytes) == (400, 208)
    assert sizes.row_bytes == 384 * dtype.itemsize
    assert sizes.alters_rows == 1


def test_codes_take_less_of_the_heap_and_of_what_lies_between() -> None:
    coded = config(**CODED, dtype=torch.bfloat16)
    plain = dataclasses.replace(coded, activation_format=None)
    ours, theirs = (twin.sizes_of(cfg, 4, 1) for cfg in (coded, plain))
    assert ours.heap_bytes < 0.75 * theirs.heap_bytes
    assert ours.intermediate_bytes < 0.6 * theirs.intermediate_bytes
    # Behind a network results are staged in a place of their own.
    far = twin.sizes_of(coded, 4, 1, remote=True)
    assert far.result_bytes == ours.result_bytes + 4 * ours.cell_places * ours.row_bytes


@pytest.mark.parametrize("name", element_formats.NAMES)
def test_quantize_makes_a_layer_of_codes_and_nothing_is_stored_for_it(name: Any) -> None:
    plain = draw_weights(config(hidden=256, intermediate=192, bias=True))
    call = draw_given_call(plain.cfg, 40, 0)

    def rank_main(world: World) -> None:
        layer = plain.layer(world)
        coded = moeos.quantize(layer, name, activation_format="fp8_group128")
        without = moeos.quantize(layer, name)
        assert coded.cfg == dataclasses.replace(
            plain.cfg, weight_format=name, activation_format="fp8_group128"
        )
        assert coded.state_dict().keys() == without.state_dict().keys()
        without.load_state_dict(coded.state_dict())
        y = call(coded)
        assert not torch.equal(y, call(without))
        assert torch.equal(y, call(copy.deepcopy(coded)))
        assert torch.equal(y, call(pickle.loads(pickle.dumps(coded)).bind(world)))

    virtual.run(rank_main, ranks=2)


def test_ranks_must_agree_on_the_format() -> None:
    def rank_main(world: World) -> None:
        name = "fp8_group128" if world.rank == 0 else None
        with pytest.raises(moeos.ConfigMismatch, match=r"activation_format is 'fp8_group128' on r"):
            MoELayer(config(**{**CODED, "activation_format": name}), world)

    virtual.run(rank_main, ranks=2)


def test_a_checkpoints_config_says_nothing_of_activations_unless_it_is_told_to() -> None:
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    assert moeos.MoEConfig.from_hf(values).activation_format is None
    coded = moeos.MoEConfig.from_hf(values, activation_format="fp8_group128")
    assert (coded.weight_format, coded.activation_format) == ("fp8_block128", "fp8_group128")
    with pytest.raises(ValueError, match=r"^weight_format is None; it must be one of fp8_block128"):
        moeos.MoEConfig.from_hf(values, dequantize=True, activation_format="fp8_group128")


# --- codes that the caller brings ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_codes_of_the_caller_are_sent_as_they_are(ranks: int, dtype: torch.dtype) -> None:
    weights = draw_weights(config(**CODED, dtype=dtype))
    calls = [draw_given_call(weights.cfg, 70 + rank, rank) for rank in range(ranks)]

    def rank_main(world: World) -> None:
        layer, call = weights.layer(world), calls[world.rank]
        coded = coded_call(call)
        y = call(layer)
        for _ in range(2):
            assert torch.equal(coded(layer), y)
        assert torch.equal(call(layer), y)
        mine = weights.of_rank(world.rank, world.size)
        experts = Experts(weights.cfg, world)
        given = (coded.x, call.ids, call.weights, mine.w1, mine.w2)
        of_experts = experts(*given, **mine.scales(), x_scale=coded.x_scale)
        assert of_experts.dtype == dtype
        assert torch.equal(of_experts, y)
        assert_matches(weights, coded, y)

    virtual.run(rank_main, ranks=ranks)


def test_codes_may_have_any_scales() -> None:
    """A group's largest code need not be 448, and scales may be powers of two."""
    call = draw_given_call(WEIGHTS.cfg, 30, 2)
    exponents = torch.randint(118, 128, (30, 2), dtype=torch.uint8)
    scale = element_formats.exponent_value(exponents)
    x = (call.x.unflatten(1, (2, 128)) / scale.unsqueeze(2)).clamp(-448, 448).flatten(1)
    coded = dataclasses.replace(call, x=x.to(torch.float8_e4m3fn), x_scale=scale)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        y = coded(layer)
        assert_matches(WEIGHTS, coded, y)
        others = [exponents]
        if hasattr(torch, "float8_e8m0fnu"):
            others.append(exponents.view(torch.float8_e8m0fnu))
        for other in others:
            assert torch.equal(dataclasses.replace(coded, x_scale=other)(layer), y)

    virtual.run(rank_main, ranks=1)


def test_codes_come_in_every_way_that_numbers_do() -> None:
    call = draw_given_call(WEIGHTS.cfg, 300, 4)
    coded = coded_call(call)
    assert coded.x_scale is not None

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        y = layer(call.x, call.ids, call.weights, pieces=3)
        given = {"x_scale": coded.x_scale, "pieces": 3}
        assert torch.equal(layer(coded.x, call.ids, call.weights, **given), y)
        out = torch.full_like(y, NAN)
        assert layer(coded.x, call.ids, call.weights, out=out, **given) is out
        assert torch.equal(out, y)
        # More dimensions, other strides, fewer tokens.
        deep = layer(
            coded.x.view(2, 150, 256),
            call.ids,
            call.weights,
            x_scale=coded.x_scale.mT.contiguous().mT.view(2, 150, 2),
            pieces=3,
        )
        assert deep.dtype == y.dtype
        assert torch.equal(deep.flatten(0, 1), y)
        few = torch.tensor([7], dtype=torch.int32)
        own = (coded.x[:50], call.ids[:50], call.weights[:50])  # type: ignore[index]
        some = layer(*own, x_scale=coded.x_scale[:50], tokens=few)
        assert torch.equal(some[:7], y[:7])
        assert not some[7:].any()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(coded.x, call.ids, call.weights, **given), y)

        def program(x: Tensor, x_scale: Tensor) -> Tensor:
            made: Tensor = layer(x, call.ids, call.weights, x_scale=x_scale, pieces=3)
            return made

        for backend in ("eager", "aot_eager"):
            traced = torch.compile(program, backend=backend, fullgraph=True)
            with torch.no_grad():
                assert torch.equal(traced(coded.x, coded.x_scale), y)

    virtual.run(rank_main, ranks=1)


Bad = tuple[dict[str, Any], Callable[[dict[str, Any]], Any], type[Exception], str]
BAD: dict[str, Bad] = {
    "no format": (
        {"activation_format": None},
        lambda given: None,
        ValueError,
        r"^x_scale is given, and cfg\.activation_format is None: leave it None, or make this with",
    ),
    "no scale": (
        {},
        lambda given: given.update(x_scale=None),
        ValueError,
        r"^x has dtype torch\.float8_e4m3fn, and x_scale is None: pass the scales of its codes, or",
    ),
    "e5m2": (
        {},
        lambda given: given.update(x=given["x"].float().to(torch.float8_e5m2)),
        TypeError,
        r"^x has dtype torch\.float8_e5m2; with x_scale it must be torch\.float8_e4m3fn, the codes",
    ),
    "e5m2 without a scale": (
        {},
        lambda given: given.update(x=given["x"].float().to(torch.float8_e5m2), x_scale=None),
        TypeError,
        r"^x has dtype torch\.float8_e5m2; it must be torch\.float32, the layer's, or torch\.floa",
    ),
    "a scale of numbers": (
        {},
        lambda given: given.update(x=given["x"].float()),
        TypeError,
        r"^x has dtype torch\.float32; with x_scale it must be torch\.float8_e4m3fn, .*leave x_sc",
    ),
    "too few scales": (
        {},
        lambda given: given.update(x_scale=given["x_scale"][:, :1]),
        ValueError,
        r"^x_scale has shape \[5, 1\]; it must be \[5, 2\], a scale for 128 elements of x",
    ),
    "scales of another dtype": (
        {},
        lambda given: given.update(x_scale=given["x_scale"].bfloat16()),
        TypeError,
        r"^x_scale has dtype torch\.bfloat16; it must be one of torch\.float32, torch\.uint8",
    ),
    "scales elsewhere": (
        {},
        lambda given: given.update(x_scale=given["x_scale"].to("meta")),
        ValueError,
        r"^x_scale is on meta; it must be on cpu",
    ),
    "scales that are a list": (
        {},
        lambda given: given.update(x_scale=[1.0]),
        TypeError,
        r"^x_scale is a list",
    ),
    "scales whose memory is gone": (
        {},
        lambda given: given["x_scale"].untyped_storage().resize_(0),
        ValueError,
        r"^x_scale reaches to byte",
    ),
    "nobody routes": (
        {},
        lambda given: given.update(topk_ids=None, topk_weights=None),
        ValueError,
        r"^x_scale is given, and topk_ids is None: a router reads no codes; pass topk_ids and top",
    ),
    "the gate weighs": (
        {},
        lambda given: given.update(topk_weights=None, weigh=True),
        ValueError,
        r"^x_scale is given, and weigh is True: a router reads no codes",
    ),
    "shared experts": (
        SHARED,
        lambda given: None,
        ValueError,
        r"^x_scale is given, and shared_experts is 2, which needs x itself: leave x_scale None, an",
    ),
    "zero experts": (
        {"zero_experts": 1},
        lambda given: None,
        ValueError,
        r"^x_scale is given, and zero_experts is 1, which needs x itself",
    ),
    "weight on input": (
        {"top_k": 1, "apply_router_weight_on_input": True},
        lambda given: None,
        ValueError,
        r"^x_scale is given, and apply_router_weight_on_input is True, which needs x itself",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_codes_that_cannot_be_are_named(case: str) -> None:
    changes, damage, error, message = BAD[case]
    weights = draw_weights(config(**{**CODED, **changes}))
    call = coded_call(draw_given_call(weights.cfg, 5, 0))
    assert call.x_scale is not None
    given: dict[str, Any] = {
        "x": call.x,
        "topk_ids": call.ids,
        "topk_weights": call.weights,
        "x_scale": call.x_scale.clone(),
    }
    damage(given)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        for _ in range(2):
            with pytest.raises(error, match=message):
                layer(**given)

    virtual.run(rank_main, ranks=1)


def test_autocast_takes_no_codes_for_numbers() -> None:
    call = coded_call(draw_given_call(WEIGHTS.cfg, 5, 0))

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ValueError, match=r"^x has dtype .*, and x_scale is None"),
        ):
            layer(call.x, call.ids, call.weights)

    virtual.run(rank_main, ranks=1)


def test_an_output_that_shares_memory_with_scales_is_refused() -> None:
    call = coded_call(draw_given_call(WEIGHTS.cfg, 5, 0))
    room = torch.ones(5 * 256)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        with pytest.raises(ValueError, match=r"^out shares memory with x_scale"):
            layer(
                call.x,
                call.ids,
                call.weights,
                x_scale=room[20:30].view(5, 2),
                out=room.view(5, 256),
            )

    virtual.run(rank_main, ranks=1)
