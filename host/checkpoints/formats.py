# SPDX-License-Identifier: Apache-2.0
"""The formats that models ship their experts' matrices in, and what each means in numbers.

A matrix is stored as one tensor or several parts, whose names differ in their ends. A row of
`FORMATS` names the parts; its function makes the matrix of them. Nothing here knows a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeos.formats import (
    BLOCK,
    INT4_GROUP,
    INT4_ZERO,
    MX_GROUP,
    NV_GROUP,
    WeightFormat,
    e2m1_value,
    exponent_value,
)

LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HOW_TO_DEQUANTISE = (
    f"dequantise it to one of {', '.join(map(str, LOADABLE))}, or keep beside it the scales that "
    "it was stored with"
)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.uint8, torch.int8)
_EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.uint8)  # PyTorch has it since 2.7
_PAIRS = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # and this since 2.8
_INT4_IN_WORD = 8

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
        held_as: the formats of a layer that can be it as it is shipped; see `hold`.
        grains: of each part the rows and columns of the matrix for which one element stands, 0 for
            all; none where that depends on more than the part's name.
    """

    name: str
    said: str
    parts: tuple[str, ...]
    dequantise: Callable[[Parts, tuple[int, int]], Tensor]
    unused: tuple[str, ...] = ()
    held_as: tuple[WeightFormat, ...] = ()
    grains: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


class Held(NamedTuple):
    """A matrix as a layer holds it, see `moeos.formats`, or several, one below the other."""

    codes: Tensor
    scale: Tensor
    scale_2: Tensor | None = None


