# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the GPU benchmark: each number is the results', each case has its row."""

from pathlib import Path
from typing import Any

import pytest

from bench import study
from bench.clocks import timing
from bench.report import gpu_tables, plots, report
from tests.bench.measured import measured, small_suite

EMPTY = "".join(
    f"<!-- benchmark {name} -->\n<!-- end of benchmark {name} -->\n"
    for name in ("gpu-1", "gpu-4", "weak-scaling", "bars")
)


def document(folder: Path, ranks: int = 4, microseconds: float = 100.0) -> dict[str, Any]:
    file = folder / f"gpu-{ranks}.json"
    return measured(file, small_suite(folder), ranks, microseconds)


def test_every_case_has_a_row_with_its_ratios(tmp_path: Path) -> None:
    first, second = gpu_tables.sections(document(tmp_path))
    assert [row[0] for row in first.rows] == [
        *("1 on one rank", "1", "128", "2048"),
        "2048, Zipf 1.2",
    ]
    assert [row[0] for row in second.rows] == ["2048"]
    cells = dict(zip(first.columns, first.rows[3][1:], strict=True))
    assert cells["moeos"] == "100 µs"
    assert cells["quartiles"] == "90 µs to 120 µs"
    assert cells["NCCL + grouped"] == "300 µs"
    assert cells["times as fast"] == "3.00 (at least 1.5)"
    assert (cells["G"], cells["T / G"]) == ("50 µs", "2.00")
    assert cells["bar"] == "max(1 G, 1.25 N) = 50 µs"
    assert cells["T / bar"] == "2.00"
    assert "H 64, I 32, E 8, k 2, swiglu" in first.heading


def test_fewer_gpus_are_said_to_have_fewer_experts_and_no_ratio_to_reach(tmp_path: Path) -> None:
    found = document(tmp_path, ranks=1)
    assert "1 × NVIDIA H200 of one host; each rank has the experts of one of 4" in (
        gpu_tables.conditions(found)
    )
    first, _ = gpu_tables.sections(found)
    cells = dict(zip(first.columns, first.rows[3][1:], strict=True))
    assert (cells["times as fast"], cells["N"]) == ("3.00", "")
    assert "E 2, k 2" in first.heading


def test_conditions_name_machine_software_and_rates(tmp_path: Path) -> None:
    said = gpu_tables.conditions(document(tmp_path))
    for words in ("4 × NVIDIA H200", "driver 580.1", "CUDA 13.0", "NCCL 2.28", "PyTorch 2.11"):
        assert words in said
    assert "commit 0123456789ab." in said
    assert "F 800 TFLOP/s" in said
    assert "W 4400 GB/s" in said
    assert "N 360 GB/s" in said


def test_numbers_of_gpus_are_compared_where_they_measured_the_same(tmp_path: Path) -> None:
    one, four = document(tmp_path, 1, 100.0), document(tmp_path, 4, 120.0)
    four["results"] = [found for found in four["results"] if found["shape"] != "other"]
    section = gpu_tables.scaling([four, one])
    assert section is not None
    assert section.columns == ["tokens per rank", "T, 1 GPUs", "T, 4 GPUs", "T(4) / T(1)"]
    assert section.rows == [
        ["qwen3-30b-a3b", "1", "100 µs", "120 µs", "1.20"],
        ["qwen3-30b-a3b", "128", "100 µs", "120 µs", "1.20"],
        ["qwen3-30b-a3b", "2048", "100 µs", "120 µs", "1.20"],
        ["other", "2048", "100 µs", "", ""],
    ]
    assert gpu_tables.scaling([one]) is None


CODED_SUITE = """
rounds = 3
full_ranks = 2
tokens = [8, 128, 2048]
[[shapes]]
name = "qwen3-30b-a3b"
[shapes.layer]
hidden = 256
intermediate = 128
experts = 8
top_k = 2
weight_format = "fp8_block128"
activation_format = "fp8_group128"
"""


