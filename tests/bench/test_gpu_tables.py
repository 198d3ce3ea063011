# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of a suite of shapes, and what it has reached of its bars."""

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


BARS_SUITE = """
rounds = 3
full_ranks = 2
tokens = [0, 2048, 8192]

[[shapes]]
name = "qwen3-30b-a3b"
layer = { hidden = 64, intermediate = 32, experts = 8, top_k = 2 }

[[shapes]]
name = "mixtral-8x7b"
layer = { hidden = 64, intermediate = 32, experts = 8, top_k = 2, activation = "gelu" }
"""


def barred(folder: Path, ranks: int, microseconds: float) -> dict[str, Any]:
    suite = small_suite(folder, BARS_SUITE)
    return measured(folder / f"gpu-{ranks}.json", suite, ranks, microseconds)


def test_bars_stand_together_with_each_number_of_gpus(tmp_path: Path) -> None:
    # G is half of moeos's time, so a case that may take G takes twice what it may.
    one, two = barred(tmp_path, 1, 10.0), barred(tmp_path, 2, 30.0)
    found = gpu_tables.bars_reached([two, one])
    assert found is not None
    assert found.title == "T at most"
    assert found.columns == ["layer", "tokens", "1 GPU", "2 GPUs"]
    assert found.rows == [
        ["a call", "qwen3-30b-a3b", "0", "0.50", "**1.50**"],
        ["a call", "mixtral-8x7b", "0", "0.50", "**1.50**"],
        ["max(1 G, 1.25 N)", "qwen3-30b-a3b", "2048", "**2.00**", "**2.00**"],
        ["max(0.95 G, 1.25 N)", "qwen3-30b-a3b", "8192", "**2.11**", "**2.11**"],
        ["a published FP8 kernel", "qwen3-30b-a3b", "2048", "", "0.06"],
        ["a published FP8 kernel", "qwen3-30b-a3b", "8192", "", "0.02"],
        ["1.06 T(1 GPU)", "qwen3-30b-a3b", "8192", "", "**2.83**"],
        ["1.06 T(1 GPU)", "mixtral-8x7b", "8192", "", "**2.83**"],
    ]


def test_what_is_met_is_counted_and_whose_times_these_are(tmp_path: Path) -> None:
    found = gpu_tables.bars_reached([barred(tmp_path, 1, 10.0), barred(tmp_path, 2, 30.0)])
    assert found is not None
    assert found.heading.endswith(
        "Met: 2 of 4 on 1 GPU (commit 0123456789ab), 2 of 8 on 2 GPUs (commit 0123456789ab)."
    )


def test_a_bar_just_missed_is_not_rounded_to_a_met_one(tmp_path: Path) -> None:
    found = gpu_tables.bars_reached([barred(tmp_path, 1, 20.01)])
    assert found is not None
    assert found.rows[0] == ["a call", "qwen3-30b-a3b", "0", "**1.00**"]
