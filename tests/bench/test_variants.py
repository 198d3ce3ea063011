# SPDX-License-Identifier: Apache-2.0
"""`bench.studies.variants` without a GPU: what is compared, and what is noted of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.studies.variants import differences, parse


def tree(folder: Path, text: str) -> Path:
    (folder / "kernels").mkdir(parents=True)
    (folder / "runtime").mkdir()
    (folder / "kernels" / "same.cuh").write_text("the same\n")
    (folder / "runtime" / "base.hpp").write_text(text)
    return folder


def test_variants_are_named_folders_of_sources_in_their_order(tmp_path: Path) -> None:
    a, b = tree(tmp_path / "a", ""), tree(tmp_path / "b", "")
    assert list(parse([f"new={b}", f"old={a}"]).items()) == [("new", b), ("old", a)]


@pytest.mark.parametrize("text", ["a", "=folder", "a=", ""])
def test_what_is_no_named_folder_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME=FOLDER"):
        parse([text])


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path, "")
    with pytest.raises(ValueError, match="each name once"):
        parse([f"a={folder}", f"a={folder}"])


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    with pytest.raises(ValueError, match=r"the variant new: .* has no runtime/"):
        parse([f"new={tmp_path}"])


def test_a_variant_is_told_by_its_difference_from_the_first(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", "one\ntwo\n")
    new = tree(tmp_path / "new", "one\nthree\n")
    (new / "runtime" / "added.hpp").write_text("four\n")
    described = differences({"old": old, "new": new})
    assert described["old"] == {"diff": ""}
    lines = described["new"]["diff"].splitlines()
    assert [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "+four",
        "-two",
        "+three",
    ]
    assert "same.cuh" not in described["new"]["diff"]
