# SPDX-License-Identifier: Apache-2.0
"""Numbers become codes and scales, and codes and scales numbers, as the formats' definitions say.

What is expected is computed here in float64, from the definitions of E4M3, E2M1 and E8M0. It shares
no code and no table with the package.
"""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor

from moeos.config import element_formats
from tests.host.checkpoints.test_stored_matrices import nibbles, small_float

ROWS, COLUMNS = 144, 160  # neither is a multiple of 128
BYTES = torch.arange(256).to(torch.uint8)
E4M3 = small_float(BYTES, 4, 3)
E2M1 = small_float(BYTES[:16], 2, 1)
INT4 = torch.arange(16).double() - 8
BLOCKS = {
    "fp8_block128": (128, 128),
    "fp8_channel": (1, COLUMNS),
    "fp8_tensor": (ROWS, COLUMNS),
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
    "int4_group32": (1, 32),
}
SCALES = {
    "fp8_block128": ((2, 2), torch.float32),
    "fp8_channel": ((ROWS,), torch.float32),
    "fp8_tensor": ((1,), torch.float32),
    "mxfp4": ((ROWS, 5), torch.uint8),
    "nvfp4": ((ROWS, 10), torch.float8_e4m3fn),
    "int4_group32": ((ROWS, 5), torch.bfloat16),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(name: str, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Of each weight its code, and what that means without a scale."""
    if codes.dtype == torch.float8_e4m3fn:
        bits = codes.view(torch.uint8).long()
        return bits, E4M3[bits]
    bits = nibbles(codes).long()
    return bits, (INT4 if name == "int4_group32" else E2M1)[bits]


def scale_of_each(name: str, scale: Tensor, scale_2: Tensor | None) -> Tensor:
    """[ROWS, COLUMNS] in float64."""
    if name == "mxfp4":
        numbers = 2.0 ** (scale.double() - 127)
    elif name == "nvfp4":
        assert scale_2 is not None
        numbers = E4M3[scale.view(torch.uint8).long()] * scale_2.double()
    else:
        numbers = scale.double()
    rows, columns = BLOCKS[name]
    grid = numbers.reshape(-(-ROWS // rows), -(-COLUMNS // columns))
    return grid[torch.arange(ROWS) // rows][:, torch.arange(COLUMNS) // columns]


def largest_of_each(name: str, weight: Tensor) -> Tensor:
    rows, columns = BLOCKS[name]
    largest = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for r in range(0, ROWS, rows):
        for c in range(0, COLUMNS, columns):
            block = weight[r : r + rows, c : c + columns]
            largest[r : r + rows, c : c + columns] = block.abs().amax()
    return largest


@pytest.mark.parametrize("name", element_formats.NAMES)
def test_each_weight_becomes_the_nearest_code_under_the_scale_of_its_block(name: str) -> None:
    weight = drawn(ROWS, COLUMNS)
    weight[3] = 0  # amax of zero rows
    weight[5, 7] = 1e4  # a row with one huge value
    codes, scale, scale_2 = element_formats.quantize_matrix(weight, name, 1)
    assert (tuple(scale.shape), scale.dtype) == SCALES[name]
    assert (scale_2 is not None) == (name == "nvfp4")
    _, numbers = codes_of(name, codes)
    scales = scale_of_each(name, scale, scale_2)
    largest = largest_of_each(name, weight)
    some = largest > 0
    if name == "mxfp4":
        assert torch.equal(scales[some], 2.0 ** (largest[some].log2().floor() - 2))
    elif name.startswith("fp8"):
        assert torch.allclose(scales[some], largest[some] / 448, rtol=1e-6)
    elif name == "int4_group32":
        assert torch.allclose(scales[some], largest[some] / 7, rtol=2**-8)
    else:
        assert scale_2 is not None
        assert float(scale_2) == pytest.approx(1e4 / 448 / 6)
        steps = largest / 6 / scale_2.double()
        nearest = E4M3[:127][(E4M3[:127] - steps[..., None]).abs().argmin(-1)]
        assert torch.equal(scales / scale_2.double(), nearest)
    # Nearest: no other code is nearer, and of two as near it is the even one.
    table = {"int4_group32": INT4, "mxfp4": E2M1[:8], "nvfp4": E2M1[:8]}.get(name, E4M3[:127])
    divisor = torch.where(scales == 0, torch.inf, scales)
    wanted = weight.double() / divisor
    signed = table if name == "int4_group32" else torch.cat((table, -table))
    wanted = wanted.clamp(float(signed.min()), float(signed.max()))
    chosen = (numbers - wanted).abs()
    best = (signed - wanted.flatten()[:, None]).abs().amin(-1).view_as(chosen)
    assert torch.all(chosen <= best + 1e-6 * wanted.abs())
    assert torch.equal(element_formats.dequantize(codes, scale, scale_2, name, 1), numbers * scales)
    assert not element_formats.dequantize(codes, scale, scale_2, name, 1)[3].any()


def test_between_two_codes_the_even_one_is_taken() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    for halfway, rounded in ((ties, even), (-ties, -even)):
        weight = torch.zeros(1, 32)
        weight[0, :8] = halfway
        codes, scale, _ = element_formats.quantize_matrix(weight, "mxfp4", 1)
        assert int(scale) == 127
        assert torch.equal(codes_of("mxfp4", codes)[1][0, :8], rounded.double())
    halves = torch.zeros(1, 32)
    halves[0, :5] = torch.tensor([7.0, 0.5, 1.5, -0.5, -2.5])
    codes, _, _ = element_formats.quantize_matrix(halves, "int4_group32", 1)
    assert codes_of("int4_group32", codes)[1][0, :5].tolist() == [7, 0, 2, 0, -2]


@pytest.mark.parametrize("name", element_formats.NAMES)
def test_gate_and_up_are_matrices_of_their_own(name: str) -> None:
    gate, up = drawn(3, ROWS, COLUMNS), 50 * drawn(3, ROWS, COLUMNS, seed=1)
    both = element_formats.quantize_matrix(torch.cat((gate, up), 1), name, 2)
    alone = [element_formats.quantize_matrix(matrix, name, 1) for matrix in (gate, up)]
    for part, first, second in zip(both, *alone, strict=True):
        assert (part is None) == (first is None)
        if part is not None and first is not None and second is not None:
            expected = torch.cat((first.view(torch.uint8), second.view(torch.uint8)), 1)
            assert torch.equal(part.view(torch.uint8), expected)
    numbers = element_formats.dequantize(*both, name, 2)
    assert torch.equal(numbers[:, ROWS:], element_formats.dequantize(*alone[1], name, 1))
    single = element_formats.dequantize(*both, name, 2, torch.float32)
    assert torch.allclose(single.double(), numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", element_formats.NAMES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 3e-39, 1e38, math.inf, math.nan])
def test_odd_numbers_spread_no_further_than_their_scale(name: str, value: float) -> None:
    weight = drawn(32, 64)
    weight[0] = value
    codes, scale, scale_2 = element_formats.quantize_matrix(weight, name, 1)
    numbers = element_formats.dequantize(codes, scale, scale_2, name, 1)
    apart = {"fp8_channel", "mxfp4", "int4_group32"}
    if value == 0:
        assert not numbers[0].any()
    if name in apart:
        plain, *scales = element_formats.quantize_matrix(drawn(32, 64), name, 1)
        assert torch.equal(numbers[1:], element_formats.dequantize(plain, *scales, name, 1)[1:])
    if math.isnan(value):
        assert numbers[0].isnan().all()


def test_a_byte_of_ones_is_no_exponent() -> None:
    found = element_formats.exponent_value(BYTES)
    assert torch.equal(found[:255].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert found[255].isnan()


@pytest.mark.parametrize("name", element_formats.NAMES)
def test_codes_do_not_depend_on_the_default_dtype(name: str) -> None:
    numbers = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(7))
    wanted = element_formats.quantize_matrix(numbers, name, 2)
    meant = element_formats.dequantize(*wanted, name, 2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = element_formats.quantize_matrix(numbers, name, 2)
        assert torch.equal(element_formats.dequantize(*found, name, 2), meant)
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# --- rows of tokens -----------------------------------------------------------------------------


def rows_by_definition(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes as bits, and scales, by fp32 arithmetic of NumPy and the nearest of all codes."""
    groups = values.float().unflatten(-1, (-1, group)).numpy()
    divisor = numpy.maximum(numpy.abs(groups).max(-1), numpy.float32(2.0**-100))
    most = numpy.float32(448)
    scale = divisor * (numpy.float32(1) / most)
    wanted = torch.from_numpy(groups * (most / divisor)[..., None]).double().clamp(-448, 448)
    magnitudes = E4M3[:127]
    far = (wanted.abs()[..., None] - magnitudes).abs()
    even = torch.arange(127) % 2
    nearest = (far == far.amin(-1, keepdim=True)).double().mul(2 - even).argmax(-1)
    bits = nearest + 128 * wanted.signbit()
    return bits.flatten(-2).to(torch.uint8), torch.from_numpy(scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("group", [64, 128])
def test_each_value_of_a_row_becomes_the_nearest_code_under_its_groups_scale(
    group: int, dtype: torch.dtype
) -> None:
    values = drawn(3, 20, 256)
    values[0, 0] = 0
    values[0, 1, 7] = 1e4
    values[0, 2] = 1e-42
    values[0, 3] *= 2.0**-112
    values[0, 4] *= 1e38 if dtype in (torch.float32, torch.float64) else 1.0
    values[0, 5, ::2] = values[0, 5, 1::2] = 3.5  # others are multiples of ties
    values[0, 6] = torch.arange(256) / 16 - 8
    values = values.to(dtype)
    codes, scale = element_formats.quantize_rows(values, group)
    bits, scales = rows_by_definition(values, group)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (3, 20, 256 // group)
    assert torch.equal(scale, scales)
    assert torch.equal(codes.view(torch.uint8), bits)
    numbers = element_formats.dequantize_rows(codes, scale)
    each = scale.double().repeat_interleave(group, -1)
    assert torch.equal(numbers, E4M3[bits.long()] * each)
    single = element_formats.dequantize_rows(codes, scale, torch.float32)
    assert torch.allclose(single.double(), numbers, rtol=1e-6, atol=0)
    assert not numbers[0, 0].any()
    largest = values.double().abs().unflatten(-1, (-1, group)).amax(-1)
    step = largest.clamp(min=2.0**-100).repeat_interleave(group, -1) / 448
    error = (numbers - values.double()).abs()
    assert torch.all(error <= values.double().abs() * 2.0**-4 * 1.0001 + step * 2.0**-10 * 1.0001)


def test_a_scale_is_divided_by_and_not_multiplied_with_an_inverse_that_is_rounded() -> None:
    """448 / 3.1 is not 448 times the fp32 inverse of 3.1: as are many."""
    largest = torch.linspace(1, 2, 10_000)
    values = largest[:, None].repeat(1, 64)
    values[:, 1:] *= torch.rand(10_000, 63, generator=torch.Generator().manual_seed(1))
    codes, _ = element_formats.quantize_rows(values, 64)
    inverse = torch.from_numpy(numpy.float32(448) / largest.numpy())
    assert not torch.equal(inverse, largest.reciprocal() * 448)
    wanted = (values * inverse[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_a_nan_of_a_row_stays_alone() -> None:
    values = drawn(4, 256)
    wanted = values.clone()
    values[1, 130] = math.nan
    wanted[1, 130] = 0.0
    numbers = element_formats.dequantize_rows(*element_formats.quantize_rows(values, 128))
    assert numbers[1, 130].isnan()
    others = element_formats.dequantize_rows(*element_formats.quantize_rows(wanted, 128))
    assert torch.equal(numbers.nan_to_num(0.0), others)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinity_makes_its_group_of_a_row_nan(value: float) -> None:
    values = drawn(4, 256)
    values[1, 130] = value
    numbers = element_formats.dequantize_rows(*element_formats.quantize_rows(values, 128))
    assert numbers[1, 128:].isnan().all()
    others = element_formats.dequantize_rows(*element_formats.quantize_rows(drawn(4, 256), 128))
    assert torch.equal(numbers[1, :128], others[1, :128])
    assert torch.equal(numbers[[0, 2, 3]], others[[0, 2, 3]])


def test_codes_of_rows_do_not_depend_on_the_default_dtype() -> None:
    values = drawn(5, 256)
    wanted = element_formats.quantize_rows(values, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = element_formats.quantize_rows(values, 64)
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
