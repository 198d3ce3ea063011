"""Tensors from safetensors files, read only as far as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeos.files import open_regular

_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of a file by name; each is read when it is looked up, and never kept.

    Attributes:
        file: what reads them.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a safetensors file, or a tensor that is looked up is of a kind that
            PyTorch does not have.
    """

    def __init__(self, path: Path) -> None:
        open_regular(path).close()  # for its errors, which name the file
        self._path = path
        try:
            self.file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:  # OSError: it cannot be mapped
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        self._names = dict.fromkeys(self.file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self.file.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError) as error:
            # Its dtype or a length is none of PyTorch's: the error's first line says which.
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} in {self._path} cannot be read: {reason}") from error
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


def piece(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's piece of `length` things begins and ends."""
    return length * rank // ranks, length * (rank + 1) // ranks
