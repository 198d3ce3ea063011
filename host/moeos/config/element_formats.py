# SPDX-License-Identifier: Apache-2.0
"""Quantization: the formats of experts' weights, with codes of 8 or 4 bits and scales; and the
format in which a layer sends tokens, multiplies them and returns results.

A number is its code times its scale, or scales. One table describes the tensors of weights; the two
functions after it quantize and dequantize them. Two more do so for rows of tokens.
kernels/element_formats.hpp does this for the kernels. Must not depend on layers, ranks or
checkpoints: this file knows matrices and rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

WeightFormat = Literal[
    "fp8_block128", "fp8_channel", "fp8_tensor", "mxfp4", "nvfp4", "int4_group32"
]
NAMES: tuple[str, ...] = get_args(WeightFormat)
"""The weight formats; the kernels number them in this order, from 1 on."""
ActivationFormat = Literal["fp8_group128"]
ACTIVATION_NAMES: tuple[str, ...] = get_args(ActivationFormat)
"""The formats of tokens, numbered likewise."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the 4-bit floats, by their lower 3 bits; the fourth is the sign."""
EXPONENT_BIAS = 127
"""The bias of an E8M0 exponent, which is a byte."""
INT4_ZERO = 8
"""The offset that is added to a 4-bit integer to store it."""
BLOCK = 128
"""Rows and columns of a block of FP8 that share a scale."""
MX_GROUP, NV_GROUP, INT4_GROUP = 32, 16, 32
"""Columns of a row that share a scale."""

TOKEN_GROUP, HIDDEN_GROUP, RESULT_GROUP = 128, 64, 128
"""Elements that share a scale: of a token, of a row between GEMM0 and GEMM1, and of a result. The
second is smaller: one part of a gated GEMM0 makes 64 elements, and scales them by itself."""

