# SPDX-License-Identifier: Apache-2.0
"""moeos.topk on a GPU: one kernel, which chooses what a stable sort does, and the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import moeos
from moeos.engines.cuda import topk as topk_kernel
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

FLOATS = [*topk_kernel.TYPES, torch.float64]
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-20, -(2.0**-20))
SIZES = [(1, 1), (5, 3), (40, 2), (60, 4), (128, 8), (256, 8), (300, 6), (512, 10), (1000, 17)]
SIZES += [(4096, 1), (4095, 8), (4096, 32)]


def drawn(rows: int, count: int, dtype: torch.dtype, *, special: bool) -> Tensor:
    """Normal numbers, of which some are equal; some of them special."""
    generator = torch.Generator("cuda").manual_seed(count)
    logits = torch.randn(rows, count, device="cuda", generator=generator)
    logits = torch.where(logits.abs() < 0.5, (8 * logits).round() / 8, logits) + 0.0
    if special:
        some = torch.rand(rows, count, device="cuda", generator=generator) < 0.02
        which = torch.randint(len(SPECIAL), (rows, count), device="cuda", generator=generator)
        logits = torch.where(some, torch.tensor(SPECIAL, device="cuda")[which], logits)
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "k"), SIZES)
def test_it_is_the_begin_of_a_stable_sort(dtype: torch.dtype, count: int, k: int) -> None:
    logits = drawn(1001, count, dtype, special=False)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    values, indices = moeos.topk(logits, k)
    assert torch.equal(indices, expected.indices[:, :k])
    assert torch.equal(values, expected.values[:, :k])
    if count > 1:
        assert torch.equal(values, torch.topk(logits, k).values)


@pytest.mark.parametrize("softmax", [None, "all", "chosen"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("count", "k"), SIZES)
def test_infinities_nans_and_zeros_are_those_of_the_cpu(
    dtype: torch.dtype, softmax: Any, count: int, k: int
) -> None:
    logits = drawn(129, count, dtype, special=True)
    values, indices = moeos.topk(logits, k, softmax=softmax)
    expected = moeos.topk(logits.cpu(), k, softmax=softmax)
    assert torch.equal(indices.cpu(), expected.indices)
    exact = {"rtol": 0.0, "atol": 0.0} if softmax is None else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(values.cpu(), expected.values, equal_nan=True, **exact)


def test_shapes_strides_and_no_rows() -> None:
    logits = drawn(24, 128, torch.bfloat16, special=False).view(2, 3, 4, 128)
    found = moeos.topk(logits, 8)
    assert found.values.shape == found.indices.shape == (2, 3, 4, 8)
    assert torch.equal(found.indices, moeos.topk(logits.cpu(), 8).indices.cuda())
    columns = logits.view(24, 128).t()
    assert torch.equal(moeos.topk(columns, 3).indices, moeos.topk(columns.contiguous(), 3).indices)
    assert moeos.topk(logits[:0], 8).values.shape == (0, 3, 4, 8)


@pytest.mark.parametrize("softmax", [None, "all", "chosen"])
def test_gradients_are_those_of_the_cpu(softmax: Any) -> None:
    logits = drawn(33, 128, torch.float32, special=False).requires_grad_()
    here = logits.detach().cpu().requires_grad_()
    weights = torch.randn(33, 8)
    (moeos.topk(logits, 8, softmax=softmax).values * weights.cuda()).sum().backward()
    (moeos.topk(here, 8, softmax=softmax).values * weights).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.cpu(), here.grad)


def test_it_is_one_launch() -> None:
    logits = drawn(64, 128, torch.float32, special=False)
    moeos.topk(logits, 8, softmax="chosen")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        moeos.topk(logits, 8, softmax="chosen")
        torch.cuda.synchronize()
    kernels = [event.name for event in trace.events() if "cuda" in str(event.device_type).lower()]
    assert kernels == ["moeos_topk"]


def test_a_graph_replays_it() -> None:
    logits = drawn(64, 128, torch.bfloat16, special=False)
    moeos.topk(logits, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moeos.topk(logits, 8)
    logits.copy_(logits.flip(0))
    graph.replay()
    assert torch.equal(found.indices, moeos.topk(logits, 8).indices)


def test_compiled_code_chooses_the_same() -> None:
    logits = drawn(64, 128, torch.float32, special=False)
    compiled = torch.compile(lambda numbers: moeos.topk(numbers, 8), fullgraph=True)
    assert torch.equal(compiled(logits).indices, moeos.topk(logits, 8).indices)
