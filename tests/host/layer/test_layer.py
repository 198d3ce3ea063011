# SPDX-License-Identifier: Apache-2.0
"""The layer computes what the float64 reference says, whatever its options and its routing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch

from moeos import ConfigMismatch, MoEConfig, MoELayer, TwinOptions, World
from moeos.config.activations import Activation
from moeos.config.config import GroupScore
from moeos.world import virtual
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
from tests.nightly import all_but, covering, in_turn, spread

pytestmark = pytest.mark.usefixtures("poisoned_output")

ONE_PROCESSOR = TwinOptions(processors=1)
TOKENS = ((77, 0, 128), (128, 5, 64), (1, 33, 0), (40, 128, 9))
"""[rank][call]"""


def stats_of_calls(
    weights: Weights,
    calls: Sequence[Sequence[Call]],
    twin: TwinOptions = ONE_PROCESSOR,
    ranks_per_node: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Makes the calls [rank][call], checks every output, and returns the stats [rank][call]."""

    def rank_main(world: World) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        layer = weights.layer(world)
        return [(call(layer), layer.stats()) for call in calls[world.rank]]

    results = virtual.run(rank_main, ranks=len(calls), twin=twin, ranks_per_node=ranks_per_node)
    assert_all_match(weights, calls, [[y for y, _ in rank] for rank in results])
    return [[stats for _, stats in rank] for rank in results]


def check(
    cfg: MoEConfig,
    *,
    given: bool = False,
    seed: int = 0,
    twin: TwinOptions = ONE_PROCESSOR,
    ranks_per_node: int | None = None,
) -> None:
    """Four ranks, three calls each, against the reference."""
    draw = draw_given_call if given else draw_call
    calls = [
        [draw(cfg, tokens, seed + 100 * rank + call) for call, tokens in enumerate(rank_tokens)]
        for rank, rank_tokens in enumerate(TOKENS)
    ]
    stats_of_calls(draw_weights(cfg, seed), calls, twin, ranks_per_node)


TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("activation", "bias", "dtype"), covering(get_args(Activation), [False, True], TYPES), ids=str
)
def test_activations(activation: str, bias: bool, dtype: torch.dtype) -> None:
    check(config(activation=activation, bias=bias, dtype=dtype))


@pytest.mark.parametrize(
    ("activation", "clamp", "dtype"),
    covering(["swiglu", "swigluoai", "geglu_tanh"], ["before", "after"], TYPES),
    ids=str,
)
def test_a_limit_clamps_gate_and_up(activation: str, clamp: str, dtype: torch.dtype) -> None:
    check(
        config(
            activation=activation,
            swiglu_limit=0.25,
            swiglu_clamp=clamp,
            bias=True,
            dtype=dtype,
        )
    )


def test_swiglu_alpha_is_the_slope_of_the_gate() -> None:
    check(config(swiglu_alpha=1.5))
    check(config(activation="swigluoai", swiglu_alpha=0.8, swiglu_limit=0.5))


@pytest.mark.parametrize(
    ("scoring", "renormalize", "routed_scaling", "selection_bias", "dtype"),
    spread(
        5,
        [
            *itertools.product(
                ["softmax", "sigmoid"], [True, False], [1.0, 2.5], [False, True], TYPES
            )
        ],
    ),
    ids=str,
)
def test_routing_rules(
    scoring: str, renormalize: bool, routed_scaling: float, selection_bias: bool, dtype: torch.dtype
) -> None:
    check(
        config(
            scoring=scoring,
            renormalize=renormalize,
            routed_scaling=routed_scaling,
            selection_bias=selection_bias,
            dtype=dtype,
        )
    )


GROUPS = [(16, 4, 4, 2), (16, 4, 8, 3), (16, 2, 16, 2), (32, 8, 8, 4), (12, 5, 2, 1), (16, 3, 4, 4)]
"""Experts and choices of a token; groups, and how many of these."""


@pytest.mark.parametrize(
    ("groups", "scoring", "selection_bias", "group_score"),
    spread(
        5, [*itertools.product(GROUPS, ["softmax", "sigmoid"], [False, True], get_args(GroupScore))]
    ),
    ids=str,
)
def test_group_limited_routing(
    groups: tuple[int, int, int, int],
    scoring: str,
    selection_bias: bool,
    group_score: str,
) -> None:
    experts, top_k, expert_groups, top_groups = groups
    check(
        config(
            experts=experts,
            top_k=top_k,
            expert_groups=expert_groups,
            top_groups=top_groups,
            group_score=group_score,
            scoring=scoring,
            selection_bias=selection_bias,
        )
    )


@pytest.mark.parametrize(
    ("experts", "top_k"), [(4, 1), (4, 4), (8, 8), (12, 3), (20, 7), (100, 2), (64, 16)]
)
def test_numbers_of_experts_that_fill_no_register(experts: int, top_k: int) -> None:
    check(config(experts=experts, top_k=top_k))


