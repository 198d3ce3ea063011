# SPDX-License-Identifier: Apache-2.0
"""Weights that are codes and scales on the GPU: outputs are the reference's on what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moeos
from moeos import World
from moeos.config.element_formats import NAMES
from moeos.world import virtual
from tests.gpu.cases import (
    DEADLINE,
    Case,
    assert_computes,
    blocks,
    compile_cases,
    given_and_routed,
    run_calls,
    why_not,
)
from tests.layers import Call, config, draw_call, draw_weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

_SIZES: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 300, "experts": 8, "top_k": 2}
SHARED_CODES = "shared experts of codes"
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "swiglu, 2 ranks": ({"hidden": 512, "intermediate": 384}, 2),
    "biases, parts that overlap": ({"hidden": 288, "intermediate": 160, "bias": True}, 1),
    "relu2, narrow": ({"activation": "relu2", "hidden": 96, "intermediate": 64}, 2),
    "a shared expert": (
        {"hidden": 512, "intermediate": 128, "shared_experts": 1, "shared_intermediate": 192},
        1,
    ),
    SHARED_CODES: (
        {
            "hidden": 512,
            "intermediate": 128,
            "shared_experts": 2,
            "shared_intermediate": 192,
            "shared_gate": True,
        },
        2,
    ),
}


def _case(form: str, name: str) -> Case:
    changes, ranks = LAYERS[name]
    formats = {
        "weight_format": form,
        "shared_weight_format": form if name == SHARED_CODES else None,
    }
    return Case(ranks, config(**{**_SIZES, **changes, **formats}))


CASES = {f"{form}, {name}": _case(form, name) for form in NAMES for name in LAYERS}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())


@pytest.mark.parametrize("name", CASES)
def test_a_format_on_the_gpu_is_the_references(name: str) -> None:
    case = CASES[name]
    weights = draw_weights(case.cfg, seed=1)
    assert_computes(case, weights, given_and_routed(weights, (1, 8, 0, 300, 77)))


@pytest.mark.parametrize("form", NAMES)
def test_an_output_does_not_depend_on_the_tokens_beside_it(form: str) -> None:
    """Weights of 4 bits are decoded in other ways in narrow tiles than in wide ones: to the same
    bits."""
    case = CASES[f"{form}, swiglu, 2 ranks"]
    weights = draw_weights(case.cfg, seed=1)
    many = draw_call(case.cfg, 300, seed=3).x
    calls = [Call(many), *(Call(many[:tokens].clone()) for tokens in (1, 9, 40))]
    outputs, _ = run_calls(case, weights, [calls, calls])
    for of_all, *others in outputs:
        assert all(torch.equal(of_all[: len(y)], y) for y in others)


def test_a_layer_that_is_quantised_on_the_gpu_has_the_codes_of_the_twins() -> None:
    """But for the few numbers that lie between two codes: PyTorch divides otherwise on a GPU."""
    cfg = config(**{**_SIZES, "hidden": 512, "intermediate": 384})
    weights = draw_weights(cfg)

    def rank_main(world: World) -> dict[str, torch.Tensor]:
        layer = moeos.quantize(weights.layer(world), "nvfp4")
        return {name: part.cpu() for name, part in layer.state_dict().items()}

    there, here = (
        virtual.run(rank_main, ranks=1, backend=backend, deadline=DEADLINE)[0]
        for backend in ("cuda", "twin")
    )
    assert there.keys() == here.keys()
    for name in ("w1_nvfp4", "w2_nvfp4"):
        assert (there[name] != here[name]).double().mean() < 1e-3, name
