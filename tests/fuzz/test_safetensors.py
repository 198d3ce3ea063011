# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of every kind of wrongness: tensors, or an error that names file or tensor.

moeos has no native code that parses them: the safetensors package does, behind `SafetensorsFile`.
A checkpoint in several files has an index, which moeos does not read: a run takes one file, so no
path in an index is ever followed.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moeos.checkpoints import load_block
from moeos.checkpoints.files import SafetensorsFile
from moeos.cli.tensors import read_rows
from moeos.config.config import MoEConfig
from tests.fuzz.outcomes import examples, make_no_file, read_well

HIDDEN = 8
CFG = MoEConfig(hidden=HIDDEN, intermediate=8, experts=2, top_k=1, dtype=torch.float32)
SHAPES = {"x": [4, HIDDEN], "gate.weight": [2, HIDDEN]} | {
    f"experts.{expert}.{name}.weight": [8, 8] for expert in (0, 1) for name in ("w1", "w2", "w3")
}
DTYPES = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"),
    *("I64", "I32", "I8", "U64", "U16", "BOOL", "C64", "Q4", "", "f32", "\n"),
)
LENGTHS = (
    0,
    1,
    4,
    8,
    -1,
    -(2**63),
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**200,
)

Header = dict[str, Any]


def header_of(shapes: dict[str, list[int]]) -> tuple[Header, bytes]:
    """A right header of float32 tensors, and as many bytes as it needs."""
    header: Header = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    return header, bytes(end)


def file_of(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    """A file with this header, which says that the header has `length` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: str, shape: list[int], size: int) -> bytes:
    """A file of one tensor x."""
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    return file_of(header, bytes(size))


lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(-100, 3000))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), lengths, st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A right file in which up to three things are changed, and perhaps bytes are lost."""
    header, data = header_of(SHAPES)
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        name = draw(st.sampled_from(sorted(SHAPES)))
        kind = draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "entry", "gone"]))
        if kind in ("dtype", "shape", "data_offsets"):
            new: Any = {
                "dtype": st.sampled_from(DTYPES),
                "shape": st.lists(lengths, max_size=4),
                "data_offsets": st.lists(lengths, min_size=1, max_size=3),
            }
            if isinstance(header.get(name), dict):
                header[name] = header[name] | {kind: draw(st.one_of(new[kind], json_values))}
        elif kind == "name":
            header[draw(st.sampled_from(["__metadata__", "experts.0.w4.weight", "a\nb", ""]))] = (
                draw(json_values)
            )
        elif kind == "entry":
            header[name] = draw(json_values)
        else:
            header.pop(name, None)
    text = json.dumps(header).encode()
    length = draw(st.sampled_from([None] * 20 + [0, 1, len(text) - 1, 2**63, 2**64 - 1]))
    content = file_of(text, data, length)
    whole = draw(st.sampled_from([True] * 4 + [False]))
    return content if whole else content[: draw(st.integers(0, len(content)))]


def read_all(path: Path, kind: str) -> None:
    """Reads the file in each way that a run does; all end well."""

    def every_tensor() -> None:
        for tensor in SafetensorsFile(path).values():
            assert tensor.numel() * tensor.element_size() <= path.stat().st_size

    read_well(f"{kind}, all tensors", every_tensor, [str(path)])
    read_well(f"{kind}, rows", lambda: read_rows(path, HIDDEN, 1, 2), [str(path)])
    # What a block lacks is told by its tensors' names.
    read_well(
        f"{kind}, a block",
        lambda: load_block(CFG, SafetensorsFile(path), "", 0, 1, ["x"]),
        [str(path), "gate.", "experts.", "prefix is", "is not used by the layer"],
    )


@examples(60)
@given(content=damaged())
@example(content=b"")
@example(content=b"\0" * 8)
@example(content=file_of(b"{}", b""))
@example(content=file_of(b"{", b"", 2**63))
@example(content=file_of(b'{"x":' + b"[" * 100_000, b""))
@example(content=one("F32", [0, 2**63], 0))
@example(content=one("F32", [2**62, 0], 0))
@example(content=one("F32", [2**40, 2**40], 64))
@example(content=one("F32", [1] * 3000, 4))
@example(content=one("F32", [0, HIDDEN], 0))
@example(content=one("F4", [4, HIDDEN], 16))
@example(content=one("F6_E2M3", [4, HIDDEN], 24))
@example(content=one("F8_E8M0", [4, HIDDEN], 32))
@example(
    content=file_of(
        b'{"x":{"dtype":"F32","shape":[1,8],"data_offsets":[0,32]},'
        b'"x":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}}',
        bytes(64),
    )
)
def test_a_damaged_file_is_read_or_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(content)
    read_all(path, "safetensors damaged")


def test_a_file_that_ends_early_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    whole = file_of(*header_of(SHAPES))
    path.write_bytes(whole)
    assert read_rows(path, HIDDEN, 0, 1).shape == (4, HIDDEN)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"block\.safetensors: not a safetensors file"):
        SafetensorsFile(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "missing", "endless device", "memory"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = make_no_file(tmp_path / "block.safetensors", kind)
    read_all(path, "safetensors no files")
    with pytest.raises((OSError, ValueError), match=str(path)):
        SafetensorsFile(path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "absent", ".", "loop"])
def test_an_index_is_refused_and_what_it_names_is_not_opened(
    tmp_path: Path, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.safetensors").write_bytes(file_of(*header_of(SHAPES)))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, shard)}))
    opened: list[str] = []
    open_file = os.open

    def note(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr("moeos.system.files.os.open", note)
    read_all(index, "safetensors indices")
    assert set(opened) == {str(index)}