def coded_document(folder: Path) -> Path:
    """Results of a suite of a layer with formats, which takes 1.25 times as long as without."""
    file = folder / "fp8-2.json"
    results = measured(file, small_suite(folder, CODED_SUITE, "fp8"), 2)
    for found in results["results"]:
        found["times"]["in_numbers"] = timing([80e-6] * 3)
    file.write_text(study.text(results))
    return file


def test_a_deployment_of_one_gpu_has_no_ratio_to_the_all_to_all_to_reach(tmp_path: Path) -> None:
    text = CODED_SUITE.replace("full_ranks = 2", "full_ranks = 1")
    found = measured(tmp_path / "small-1.json", small_suite(tmp_path, text, "small"), 1)
    [section] = gpu_tables.sections(found)
    assert section.rows[0][section.columns.index("times as fast") + 1] == "3.00"


def test_a_layer_with_formats_is_judged_by_the_same_layer_without(tmp_path: Path) -> None:
    found = report.load(coded_document(tmp_path))
    [section] = gpu_tables.sections(found)
    cells = dict(zip(section.columns, section.rows[0][1:], strict=True))
    assert (cells["bar"], cells["T / bar"]) == ("moeos in BF16 = 80 µs", "1.25")
    assert cells["times as fast"] == "3.00"
    assert "; weights in fp8_block128, tokens in fp8_group128" in section.heading
    assert "; bfloat16 but for the formats that each table names; driver" in (
        gpu_tables.conditions(found)
    )
    lines = plots.shape_series(found, "qwen3-30b-a3b")
    assert lines["moeos in BF16"] == pytest.approx([80.0] * 3)


def test_results_of_another_suite_have_their_own_page_and_no_part_in_comparisons(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    page = tmp_path / "page.md"
    page.write_text(EMPTY + "<!-- benchmark fp8-2 -->\n<!-- end of benchmark fp8-2 -->\n")
    report.execute(coded_document(tmp_path), page)
    text = page.read_text()
    assert text.startswith(EMPTY)
    assert f"({plots.FOLDER}/fp8-2-qwen3-30b-a3b.svg)" in text
    assert report.bars(tmp_path) == report.scaling(tmp_path) == ""


def test_the_command_writes_tables_plots_and_the_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    page = tmp_path / "page.md"
    page.write_text(EMPTY)
    for ranks in (1, 4):
        document(tmp_path, ranks)
        report.execute(tmp_path / f"gpu-{ranks}.json", page)
    text = page.read_text()
    assert text.count("**qwen3-30b-a3b**") == 2
    assert "T(4) / T(1)" in text
    assert "| T at most | layer | tokens | 1 GPU | 4 GPUs |" in text
    drawn = sorted(file.name for file in (tmp_path / plots.FOLDER).iterdir())
    assert drawn == ["gpu-1-qwen3-30b-a3b.svg", "gpu-4-qwen3-30b-a3b.svg"]  # "other" has one point
    for name in drawn:
        assert f"({plots.FOLDER}/{name})" in text


def test_a_plot_carries_the_digest_of_its_numbers_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots")
    results = document(tmp_path)
    [file] = plots.draw_shapes(results, tmp_path)
    picture = file.read_text()
    assert plots.shape_digest(results, "qwen3-30b-a3b") in picture
    plots.draw_shapes(results, tmp_path)
    assert file.read_text() == picture
    results["results"][0]["times"]["moeos"]["median"] *= 1.01
    results["results"][1]["times"]["moeos"]["median"] *= 1.01
    assert plots.shape_digest(results, "qwen3-30b-a3b") not in picture


def test_a_plot_shows_the_gates_routing_on_all_ranks_alone(tmp_path: Path) -> None:
    found = plots.shape_series(document(tmp_path), "qwen3-30b-a3b")
    assert found["tokens"] == [1, 128, 2048]
    assert found["moeos"] == pytest.approx([100.0] * 3)
    assert len(found) == 8
    alone = plots.shape_series(document(tmp_path, ranks=1), "qwen3-30b-a3b")
    assert "N: rows over NVLink" not in alone