_E4M3_MOST = 448.0
_LEAST_DIVISOR = 2.0**-100
"""The least value for the largest magnitude of a row's group. So neither scales nor their inverses
are subnormal or infinite."""
_E2M1_MOST, _E2M1_EXPONENT = 6.0, 2
_INT4_MOST = 7.0
_NAN_EXPONENT = 255
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints between two magnitudes."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to hold matrices.

    Attributes:
        name: of the row.
        code_dtype: of a tensor of codes; two of 4 bits are a byte, the first in its low half.
        code_bits: of one of them.
        scale_dtype: of the scales.
        rows, columns: of a matrix that share a scale; None: all of them.
        scale_2: each matrix has an fp32 scale in addition.
        multiple: rows and columns of a matrix are multiples of it.
    """

    name: str
    code_dtype: torch.dtype
    code_bits: int
    scale_dtype: torch.dtype
    rows: int | None
    columns: int | None
    scale_2: bool
    multiple: int

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of a code tensor with `rows` rows."""
        return rows, columns * self.code_bits // 8

    def scale_shape(self, halves: int, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of `halves` stacked matrices with `rows` rows each."""
        down = halves * (1 if self.rows is None else -(-rows // self.rows))
        return (down,) if self.columns is None else (down, -(-columns // self.columns))


def _fp8(name: str, rows: int | None, columns: int | None) -> Format:
    return Format(name, torch.float8_e4m3fn, 8, torch.float32, rows, columns, False, 16)


def _of_4_bits(name: str, scale: torch.dtype, group: int, scale_2: bool = False) -> Format:
    return Format(name, torch.uint8, 4, scale, 1, group, scale_2, 32)


FORMATS = {
    row.name: row
    for row in (
        _fp8("fp8_block128", BLOCK, BLOCK),
        _fp8("fp8_channel", 1, None),
        _fp8("fp8_tensor", None, None),
        _of_4_bits("mxfp4", torch.uint8, MX_GROUP),
        _of_4_bits("nvfp4", torch.float8_e4m3fn, NV_GROUP, scale_2=True),
        _of_4_bits("int4_group32", torch.bfloat16, INT4_GROUP),
    )
}
"""The formats by name."""


def quantize_matrix(weight: Tensor, name: str, halves: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and, where the format has them, the scales of whole matrices.

    The largest magnitude that shares a scale becomes the largest of the code, or, with mxfp4, the
    next power of two below that does (OCP Microscaling Formats 1.0). A number between two codes
    becomes the nearer one, and the even one of two that are equally near.

    Args:
        weight: [..., R, C] of any floating dtype: `halves` matrices, one below the other.
        name: of the format.
        halves: 2 where a matrix is a gate's and what it gates, else 1.
    """
    row = FORMATS[name]
    every = weight.float().unflatten(-2, (halves, -1))
    largest = _largest(every, row)
    scale_2: Tensor | None = None
    if name == "mxfp4":
        scale = _exponents(largest)
        divisor = exponent_value(scale)
    elif row.scale_2:
        of_all = largest.amax(dim=(-2, -1), keepdim=True)
        over = _or_one(of_all / (_E4M3_MOST * _E2M1_MOST))
        wanted = (largest / _E2M1_MOST / over).clamp(max=_E4M3_MOST)
        scale = wanted.to(row.scale_dtype)
        divisor = _or_one(scale.float()) * over
        scale_2 = over.flatten(-3)
    else:
        most = _INT4_MOST if name == "int4_group32" else _E4M3_MOST
        scale = _or_one((largest / most).to(row.scale_dtype))
        divisor = scale.float()
    codes = _codes(every / _spread(divisor, every.shape, row), row).flatten(-3, -2)
    return codes, scale.flatten(-3, -2 if row.columns is not None else -1), scale_2


def dequantize(
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor | None,
    name: str,
    halves: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The numbers [..., R, C] that codes and scales stand for: exact in float64.

    Shapes are those that `quantize_matrix` returns, of any leading dimensions.
    """
    row = FORMATS[name]
    numbers: Tensor = _numbers(codes, row).to(dtype).unflatten(-2, (halves, -1))
    grid = exponent_value(scale) if name == "mxfp4" else scale
    grid = grid.to(dtype)
    if row.columns is None:
        grid = grid.unsqueeze(-1)
    numbers = numbers * _spread(grid.unflatten(-2, (halves, -1)), numbers.shape, row)
    if scale_2 is not None:
        numbers = numbers * scale_2.to(dtype)[..., None, None]
    return numbers.flatten(-3, -2)


def quantize_rows(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [..., n] in e4m3 and scales [..., n / group] in fp32 of rows [..., n].

    The largest magnitude of a group becomes 448, the largest code. A number between two codes
    becomes the nearer one, and the even one of two that are equally near. Each step is one of fp32,
    so that all machines make equal codes from equal numbers. A NaN stays one, and does not count
    for the largest magnitude. An infinity makes its whole group NaN.

    Args:
        values: of any floating dtype; float64 is rounded to fp32 first.
        group: elements that share a scale; n is a multiple of it.
    """
    groups = values.float().unflatten(-1, (-1, group))
    sizes = groups.abs()
    sizes = sizes.masked_fill(sizes.isnan(), 0.0)
    divisor = sizes.amax(-1, keepdim=True).clamp(min=_LEAST_DIVISOR)
    most = torch.full_like(divisor, _E4M3_MOST)
    scale = divisor * most.reciprocal()
    codes = (groups * (most / divisor)).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale.squeeze(-1)


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers [..., n] of `quantize_rows`: exact in float64."""
    groups = codes.to(dtype).unflatten(-1, (scale.shape[-1], -1))
    numbers: Tensor = (groups * scale.to(dtype).unsqueeze(-1)).flatten(-2)
    return numbers


def e2m1_value(pairs: Tensor) -> Tensor:
    """[..., n] bytes of two 4-bit floats each -> [..., 2n] in float32."""
    signed = [*E2M1, *(-number for number in E2M1)]
    table = torch.tensor(signed, dtype=torch.float32, device=pairs.device)
    found: Tensor = table[_halves_of(pairs).int()]
    return found


def exponent_value(exponents: Tensor) -> Tensor:
    """Bytes that are exponents (E8M0) in float32: 2^(byte - 127), and NaN for 255."""
    exact = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float64), exponents.int() - EXPONENT_BIAS
    )
    found: Tensor = exact.masked_fill(exponents == _NAN_EXPONENT, math.nan).float()
    return found


def _largest(every: Tensor, row: Format) -> Tensor:
    """The largest magnitudes [..., halves, grid rows, grid columns] among those with one scale."""
    rows, columns = every.shape[-2:]
    down, across = row.rows or rows, row.columns or columns
    padded = functional.pad(every.abs(), (0, -columns % across, 0, -rows % down))
    found: Tensor = padded.unflatten(-1, (-1, across)).unflatten(-3, (-1, down)).amax((-3, -1))
    return found


def _spread(grid: Tensor, shape: torch.Size, row: Format) -> Tensor:
    """[..., grid rows, grid columns] to something that multiplies [..., rows, columns]."""
    rows, columns = shape[-2:]
    if row.rows is not None and row.rows > 1:
        grid = grid.repeat_interleave(row.rows, -2)[..., :rows, :]
    if row.columns is not None:
        grid = grid.repeat_interleave(row.columns, -1)[..., :columns]
    return grid


def _or_one(scale: Tensor) -> Tensor:
    """Scales with 1 in place of zeros, by which nothing can be divided."""
    return scale.masked_fill(scale == 0, 1.0)


def _exponents(largest: Tensor) -> Tensor:
    """The scales of mxfp4, as bytes."""
    power = torch.frexp(largest).exponent - 1 - _E2M1_EXPONENT + EXPONENT_BIAS
    found = power.clamp(0, _NAN_EXPONENT - 1)
    found = found.masked_fill(largest == 0, 0).masked_fill(largest.isinf(), _NAN_EXPONENT - 1)
    return found.masked_fill(largest.isnan(), _NAN_EXPONENT).to(torch.uint8)


def _codes(numbers: Tensor, row: Format) -> Tensor:
    """The codes nearest to numbers that have been divided by their scales."""
    if row.code_bits == 8:
        return numbers.clamp(-_E4M3_MOST, _E4M3_MOST).to(row.code_dtype)
    if row.name == "int4_group32":
        halves = (numbers.round().clamp(-INT4_ZERO, _INT4_MOST) + INT4_ZERO).to(torch.uint8)
    else:
        ties = torch.tensor(_E2M1_TIES, dtype=torch.float32, device=numbers.device)
        ties[1::2] = ties[1::2].nextafter(torch.zeros_like(ties[0]))  # up, to even codes
        magnitude = torch.bucketize(numbers.abs(), ties, out_int32=True).to(torch.uint8)
        halves = magnitude | (numbers.signbit().to(torch.uint8) << 3)
    return halves[..., 0::2] | (halves[..., 1::2] << 4)


def _numbers(codes: Tensor, row: Format) -> Tensor:
    """The numbers that codes mean without their scales, in float32."""
    if row.code_bits == 8:
        return codes.float()
    if row.name == "int4_group32":
        return _halves_of(codes).float() - INT4_ZERO
    return e2m1_value(codes)


def _halves_of(pairs: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] halves, the low one first."""
    return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
