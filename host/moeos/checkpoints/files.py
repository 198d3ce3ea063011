# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files, read only as far as they are needed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeos.system import tensor_memory
from moeos.system.files import open_regular

INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 1 << 28
"""The largest index that is read: a name of 100 bytes for each of two million tensors."""

Tensors = Mapping[str, Tensor]


@runtime_checkable
class ByParts(Protocol):
    """Tensors by name of which a part can be read alone."""

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without its values."""

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """What lies between two numbers of each of a tensor's first dimensions."""


def shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    """A tensor's shape; of a file nothing else is read."""
    if isinstance(tensors, ByParts):
        return tensors.shape_of(name)
    return tuple(tensor_memory.require_dense(name, tensors[name]).shape)


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
        return self._read(name, lambda: self.file.get_tensor(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without its values."""
        if name not in self._names:
            raise KeyError(name)
        return tuple(self.file.get_slice(name).get_shape())

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """What lies between two numbers of each of a tensor's first dimensions; no more is read."""
        return self._read(name, lambda: self.file.get_slice(name)[index])

    def _read(self, name: str, how: Callable[[], Tensor]) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            return how()
        except (SafetensorError, RuntimeError, TypeError) as error:
            # Its dtype or a length is none of PyTorch's: the error's first line says which.
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} in {self._path} cannot be read: {reason}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Shards(Mapping[str, Tensor]):
    """The tensors of several files, by name; a file is opened when the first of its own is asked
    for.

    Args:
        files: the file that has each tensor.

    Raises:
        OSError: a file that is asked for is not there.
        ValueError: it is not a safetensors file, or lacks the tensor.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, SafetensorsFile] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of(name)[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without its values."""
        return self._file_of(name).shape_of(name)

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """What lies between two numbers of each of a tensor's first dimensions; no more is read."""
        return self._file_of(name).part(name, index)

    def _file_of(self, name: str) -> SafetensorsFile:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = SafetensorsFile(path)
        if name not in self._open[path]:
            raise ValueError(f"{path} lacks {name}, which its index says it has")
        return self._open[path]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file, of the files of an index, or of those of a folder.

    A folder's index decides which of its files count; without one they all do.

    Raises:
        FileNotFoundError: there is no such file or folder; says what may be named.
        OSError: it cannot be read.
        ValueError: it is none of these; a folder has several indices, no file, or a name twice.
    """
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT,
            f"{os.strerror(errno.ENOENT)}: name a folder with safetensors files, an index of such "
            "or a file; nothing is downloaded",
            str(path),
        )
    if path.is_dir():
        return _of_folder(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _of_index(path)
    return SafetensorsFile(path)


def _of_folder(folder: Path) -> Tensors:
    indices = sorted(folder.glob(f"*.safetensors{INDEX_SUFFIX}"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise ValueError(f"{folder} has several indices, {names}: name one of them")
    if indices:
        return _of_index(indices[0])
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in SafetensorsFile(path):
            if name in files:
                raise ValueError(f"{name} is in {files[name]} and in {path}: name one of them")
            files[name] = path
    if not files:
        raise ValueError(f"{folder} has no *.safetensors file with a tensor")
    return Shards(files)


def _of_index(path: Path) -> Tensors:
    with open_regular(path) as file:
        content = file.read(MAX_INDEX_BYTES + 1)
    if len(content) > MAX_INDEX_BYTES:
        raise ValueError(f"{path}: larger than {MAX_INDEX_BYTES} bytes, the most of an index")
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not the index of safetensors files: {error}") from error
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path}: not the index of safetensors files: it has no weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{path}: {name} is in {shard!r}, which is no file's name in its folder"
            )
    return Shards({name: path.parent / shard for name, shard in shards.items()})