def hold(
    row: Format, parts: Parts, shape: tuple[int, int], halves: int, wanted: WeightFormat
) -> Held:
    """A matrix [rows, columns] as it is shipped, in a format of `row.held_as`. Raises `Unfit`.

    `halves`: matrices that it is made of, gate and up, or 1.
    """
    return _HOLD[wanted](row, parts, shape, halves)


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
        _require(of_blocks, scale, (_EXPONENTS, torch.uint8), (rows, columns // MX_GROUP))
        return _times_groups(_e2m1("weight", weight, shape), _number(scale))
    _require("weight", weight, _FP8, shape)
    blocks = tuple(-(-length // BLOCK) for length in shape)
    _require(of_blocks, scale, (*LOADABLE, _EXPONENTS, torch.uint8), blocks)
    scales = _number(scale).repeat_interleave(BLOCK, 0)[: shape[0]]
    return weight.float() * scales.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _fp8(parts: Parts, shape: tuple[int, int]) -> Tensor:
    weight = parts["weight"]
    _require("weight", weight, _FP8, shape)
    return weight.float() * _of_rows(parts["weight_scale"], shape).float()


def _of_rows(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """[1, 1] or [rows, 1]: a scale a matrix or a row."""
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    _require("weight_scale", scale, LOADABLE, (1 if len(scale) == 1 else shape[0], 1))
    return scale


def _mxfp4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    pairs = _pairs_of_blocks(parts, shape)
    return _times_groups(_e2m1("blocks", pairs, shape), _number(parts["scales"]))


def _pairs_of_blocks(parts: Parts, shape: tuple[int, int]) -> Tensor:
    """The codes [rows, columns / 2]. Raises for scales that do not fit, too."""
    rows, columns = shape
    groups = columns // MX_GROUP
    _require("blocks", parts["blocks"], _BYTES, (rows, groups, MX_GROUP // 2))
    _require("scales", parts["scales"], (torch.uint8, _EXPONENTS), (rows, groups))
    return parts["blocks"].reshape(rows, columns // 2)


def _nvfp4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _two_scales(parts, "weight", "weight_scale_2", 1, shape)


def _nvfp4_packed(parts: Parts, shape: tuple[int, int]) -> Tensor:
    return _two_scales(parts, "weight_packed", "weight_global_scale", -1, shape)


def _two_scales(
    parts: Parts, weight: str, of_all: str, power: int, shape: tuple[int, int]
) -> Tensor:
    """FP4 times the scales of groups, times the `power` of the whole matrix's scale."""
    scale_2 = _scales_of_groups(parts, of_all, power, shape)
    scales = parts["weight_scale"].float() * scale_2
    return _times_groups(_e2m1(weight, parts[weight], shape), scales)


def _scales_of_groups(parts: Parts, of_all: str, power: int, shape: tuple[int, int]) -> Tensor:
    """What multiplies the scales of groups: [1, 1]. Raises where these do not fit, too."""
    groups = (shape[0], shape[1] // NV_GROUP)
    _require("weight_scale", parts["weight_scale"], (torch.float8_e4m3fn,), groups)
    if parts[of_all].numel() != 1:
        raise Unfit(of_all, f"has shape {list(parts[of_all].shape)}; a matrix has one number")
    return parts[of_all].float().reshape(1, 1).pow(power)


def _int4(parts: Parts, shape: tuple[int, int]) -> Tensor:
    _require_int4(parts, shape)
    packed, columns = parts["weight_packed"], shape[1]
    shifts = torch.arange(0, 4 * _INT4_IN_WORD, 4, device=packed.device, dtype=torch.int32)
    fields = ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(1)[:, :columns]
    return _times_groups((fields - INT4_ZERO).float(), parts["weight_scale"].float())


def _require_int4(parts: Parts, shape: tuple[int, int]) -> None:
    """Raises unless words and scales fit each other and the shape."""
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


# --- as they are shipped -------------------------------------------------------------------------

_IN_NUMBERS = (
    "set weight_format=None, which MoEConfig.from_hf(..., dequantize=True) does, to read it in "
    "numbers"
)


def _hold_blocks(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    weight, of_blocks = parts["weight"], row.parts[1]
    _require_e4m3(weight, shape)
    blocks = tuple(-(-length // BLOCK) for length in shape)
    _require(of_blocks, parts[of_blocks], (*LOADABLE, _EXPONENTS, torch.uint8), blocks)
    if shape[0] // halves % BLOCK != 0 and halves > 1:
        raise Unfit(
            of_blocks,
            f"has a block with rows of gate and of up, as {shape[0] // halves} is no multiple of "
            f"{BLOCK}: {_IN_NUMBERS}",
        )
    return Held(weight, _number(parts[of_blocks]))


def _hold_rows(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    return Held(parts["weight"], _fp8_scale(parts, shape).expand(shape[0]))


def _hold_matrix(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    scale = _fp8_scale(parts, shape)
    if len(scale) > 1:
        raise Unfit(
            "weight_scale",
            f"has a number for each of {len(scale)} rows, and weight_format is 'fp8_tensor': set "
            "weight_format='fp8_channel'",
        )
    return Held(parts["weight"], scale.expand(halves))


def _fp8_scale(parts: Parts, shape: tuple[int, int]) -> Tensor:
    """[1] or [rows], in float32."""
    _require_e4m3(parts["weight"], shape)
    return _of_rows(parts["weight_scale"], shape).float().flatten()


def _require_e4m3(weight: Tensor, shape: tuple[int, int]) -> None:
    if weight.dtype == torch.float8_e5m2:
        raise Unfit(
            "weight", f"is {weight.dtype}, and a layer's is {torch.float8_e4m3fn}: {_IN_NUMBERS}"
        )
    _require("weight", weight, (torch.float8_e4m3fn,), shape)


def _hold_mxfp4(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    if row.name == "mxfp4":
        pairs, scale = _pairs_of_blocks(parts, shape), parts["scales"]
    else:
        pairs, scale = parts["weight"], parts["scale"]
        _require("weight", pairs, (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
        groups = (shape[0], shape[1] // MX_GROUP)
        _require("scale", scale, (_EXPONENTS, torch.uint8), groups)
    return Held(_bytes_of(pairs), _bytes_of(scale))


def _hold_nvfp4(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    weight, of_groups, of_all = row.parts
    scale_2 = _scales_of_groups(parts, of_all, -1 if row.name == "nvfp4_packed" else 1, shape)
    _require(weight, parts[weight], (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
    return Held(_bytes_of(parts[weight]), parts[of_groups], scale_2.flatten().expand(halves))


def _hold_int4(row: Format, parts: Parts, shape: tuple[int, int], halves: int) -> Held:
    _require_int4(parts, shape)
    scale = parts["weight_scale"]
    group = shape[1] // scale.shape[1]
    if group != INT4_GROUP or scale.dtype != torch.bfloat16:
        raise Unfit(
            "weight_scale",
            f"is {scale.dtype} and has a number for {group} columns, and a layer's is "
            f"{torch.bfloat16} for {INT4_GROUP}: {_IN_NUMBERS}",
        )
    # A word's first code is in its lowest bits, which are those of its first byte.
    return Held(parts["weight_packed"].contiguous().view(torch.uint8), scale)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


_HOLD: Mapping[str, Callable[[Format, Parts, tuple[int, int], int], Held]] = {
    "fp8_block128": _hold_blocks,
    "fp8_channel": _hold_rows,
    "fp8_tensor": _hold_matrix,
    "mxfp4": _hold_mxfp4,
    "nvfp4": _hold_nvfp4,
    "int4_group32": _hold_int4,
}

PLAIN = Format("plain", "unquantised", ("weight",), _plain)
FORMATS: tuple[Format, ...] = (
    PLAIN,
    Format(
        "fp8_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK} (weight_scale_inv)",
        ("weight", "weight_scale_inv"),
        _fp8_blocks,
        ("activation_scale", "input_scale"),
        held_as=("fp8_block128",),
        grains={"weight": (1, 1), "weight_scale_inv": (BLOCK, BLOCK)},
    ),
    Format(
        "scaled_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK}, or FP4 in groups of {MX_GROUP} (scale)",
        ("weight", "scale"),
        _scaled_blocks,
        held_as=("fp8_block128", "mxfp4"),
    ),
    Format(
        "fp8",
        "FP8 with a scale a row or a matrix (weight_scale)",
        ("weight", "weight_scale"),
        _fp8,
        ("input_scale",),
        held_as=("fp8_channel", "fp8_tensor"),
        grains={"weight": (1, 1), "weight_scale": (1, 0)},
    ),
    Format(
        "mxfp4",
        "MXFP4 (blocks and scales)",
        ("blocks", "scales"),
        _mxfp4,
        held_as=("mxfp4",),
        grains={"blocks": (1, MX_GROUP), "scales": (1, MX_GROUP)},
    ),
    Format(
        "nvfp4",
        "NVFP4 (weight_scale and weight_scale_2)",
        ("weight", "weight_scale", "weight_scale_2"),
        _nvfp4,
        ("input_scale",),
        held_as=("nvfp4",),
        grains={"weight": (1, 2), "weight_scale": (1, NV_GROUP), "weight_scale_2": (0, 0)},
    ),
    Format(
        "nvfp4_packed",
        "NVFP4 (weight_packed and weight_global_scale)",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        _nvfp4_packed,
        ("input_global_scale",),
        held_as=("nvfp4",),
        grains={
            "weight_packed": (1, 2),
            "weight_scale": (1, NV_GROUP),
            "weight_global_scale": (0, 0),
        },
    ),
    Format(
        "int4",
        "int4 (weight_packed and weight_scale)",
        ("weight_packed", "weight_scale", "weight_shape"),
        _int4,
        held_as=("int4_group32",),
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
    return exponent_value(scale) if scale.dtype == torch.uint8 else scale.float()


def _e2m1(part: str, pairs: Tensor, shape: tuple[int, int]) -> Tensor:
    """Numbers of 4 bits, two a byte with the first in the low half, in float32."""
    _require(part, pairs, (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
    return e2m1_value(pairs.contiguous().view(torch.uint8))


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
