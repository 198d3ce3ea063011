# SPDX-License-Identifier: Apache-2.0
"""The formats that models ship their experts' matrices in, and what each means in numbers.

A matrix is stored as one tensor or several parts, whose names differ in their ends. A row of
`FORMATS` names the parts; its function makes the matrix from them. This file must not depend on
models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeos.config.element_formats import (
    BLOCK,
    INT4_GROUP,
    MX_GROUP,
    NV_GROUP,
    WeightFormat,
    e2m1_value,
    exponent_value,
)
from moeos.config.hf.quantization_configs import INTEGER_BITS

LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HOW_TO_DEQUANTISE = (
    f"dequantise it to one of {', '.join(map(str, LOADABLE))}, or keep beside it the scales that "
    "it was stored with"
)
_DAMAGED = "the file is damaged: fetch it again, or quantize the model again"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.uint8, torch.int8)
_EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.uint8)  # PyTorch has it since 2.7
_PAIRS = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # and this since 2.8
_WORD_BITS, _INT4_BITS = 32, 4
Parts = Mapping[str, Tensor]


class Unfit(Exception):
    """A part of a matrix is not what its format says.

    Attributes:
        part: the end of its name.
        reason: the error text after the name.
        instead: the format with which a layer takes the matrix, None for numbers; () where it takes
            it with none.
    """

    def __init__(
        self, part: str, reason: str, instead: WeightFormat | tuple[()] | None = ()
    ) -> None:
        super().__init__(f"{part} {reason}")
        self.part = part
        self.reason = reason
        self.instead = instead


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """One way to store a matrix.

    Attributes:
        name: of the row.
        said: what a user calls it.
        parts: the ends of the names of what it needs.
        dequantise: these, and the matrix's shape [rows, columns], to the matrix in float32, or in
            the dtype of what is not quantised. Raises `Unfit`.
        unused: ends of names that may stand next to them: of what a matrix does not need, such as
            the scales of activations.
        held_as: the formats of a layer that can be it as it is shipped; see `hold`.
        grains: of each part the rows and columns of the matrix for which one element stands, 0 for
            all; of several the first that fits the part's shape. None where no more than the part's
            name and shape does not tell.
    """

    name: str
    said: str
    parts: tuple[str, ...]
    dequantise: Callable[[Parts, tuple[int, int]], Tensor]
    unused: tuple[str, ...] = ()
    held_as: tuple[WeightFormat, ...] = ()
    grains: Mapping[str, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)

    @property
    def scales(self) -> tuple[str, ...]:
        """The parts that numbers are multiplied by."""
        return tuple(part for part in self.parts if "scale" in part)


class HeldMatrix(NamedTuple):
    """A matrix as a layer holds it (see `element_formats`), or several, one below another."""

    codes: Tensor
    scale: Tensor
    scale_2: Tensor | None = None


def hold(
    row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int, wanted: WeightFormat
) -> HeldMatrix:
    """A matrix [rows, columns] as it is shipped, in a format of `row.held_as`. Raises `Unfit`.

    `halves`: matrices that it is made of, gate and up, or 1.
    """
    return _HOLD[wanted](row, parts, shape, halves)


def require_finite(row: StoredFormat, parts: Parts) -> None:
    """Raises `Unfit` for a NaN or an infinity among a matrix's scales, and for what becomes one."""
    for name in row.scales:
        scale = parts[name]
        bad = ~_number(scale).isfinite()
        if name == "weight_global_scale":  # whose reciprocal is taken
            bad |= ~scale.float().reciprocal().isfinite()
        if bad.any():
            first = bad.nonzero()[0].tolist()
            raise Unfit(
                name,
                f"has {int(bad.sum())} of {bad.numel()} scales that are no finite numbers, the "
                f"first {_number(scale)[tuple(first)].item()} at {first}; {_DAMAGED}",
            )


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


def _codes_of_8_bits(parts: Parts, shape: tuple[int, int]) -> Tensor:
    weight = parts["weight"]
    _require("weight", weight, (*_FP8, torch.int8), shape)
    numbers, scales = weight.float(), _everywhere("weight_scale", parts["weight_scale"], shape)
    if "weight_zero_point" in parts:
        numbers = numbers - _everywhere("weight_zero_point", parts["weight_zero_point"], shape)
    return numbers * scales


