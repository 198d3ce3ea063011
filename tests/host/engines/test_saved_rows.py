# SPDX-License-Identifier: Apache-2.0
"""A call that keeps its pre-activation has the gradients of one that does not, keeps no more than
it may, and computes the rest again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeos import MoEConfig, Placement, TwinOptions, World
from moeos.config.activations import Activation
from moeos.engines.saved_rows import saved_rows
from moeos.world import virtual
from tests.gradients import (
    ONE_PROCESSOR,
    Gradients,
    assert_match,
    drawn,
    found_of,
    gradients_of,
    kept_bytes,
    leaves_of,
)
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn

pytestmark = pytest.mark.usefixtures("poisoned_output")

TOKENS = (77, 0, 128, 5)
"""[rank]"""
ALL = 10**6
"""More rows than any call has."""


def saving(weights: Weights, rows: int | None = None) -> Weights:
    """The same layer, which keeps at most so many rows."""
    cfg = dataclasses.replace(weights.cfg, save="preactivation", saved_rows=rows)
    return dataclasses.replace(weights, cfg=cfg)


def draw(cfg: MoEConfig, tokens: Sequence[int], kind: str = "uniform") -> list[Call]:
    """A call of each rank, which the caller routes."""
    favoured = PREFERENCES[kind](cfg.experts, len(tokens))
    return [draw_given_call(cfg, count, rank, favoured) for rank, count in enumerate(tokens)]


def assert_equal(found: Sequence[Gradients], expected: Sequence[Gradients]) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.equal(mine[name], gradient), name


def check(cfg: MoEConfig, rows: int | None = None, *, kind: str = "uniform", **how: Any) -> None:
    """Calls that keep at most so many rows, against the reference, and in float32 bit by bit
    against calls that keep none.
    """
    weights = draw_weights(cfg)
    calls = draw(cfg, how.pop("tokens", TOKENS), kind)
    found = gradients_of(saving(weights, rows), calls, **how)
    assert_match(weights, calls, found)
    if cfg.dtype == torch.float32:
        assert_equal(found, gradients_of(weights, calls, **how))


# --- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "dtype"), in_turn(get_args(Activation), [torch.float32, torch.bfloat16]), ids=str
)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check(config(activation=activation, bias=True, dtype=dtype))


@pytest.mark.parametrize("clamp", ["before", "after"])
def test_a_limit_stops_what_it_clamps(clamp: str) -> None:
    check(config(activation="swigluoai", swiglu_limit=0.25, swiglu_clamp=clamp, bias=True))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    in_turn([0, 1, 4, 33, 101, ALL, None], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_rows_beyond_those_that_are_saved_are_computed_again(
    rows: int | None, dtype: torch.dtype
) -> None:
    check(config(top_k=3, bias=True, dtype=dtype), rows)


@pytest.mark.parametrize(("kind", "rows"), in_turn(PREFERENCES, [5, None]))
def test_routing_of_any_kind(kind: str, rows: int | None) -> None:
    check(config(top_k=3, bias=True), rows, kind=kind)


KINDS: list[dict[str, Any]] = [
    {"row_map": "capacity"},
    {"capacity_factor": 0.7, "row_map": "ragged"},
    {"capacity_factor": 0.7},
    {"shared_experts": 2, "shared_intermediate": 40},
    {"zero_experts": 3, "top_k": 4},
    {"apply_router_weight_on_input": True, "top_k": 1},
    {"hidden": 520, "intermediate": 272, "bias": True},
    {"hidden": 264, "intermediate": 520, "activation": "gelu"},
    {"experts": 7, "top_k": 5},
]


@pytest.mark.parametrize(("changes", "rows"), in_turn(KINDS, [13, None]))
def test_layers_of_any_kind(changes: dict[str, Any], rows: int | None) -> None:
    check(config(**changes), rows, kind="zipf")


@pytest.mark.parametrize("tokens", [(64,), (5,), (1,), (0,), (128, 3), (0, 0, 9), (2, 1)], ids=str)
@pytest.mark.parametrize("rows", [7, None])
def test_ranks_and_tokens(tokens: tuple[int, ...], rows: int | None) -> None:
    check(config(), rows, tokens=tokens)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_remote_peers(ranks_per_node: int) -> None:
    check(config(top_k=3), 100, ranks_per_node=ranks_per_node)


def test_experts_that_lie_elsewhere() -> None:
    weights = draw_weights(config(experts=6))
    calls = draw(weights.cfg, (40, 33))
    placement = Placement(((4, 0, 2), (1, 5, 3)))
    found = gradients_of(saving(weights, 60), calls, placement=placement)
    assert_equal(found, gradients_of(weights, calls, placement=placement))


def test_a_gate_that_routes() -> None:
    weights = draw_weights(config(top_k=3, router_bias=True))
    calls = [draw_call(weights.cfg, count, rank) for rank, count in enumerate(TOKENS)]
    found = gradients_of(saving(weights), calls)
    assert_match(weights, calls, found)
    assert_equal(found, gradients_of(weights, calls))


def test_bits_do_not_depend_on_processors_or_timing() -> None:
    """Also where a kept row is rounded, and one that is computed again is not."""
    weights = saving(draw_weights(config(top_k=3, dtype=torch.bfloat16)), 90)
    calls = draw(weights.cfg, TOKENS, "zipf")
    first = gradients_of(weights, calls)
    for twin in (
        TwinOptions(processors=3),
        TwinOptions(processors=2, split_os=True),
        TwinOptions(processors=2, jitter_us=50.0, jitter_seed=7),
    ):
        assert_equal(gradients_of(weights, calls, twin), first)


def test_bfloat16_without_kept_rows_has_the_bits_of_a_call_that_saves_nothing() -> None:
    weights = draw_weights(config(dtype=torch.bfloat16))
    calls = draw(weights.cfg, TOKENS)
    assert_equal(gradients_of(saving(weights, 0), calls), gradients_of(weights, calls))


# --- Autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_several_calls_of_one_layer_are_under_way(order: tuple[int, ...]) -> None:
    weights = draw_weights(config())
    calls = [draw(weights.cfg, (20 + 9 * i, 31 - 8 * i)) for i in range(3)]

    def rank_main(world: World) -> list[Tensor]:
        layer = saving(weights, 50).layer(world).requires_grad_()
        mine = [leaves_of(call[world.rank]) for call in calls]
        outputs = [call(layer) for call in mine]
        for place in order:
            outputs[place].backward(drawn(mine[place], world.rank))
        return [call.x.grad for call in mine if call.x.grad is not None]

    found = virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR)
    for place in range(3):
        expected = gradients_of(weights, calls[place])
        for rank in (0, 1):
            assert torch.equal(found[rank][place], expected[rank]["x"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_calls_the_layer_again(reentrant: bool) -> None:
    weights = draw_weights(config())
    calls = [draw_call(weights.cfg, count, rank) for rank, count in enumerate((30, 12))]

    def rank_main(world: World) -> Gradients:
        layer = saving(weights).layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        checkpoint(layer, call.x, use_reentrant=reentrant).backward(drawn(call, world.rank))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))


@pytest.mark.parametrize("rows", [9, None])
def test_a_call_in_pieces(rows: int | None) -> None:
    weights = draw_weights(config(max_tokens=16))
    calls = draw(weights.cfg, (37, 10))

    def rank_main(world: World) -> Gradients:
        layer = saving(weights, rows).layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        y = layer(call.x, call.ids, call.weights, pieces=3)
        y.backward(drawn(call, world.rank))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))


def test_rows_beyond_the_tokens_have_no_gradient() -> None:
    weights = draw_weights(config())
    whole = draw_given_call(weights.cfg, 50, 0)

    def rank_main(world: World) -> list[Gradients]:
        found = []
        for its in (saving(weights), weights):
            layer = its.layer(world).requires_grad_()
            call = leaves_of(whole)
            y = layer(call.x, call.ids, call.weights, tokens=torch.tensor(20, dtype=torch.int32))
            y.backward(drawn(call, 0))
            found.append(found_of(call, layer))
        return found

    ((found, expected),) = virtual.run(rank_main, ranks=1, twin=ONE_PROCESSOR)
    assert not found["x"][20:].any()
    assert_equal([found], [expected])


@pytest.mark.parametrize(
    ("rows", "kept_rows"), [(None, 200), (0, 0), (1, 1), (77, 77), (ALL, 200)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_keeps_its_routing_and_so_many_rows(
    rows: int | None, kept_rows: int, dtype: torch.dtype
) -> None:
    weights = saving(draw_weights(config(dtype=dtype)), rows)
    cfg = weights.cfg
    kept = kept_bytes(weights, draw_call(cfg, 100, 0))
    assert kept == 100 * cfg.top_k * 8 + kept_rows * cfg.w1_rows * dtype.itemsize


def test_what_was_saved_is_what_backward_reads() -> None:
    weights = saving(draw_weights(config()))
    call = draw_given_call(weights.cfg, 50, 0)
    shape = (50 * weights.cfg.top_k, weights.cfg.w1_rows)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()

        def unpack(tensor: Tensor) -> Tensor:
            return torch.zeros_like(tensor) if tensor.shape == shape else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            call(layer).backward(drawn(call, 0))
        assert layer.w2.grad is not None
        assert not layer.w2.grad.any()  # silu(0) * 0

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    "changed",
    [lambda saved: saved[1:], lambda saved: saved.double()],
    ids=["shape", "dtype"],
)
def test_saved_rows_that_are_not_the_calls_are_refused(changed: Any) -> None:
    weights = saving(draw_weights(config()))
    call = draw_given_call(weights.cfg, 50, 0)
    shape = (50 * weights.cfg.top_k, weights.cfg.w1_rows)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()

        def unpack(tensor: Tensor) -> Tensor:
            return changed(tensor) if tensor.shape == shape else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = call(layer).sum()
        with pytest.raises(ValueError, match=r"has saved as .* is now .*hooks"):
            y.backward()
        call(layer).sum().backward()  # and no call is missing

    virtual.run(rank_main, ranks=1)


def test_weights_that_have_changed_since_are_found() -> None:
    weights = saving(draw_weights(config()))

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        y = layer(draw_call(weights.cfg, 10, 0).x)
        with torch.no_grad():
            layer.w1.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    virtual.run(rank_main, ranks=1)


def test_ranks_that_save_otherwise_are_told_so() -> None:
    weights = draw_weights(config())

    def rank_main(world: World) -> None:
        mine = saving(weights) if world.rank == 1 else weights
        with pytest.raises(ValueError, match=r"save"):
            mine.layer(world)

    virtual.run(rank_main, ranks=2)


# --- How many rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ranks", "tokens", "expected"),
    [
        ({}, 1, 100, 200),  # a rank alone has no more than these
        ({}, 4, 100, 4 * 63),  # 62.5 of each source
        ({}, 4, 0, 0),
        ({}, 2, 128, 2 * 160),
        ({"experts": 2}, 2, 128, 2 * 128),  # one of each token at most
        ({"zero_experts": 8}, 1, 100, 125),
        ({"capacity_factor": 0.5}, 1, 100, 8 * 13),
        ({"saved_rows": 101}, 4, 0, 100),
        ({"saved_rows": 3}, 4, 100, 0),
        ({"saved_rows": ALL}, 4, 1, 4 * 128 * 2),
        ({"rounding": "UP"}, 4, 100, 4 * 125),
    ],
    ids=str,
)
def test_rows_of_a_call(changes: dict[str, Any], ranks: int, tokens: int, expected: int) -> None:
    cfg = config(save="preactivation", **changes)
    assert saved_rows(cfg, ranks, cfg.experts_per_rank(ranks)).of_call(tokens, 1) == expected


def test_each_piece_has_its_rows() -> None:
    cfg = config(save="preactivation", max_tokens=16)
    assert saved_rows(cfg, 1, 8).of_pieces(37, 4) == [32, 32, 10, 0]
    assert saved_rows(config(), 1, 8).of_pieces(37, 4) == [0, 0, 0, 0]
