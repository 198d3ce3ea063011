"""Tensors from safetensors files, read only as far as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of a file by name; each is read when it is looked up, and never kept.

    Attributes:
        file: what reads them.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb"):  # for its OSError, which names the file
            pass
        try:
            self.file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        self._names = dict.fromkeys(self.file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self.file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_rows(path: Path, hidden: int, rank: int, ranks: int) -> Tensor:
    """This rank's piece of the tensor "x" [tokens, hidden] in a file, in the file's dtype.

    Pieces are consecutive, in rank order, and differ by one row at most.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a safetensors file, or has no such floating point tensor.
    """
    names = SafetensorsFile(path)
    if "x" not in names:
        raise ValueError(f"{path} has no tensor 'x'; it has {', '.join(names) or 'none'}")
    every = names.file.get_slice("x")
    shape = every.get_shape()
    if len(shape) != 2 or shape[1] != hidden:
        raise ValueError(f"x in {path} has shape {shape}; it must be [tokens, {hidden}]")
    rows: Tensor = every[slice(*piece(shape[0], rank, ranks))]
    if not rows.is_floating_point():
        raise ValueError(f"x in {path} has dtype {rows.dtype}; it must be a floating point type")
    return rows


def piece(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's piece of `length` things begins and ends."""
    return length * rank // ranks, length * (rank + 1) // ranks
