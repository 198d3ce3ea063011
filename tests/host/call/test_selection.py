# SPDX-License-Identifier: Apache-2.0
"""The best k of a row, of equal ones the first, whatever the dtype and the order of memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moeos
from moeos.call import selection
from moeos.engines.cuda import topk as topk_kernel

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def first_of_equals(row: list[float], k: int) -> list[int]:
    """NaN is above all numbers; Python's sort is stable."""

    def key(place: int) -> tuple[bool, float]:
        value = row[place]
        return (not math.isnan(value), 0.0 if math.isnan(value) else -value)

    return sorted(range(len(row)), key=key)[:k]


NUMBERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-120, -(2.0**-120), math.inf, -math.inf, math.nan]
)


@settings(deadline=None, max_examples=200)
@given(row=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
def test_of_equal_logits_the_first_is_chosen(row: list[float], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    k = data.draw(st.integers(1, min(32, len(row))))
    logits = torch.tensor(row, dtype=dtype)
    if data.draw(st.booleans()):  # a NaN has a sign, too
        logits = torch.where(logits.isnan(), -logits, logits)
    values, indices = moeos.topk(logits, k)
    assert indices.tolist() == first_of_equals(logits.tolist(), k)
    assert values.dtype == dtype
    assert torch.equal(values.nan_to_num(7.0), logits[indices].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (2, 2), (128, 8), (4096, 32)])
def test_without_ties_it_chooses_as_pytorch_does(dtype: torch.dtype, experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    ranks = torch.stack([torch.randperm(experts, generator=generator) for _ in range(9)])
    # 4096 numbers that each dtype has, but bfloat16, of which each is there several times
    logits = ((ranks - experts // 2) / 8).to(dtype).view(3, 3, experts)
    found = moeos.topk(logits, k)
    assert found.values.shape == found.indices.shape == (3, 3, k)
    assert found.indices.dtype == torch.int64
    assert torch.equal(found.values, logits.topk(k).values)
    if dtype != torch.bfloat16:
        assert torch.equal(found.indices, logits.topk(k).indices)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_softmax_is_over_all_logits_or_over_the_chosen(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = logits.double()
    some, _ = wide.topk(5)
    out = torch.float64 if dtype == torch.float64 else torch.float32
    over_all, over_chosen = (
        moeos.topk(logits, 5, softmax="all"),
        moeos.topk(logits, 5, softmax="chosen"),
    )
    assert over_all.values.dtype == over_chosen.values.dtype == out
    every = (some - wide.logsumexp(dim=-1, keepdim=True)).exp()
    torch.testing.assert_close(over_all.values.double(), every, rtol=1e-5, atol=1e-7)
    chosen = every / every.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(over_chosen.values.double(), chosen, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("softmax", [None, "all", "chosen"])
def test_values_have_derivatives(softmax: Any) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def values(numbers: Tensor) -> Tensor:
        return moeos.topk(numbers, 3, softmax=softmax).values

    assert torch.autograd.gradcheck(values, logits)


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes everything, in place of the GPU's."""

    def run(logits: Tensor, k: int, softmax: Any) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()  # PyTorch does not see into a kernel
        indices = selection._best(logits, k)
        return selection._values(logits, indices, softmax), indices

    monkeypatch.setattr(topk_kernel, "takes", lambda logits: True)
    monkeypatch.setattr(topk_kernel, "run", run)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("softmax", [None, "all", "chosen"])
def test_values_of_the_kernel_have_derivatives_twice(softmax: Any) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)

    def values(numbers: Tensor) -> Tensor:
        found = moeos.topk(numbers, 3, softmax=softmax)
        assert not found.indices.requires_grad
        return found.values

    assert torch.autograd.gradcheck(values, logits)
    if softmax is not None:  # or the second derivative is 0 everywhere
        assert torch.autograd.gradgradcheck(values, logits)


@pytest.mark.usefixtures("_kernel")
def test_gradients_of_the_kernel_stop_at_what_was_given() -> None:
    leaf = torch.randn(4, 9, requires_grad=True)
    moeos.topk(2 * leaf, 3, softmax="chosen").values[:, 0].sum().backward()
    by_kernel, leaf.grad = leaf.grad, None
    logits = 2 * leaf
    selection._values(logits, selection._best(logits.detach(), 3), "chosen")[:, 0].sum().backward()
    assert torch.equal(by_kernel, leaf.grad)


def test_the_kernel_takes_what_has_memory_on_a_gpu() -> None:
    assert not topk_kernel.takes(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("count", "k", "kept", "lanes"),
    [
        (1, 1, 1, 1),
        (16, 3, 4, 1),
        (17, 3, 4, 2),
        (64, 8, 8, 4),
        (128, 8, 8, 8),
        (256, 6, 8, 16),
        (512, 17, 32, 16),
        (4096, 32, 32, 32),
    ],
)
def test_rows_are_cut_into_powers_of_two(count: int, k: int, kept: int, lanes: int) -> None:
    assert topk_kernel.cut(count, k) == (kept, lanes)
    assert kept >= k
    assert topk_kernel.THREADS % lanes == 0


def test_no_rows_and_other_strides_are_rows_as_any() -> None:
    assert moeos.topk(torch.empty(0, 8), 2).values.shape == (0, 2)
    columns = torch.arange(12.0).view(3, 4).T
    assert moeos.topk(columns, 1).indices.flatten().tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("logits", "k", "softmax", "error"),
    [
        (torch.ones(2, 4, dtype=torch.int64), 1, None, "logits have dtype torch.int64"),
        (torch.ones(2, 4), True, None, "k is True"),
        (torch.ones(2, 4), 5, None, "k is 5; of 4 logits it must be 1 to 4"),
        (torch.ones(2, 40), 33, None, "k is 33; of 40 logits it must be 1 to 32"),
        (torch.ones(2, 4), 0, None, "k is 0"),
        (torch.ones(2, 4097), 1, None, "the last dimension must be 1 to 4096"),
        (torch.tensor(1.0), 1, None, "the last dimension must be 1 to 4096"),
        (torch.ones(2, 4), 1, "before", "softmax is 'before'"),
    ],
)
def test_what_is_wrong_is_named(logits: Tensor, k: Any, softmax: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        moeos.topk(logits, k, softmax=softmax)
