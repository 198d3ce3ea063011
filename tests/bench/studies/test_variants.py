# SPDX-License-Identifier: Apache-2.0
"""`bench.studies.variants` without a GPU: what is compared, and what is noted of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import suite
from bench.studies.variants import describe_variants, layers_for, parse_delays, parse_variants
from tests import programs
from tests.processes import ROOT


def tree(folder: Path, text: str) -> Path:
    (folder / "kernels").mkdir(parents=True)
    (folder / "runtime").mkdir()
    (folder / "kernels" / "same.cuh").write_text("the same\n")
    (folder / "runtime" / "base.hpp").write_text(text)
    return folder


def test_variants_are_named_folders_of_sources_in_their_order(tmp_path: Path) -> None:
    a, b = tree(tmp_path / "a", ""), tree(tmp_path / "b", "")
    assert list(parse_variants([f"new={b}", f"old={a}"]).items()) == [("new", b), ("old", a)]


@pytest.mark.parametrize("text", ["a", "=folder", "a=", ""])
def test_what_is_no_named_folder_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME=FOLDER"):
        parse_variants([text])


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path, "")
    with pytest.raises(ValueError, match="each name once"):
        parse_variants([f"a={folder}", f"a={folder}"])


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    with pytest.raises(ValueError, match=r"the variant new: .* has no runtime/"):
        parse_variants([f"new={tmp_path}"])


def test_a_variant_is_told_by_its_difference_from_the_first(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", "one\ntwo\n")
    new = tree(tmp_path / "new", "one\nthree\n")
    (new / "runtime" / "added.hpp").write_text("four\n")
    (new / "ABOUT").write_text("three for two\n")
    described = describe_variants({"old": old, "new": new})
    assert described["old"] == {"what": "", "diff": ""}
    assert described["new"]["what"] == "three for two"
    lines = described["new"]["diff"].splitlines()
    assert [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "+four",
        "-two",
        "+three",
    ]
    assert "same.cuh" not in described["new"]["diff"]


def test_calls_of_any_size_have_the_layers_that_the_suite_measures_them_with() -> None:
    chosen = suite.read(ROOT / "configs" / "suites" / "gpu.toml").only(("qwen3-30b-a3b",), ())
    layers = layers_for(chosen, (9000, 300, 1, 300), ranks=2)
    assert [(name, cfg.max_tokens, counts) for name, cfg, counts in layers] == [
        ("qwen3-30b-a3b", 512, [1, 300]),
        ("qwen3-30b-a3b", 9000, [9000]),
    ]
    assert {cfg.experts for _, cfg, _ in layers} == {64}


@pytest.mark.parametrize("counts", [(), (1, -1)])
def test_counts_that_no_call_has_are_refused(counts: tuple[int, ...]) -> None:
    chosen = suite.read(ROOT / "configs" / "suites" / "gpu.toml")
    with pytest.raises(ValueError, match="must be numbers from 0 on"):
        layers_for(chosen, counts, ranks=1)


def test_a_wrong_argument_is_told_before_a_gpu_is_looked_for(tmp_path: Path) -> None:
    module = "bench.studies.variants"
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    ended = programs.ended(program, "--out", str(tmp_path / "out"), "a")
    assert ended.returncode != 0
    assert "the variant is 'a'; it must be NAME=FOLDER" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_delays_are_microseconds() -> None:
    assert parse_delays("0,16,0.5") == pytest.approx([0, 16e-6, 0.5e-6])


@pytest.mark.parametrize("text", ["", "soon", "-1", "1,", "nan", "1000001"])
def test_a_delay_that_no_rank_can_have_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be microseconds from 0 to 1000000"):
        parse_delays(text)
