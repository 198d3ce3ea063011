# SPDX-License-Identifier: Apache-2.0
"""The kernel of moeos.topk on the emulated GPU chooses what moeos.topk chooses on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import moeos
from moeos.engines.cuda import topk as topk_kernel
from moeos.engines.cuda.topk import TYPES, Softmax
from tests.emulator import emulated
from tests.nightly import spread

Topk = Callable[[Tensor, int, Softmax | None], tuple[Tensor, Tensor]]

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 2.0**-20, -(2.0**-20))
SOFTMAXES: tuple[Softmax | None, ...] = (None, "all", "chosen")
SIZES = [(1, 1), (5, 3), (40, 2), (128, 8), (300, 4), (130, 12), (1030, 32), (4096, 7)]
"""Logits of a row, and how many are chosen: all numbers of keys that a lane keeps."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype, int], ctypes.CDLL]:
    """The kernel for a type of logits and so many keys of a lane."""
    folder = tmp_path_factory.mktemp("topk")

    def built(dtype: torch.dtype, kept: int) -> ctypes.CDLL:
        type_ = TYPES.index(dtype)
        library = folder / f"{type_}-{kept}.so"
        if not library.exists():
            emulated.build_topk(library, type_, kept)
        return ctypes.CDLL(str(library))

    return built


@pytest.fixture
def topk(build: Callable[[torch.dtype, int], ctypes.CDLL]) -> Topk:
    def topk(logits: Tensor, k: int, softmax: Softmax | None) -> tuple[Tensor, Tensor]:
        rows, count = logits.shape
        kept, lanes = topk_kernel.cut(count, k)
        dtype = logits.dtype if softmax is None else torch.float32
        values = torch.empty(rows, k, dtype=dtype)
        indices = torch.full((rows, k), -1)
        failed = build(logits.dtype, kept).launch(
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_uint64(rows),
            *(ctypes.c_uint32(size) for size in (count, k, lanes, topk_kernel.number_of(softmax))),
            ctypes.c_void_p(values.data_ptr()),
            ctypes.c_void_p(indices.data_ptr()),
            ctypes.c_uint32(topk_kernel.THREADS),
        )
        assert failed == 0
        return values, indices

    return topk


def drawn(rows: int, count: int, dtype: torch.dtype) -> Tensor:
    """Few different numbers, so that many are equal; in every other row special ones, too."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(-9, 9, (rows, count), generator=generator) / 4
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (rows, count), generator=generator)]
    some = torch.rand(rows, count, generator=generator) < 0.05
    some[::2] = False
    return torch.where(some, special, logits).to(dtype)


@pytest.mark.parametrize(
    ("count", "k", "dtype"), spread(5, [(*one, dtype) for one in SIZES for dtype in TYPES])
)
def test_it_chooses_as_on_the_cpu(topk: Topk, dtype: torch.dtype, count: int, k: int) -> None:
    rows = 2 if count > 1000 else 70  # not a whole block's
    logits = drawn(rows, count, dtype)
    for softmax in SOFTMAXES:
        values, indices = topk(logits, k, softmax)
        expected = moeos.topk(logits, k, softmax=softmax)
        assert torch.equal(indices, expected.indices)
        assert values.dtype == expected.values.dtype
        exact = {"rtol": 0.0, "atol": 0.0} if softmax is None else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(values, expected.values, equal_nan=True, **exact)
        if softmax is None:  # of zeros, the sign
            assert torch.equal(values.signbit(), expected.values.signbit())


@pytest.mark.parametrize("dtype", TYPES)
def test_each_number_has_its_order(topk: Topk, dtype: torch.dtype) -> None:
    """All 16-bit numbers, and as many of 32 bits, beside their neighbours."""
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (2048, 31), generator=generator).to(torch.int32)
        bits[:, 1] = bits[:, 0] + 1
    else:
        bits = torch.arange(-(2**15), 2**15 - 1).unfold(0, 31, 30).to(torch.int16)
        bits = bits[:, torch.randperm(31, generator=generator)].contiguous()
    logits = bits.view(dtype)
    _, indices = topk(logits, 9, None)
    assert torch.equal(indices, moeos.topk(logits, 9).indices)
