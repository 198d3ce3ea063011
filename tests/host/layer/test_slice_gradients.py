# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers whose ranks have the same tokens and slices of experts, on the twin: those of
the float64 reference, and the same bits on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import Experts, MoEConfig, PeerTimeout, TwinOptions, World
from moeos.partition.slicing import Slicing
from moeos.world import virtual
from tests.gradients import (
    Gradients,
    assert_match,
    drawn,
    expected_of,
    found_of,
    gradients_of,
    leaves_of,
)
from tests.layers import Call, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but, in_turn

SIZES = {"intermediate": 192, "max_tokens": 300, "bias": True}
SHARED = {"shared_experts": 2, "shared_intermediate": 48, "shared_gate": True}
OF_SLICES = ("w1", "w2", "b1", "shared_w1", "shared_w2")
"""All other gradients are equal on the ranks with the same tokens."""


def check(
    cfg: MoEConfig,
    slicing: Slicing,
    tokens: Sequence[int],
    *,
    given: bool = False,
    **options: Any,
) -> list[Gradients]:
    """One call of each group of ranks, of which `tokens` has the sizes, against the reference."""
    weights = draw_weights(cfg)
    draw = draw_given_call if given else draw_call
    calls = [draw(cfg, count, count) for count in tokens for _ in range(slicing.slices)]
    found = gradients_of(weights, calls, slicing=slicing, **options)
    assert_match(weights, calls, found, slicing=slicing)
    for rank, mine in enumerate(found):
        first = found[rank - slicing.slice_of(rank)]
        for name in mine.keys() - set(OF_SLICES):
            if name != "b2" or slicing.slices == len(found):
                assert torch.equal(mine[name], first[name]), f"rank {rank}, {name}"
    return found


@pytest.mark.parametrize(
    ("ranks", "everywhere"),
    all_but(
        [(2, True), (3, False), (8, True)],
        itertools.product(range(2, 9), [True, False]),
    ),
)
def test_gradients_are_those_of_the_reference(ranks: int, everywhere: bool) -> None:
    cfg = config(**{**SIZES, "intermediate": 24 * ranks, "max_tokens": 70})
    slicing = Slicing(ranks, everywhere)
    for tokens, given in ((70, False), (33, True), (3, True)):
        check(cfg, slicing, [tokens], given=given)


KINDS: list[dict[str, Any]] = [
    SHARED,
    {**SHARED, "shared_gate": False},
    {**SHARED, "dtype": torch.bfloat16},
    {"activation": "gelu"},
    {"dtype": torch.bfloat16, "save": "preactivation"},
    {"save": "preactivation", **SHARED},
    {"capacity_factor": 1.0},
    {"top_k": 1, "apply_router_weight_on_input": True},
    {"router_bias": True, "expert_scale": True, "scoring": "sigmoid", "renormalize": False},
]


@pytest.mark.parametrize(("changes", "everywhere"), in_turn(KINDS, [True, False]), ids=str)
def test_layers_of_all_kinds_have_gradients(changes: dict[str, Any], everywhere: bool) -> None:
    check(config(**(SIZES | changes)), Slicing(2, everywhere), [130])


@pytest.mark.parametrize(
    ("group", "everywhere"),
    in_turn([(2, (40, 7)), (2, (0, 33, 1)), (3, (5, 64))], [True, False]),
    ids=str,
)
def test_groups_of_ranks_have_tokens_of_their_own(
    group: tuple[int, tuple[int, ...]], everywhere: bool
) -> None:
    tensor_ranks, tokens = group
    cfg = config(**SIZES, **SHARED)
    check(cfg, Slicing(tensor_ranks, everywhere), tokens)
    check(cfg, Slicing(tensor_ranks, everywhere), tokens, given=True)


def test_bits_do_not_depend_on_processors_or_timing() -> None:
    cfg = config(**SIZES, **SHARED)
    found = []
    for processors, split, jitter in ((1, False, 0.0), (3, True, 0.0), (2, True, 200.0)):
        twin = TwinOptions(processors=processors, split_os=split, jitter_us=jitter)
        found.append(check(cfg, Slicing(3), [77], given=True, twin=twin))
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert mine.keys() == first.keys()
            assert all(torch.equal(mine[name], first[name]) for name in mine)