def _everywhere(part: str, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """The factor of a matrix, or the offset subtracted from it, in float32: [rows, columns], or
    what expands to that. `scale`: a number a matrix, a row, a group of a row's columns, or a block.
    """
    rows, columns = shape
    grid = _grid(part, scale, shape)
    values = (exponent_value(grid) if _is_exponent(part, grid) else grid.float()).view(grid.shape)
    if _is_of_blocks(grid, shape):
        values = values.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    elif grid.shape[1] > 1:
        values = values.repeat_interleave(columns // grid.shape[1], 1)
    return values


def _grid(part: str, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """[1, 1], [rows, 1], [rows, groups] or [blocks of rows, blocks of columns]."""
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    rows, columns = shape
    fits = scale.dim() == 2 and scale.shape[1] > 0
    if fits and not _is_of_blocks(scale, shape):
        fits = scale.shape[0] in (1, rows) and columns % scale.shape[1] == 0
        fits = fits and (len(scale) > 1 or scale.shape[1] == 1)
    if not fits:
        blocks = [-(-length // BLOCK) for length in shape]
        raise Unfit(
            part,
            f"has shape {list(scale.shape)}; this config needs [1] for the matrix, [{rows}, 1] for "
            f"its rows, [{rows}, groups] with groups that divide {columns}, or {blocks} for blocks "
            f"of {BLOCK}x{BLOCK}",
        )
    _require(part, scale, (*LOADABLE, torch.int8, torch.uint8, _EXPONENTS), tuple(scale.shape))
    return scale


def _is_exponent(part: str, grid: Tensor) -> bool:
    return grid.dtype == torch.uint8 and "scale" in part


def _is_of_blocks(grid: Tensor, shape: tuple[int, int]) -> bool:
    blocks = tuple(-(-length // BLOCK) for length in shape)
    return tuple(grid.shape) == blocks and blocks != (shape[0], 1)


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
    """The factor of the scales of groups: [1, 1]. Also raises where these do not fit."""
    groups = (shape[0], shape[1] // NV_GROUP)
    _require("weight_scale", parts["weight_scale"], (torch.float8_e4m3fn,), groups)
    if parts[of_all].numel() != 1:
        raise Unfit(of_all, f"has shape {list(parts[of_all].shape)}; a matrix has one number")
    return parts[of_all].float().reshape(1, 1).pow(power)


def _mxfp4_packed(parts: Parts, shape: tuple[int, int]) -> Tensor:
    _require_mxfp4_packed(parts, shape)
    scales = _number(parts["weight_scale"])
    return _times_groups(_e2m1("weight_packed", parts["weight_packed"], shape), scales)


def _require_mxfp4_packed(parts: Parts, shape: tuple[int, int]) -> None:
    rows, columns = shape
    _require("weight_packed", parts["weight_packed"], (*_BYTES, _PAIRS), (rows, columns // 2))
    groups = (rows, columns // MX_GROUP)
    _require("weight_scale", parts["weight_scale"], (torch.uint8, _EXPONENTS), groups)


def _integers(parts: Parts, shape: tuple[int, int]) -> Tensor:
    bits = _require_integers(parts, shape)
    numbers = _unpacked(parts["weight_packed"], bits, shape[1])
    scale = parts["weight_scale"]
    if "weight_zero_point" in parts:
        words = parts["weight_zero_point"]
        wanted = (-(-shape[0] * bits // _WORD_BITS), scale.shape[1])
        _require("weight_zero_point", words, (torch.int32,), wanted)
        zeros = _unpacked(words.mT, bits, shape[0]).mT
        numbers = numbers - zeros.repeat_interleave(shape[1] // scale.shape[1], 1)
    return _times_groups(numbers, scale.float())


def _unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Signed integers [rows, columns] in float32, of words [rows, words], in which they lie
    from the lowest bits on with half of their range added.
    """
    shifts = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
    fields = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)[:, :columns]
    numbers: Tensor = (fields - 2 ** (bits - 1)).float()
    return numbers


def _require_integers(parts: Parts, shape: tuple[int, int]) -> int:
    """Bits of an integer; raises unless words and scales fit each other and the shape."""
    rows, columns = shape
    told = parts.get("weight_shape")
    if told is not None and tuple(told.tolist()) != shape:
        raise Unfit("weight_shape", f"is {told.tolist()}; this config needs {list(shape)}")
    packed = parts["weight_packed"]
    words = {-(-columns * bits // _WORD_BITS): bits for bits in INTEGER_BITS}
    bits = words.get(packed.shape[-1] if packed.dim() == 2 else 0, _INT4_BITS)
    _require("weight_packed", packed, (torch.int32,), (rows, -(-columns * bits // _WORD_BITS)))
    scale = parts["weight_scale"]
    if scale.dim() != 2 or len(scale) != rows or scale.shape[1] == 0 or columns % scale.shape[1]:
        raise Unfit(
            "weight_scale",
            f"has shape {list(scale.shape)}; it must be [{rows}, groups], with groups that divide "
            f"{columns}",
        )
    _require("weight_scale", scale, LOADABLE, tuple(scale.shape))
    return bits


# --- as they are shipped -------------------------------------------------------------------------


def _hold_blocks(
    row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int
) -> HeldMatrix:
    weight, of_blocks = parts["weight"], row.parts[1]
    _require_e4m3(weight, shape)
    blocks = tuple(-(-length // BLOCK) for length in shape)
    if row.name == "codes_of_8_bits":
        _refuse_other_grid(_grid(of_blocks, parts[of_blocks], shape), shape, "fp8_block128")
    _require(of_blocks, parts[of_blocks], (*LOADABLE, _EXPONENTS, torch.uint8), blocks)
    if shape[0] // halves % BLOCK != 0 and halves > 1:
        raise Unfit(
            of_blocks,
            f"has a block with rows of gate and of up, as {shape[0] // halves} is no multiple of "
            f"{BLOCK}",
            None,
        )
    return HeldMatrix(weight, _number(parts[of_blocks]).view(blocks))


def _hold_rows(row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int) -> HeldMatrix:
    return HeldMatrix(parts["weight"], _fp8_scale(parts, shape, "fp8_channel").expand(shape[0]))


def _hold_matrix(
    row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int
) -> HeldMatrix:
    return HeldMatrix(parts["weight"], _fp8_scale(parts, shape, "fp8_tensor").expand(halves))


def _fp8_scale(parts: Parts, shape: tuple[int, int], wanted: WeightFormat) -> Tensor:
    """[1] or [rows], in float32."""
    _require_e4m3(parts["weight"], shape)
    grid = _grid("weight_scale", parts["weight_scale"], shape)
    _refuse_other_grid(grid, shape, wanted)
    return _number(grid).flatten()


def _refuse_other_grid(grid: Tensor, shape: tuple[int, int], wanted: WeightFormat) -> None:
    """Raises for scales that a format has differently."""
    own: WeightFormat | None
    if grid.numel() == 1:
        own, each = "fp8_tensor", "the matrix"
    elif _is_of_blocks(grid, shape):
        own, each = "fp8_block128", f"each block of {BLOCK}x{BLOCK}"
    elif grid.shape[1] == 1:
        own, each = "fp8_channel", f"each of {shape[0]} rows"
    else:
        own, each = None, f"{shape[1] // grid.shape[1]} columns of a row"
    of_one = own == "fp8_tensor" and (
        wanted == "fp8_channel" or max(shape) <= BLOCK  # one block
    )
    if own != wanted and not of_one:
        raise Unfit("weight_scale", f"has a number for {each}, which is not {wanted!r}", own)


def _require_e4m3(weight: Tensor, shape: tuple[int, int]) -> None:
    if weight.dtype in (torch.float8_e5m2, torch.int8):
        raise Unfit("weight", f"is {weight.dtype}, and a layer's is {torch.float8_e4m3fn}", None)
    _require("weight", weight, (torch.float8_e4m3fn,), shape)


def _hold_mxfp4(row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int) -> HeldMatrix:
    if row.name == "mxfp4":
        pairs, scale = _pairs_of_blocks(parts, shape), parts["scales"]
    elif row.name == "mxfp4_packed":
        _require_mxfp4_packed(parts, shape)
        pairs, scale = parts["weight_packed"], parts["weight_scale"]
    else:
        pairs, scale = parts["weight"], parts["scale"]
        _require("weight", pairs, (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
        groups = (shape[0], shape[1] // MX_GROUP)
        _require("scale", scale, (_EXPONENTS, torch.uint8), groups)
    return HeldMatrix(_bytes_of(pairs), _bytes_of(scale))


def _hold_nvfp4(row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int) -> HeldMatrix:
    weight, of_groups, of_all = row.parts
    scale_2 = _scales_of_groups(parts, of_all, -1 if row.name == "nvfp4_packed" else 1, shape)
    _require(weight, parts[weight], (*_BYTES, _PAIRS), (shape[0], shape[1] // 2))
    return HeldMatrix(_bytes_of(parts[weight]), parts[of_groups], scale_2.flatten().expand(halves))


def _hold_int4(row: StoredFormat, parts: Parts, shape: tuple[int, int], halves: int) -> HeldMatrix:
    bits = _require_integers(parts, shape)
    if bits != _INT4_BITS:
        said = f"has integers of {bits} bits, and a layer's are of {_INT4_BITS}"
        raise Unfit("weight_packed", said, None)
    scale = parts["weight_scale"]
    group = shape[1] // scale.shape[1]
    if group != INT4_GROUP or scale.dtype != torch.bfloat16:
        raise Unfit(
            "weight_scale",
            f"is {scale.dtype} and has a number for {group} columns, and a layer's is "
            f"{torch.bfloat16} for {INT4_GROUP}",
            None,
        )
    # A word's first code is in its lowest bits, which are those of its first byte.
    return HeldMatrix(parts["weight_packed"].contiguous().view(torch.uint8), scale)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


_HOLD: Mapping[str, Callable[[StoredFormat, Parts, tuple[int, int], int], HeldMatrix]] = {
    "fp8_block128": _hold_blocks,
    "fp8_channel": _hold_rows,
    "fp8_tensor": _hold_matrix,
    "mxfp4": _hold_mxfp4,
    "nvfp4": _hold_nvfp4,
    "int4_group32": _hold_int4,
}

_SCALE_GRAINS = ((0, 0), (1, 0), (BLOCK, BLOCK))
PLAIN = StoredFormat("plain", "unquantised", ("weight",), _plain)
FORMATS: tuple[StoredFormat, ...] = (
    PLAIN,
    StoredFormat(
        "fp8_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK} (weight_scale_inv)",
        ("weight", "weight_scale_inv"),
        _fp8_blocks,
        ("activation_scale", "input_scale"),
        held_as=("fp8_block128",),
        grains={"weight": ((1, 1),), "weight_scale_inv": ((BLOCK, BLOCK),)},
    ),
    StoredFormat(
        "scaled_blocks",
        f"FP8 in blocks of {BLOCK}x{BLOCK}, or FP4 in groups of {MX_GROUP} (scale)",
        ("weight", "scale"),
        _scaled_blocks,
        held_as=("fp8_block128", "mxfp4"),
    ),
    StoredFormat(
        "codes_of_8_bits",
        "FP8 or int8 with a scale a matrix, a row, a group or a block (weight_scale)",
        ("weight", "weight_scale"),
        _codes_of_8_bits,
        ("input_scale",),
        held_as=("fp8_channel", "fp8_tensor", "fp8_block128"),
        grains={"weight": ((1, 1),), "weight_scale": _SCALE_GRAINS},
    ),
    StoredFormat(
        "int8_asymmetric",
        "int8 with a zero (weight_scale and weight_zero_point)",
        ("weight", "weight_scale", "weight_zero_point"),
        _codes_of_8_bits,
        ("input_scale", "input_zero_point"),
        grains={
            "weight": ((1, 1),),
            "weight_scale": _SCALE_GRAINS,
            "weight_zero_point": _SCALE_GRAINS,
        },
    ),
    StoredFormat(
        "mxfp4",
        "MXFP4 (blocks and scales)",
        ("blocks", "scales"),
        _mxfp4,
        held_as=("mxfp4",),
        grains={"blocks": ((1, MX_GROUP),), "scales": ((1, MX_GROUP),)},
    ),
    StoredFormat(
        "nvfp4",
        "NVFP4 (weight_scale and weight_scale_2)",
        ("weight", "weight_scale", "weight_scale_2"),
        _nvfp4,
        ("input_scale",),
        held_as=("nvfp4",),
        grains={
            "weight": ((1, 2),),
            "weight_scale": ((1, NV_GROUP),),
            "weight_scale_2": ((0, 0),),
        },
    ),
    StoredFormat(
        "nvfp4_packed",
        "NVFP4 (weight_packed and weight_global_scale)",
        ("weight_packed", "weight_scale", "weight_global_scale"),
        _nvfp4_packed,
        ("input_global_scale",),
        held_as=("nvfp4",),
        grains={
            "weight_packed": ((1, 2),),
            "weight_scale": ((1, NV_GROUP),),
            "weight_global_scale": ((0, 0),),
        },
    ),
    StoredFormat(
        "mxfp4_packed",
        "MXFP4 (weight_packed and weight_scale)",
        ("weight_packed", "weight_scale"),
        _mxfp4_packed,
        held_as=("mxfp4",),
        grains={"weight_packed": ((1, 2),), "weight_scale": ((1, MX_GROUP),)},
    ),
    StoredFormat(
        "integers",
        "integers of 4 or 8 bits in words (weight_packed, weight_scale and weight_shape)",
        ("weight_packed", "weight_scale", "weight_shape"),
        _integers,
        held_as=("int4_group32",),
    ),
    StoredFormat(
        "integers_asymmetric",
        "integers of 4 or 8 bits in words with a zero (weight_packed and weight_zero_point)",
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
        _integers,
    ),
)
BY_NAME = {row.name: row for row in FORMATS}


def of_parts(found: Sequence[str], allowed: Sequence[str]) -> StoredFormat | None:
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


def require_format(shown: str, found: Sequence[str], allowed: Sequence[str]) -> StoredFormat:
    """The format that `of_parts` finds for at least one part, the first of them called `shown`;
    raises `ValueError` where there is none.
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
