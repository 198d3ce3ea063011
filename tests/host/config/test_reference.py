# SPDX-License-Identifier: Apache-2.0
"""The float64 reference: against Hugging Face's modules, plain definitions, and its own words."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeos.checkpoints import load_block
from moeos.config.config import GroupScore, MoEConfig, Scoring
from moeos.config.reference import dropped, margin_in_errors, moe, relative_error, route, weigh
from tests.huggingface import (
    Block,
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen3_moe,
)
from tests.layers import draw_call, draw_weights, pair_experts
from tests.nightly import in_turn

SIZES: dict[str, Any] = {"hidden": 16, "intermediate": 24, "experts": 16, "top_k": 3}


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(**(SIZES | {"dtype": torch.float32} | changes))


def random_arguments(cfg: MoEConfig, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        normal = torch.randn(shape, dtype=torch.float64, generator=generator)
        return normal / math.sqrt(shape[-1])

    arguments = {
        "x": draw(tokens, cfg.hidden) * cfg.hidden**0.5,
        "gate_weight": draw(cfg.experts, cfg.hidden),
        "w1": draw(cfg.experts, cfg.w1_rows, cfg.hidden),
        "w2": draw(cfg.experts, cfg.hidden, cfg.intermediate),
    }
    if cfg.bias:
        arguments["b1"] = draw(cfg.experts, cfg.w1_rows)
        arguments["b2"] = draw(cfg.experts, cfg.hidden)
    if cfg.shared_experts > 0:
        arguments["shared_w1"] = draw(cfg.shared_experts, cfg.shared_w1_rows, cfg.hidden)
        arguments["shared_w2"] = draw(cfg.shared_experts, cfg.hidden, cfg.shared_intermediate)
    if cfg.shared_gate:
        arguments["shared_gate"] = draw(cfg.hidden)
    return arguments


# --- Hugging Face's own modules -----------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (mixtral, {}),
        (mixtral, {"hidden": 72, "intermediate": 40, "experts": 6, "top_k": 3}),
        (qwen3_moe, {"renormalize": True}),
        (qwen3_moe, {"renormalize": False, "experts": 16, "top_k": 8}),
        (olmoe, {"renormalize": True}),
        (olmoe, {"renormalize": False, "experts": 16, "top_k": 8}),
        (deepseek_v2, {}),
        (deepseek_v2, {"experts": 32, "expert_groups": 8, "top_groups": 3, "top_k": 6}),
        (minimax_m2, {}),
        (ernie4_5_moe, {}),
        (deepseek_v3, {}),
        (deepseek_v3, {"renormalize": False, "routed_scaling": 1.0}),
        (deepseek_v3, {"experts": 32, "expert_groups": 8, "top_groups": 3, "top_k": 6}),
    ],
)
def test_agrees_with_hugging_face(
    make: Callable[..., Block], options: dict[str, Any], seed: int
) -> None:
    made = make(seed=seed, **options)
    cfg = made.config
    block = load_block(cfg, made.state_dict, made.prefix, 0, 1, made.ignore)
    selection_bias = block.get("gate.selection_bias")
    x = torch.randn(100, cfg.hidden, generator=torch.Generator().manual_seed(seed))
    gate_weight = block["gate.weight"]
    # The modules' routers work in float32, so that a near tie may go the other way there.
    clear = route(x, gate_weight, cfg, selection_bias).margin > 1e-6
    assert clear.sum() >= 98
    y = moe(x, gate_weight, block["w1"], block["w2"], cfg, selection_bias=selection_bias)
    assert relative_error(y[clear], made.routed_output(x)[clear]) <= 1e-6


# --- Routing ------------------------------------------------------------------------------------


def exact_scores(logits: list[float], cfg: MoEConfig) -> list[Fraction]:
    """The scores of one token; opposite logits have sigmoids whose sum is 1."""
    if cfg.scoring == "sigmoid":
        smaller = [Fraction(1 / (1 + math.exp(abs(logit)))) for logit in logits]
        return [
            1 - part if logit > 0 else part for part, logit in zip(smaller, logits, strict=True)
        ]
    powers = [Fraction(math.exp(logit - max(logits))) for logit in logits]
    return [power / sum(powers) for power in powers]


def chosen_by_definition(selection: list[Fraction], cfg: MoEConfig) -> list[int]:
    """The experts of one token, by sorting."""
    size = cfg.experts // cfg.expert_groups
    counted = 1 if cfg.group_score == "max" else 2
    groups = [list(range(first, first + size)) for first in range(0, cfg.experts, size)]
    group_scores = [
        sum(sorted((selection[e] for e in group), reverse=True)[:counted]) for group in groups
    ]
    best = sorted(range(len(groups)), key=lambda group: (-group_scores[group], group))
    candidates = [expert for group in best[: cfg.top_groups] for expert in groups[group]]
    return sorted(candidates, key=lambda expert: (-selection[expert], expert))[: cfg.top_k]


@st.composite
def routed_layers(draw: st.DrawFn) -> tuple[MoEConfig, Tensor, Tensor | None]:
    """A config, logits with many ties, and a selection bias or None."""
    groups = draw(st.sampled_from([1, 2, 4, 8, 16]))
    top_groups = draw(st.integers(1, groups))
    cfg = config(
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        routed_scaling=draw(st.sampled_from([1.0, 2.5])),
        selection_bias=draw(st.booleans()),
        expert_groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(get_args(GroupScore))),
        top_k=draw(st.integers(1, top_groups * 16 // groups)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randint(-2, 3, (8, 16), generator=generator).double()
    bias = torch.randint(-1, 2, (16,), generator=generator) / 4 if cfg.selection_bias else None
    return cfg, logits, bias


@settings(deadline=None)
@given(routed_layers())
def test_experts_and_weights_are_those_of_the_definition_with_ties_to_the_lower_expert(
    layer: tuple[MoEConfig, Tensor, Tensor | None],
) -> None:
    cfg, logits, bias = layer
    routing = route(logits, torch.eye(16), cfg, bias)  # hidden = experts: the logits are x
    assert routing.ids.dtype == torch.int64
    assert routing.weights.dtype == routing.margin.dtype == torch.float64
    scores = logits.softmax(dim=1) if cfg.scoring == "softmax" else logits.sigmoid()
    biases = [Fraction(0)] * 16 if bias is None else [Fraction(value) for value in bias.tolist()]
    for token, ids in enumerate(routing.ids.tolist()):
        exact = exact_scores(logits[token].tolist(), cfg)
        selection = [score + added for score, added in zip(exact, biases, strict=True)]
        assert ids == chosen_by_definition(selection, cfg)
        total = sum(scores[token, expert].item() for expert in ids) if cfg.renormalize else 1.0
        expected = [scores[token, expert].item() / total * cfg.routed_scaling for expert in ids]
        assert routing.weights[token].tolist() == pytest.approx(expected, rel=1e-14)


def test_softmax_and_sigmoid_scores_by_hand() -> None:
    logits = torch.zeros(1, 16)
    logits[0, 5], logits[0, 2] = math.log(6), math.log(3)
    softmax = route(logits, torch.eye(16), config(top_k=2, renormalize=False))
    assert softmax.ids.tolist() == [[5, 2]]
    assert softmax.weights[0].tolist() == pytest.approx([6 / 23, 3 / 23])
    sigmoid = route(logits, torch.eye(16), config(top_k=2, renormalize=False, scoring="sigmoid"))
    assert sigmoid.weights[0].tolist() == pytest.approx([6 / 7, 3 / 4])
    renormalized = route(logits, torch.eye(16), config(top_k=2))
    assert renormalized.weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_a_selection_bias_moves_the_choice_and_not_the_weights() -> None:
    cfg = config(top_k=1, scoring="sigmoid", renormalize=False, selection_bias=True)
    bias = torch.zeros(16)
    bias[9] = 0.75
    routing = route(torch.zeros(1, 16), torch.eye(16), cfg, bias)
    assert routing.ids.tolist() == [[9]]
    assert routing.weights.tolist() == [[0.5]]


def test_equal_scores_go_to_the_lower_experts_and_have_no_margin() -> None:
    routing = route(torch.zeros(2, 16), torch.eye(16), config(top_k=4))
    assert routing.ids.tolist() == [[0, 1, 2, 3]] * 2
    assert routing.margin.tolist() == [0.0, 0.0]


def test_a_tie_of_groups_alone_has_no_margin() -> None:
    cfg = config(top_k=1, expert_groups=2, top_groups=1)
    logits = torch.zeros(1, 16)
    logits[0, 0], logits[0, 1], logits[0, 8], logits[0, 9] = 3.0, 1.0, 3.0, 1.0
    routing = route(logits, torch.eye(16), cfg)
    assert routing.ids.tolist() == [[0]]
    assert routing.margin.tolist() == [0.0]


SATURATED: dict[str, list[float]] = {
    "sigmoid": [40.0, 42.0, 41.0, 43.0, *[-900.0, -800.0, -850.0, -820.0] * 3],
    "softmax": [0.0, -802.0, -800.0, -801.0, *[-900.0, -950.0, -930.0, -920.0] * 3],
}
"""Logits whose scores float64 rounds to 1 or to 0."""


def by_logit(logits: list[float], count: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))[:count]


@pytest.mark.parametrize("bias", [None, 0.0, 0.125])
@pytest.mark.parametrize("scoring", [*SATURATED])
def test_saturated_scores_are_in_the_order_of_their_logits(
    scoring: str, bias: float | None
) -> None:
    logits = SATURATED[scoring]
    biases = None if bias is None else torch.full((16,), bias)
    for top_k in range(1, 9):
        cfg = config(scoring=scoring, top_k=top_k, selection_bias=bias is not None)
        routing = route(torch.tensor([logits]), torch.eye(16), cfg, biases)
        assert routing.ids.tolist() == [by_logit(logits, top_k)]


@pytest.mark.parametrize("group_score", get_args(GroupScore))
@pytest.mark.parametrize("bias", [None, 0.125])
def test_groups_of_saturated_scores_are_told_apart(group_score: str, bias: float | None) -> None:
    logits = [40.0, 43.0, 0.0, 0.0, 42.0, 42.0, 0.0, 0.0, *[-5.0] * 8]
    cfg = config(
        scoring="sigmoid",
        top_k=1,
        expert_groups=4,
        top_groups=1,
        group_score=group_score,
        selection_bias=bias is not None,
    )
    biases = None if bias is None else torch.full((16,), bias)
    routing = route(torch.tensor([logits]), torch.eye(16), cfg, biases)
    # The sum of two scores that are 1 - exp(-42) each is above that of 1 - exp(-40) and the best.
    assert routing.ids.tolist() == [[1 if group_score == "max" else 4]]


@pytest.mark.parametrize("bias", [None, 0.125])
def test_margins_of_saturated_scores_are_what_is_left_of_them(bias: float | None) -> None:
    cfg = config(scoring="sigmoid", top_k=2, selection_bias=bias is not None)
    biases = None if bias is None else torch.full((16,), bias)
    routing = route(torch.tensor([SATURATED["sigmoid"]]), torch.eye(16), cfg, biases)
    assert routing.margin.tolist() == pytest.approx([math.exp(-41) - math.exp(-42)], rel=1e-9)


def test_what_fp32_chooses_by_scores_is_in_doubt_where_they_are_saturated() -> None:
    logits = torch.tensor([SATURATED["sigmoid"]])
    by_scores = config(scoring="sigmoid", top_k=2, selection_bias=True)
    assert margin_in_errors(logits, torch.eye(16), by_scores, torch.zeros(16)).item() < 1e-6
    by_logits = config(scoring="sigmoid", top_k=2)
    assert margin_in_errors(logits, torch.eye(16), by_logits).item() > 1000


def test_a_bias_outweighs_what_is_left_of_saturated_scores() -> None:
    logits = SATURATED["sigmoid"]
    biases = torch.zeros(16)
    biases[0], biases[7] = 1e-15, 2.0  # the lowest of those beside 1, and one beside 0
    cfg = config(scoring="sigmoid", top_k=3, selection_bias=True)
    assert route(torch.tensor([logits]), torch.eye(16), cfg, biases).ids.tolist() == [[7, 0, 3]]


def test_the_margin_is_infinite_where_all_experts_are_chosen() -> None:
    assert route(torch.zeros(1, 16), torch.eye(16), config(top_k=16)).margin.tolist() == [math.inf]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([(1, 1), (4, 2), (8, 3), (16, 5)]),
    fraction=st.floats(0.0, 0.999),
)
def test_scores_that_change_by_less_than_half_the_margin_choose_the_same_experts(
    seed: int, groups: tuple[int, int], fraction: float
) -> None:
    cfg = config(
        scoring="sigmoid", selection_bias=True, expert_groups=groups[0], top_groups=groups[1]
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 16, dtype=torch.float64, generator=generator)
    signs = torch.randint(0, 2, (16,), generator=generator) * 2 - 1
    before = route(logits, torch.eye(16), cfg, torch.zeros(16))
    after = route(logits, torch.eye(16), cfg, signs * before.margin * fraction / 2)
    assert set(before.ids[0].tolist()) == set(after.ids[0].tolist())


def test_scores_that_change_by_more_than_half_the_margin_can_choose_other_experts() -> None:
    cfg = config(scoring="sigmoid", selection_bias=True)
    logits = torch.randn(50, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = route(logits, torch.eye(16), cfg, torch.zeros(16))
    for token, chosen in enumerate(before.ids):
        against_the_choice = torch.ones(16, dtype=torch.float64)
        against_the_choice[chosen] = -1.0
        bias = against_the_choice * before.margin[token] * 0.5001
        after = route(logits[token : token + 1], torch.eye(16), cfg, bias)
        assert set(after.ids[0].tolist()) != set(chosen.tolist())


@pytest.mark.parametrize(("fraction", "expected"), [(0.499, 0), (0.501, 8)])
def test_the_margin_of_groups_counts_that_both_their_best_scores_can_change(
    fraction: float, expected: int
) -> None:
    cfg = config(scoring="sigmoid", selection_bias=True, top_k=1, expert_groups=2, top_groups=1)
    logits = torch.zeros(1, 16)
    logits[0, 0], logits[0, 8] = 1.0, 0.9
    margin = route(logits, torch.eye(16), cfg, torch.zeros(16)).margin
    towards_the_second_group = torch.tensor([-1.0] * 8 + [1.0] * 8, dtype=torch.float64)
    bias = towards_the_second_group * margin * fraction
    assert route(logits, torch.eye(16), cfg, bias).ids.tolist() == [[expected]]


def truncated(sums: Tensor) -> Tensor:
    """float64 sums to the fp32 number next to them, towards zero."""
    nearest = sums.float()
    too_large = nearest.double().abs() > sums.abs()
    return torch.where(too_large, nearest.nextafter(torch.zeros(())), nearest).double()


def logits_in_fp32(x: Tensor, gate: Tensor) -> Tensor:
    """Logits as tensor cores may sum them: 16 products exactly, then a truncated fp32 addition."""
    sums = torch.zeros(len(x), len(gate), dtype=torch.float64)
    for first in range(0, x.shape[1], 16):
        columns = slice(first, first + 16)
        sums = truncated(sums + x[:, columns].double() @ gate[:, columns].double().T)
    return sums


@pytest.mark.parametrize(
    "changes",
    [{}, {"scoring": "sigmoid", "selection_bias": True, "expert_groups": 8, "top_groups": 3}],
    ids=["logits", "groups"],
)
def test_a_token_beyond_the_error_of_fp32_is_routed_alike(changes: dict[str, Any]) -> None:
    cfg = config(hidden=512, experts=64, top_k=7, dtype=torch.bfloat16, **changes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 512, generator=generator)
    gate = torch.randn(64, 512, generator=generator) / 512**0.5
    bias = torch.rand(64, generator=generator) if cfg.selection_bias else None
    # Experts in pairs, of which an odd top_k divides one; what parts them grows with the tokens.
    gate[1::2, 1:] = gate[::2, 1:]
    x[:, 0] = torch.logspace(-8, -1, 5000)
    if bias is not None:
        bias[1::2] = bias[::2]
    x, gate = x.bfloat16(), gate.bfloat16()
    margin = margin_in_errors(x, gate, cfg, bias)
    exact = route(x, gate, cfg, bias).ids.sort(dim=1).values
    logits = logits_in_fp32(x, gate)
    cfg_of_logits = dataclasses.replace(cfg, hidden=64)
    in_fp32 = route(logits, torch.eye(64), cfg_of_logits, bias).ids.sort(dim=1).values
    differs = (in_fp32 != exact).any(dim=1)
    assert not (differs & (margin > 1)).any()
    assert int((differs & (margin <= 1)).sum()) > 100
    assert int((margin > 1).sum()) > 100


def fp32_router_logits(x: Tensor, gate: Tensor, slices: int) -> Tensor:
    """Logits of an fp32 router as the GPU sums them (kernels/sm90/route/fp32_router.cuh): each
    weight as three terms of bfloat16, the smallest first; 16 products at a time are added, by
    truncation, to a sum that begins anew for every 32 columns; these are added up in fp32 by slices
    of the depth.
    """
    terms = []
    rest = gate.clone()
    for _ in range(3):
        term = (rest.view(torch.int32) & -0x10000).view(torch.float32)
        terms.append(term.double())
        rest = rest - term
    assert not rest.any()  # three terms are all of a weight
    x = x.double()
    logits = torch.zeros(len(x), len(gate))
    for columns in torch.arange(x.shape[1]).chunk(slices):
        of_slice = torch.zeros_like(logits)
        for box in columns.split(32):
            sums = torch.zeros(len(x), len(gate), dtype=torch.float64)
            for term in reversed(terms):
                for few in box.split(16):
                    sums = truncated(sums + x[:, few] @ term[:, few].T)
            of_slice += sums.float()
        logits += of_slice
    return logits


@pytest.mark.parametrize(("hidden", "outliers"), in_turn([512, 7168], [False, True]))
def test_an_fp32_router_on_tensor_cores_chooses_as_float64(hidden: int, outliers: bool) -> None:
    cfg = config(
        hidden=hidden, experts=64, top_k=7, dtype=torch.bfloat16, router_dtype=torch.float32
    )
    weights = pair_experts(draw_weights(cfg))
    x = draw_call(cfg, 300, 1).x
    if outliers:
        x[:, 17] *= 40
    sure = margin_in_errors(x, weights.gate, cfg) > 1
    assert sure.sum() > 0.6 * len(x)
    exact = route(x, weights.gate, cfg).ids.sort(dim=1).values
    logits = fp32_router_logits(x, weights.gate, 7)
    cfg_of_logits = dataclasses.replace(cfg, hidden=64)
    found = route(logits, torch.eye(64), cfg_of_logits).ids.sort(dim=1).values
    assert torch.equal(found[sure], exact[sure])
    largest = (x.double() @ weights.gate.double().T).abs().amax(dim=1, keepdim=True)
    error = (logits - x.double() @ weights.gate.double().T).abs() / largest
    assert error.max() < 0.5e-6  # what the margin allows for


def test_tokens_whose_experts_are_tied_have_no_margin_in_errors() -> None:
    cfg = config(top_k=4)
    assert margin_in_errors(torch.zeros(2, 16), torch.eye(16), cfg).tolist() == [0.0, 0.0]
    assert margin_in_errors(torch.ones(1, 16), torch.eye(16), cfg).tolist() == [0.0]
    all_chosen = config(top_k=16)
    assert margin_in_errors(torch.ones(1, 16), torch.eye(16), all_chosen).tolist() == [math.inf]


@pytest.mark.parametrize("scoring", get_args(Scoring))
def test_renormalised_weights_are_right_where_all_scores_underflow(scoring: str) -> None:
    """Far below zero a sigmoid is exp(logit), the root of a softplus exp(logit / 2)."""
    logits = torch.full((1, 16), -3000.0)
    logits[0, 7] = 3000.0  # before it all softmax scores vanish
    logits[0, :3] = torch.tensor([-2000.0, -2001.0, -2003.0])
    cfg = config(scoring=scoring, routed_scaling=2.0)
    ids = torch.tensor([[2, 0, 1]])
    steps = (0.5 if scoring == "sqrtsoftplus" else 1.0) * torch.tensor([-3.0, 0.0, -1.0]).double()
    weights = weigh(logits, torch.eye(16), ids, cfg)
    assert weights[0].tolist() == pytest.approx((2 * steps.softmax(0)).tolist(), rel=1e-12)
    some = weigh(logits, torch.eye(16), torch.tensor([[-1, 1, -1]]), cfg)
    assert some.tolist() == [[0.0, 2.0, 0.0]]
    none = weigh(logits, torch.eye(16), torch.tensor([[-1, -1, -1]]), cfg)
    assert none.tolist() == [[0.0, 0.0, 0.0]]


def test_the_gradient_of_renormalised_weights_is_finite_with_and_without_unused_slots() -> None:
    for scoring in get_args(Scoring):
        logits = torch.randn(3, 16, dtype=torch.float64) * 1000
        logits.requires_grad_()
        ids = torch.tensor([[2, 0, 1], [-1, 4, -1], [-1, -1, -1]])
        weigh(logits, torch.eye(16), ids, config(scoring=scoring))[:, 0].sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


def test_non_finite_logits_are_an_error_that_names_the_token() -> None:
    x = torch.zeros(4, 16)
    x[2, 3] = math.nan
    with pytest.raises(ValueError, match="the logits of token 2 are not finite"):
        route(x, torch.eye(16), config())


# --- The layer ----------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: (
        v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
    "silu": lambda v: v / (1 + math.exp(-v)),
    "relu": lambda v: max(v, 0.0),
    "relu2": lambda v: max(v, 0.0) ** 2,
    "identity": lambda v: v,
}
GATED: dict[str, tuple[str, float]] = {
    "swiglu": ("silu", 0.0),
    "geglu_tanh": ("gelu_tanh", 0.0),
    "swigluoai": ("silu", 1.0),
}
"""The curve of the gate, and what is added to up."""


def activate_by_definition(rows: Tensor, cfg: MoEConfig) -> Tensor:
    """[S, w1_rows] -> [S, I], number by number."""
    if not cfg.gated:
        return rows.clone().apply_(ACTIVATIONS[cfg.activation])
    oai = cfg.activation == "swigluoai"
    limit = cfg.swiglu_limit or (7.0 if oai else math.inf)
    alpha = cfg.swiglu_alpha or (1.702 if oai else 1.0)
    name, offset = GATED[cfg.activation]

    def curve(v: float) -> float:
        if name == "silu":
            return v / (1 + math.exp(-alpha * v))
        return ACTIVATIONS[name](v)

    def of_gate(v: float) -> float:
        return curve(min(v, limit)) if cfg.swiglu_clamp == "before" else min(curve(v), limit)

    gate = rows[:, : cfg.intermediate].clone().apply_(of_gate)
    up = rows[:, cfg.intermediate :].clone().apply_(lambda v: max(-limit, min(v, limit)) + offset)
    return gate * up


def moe_by_definition(
    arguments: dict[str, Tensor], cfg: MoEConfig, ids: Tensor, weights: Tensor
) -> Tensor:
    """Every expert over every token, then a weighted sum over [S, E]."""
    x = arguments["x"]
    y = torch.zeros_like(x)
    for expert in range(cfg.experts):
        rows = x @ arguments["w1"][expert].T
        rows += arguments["b1"][expert] if cfg.bias else 0.0
        output = activate_by_definition(rows, cfg) @ arguments["w2"][expert].T
        output += arguments["b2"][expert] if cfg.bias else 0.0
        y += (weights * (ids == expert)).sum(dim=1, keepdim=True) * output
    return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        *({"activation": name} for name in (*ACTIVATIONS, *GATED)),
        *({"activation": name, "swiglu_limit": 0.5} for name in GATED),
        *({"activation": name, "swiglu_limit": 0.5, "swiglu_clamp": "after"} for name in GATED),
        {"activation": "swiglu", "swiglu_alpha": 1.3},
        {"activation": "swigluoai", "swiglu_alpha": 1.3, "swiglu_limit": 0.2},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_computes_the_weighted_sum_of_its_experts(changes: dict[str, Any], bias: bool) -> None:
    cfg = config(bias=bias, **changes)
    arguments = random_arguments(cfg, tokens=20)
    routing = route(arguments["x"], arguments["gate_weight"], cfg)
    expected = moe_by_definition(arguments, cfg, routing.ids, routing.weights)
    y = moe(cfg=cfg, **arguments)
    assert y.dtype == torch.float64
    assert relative_error(y, expected) <= 1e-14


SHARED: dict[str, Any] = {"shared_experts": 3, "shared_intermediate": 40}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "relu2"])
def test_shared_experts_add_their_sum_for_every_token(
    activation: str, bias: bool, gate: bool
) -> None:
    cfg = config(activation=activation, bias=bias, shared_gate=gate, **SHARED)
    arguments = random_arguments(cfg, tokens=20)
    ids, weights, _ = route(arguments["x"], arguments["gate_weight"], cfg)
    ids = ids.masked_fill(torch.arange(20).unsqueeze(1) < 5, -1)  # tokens of no routed expert
    x = arguments["x"]
    shared = torch.zeros_like(x)
    narrow = dataclasses.replace(cfg, intermediate=cfg.shared_intermediate)
    for w1, w2 in zip(arguments["shared_w1"], arguments["shared_w2"], strict=True):
        shared += activate_by_definition(x @ w1.T, narrow) @ w2.T
    if gate:
        shared *= 1 / (1 + torch.exp(-x @ arguments["shared_gate"]).unsqueeze(1))
    expected = moe_by_definition(arguments, cfg, ids, weights) + shared
    y = moe(cfg=cfg, topk_ids=ids, topk_weights=weights, **arguments)
    assert relative_error(y, expected) <= 1e-12
    assert relative_error(y[:5], shared[:5]) <= 1e-12


@pytest.mark.parametrize(
    "changes", [{"capacity_factor": 1e-6}, {"top_k": 1, "apply_router_weight_on_input": True}]
)
def test_no_rule_of_the_router_touches_shared_experts(changes: dict[str, Any]) -> None:
    cfg = config(**SHARED, **changes)
    arguments = random_arguments(cfg, tokens=20)
    shared = {name: arguments.pop(name) for name in ("shared_w1", "shared_w2")}
    plain = dataclasses.replace(cfg, shared_experts=0, shared_intermediate=0)
    nothing = torch.full((20, cfg.top_k), -1)
    alone = moe(
        cfg=cfg, topk_ids=nothing, topk_weights=torch.zeros(20, cfg.top_k), **arguments, **shared
    )
    expected = moe(cfg=plain, **arguments) + alone
    assert relative_error(moe(cfg=cfg, **arguments, **shared), expected) <= 1e-12


def test_the_callers_routing_is_used_as_it_is() -> None:
    cfg = config()
    arguments = random_arguments(cfg, tokens=3)
    ids = torch.tensor([[5, -1, 0], [-1, -1, -1], [15, 1, 2]], dtype=torch.int32)
    weights = torch.tensor([[2.0, math.nan, -1.0], [1.0, 1.0, 1.0], [0.5, 0.25, 3.0]])
    used = torch.where(ids < 0, 0.0, weights)
    y = moe(cfg=cfg, topk_ids=ids, topk_weights=weights, **arguments)
    assert relative_error(y, moe_by_definition(arguments, cfg, ids, used)) <= 1e-14
    assert not y[1].any()


def test_routing_given_by_the_caller_equals_the_layers_own() -> None:
    cfg = config()
    arguments = random_arguments(cfg, tokens=20)
    ids, weights, _ = route(arguments["x"], arguments["gate_weight"], cfg)
    given_routing = moe(cfg=cfg, topk_ids=ids, topk_weights=weights, **arguments)
    assert torch.equal(given_routing, moe(cfg=cfg, **arguments))


def test_a_dropped_pair_contributes_nothing_and_the_others_keep_their_weights() -> None:
    cfg = config(capacity_factor=0.5)
    arguments = random_arguments(cfg, tokens=40)
    ids, weights, _ = route(arguments["x"], arguments["gate_weight"], cfg)
    drops = dropped(ids, cfg)
    assert drops.any()
    expected = moe_by_definition(arguments, cfg, ids, weights * ~drops)
    assert relative_error(moe(cfg=cfg, **arguments), expected) <= 1e-14


def test_no_tokens_give_no_output() -> None:
    cfg = config(capacity_factor=1.0, expert_groups=4, top_groups=2)
    assert moe(cfg=cfg, **random_arguments(cfg, tokens=0)).shape == (0, 16)


def test_low_precision_arguments_are_computed_in_float64() -> None:
    cfg = config(dtype=torch.bfloat16, bias=True)
    arguments = {name: t.bfloat16() for name, t in random_arguments(cfg, tokens=20).items()}
    exact = {name: tensor.double() for name, tensor in arguments.items()}
    assert torch.equal(moe(cfg=cfg, **arguments), moe(cfg=cfg, **exact))


def test_gradients_are_those_of_finite_differences() -> None:
    cfg = config(hidden=8, intermediate=8, experts=4, top_k=2, bias=True)
    arguments = random_arguments(cfg, tokens=3)
    inputs = tuple(tensor.requires_grad_() for tensor in arguments.values())

    def layer(*tensors: Tensor) -> Tensor:
        return moe(cfg=cfg, **dict(zip(arguments, tensors, strict=True)))

    assert torch.autograd.gradcheck(layer, inputs)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(0, 30),
    factor=st.sampled_from([0.1, 0.5, 1.0, 1.25, 5.0]),
)
def test_an_expert_keeps_its_first_pairs_by_token_and_then_by_slot(
    seed: int, tokens: int, factor: float
) -> None:
    cfg = config(capacity_factor=factor)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 16, (tokens, 3), generator=generator)
    capacity = min(tokens, math.ceil(round(factor * 100) * tokens * 3 / 1600))
    taken = [0] * 16
    expected = []
    for row in ids.tolist():
        for expert in row:
            expected.append(expert >= 0 and taken[expert] >= capacity)
            taken[expert] += expert >= 0
    assert dropped(ids, cfg).flatten().tolist() == expected


def test_nothing_is_dropped_without_a_capacity_factor() -> None:
    assert not dropped(torch.zeros(50, 3, dtype=torch.int64), config(row_map="capacity")).any()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"x": torch.zeros(4, 8)}, r"x is \[4, 8\]; it must be \[4, 16\]"),
        ({}, {"gate_weight": torch.zeros(8, 16)}, r"gate_weight is \[8, 16\]; .*\[16, 16\]"),
        ({}, {"w1": torch.zeros(16, 24, 16)}, r"w1 is \[16, 24, 16\]; .*\[16, 48, 16\]"),
        ({}, {"w2": torch.zeros(16, 24, 16)}, r"w2 is \[16, 24, 16\]; .*\[16, 16, 24\]"),
        ({}, {"b1": torch.zeros(16, 48)}, "b1 must be None for this config"),
        ({"bias": True}, {"b2": None}, "b2 must be given for this config"),
        ({"bias": True}, {"b1": torch.zeros(16, 24)}, r"b1 is \[16, 24\]; .*\[16, 48\]"),
        ({"selection_bias": True}, {}, "selection_bias must be given for this config"),
        ({}, {"shared_w1": torch.zeros(1, 48, 16)}, "shared_w1 must be None for this config"),
        (
            {"shared_experts": 3, "shared_intermediate": 40},
            {"shared_w2": None},
            "shared_w2 must be given for this config",
        ),
        (
            {"shared_experts": 3, "shared_intermediate": 40},
            {"shared_w1": torch.zeros(2, 80, 16)},
            r"shared_w1 is \[2, 80, 16\]; it must be \[3, 80, 16\]",
        ),
        (
            {"shared_experts": 3, "shared_intermediate": 40},
            {"shared_gate": torch.zeros(16)},
            "shared_gate must be None for this config",
        ),
        ({}, {"selection_bias": torch.zeros(16)}, "selection_bias must be None for this config"),
        (
            {"routing": "caller"},
            {"topk_ids": torch.zeros(4, 3)},
            "topk_weights is None, and routing is 'caller'",
        ),
        ({}, {"topk_weights": torch.zeros(4, 3)}, "topk_weights is given without topk_ids"),
        (
            {},
            {"topk_ids": torch.zeros(4, 2), "topk_weights": torch.zeros(4, 3)},
            r"topk_ids is \[4, 2\]; it must be \[4, 3\]",
        ),
        (
            {},
            {"topk_ids": torch.zeros(4, 3), "topk_weights": torch.zeros(4)},
            r"topk_weights is \[4\]; it must be \[4, 3\]",
        ),
        (
            {},
            {"topk_ids": torch.full((4, 3), 16), "topk_weights": torch.zeros(4, 3)},
            "topk_ids holds 16; it must be an expert below 16, or -1",
        ),
        (
            {},
            {"topk_ids": torch.full((4, 3), -2), "topk_weights": torch.zeros(4, 3)},
            "topk_ids holds -2; it must be an expert below 16, or -1",
        ),
    ],
)
def test_arguments_that_do_not_fit_the_config_are_refused(
    changes: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    cfg = config(**changes)
    with pytest.raises(ValueError, match=message):
        moe(cfg=cfg, **(random_arguments(cfg, tokens=4) | arguments))


# --- Relative error -----------------------------------------------------------------------------


def test_relative_error_is_a_quotient_of_frobenius_norms() -> None:
    expected = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    actual = torch.tensor([[3.0, 0.5], [0.0, 4.0]], dtype=torch.bfloat16)
    assert relative_error(actual, expected) == pytest.approx(0.1)
    assert relative_error(expected, expected) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([], [], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-300, 0.0], [0.0, 0.0], math.inf),
        ([math.nan, 0.0], [1.0, 0.0], math.inf),
        ([1.0, 0.0], [math.nan, 0.0], math.inf),
        ([math.inf, 0.0], [math.inf, 0.0], math.inf),
        ([math.inf, 0.0], [1.0, 0.0], math.inf),
        ([1.0, 0.0], [math.inf, 0.0], math.inf),
        ([math.nan], [0.0], math.inf),
    ],
)
def test_relative_error_of_zeros_and_of_values_that_are_not_finite(
    actual: list[float], expected: list[float], error: float
) -> None:
    as_double = [torch.tensor(values, dtype=torch.float64) for values in (actual, expected)]
    assert relative_error(*as_double) == error


def test_relative_error_of_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"actual is \[1, 2\] and expected \[2\]"):
        relative_error(torch.zeros(1, 2), torch.zeros(2))
