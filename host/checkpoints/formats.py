# SPDX-License-Identifier: Apache-2.0
"""The formats that models ship their experts' matrices in, and what each means in numbers.

A matrix is stored as one tensor or several parts, whose names differ in their ends. A row of
`FORMATS` names the parts; its function makes the matrix of them. Nothing here knows a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HOW_TO_DEQUANTISE = (
    f"dequantise it to one of {', '.join(map(str, LOADABLE))}, or keep beside it the scales that "
    "it was stored with"
)
BLOCK = 128
"""Rows and columns of a block of FP8 that share a scale."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.uint8, torch.int8)
_EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.uint8)  # PyTorch has it since 2.7
_PAIRS = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # and this since 2.8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_MX_GROUP, _NV_GROUP = 32, 16
_INT4_IN_WORD, _INT4_ZERO = 8, 8

Parts = Mapping[str, Tensor]


class Unfit(Exception):
    """A part of a matrix is not what its format says.

    Attributes:
        part: the end of its name.
        reason: what is said after the name.
    """

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {reason}")
        self.part = part
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to store a matrix.

    Attributes:
        name: of the row.
        said: what a user calls it.
        parts: the ends of the names of what it needs.
        dequantise: these, and the matrix's shape [rows, columns], to the matrix in float32, or in
            the dtype of what is not quantised. Raises `Unfit`.
        unused: ends of names that may stand beside them: of what a matrix does not need, such as
            the scales of activations.
    """

    name: str
    said: str
    parts: tuple[str, ...]
    dequantise: Callable[[Parts, tuple[int, int]], Tensor]
    unused: tuple[str, ...] = ()


def part_name(matrix: str, part: str) -> str:
    """The name of a part of the matrix that is called `matrix` where it is one tensor."""
    if matrix.endswith(".weight"):
        return matrix.removesuffix("weight") + part
    return matrix if part == "weight" else f"{matrix}_{part.removeprefix('weight_')}"


def _plain(parts: Parts, shape: tuple[int, int]) -> Tensor:
    weight = parts["weight"]
    if weight.dtype not in LOADABLE:
        raise Unfit("weight", f"is {weight.dtype}; {HOW_TO_DEQUANTISE}")
    _require("weight", weight, LOADABLE, shape)
    return weight


def _fp8_blocks(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _blocks(parts, "weight_scale_inv", shape)


def _scaled_blocks(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _blocks(parts, "scale", shape)


def _blocks(parts: Parts, of_blocks: str, shape: tuple[int, int]) -> Tensor:
    """FP8 in square blocks or FP4 in groups, as the weight's type says."""
    weight, scale = parts["weight"], parts[of_blocks]
    if weight.dtype in (*_BYTES, _PAIRS):
        rows, columns = shape
        _require(of_blocks, scale, (_EXPONENTS, torch.uint8), (rows, columns // _MX_GROUP))
        return _times_groups(_e2m1("weight", weight, shape), _number(scale))
    _require("weight", weight, _FP8, shape)
    blocks = tuple(-(-length // BLOCK) for length in shape)
    _require(of_blocks, scale, (*LOADABLE, _EXPONENTS, torch.uint8), blocks)
    scales = _number(scale).repeat_interleave(BLOCK, 0)[: shape[0]]
    return weight.float() * scales.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _fp8(parts: Parts, shape: tuple[int, int]) -> Tensor:
    weight, scale = parts["weight"], parts["weight_scale"]
    _require("weight", weight, _FP8, shape)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    _require("weight_scale", scale, LOADABLE, (1 if len(scale) == 1 else shape[0], 1))
    return weight.float() * scale.float()


def _mxfp4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    rows, columns = shape
    groups = columns // _MX_GROUP
    _require("blocks", parts["blocks"], _BYTES, (rows, groups, _MX_GROUP // 2))
    _require("scales", parts["scales"], (torch.uint8, _EXPONENTS), (rows, groups))
    numbers = _e2m1("blocks", parts["blocks"].reshape(rows, columns // 2), shape)
    return _times_groups(numbers, _number(parts["scales"]))


def _nvfp4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _two_scales(parts, "weight", "weight_scale_2", 1, shape)


def _nvfp4_packed(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _two_scales(parts, "weight_packed", "weight_global_scale", -1, shape)


def _two_scales(
    parts: Parts, weight: str, of_all: str, power: int, shape: tuple[int, int]
) -> Tensor:
    """FP4 times the scales of groups, times the `power` of the whole matrix's scale."""
    rows, columns = shape
    scale = parts["weight_scale"]
    _require("weight_scale", scale, (torch.float8_e4m3fn,), (rows, columns // _NV_GROUP))
    if parts[of_all].numel() != 1:
        raise Unfit(of_all, f"has shape {list(parts[of_all].shape)}; a matrix has one number")
    scales = scale.float() * parts[of_all].float().reshape(1, 1).pow(power)
    return _times_groups(_e2m1(weight, parts[weight], shape), scales)


def _int4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    rows, columns = shape
    told = parts.get("weight_shape")
    if told is not None and tuple(told.tolist()) != shape:
        raise Unfit("weight_shape", f"is {told.tolist()}; this config needs {list(shape)}")
    words = -(-columns // _INT4_IN_WORD)
    packed = parts["weight_packed"]
    _require("weight_packed", packed, (torch.int32,), (rows, words))
    scale = parts["weight_scale"]
    if scale.dim() != 2 or len(scale) != rows or scale.shape[1] == 0 or columns % scale.shape[1]:
        raise Unfit(
            "weight_scale",
            f"has shape {list(scale.shape)}; it must be [{rows}, groups], with groups that divide "
            f"{columns}",
        )
    _require("weight_scale", scale, LOADABLE, tuple(scale.shape))
    shifts = torch.arange(0, 4 * _INT4_IN_WORD, 4, device=packed.device, dtype=torch.int32)
    fields = ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(1)[:, :columns]
    return _times_groups((fields - _INT4_ZERO).float(), scale.float())


PLAIN = Format("plain", "unquantised", ("weight",), _plain)
FORMATS: tuple[Format, ...] = (
    PLAIN,
    Format(
        "fp8_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK} (weight_scale_inv)",
        ("weight", "weight_scale_inv"),
        _fp8_blocks,
        ("activation_scale", "input_scale"),
    ),
    Format(
        "scaled_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK}, or FP4 in groups of {_MX_GROUP} (scale)",
        ("weight", "scale"),
        _scaled_blocks,
    ),
    Format(
        "fp8",
        "FP8 with a scale a row or a matrix (weight_scale)",
        ("weight", "weight_scale"),
        _fp8,
        ("input_scale",),
    ),
    Format("mxfp4", "MXFP4 (blocks and scales)", ("blocks", "scales"), _mxfp4),
    Format(
        "nvfp4",
        "NVFP4 (weight_scale and weight_scale_2)",
        ("weight", "weight_scale", "weight_scale_2"),
        _nvfp4,
        ("input_scale",),
    ),
    Format(
        "nvfp4_packed",
        "NVFP4 (weight_packed and weight_global_scale)",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        _nvfp4_packed,
        ("input_global_scale",),
    ),
    Format(
        "int4",
        "int4 (weight_packed and weight_scale)",
        ("weight_packed", "weight_scale", "weight_shape"),
        _int4,
    ),
)
BY_NAME = {row.name: row for row in FORMATS}


def of_parts(found: Sequence[str], allowed: Sequence[str]) -> Format | None:
    """The format that has just these parts, of those called `allowed`."""
    for name in allowed:
        row = BY_NAME[name]
        if set(row.parts) <= set(found) <= {*row.parts, *row.unused}:
            return row
    return None


def parts_of(matrices: Sequence[str], allowed: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The names of all parts of these matrices in the formats called `allowed`: of which matrix,
    and which part.
    """
    return {
        part_name(matrix, part): (matrix, part)
        for matrix in matrices
        for name in allowed
        for part in (*BY_NAME[name].parts, *BY_NAME[name].unused)
    }


def require_format(shown: str, found: Sequence[str], allowed: Sequence[str]) -> Format:
    """The same as `of_parts` of parts of which there are some, the first of them called `shown`;
    raises `ValueError` where there is no such format.
    """
    row = of_parts(found, allowed)
    if row is None:
        said = "; ".join(
            f"{BY_NAME[name].said} has {', '.join(BY_NAME[name].parts)}" for name in allowed
        )
        raise ValueError(
            f"{shown} has the parts {', '.join(sorted(found))}, which is no format that can be "
            f"read: {said}"
        )
    return row


def _number(scale: Tensor) -> Tensor:
    """Scales in float32; a byte is an exponent (E8M0)."""
    if scale.dtype == torch.uint8:
        exponents = scale.int() - _EXPONENT_BIAS
        powers: Tensor = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        return powers
    return scale.float()


def _e2m1(part: str, pairs: Tensor, shape: tuple[int, int]) -> Tensor:
    """Numbers of 4 bits, two a byte with the first in the low half, in float32."""
    _require(part, pairs, (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
    bits = pairs.contiguous().view(torch.uint8)
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=pairs.device)
    return table[torch.stack((bits & 0xF, bits >> 4), dim=-1).flatten(1).int()]


def _times_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns] in groups of consecutive columns, each times its scale [rows, groups]."""
    rows, groups = scales.shape
    return (numbers.view(rows, groups, -1) * scales.unsqueeze(-1)).flatten(1)


def _require(
    part: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]
) -> None:
    if tensor.dtype not in dtypes:
        said = ", ".join(dict.fromkeys(map(str, dtypes)))
        raise Unfit(part, f"is {tensor.dtype}; beside the other parts it must be one of {said}")
    if tuple(tensor.shape) != shape:
        raise Unfit(part, f"has shape {list(tensor.shape)}; this config needs {list(shape)}")
