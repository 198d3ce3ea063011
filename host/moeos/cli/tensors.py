# SPDX-License-Identifier: Apache-2.0
"""Rows of safetensors files, of which each rank reads its piece; and files of them, written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from moeos.checkpoints.files import SafetensorsFile
from moeos.system.files import replace

_FLOATS = ("F64", "F32", "F16", "BF16")


def read_rows(path: Path, hidden: int, rank: int, ranks: int) -> Tensor:
    """This rank's piece of the tensor "x" [tokens, hidden] in a file, in the file's dtype.

    Pieces are consecutive, in rank order, and differ by one row at most.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a safetensors file, or has no such tensor of floating point numbers.
    """
    names = SafetensorsFile(path)
    if "x" not in names:
        raise ValueError(f"{path} has no tensor 'x'; it has {', '.join(names) or 'none'}")
    every = names.file.get_slice("x")
    shape = every.get_shape()
    if len(shape) != 2 or shape[1] != hidden:
        raise ValueError(f"x in {path} has shape {shape}; it must be [tokens, {hidden}]")
    if every.get_dtype() not in _FLOATS:
        raise ValueError(
            f"x in {path} has dtype {every.get_dtype()}; it must be one of {', '.join(_FLOATS)}"
        )
    rows: Tensor = every[slice(*piece(shape[0], rank, ranks))]
    return rows


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file. Raises `OSError`, which names it.

    Not by `save_file`, which would put a file in the place of a link, a pipe or a device.
    """
    replace(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def piece(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's piece of `length` things begins and ends."""
    return length * rank // ranks, length * (rank + 1) // ranks