@pytest.mark.parametrize(
    ("ranks_per_node", "row_map", "split_os", "dtype"),
    covering([None, 1, 2], ["ragged", "capacity"], [False, True], TYPES),
    ids=str,
)
def test_ways_to_run_it(
    dtype: torch.dtype, row_map: str, ranks_per_node: int | None, split_os: bool
) -> None:
    twin = TwinOptions(processors=2, split_os=split_os)
    cfg = config(row_map=row_map, dtype=dtype)
    check(cfg, given=True, twin=twin, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("capacity_factor", "row_map", "way", "given"),
    spread(
        5,
        [
            *itertools.product(
                [0.01, 0.5, 1.1, 8.0],
                ["ragged", "capacity"],
                [(torch.float32, None), (torch.bfloat16, 1)],
                [False, True],
            )
        ],
    ),
    ids=str,
)
def test_capacity_drops_the_pairs_that_the_reference_drops(
    capacity_factor: float,
    row_map: str,
    way: tuple[torch.dtype, int | None],
    given: bool,
) -> None:
    dtype, ranks_per_node = way
    cfg = config(capacity_factor=capacity_factor, row_map=row_map, dtype=dtype)
    preference = PREFERENCES["zipf"](cfg.experts, 4)
    weights = draw_weights(cfg, 3, preference)
    calls = [
        [
            draw_given_call(cfg, tokens, 10 * rank + call, preference)
            if given
            else draw_call(cfg, tokens, 10 * rank + call)
            for call, tokens in enumerate(rank_tokens)
        ]
        for rank, rank_tokens in enumerate(TOKENS)
    ]
    stats = stats_of_calls(weights, calls, ranks_per_node=ranks_per_node)
    drops = [[call_stats["drops"] for call_stats in rank] for rank in stats]
    assert drops == [[weights.drops(call) for call in rank] for rank in calls]
    assert (sum(map(sum, drops)) > 0) == (capacity_factor < 4)


@pytest.mark.parametrize("kind", PREFERENCES)
@pytest.mark.parametrize("given", [False, True], ids=["routed", "given"])
def test_skewed_routing(kind: str, given: bool) -> None:
    cfg = config(experts=16, top_k=3, max_tokens=300)
    preference = PREFERENCES[kind](16, 4)
    weights = draw_weights(cfg, 1, preference.clamp(-4.0, 4.0))
    calls = [
        [
            draw_given_call(cfg, tokens, 10 * rank + call, preference)
            if given
            else draw_call(cfg, tokens, 10 * rank + call)
            for call, tokens in enumerate((300, 17, 180))
        ]
        for rank in range(4)
    ]
    stats_of_calls(weights, calls)


def test_tokens_without_any_expert_are_zero() -> None:
    cfg = config(bias=True)
    weights = draw_weights(cfg)
    calls = [[draw_given_call(cfg, 70, rank, unused=0.7)] for rank in range(4)]
    calls[2] = [draw_given_call(cfg, 70, 2, unused=1.1)]
    assert sum(weights.routing(calls[2][0]).flatten().tolist()) == -140

    def rank_main(world: World) -> torch.Tensor:
        return calls[world.rank][0](weights.layer(world))

    outputs = virtual.run(rank_main, ranks=4)
    assert_all_match(weights, calls, [[y] for y in outputs])
    for [call], y in zip(calls, outputs, strict=True):
        assert call.ids is not None
        empty = (call.ids == -1).all(dim=1)
        assert empty.any()
        assert (y[empty] == 0).all()
        assert (y[~empty] != 0).any(dim=1).all()


def test_given_ids_and_weights_are_used_as_they_are() -> None:
    """Weights of any size and sign, 0 among them, int32 and int64 ids, any floating dtype."""
    cfg = config(scoring="sigmoid", routed_scaling=3.0, selection_bias=True)
    weights = draw_weights(cfg)
    ids = torch.tensor([[7, 0], [0, 7], [3, -1], [-1, 3], [5, 6]])
    factors = torch.tensor([[2.0, -1.5], [0.0, 1.0], [-0.25, 99.0], [99.0, 8.0], [1e-3, 0.5]])
    x = draw_call(cfg, 5, 0).x
    kinds = [
        (torch.int64, torch.float32),
        (torch.int32, torch.float64),
        (torch.int64, torch.float16),
    ]
    calls = [[Call(x, ids.to(kind), factors.to(dtype)) for kind, dtype in kinds]] * 2
    stats_of_calls(weights, calls)


def test_given_routing_need_not_be_contiguous() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 50, 0)
    assert call.ids is not None
    assert call.weights is not None
    strided = Call(call.x, call.ids.T.contiguous().T, call.weights.T.contiguous().T)
    stats_of_calls(weights, [[strided]] * 2)


@pytest.mark.parametrize("dtype", all_but([torch.bfloat16], TYPES), ids=str)
def test_large_hidden_size_keeps_the_accumulated_error_small(dtype: torch.dtype) -> None:
    cfg = config(hidden=2048, intermediate=512, experts=4, top_k=2, dtype=dtype)
    calls = [[draw_call(cfg, 48, rank)] for rank in range(2)]
    stats_of_calls(draw_weights(cfg), calls)


