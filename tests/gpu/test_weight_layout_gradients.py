# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights in every layout on the GPU: they are float64's, each lies as its parameter
does, and those of parameters have the bits of the plain layout. Where gates and ups are columns in
turn, the compiler contracts other sums to fused ones, so the last bit may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from moeos import Experts, MoEConfig, World
from moeos.config.reference import relative_error
from moeos.world import virtual
from tests.gpu.cases import DEADLINE, Case, blocks, compile_cases, why_not
from tests.host.layer.test_weight_layouts import (
    LAYOUTS,
    PLAIN,
    SAVES,
    TOLERANCE,
    Call,
    Layout,
    Tensors,
    as_plain,
    call_of,
    drawn,
    expected_of,
    laid,
)
from tests.layers import config

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

TOKENS = (1, 300, 1100)
LAST_BITS = 5e-4
"""The largest relative error between two ways to contract the same sums: 1e-4 was seen."""
_SIZES: dict[str, Any] = {"dtype": torch.bfloat16, "experts": 5, "max_tokens": 1100}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "parts that are not whole, biases": (
        {"hidden": 328, "intermediate": 200, "bias": True, "activation": "swigluoai"},
        1,
    ),
    "whole parts": ({"hidden": 512, "intermediate": 384}, 2),
}
"""What is not usual in a config, and its ranks."""
KINDS = [*itertools.product(SHAPES, LAYOUTS, SAVES)]


def config_of(shape: str, layout: Layout, save: Any) -> MoEConfig:
    changes = {**_SIZES, **SHAPES[shape][0], **layout._asdict()}
    return config(**changes, save=save, routing="caller")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All are compiled, side by side, before the first test."""
    cases = [
        Case(SHAPES[shape][1], config_of(shape, layout, save))
        for shape, layout, save in itertools.product(SHAPES, [PLAIN, *LAYOUTS], SAVES)
    ]
    compile_cases(cases, blocks(), gradients=True)


def gradients(cfg: MoEConfig, layout: Layout, calls: list[Call], ranks: int) -> list[Tensors]:
    """What each rank gets of its call, in the plain layout."""
    plain = drawn(cfg)

    def rank_main(world: World) -> Tensors:
        own = cfg.experts_of(world.rank, world.size)
        mine = {name: one[own.start : own.stop] for name, one in laid(plain, layout).items()}
        weights = {name: one.clone().cuda().requires_grad_() for name, one in mine.items()}
        call = Call(*(one.cuda() for one in calls[world.rank]))
        x, scores = call.x.requires_grad_(), call.weights.requires_grad_()
        y = Experts(cfg, world)(x, call.ids, scores, **weights)
        y.backward(call.d_out)
        for name, one in weights.items():
            assert one.grad is not None
            assert one.grad.stride() == one.stride(), name
        found = {name: one.grad.cpu() for name, one in weights.items() if one.grad is not None}
        assert x.grad is not None
        assert scores.grad is not None
        return {"x": x.grad.cpu(), "topk_weights": scores.grad.cpu(), **as_plain(found, layout)}

    return virtual.run(rank_main, ranks=ranks, backend="cuda", deadline=DEADLINE)


@pytest.mark.parametrize(("shape", "layout", "save"), KINDS, ids=str)
def test_gradients_are_float64s_and_those_of_weights_have_the_bits_of_the_plain_layout(
    shape: str, layout: Layout, save: str
) -> None:
    ranks = SHAPES[shape][1]
    cfg = config_of(shape, layout, save)
    base = dataclasses.replace(cfg, **PLAIN._asdict())
    for number, tokens in enumerate(TOKENS):
        calls = [call_of(cfg, tokens, 10 * number + rank) for rank in range(ranks)]
        found = gradients(cfg, layout, calls, ranks)
        right = gradients(base, PLAIN, calls, ranks)
        expected = expected_of(base, drawn(base), calls)
        for rank in range(ranks):
            own = cfg.experts_of(rank, ranks)
            for name, gradient in found[rank].items():
                wanted = expected[rank][name]
                if name in ("w1", "w2", "b1", "b2"):
                    wanted = wanted[own.start : own.stop]
                    same = right[rank][name]
                    if layout == Layout("interleaved", True):
                        assert relative_error(gradient, same) <= LAST_BITS, (tokens, name)
                    else:
                        assert torch.equal(gradient, same), (tokens, name)
                assert relative_error(gradient, wanted) <= TOLERANCE[cfg.dtype], (tokens, name)
