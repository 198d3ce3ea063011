# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of the benchmark computes the layer; no other layer is measured with it."""

import dataclasses

import pytest
import torch

from bench.twin import PlainLayer, Workload
from moeos import MoEConfig
from moeos.config import reference

CFG = MoEConfig(hidden=32, intermediate=48, experts=8, top_k=2, dtype=torch.float32, max_tokens=40)
WORKLOAD = Workload(cfg=CFG, ranks=2, seed=7)


def test_plain_pytorch_computes_what_the_reference_does() -> None:
    gate, (w1, w2) = WORKLOAD.gate(), WORKLOAD.experts(range(CFG.experts))
    x = WORKLOAD.all_tokens().flatten(0, 1)
    y = PlainLayer(gate, w1, w2, CFG.top_k, 80)(x)
    expected = reference.moe(x, gate, w1, w2, CFG)
    assert 0 < reference.relative_error(y, expected) < 1e-5


def test_an_expert_without_tokens_is_skipped() -> None:
    gate, (w1, w2) = WORKLOAD.gate(), WORKLOAD.experts(range(CFG.experts))
    x = WORKLOAD.tokens(0)[:1]  # k of the E experts have a row
    y = PlainLayer(gate, w1, w2, CFG.top_k, 80)(x)
    assert reference.relative_error(y, reference.moe(x, gate, w1, w2, CFG)) < 1e-5


def test_one_call_leaves_nothing_behind_for_the_next() -> None:
    x = WORKLOAD.all_tokens().flatten(0, 1)
    layer = PlainLayer(WORKLOAD.gate(), *WORKLOAD.experts(range(CFG.experts)), CFG.top_k, 80)
    first = layer(x)
    kept = first.clone()
    layer(-x[:30])
    assert torch.equal(first, kept)
    assert torch.equal(layer(x), kept)


def test_every_contestant_draws_the_same_work() -> None:
    assert torch.equal(WORKLOAD.all_tokens()[1], WORKLOAD.tokens(1))
    w1, w2 = WORKLOAD.experts(range(8))
    last_w1, last_w2 = WORKLOAD.experts(range(4, 8))  # what the second of two ranks draws
    assert torch.equal(last_w1, w1[4:])
    assert torch.equal(last_w2, w2[4:])
    assert not torch.equal(WORKLOAD.tokens(0), WORKLOAD.tokens(1))
    assert not torch.equal(w1[0], w1[1])


def test_work_is_counted_for_all_ranks() -> None:
    pairs, router = 2 * 40 * 2, 2 * 80 * 8 * 32
    assert WORKLOAD.flops == router + pairs * 2 * (96 + 48) * 32
    weights = 8 * 32 + 8 * (96 * 32 + 32 * 48)
    assert WORKLOAD.least_bytes == 4 * (weights + 2 * 80 * 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", torch.bfloat16), ("activation", "gelu"), ("scoring", "sigmoid"), ("bias", True)],
)
def test_a_layer_that_the_pytorch_side_does_not_compute_is_refused(
    field: str, value: object
) -> None:
    other = dataclasses.replace(CFG, **{field: value})
    with pytest.raises(ValueError, match=f"^{field} is .* what is measured against PyTorch has"):
        Workload(cfg=other, ranks=2, seed=7)
