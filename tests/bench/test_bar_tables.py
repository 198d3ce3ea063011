# SPDX-License-Identifier: Apache-2.0
"""The table of bars: every case that has one, with each number of GPUs, and which are missed."""

from pathlib import Path
from typing import Any

from bench.report import gpu_tables
from tests.bench.measured import measured, small_suite

SUITE = """
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


def document(folder: Path, ranks: int, microseconds: float) -> dict[str, Any]:
    suite = small_suite(folder, SUITE)
    return measured(folder / f"gpu-{ranks}.json", suite, ranks, microseconds)


def test_bars_stand_together_with_each_number_of_gpus(tmp_path: Path) -> None:
    # G is half of moeos's time, so a case that may take G takes twice what it may.
    one, two = document(tmp_path, 1, 10.0), document(tmp_path, 2, 30.0)
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
    found = gpu_tables.bars_reached([document(tmp_path, 1, 10.0), document(tmp_path, 2, 30.0)])
    assert found is not None
    assert found.heading.endswith(
        "Met: 2 of 4 on 1 GPU (commit 0123456789ab), 2 of 8 on 2 GPUs (commit 0123456789ab)."
    )


def test_a_bar_just_missed_is_not_rounded_to_a_met_one(tmp_path: Path) -> None:
    found = gpu_tables.bars_reached([document(tmp_path, 1, 20.01)])
    assert found is not None
    assert found.rows[0] == ["a call", "qwen3-30b-a3b", "0", "**1.00**"]


def test_without_a_single_gpu_nothing_is_compared_with_it(tmp_path: Path) -> None:
    found = gpu_tables.bars_reached([document(tmp_path, 2, 30.0)])
    assert found is not None
    assert {row[0] for row in found.rows} == {
        *("a call", "max(1 G, 1.25 N)", "max(0.95 G, 1.25 N)", "a published FP8 kernel"),
    }
    assert gpu_tables.bars_reached([]) is None
