# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: tensors are read when asked for, rows in pieces, and bad files are named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeos.checkpoints.files import SafetensorsFile, open_tensors
from moeos.cli.tensors import piece, read_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file(
        {"x": torch.arange(40.0).view(10, 4), "words": torch.zeros(3, dtype=torch.int64)}, path
    )
    return path


def test_a_file_is_a_mapping_from_names_to_tensors(rows: Path) -> None:
    tensors = SafetensorsFile(rows)
    assert sorted(tensors) == ["words", "x"]
    assert len(tensors) == 2
    assert "y" not in tensors
    assert torch.equal(tensors["x"], torch.arange(40.0).view(10, 4))
    with pytest.raises(KeyError, match="y"):
        tensors["y"]


def test_the_ranks_pieces_are_all_rows_in_order(rows: Path) -> None:
    pieces = [read_rows(rows, 4, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(pieces), torch.arange(40.0).view(10, 4))
    assert [len(part) for part in pieces] == [3, 3, 4]


def test_more_ranks_than_rows_leave_some_without() -> None:
    assert [piece(2, rank, 4) for rank in range(4)] == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_a_missing_file_is_an_os_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"not at all" * 10)
    with pytest.raises(ValueError, match="not a safetensors file"):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_rows_of_another_width_are_refused(rows: Path) -> None:
    with pytest.raises(ValueError, match=r"has shape \[10, 4\]; it must be \[tokens, 8\]"):
        read_rows(rows, 8, 0, 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"y": torch.zeros(2, 4)}, "has no tensor 'x'; it has y"),
        ({"x": torch.zeros(2, 4, dtype=torch.int32)}, "has dtype I32; it must be one of F64"),
    ],
)
def test_a_file_without_tokens_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "x.safetensors", 4, 0, 1)


def test_a_shard_is_opened_when_a_tensor_of_it_is_looked_up(rows: Path) -> None:
    index = rows.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"x": rows.name, "y": "absent.safetensors"}}))
    tensors = open_tensors(index)
    assert sorted(tensors) == ["x", "y"]
    assert torch.equal(tensors["x"], torch.arange(40.0).view(10, 4))
    with pytest.raises(FileNotFoundError, match="absent"):
        tensors["y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "not the index of safetensors files"),
        ("[" * 100_000, "not the index of safetensors files"),
        ("{}", "it has no weight_map"),
        ('{"weight_map": {"x": "../x.safetensors"}}', "which is no file's name in its folder"),
        ('{"weight_map": {"x": 3}}', "which is no file's name in its folder"),
    ],
    ids=["no-json", "deep", "no-map", "elsewhere", "no-name"],
)
def test_a_bad_index_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)


def test_an_index_that_names_the_wrong_file_is_told(rows: Path) -> None:
    index = rows.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"y": rows.name}}))
    with pytest.raises(ValueError, match="lacks y, which its index says it has"):
        open_tensors(index)["y"]


def test_a_folder_without_one_answer_is_refused(rows: Path) -> None:
    save_file({"x": torch.zeros(1)}, rows.with_name("z.safetensors"))
    with pytest.raises(ValueError, match=r"x is in .*x\.safetensors and in .*z\.safetensors"):
        open_tensors(rows.parent)
    for name in ("a", "b"):
        rows.with_name(f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"several indices, a\.safetensors\.index\.json, b"):
        open_tensors(rows.parent)
    (rows.parent / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        open_tensors(rows.parent / "empty")


def test_a_name_of_a_hub_is_told_that_nothing_is_downloaded() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing is downloaded.*'Qwen/Qwen3-30B-A3B'"):
        open_tensors(Path("Qwen/Qwen3-30B-A3B"))