@pytest.mark.parametrize(
    ("sizes", "activation"),
    in_turn([(8, 8), (8, 264), (264, 8), (520, 136), (248, 120), (256, 128)], ["swiglu", "relu"]),
    ids=str,
)
def test_sizes_around_those_of_a_part(sizes: tuple[int, int], activation: str) -> None:
    hidden, intermediate = sizes
    cfg = config(hidden=hidden, intermediate=intermediate, activation=activation, bias=True)
    check(cfg, given=True)


@pytest.mark.parametrize(
    ("activation", "swiglu_limit"),
    [("swiglu", 7.0), *((name, None) for name in get_args(Activation))],
)
def test_a_nan_in_a_token_of_given_routing_reaches_its_output_alone(
    activation: Activation, swiglu_limit: float | None
) -> None:
    cfg = config(activation=activation, swiglu_limit=swiglu_limit)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 20, 0, unused=0.0)
    call.x[4, 3] = torch.nan

    def rank_main(world: World) -> torch.Tensor:
        return call(weights.layer(world))

    for y in virtual.run(rank_main, ranks=2):
        assert torch.equal(y.isnan(), weights.expected(call).isnan())


@pytest.mark.parametrize("given", [False, True], ids=["routed", "given"])
@pytest.mark.parametrize("capacity_factor", [None, 0.6], ids=["dropless", "capacity"])
def test_a_count_of_tokens_means_the_first_rows_and_the_others_become_zero(
    capacity_factor: float | None, given: bool
) -> None:
    """Whatever lies in the rows beyond them, in x and in the routing."""
    cfg = config(capacity_factor=capacity_factor, bias=True)
    weights = draw_weights(cfg)
    draw = draw_given_call if given else draw_call
    counts = [[0, 40, 77], [77, 1, 33]]
    padded = [[draw(cfg, 77, 10 * rank + n) for n in range(3)] for rank in range(2)]
    for rank, rank_counts in enumerate(counts):
        for call, tokens in zip(padded[rank], rank_counts, strict=True):
            call.x[tokens:] = torch.nan
            if call.ids is not None:
                call.ids[tokens:] = 99
    calls = [
        [call.first(tokens) for call, tokens in zip(padded[rank], counts[rank], strict=True)]
        for rank in range(2)
    ]

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        outputs = []
        for call, tokens in zip(padded[world.rank], counts[world.rank], strict=True):
            count = torch.tensor([tokens], dtype=torch.int32)
            y = layer(call.x, call.ids, call.weights, tokens=count)
            assert not y[tokens:].any()
            assert layer.stats()["tokens"] == tokens
            outputs.append(y[:tokens])
        return outputs

    assert_all_match(weights, calls, virtual.run(rank_main, ranks=2))


def test_state_dict_of_a_layer_restores_it() -> None:
    cfg = config(bias=True, selection_bias=True)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 30, 0)

    def rank_main(world: World) -> bool:
        first, second = weights.layer(world), draw_weights(cfg, 9).layer(world)
        expected, before = call(first), call(second)
        second.load_state_dict(first.state_dict())
        return not torch.equal(before, expected) and torch.equal(call(second), expected)

    assert all(virtual.run(rank_main, ranks=2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_expert_starts_the_same_on_whichever_rank_it_lies(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeos.layer.layer.torch.randint", lambda *_, **__: torch.tensor(12345))
    cfg = config()

    def rank_main(world: World) -> MoELayer:
        return MoELayer(cfg, world)

    [alone] = virtual.run(rank_main, ranks=1)
    parts = virtual.run(rank_main, ranks=ranks)
    for part in parts:
        assert torch.equal(part.gate.weight, alone.gate.weight)
    assert torch.equal(torch.cat([part.w1 for part in parts]), alone.w1)
    assert torch.equal(torch.cat([part.w2 for part in parts]), alone.w2)
    assert len(set(alone.w1.flatten().tolist())) > alone.w1.numel() // 2  # not one value repeated


def test_a_layer_without_initial_weights_draws_nothing_and_takes_those_it_loads() -> None:
    weights = draw_weights(config())

    def rank_main(world: World) -> None:
        before = torch.get_rng_state()
        layer = MoELayer(weights.cfg, world, init=False)
        assert torch.equal(torch.get_rng_state(), before)
        layer.load_state_dict(weights.layer(world).state_dict())
        call = draw_call(weights.cfg, 20, world.rank)
        assert_matches(weights, call, layer(call.x))

    virtual.run(rank_main, ranks=1)


def test_ranks_of_which_one_draws_no_initial_weights_raise_alike() -> None:
    def rank_main(world: World) -> None:
        with pytest.raises(ConfigMismatch, match=r"0 makes MoELayer\(init=False\) and rank 1 mak"):
            MoELayer(config(), world, init=world.rank == 1)

    virtual.run(rank_main, ranks=2)