def test_the_same_calls_have_the_same_gradients_again() -> None:
    """Calls of one workspace, scattered and not, forward and backward in other orders."""
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, tokens, tokens) for tokens in (60, 5)]

    def run(world: World) -> list[Gradients]:
        layers = [
            weights.layer(world, parallel="tensor", output=output).requires_grad_()
            for output in ("replicated", "scattered")
        ]
        found = []
        for layer, order in [(one, order) for order in ((0, 1), (1, 0)) for one in layers]:
            layer.zero_grad()
            leaves = [leaves_of(call) for call in calls]
            outputs = [call(layer) for call in leaves]
            for number in order:
                layer.zero_grad()
                mine = slice(None)
                if len(outputs[number]) < len(calls[number].x):
                    own = Slicing(2, everywhere=False).tokens_of(world.rank, len(calls[number].x))
                    mine = slice(own.start, own.stop)
                outputs[number].backward(drawn(calls[number], 0)[mine])
                found.append((number, found_of(leaves[number], layer)))
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    for of_rank in virtual.run(run, 2):
        half = len(of_rank) // 2
        for number, mine in enumerate(of_rank):
            first = of_rank[number // half * half]
            assert all(torch.equal(mine[name], first[name]) for name in first)


def test_pieces_and_rows_that_are_no_tokens() -> None:
    cfg = config(**{**SIZES, **SHARED, "max_tokens": 16})
    weights = draw_weights(cfg)
    whole, few = draw_call(cfg, 40, 0), draw_call(cfg, 9, 1)
    count = torch.tensor([9], dtype=torch.int32)

    def run(world: World) -> list[Gradients]:
        layer = weights.layer(world, parallel="tensor").requires_grad_()
        call = leaves_of(whole)
        layer(call.x, pieces=3).backward(drawn(whole, 0))
        found = [found_of(call, layer)]
        layer.zero_grad()
        padded = torch.cat([few.x, torch.full((5, cfg.hidden), torch.nan)]).requires_grad_()
        d_out = torch.cat([drawn(few, 0), torch.full((5, cfg.hidden), torch.nan)])
        layer(padded, tokens=count).backward(d_out)
        found.append(found_of(Call(padded), layer))
        return found

    found = virtual.run(run, 2)
    for rank in range(2):
        assert torch.equal(found[rank][1]["x"][9:], torch.zeros(5, cfg.hidden))
        found[rank][1]["x"] = found[rank][1]["x"][:9]
    for number, call in enumerate((whole, few)):
        mine = [of_rank[number] for of_rank in found]
        assert_match(weights, [call] * 2, mine, slicing=Slicing(2))


def test_experts_that_a_caller_routes() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 33, 0)

    def run(world: World) -> dict[str, Tensor | None]:
        experts = Experts(cfg, world, parallel="tensor")
        mine = weights.of_slice(experts.slicing, world.rank, world.size)
        own = {"w1": mine.w1, "w2": mine.w2, "b1": mine.b1, "b2": weights.b2}
        leaves = {name: one.clone().requires_grad_() for name, one in own.items()}
        its = leaves_of(call)
        y = experts(its.x, its.ids, its.weights, *leaves.values())
        y.backward(drawn(call, 0))
        return {"x": its.x.grad, "topk_weights": its.weights.grad} | {
            name: leaf.grad for name, leaf in leaves.items()
        }

    assert_match(weights, [call] * 2, virtual.run(run, 2), slicing=Slicing(2))


@pytest.mark.parametrize("output", all_but(["scattered"], ["replicated", "scattered"]))
def test_a_compiled_layer_has_the_same_bits(output: Any) -> None:
    cfg = config(**SIZES, **SHARED)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 20, 0)

    def run(world: World) -> list[Gradients]:
        found = []
        for compiled in (False, True):
            layer = weights.layer(world, parallel="tensor", output=output).requires_grad_()
            its = leaves_of(call)
            called = torch.compile(layer, backend="aot_eager", fullgraph=True)
            y = (called if compiled else layer)(its.x)
            y.backward(drawn(call, 0)[: len(y)])
            found.append(found_of(its, layer))
        return found

    for plain, compiled in virtual.run(run, 2, deadline=120.0):  # one thread compiles at a time
        assert all(torch.equal(compiled[name], plain[name]) for name in plain)


def test_gradients_of_outputs_that_differ_are_refused() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)

    def run(world: World) -> None:
        layer = weights.layer(world, parallel="tensor").requires_grad_()
        y = layer(draw_call(cfg, 12, 0).x)
        y.backward(torch.full_like(y, world.rank))

    with pytest.raises(ValueError, match="the gradient of the output"):
        virtual.run(run, 2)


def test_a_rank_that_makes_no_backward_is_named() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)

    def run(world: World) -> str:
        layer = weights.layer(world, parallel="tensor").requires_grad_()
        y = layer(draw_call(cfg, 12, 0).x)
        if world.rank == 1:
            return ""
        with pytest.raises(PeerTimeout) as raised:
            y.sum().backward()
        return str(raised.value)

    assert "rank 1" in virtual.run(run, 2, deadline=1.0)[0]


def test_the_reference_tells_slices_apart() -> None:
    """A sum over ranks in place of one over slices would be found."""
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 20, 0)] * 2
    alone, of_slices = expected_of(weights, calls[:1])[0], expected_of(weights, calls, Slicing(2))
    assert torch.equal(alone["w2"][:, :, 96:], of_slices[1]["w2"])
    assert torch.equal(alone["b2"], of_slices[1]["b2"])
