# SPDX-License-Identifier: Apache-2.0
"""What the report says of an evaluation: its numbers and the thesis', and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.clocks import timing
from bench.report import (
    evaluation_tables,
    plots,
    report,
    thesis,
)

EMPTY = "".join(
    f"<!-- benchmark {name} -->\n<!-- end of benchmark {name} -->\n"
    for name in ("evaluation-cuda-4", evaluation_tables.SCALING, evaluation_tables.MEMORY)
)


def case_of(tokens: int, experts: int, milliseconds: float) -> dict[str, Any]:
    """A made-up case in which the all-to-all takes twice as long."""
    times = {
        name: timing([factor * milliseconds / 1e3] * 2)
        for name, factor in (("moeos", 1), ("baseline", 2))
    }
    return {
        "tokens": tokens,
        "experts": experts,
        "run": 0,
        "relative_error": 0.0,
        "times": times,
        "busy_shares": [0.5, 0.75],
        "pairs_to_peers": 1234,
        "row_bytes_to_peers": 3 << 20,
        "bytes_to_peers": 5 << 20,
        "fullest_pair_rows": 7,
        "padded_bytes_to_peers": 4 << 20,
        "payload_efficiency": 0.75,
        "operations": {
            "moeos": {"kernels": 1, "copies": 0},
            "baseline": {"kernels": 21, "copies": 3},
        },
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Made up, as of 4 GPUs; a case is missing."""
    return {
        "benchmark": "evaluation-cuda-4",
        "commit": {"id": "0123456789abcdef", "changed_files": []},
        "backend": "cuda",
        "device": "a made-up GPU",
        "ranks": 4,
        "hidden": 1024,
        "intermediate": 4096,
        "top_k": 2,
        "activation": "gelu",
        "dtype": "bfloat16",
        "scaling_experts": 32,
        "scaling_tokens": 8192,
        "rounds": 2,
        "warm_up_rounds": 1,
        "seed": 0,
        "tokens": [1024, 8192],
        "experts": [32, 64],
        "runs": [{"processors": 131, "machine": {"cores": 16}, "versions": {"torch": "2.9"}}],
        "cases": [case_of(8192, 32, 1.25), case_of(1024, 32, 0.5)],
        "not_measured": [{"tokens": 8192, "experts": 64}],
    }


def row_of(text: str, label: str, number: int = 0) -> list[str]:
    """The cells of the n-th row whose first cell is `label`."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] == label][number]


def test_our_numbers_and_the_thesis_numbers_stand_side_by_side(results: dict[str, Any]) -> None:
    text = report.markdown(results)
    assert "a made-up GPU: 4 ranks with 131 processors each" in text
    assert "commit 0123456789ab" in text
    assert row_of(text, "1024")[1:] == [
        *("500 µs", "500 µs to 500 µs", "1 ms", "2.00"),
        *("2.07 ms", "2.87 ms", "3.85 ms", "2.59 ms", "3.80 ms"),
    ]
    assert row_of(text, "32")[1:] == [
        *("1.25 ms", "1.25 ms to 1.25 ms", "2.5 ms", "2.00"),
        *("2.33 ms", "19.01 ms", "12.37 ms", "10.32 ms", "7.12 ms"),
    ]
    assert "thesis, 8 H100, FP32: FlashDMoE | thesis, 8 H100, FP16: Comet" in text
    assert "other machines than ours" in text
    assert row_of(text, "1024, 32")[1:] == [
        *("62.5 %", "1 234", "3 MiB", "5 MiB", "4 MiB", "75.0 %"),
    ]
    assert row_of(text, "moeos, 1024, 32")[1:] == ["1", "0"]
    assert row_of(text, "all-to-all, 1024, 32")[1:] == ["21", "3"]
    assert row_of(text, "thesis, DeepSpeedMoE")[1] == "550"


def test_what_is_missing_is_said(results: dict[str, Any]) -> None:
    text = report.markdown(results)
    missing = [evaluation_tables.NOT_MEASURED, "", evaluation_tables.NOT_MEASURED, ""]
    assert row_of(text, "64")[1:5] == missing  # asked for
    assert row_of(text, "128")[1:5] == missing  # of the thesis alone
    assert row_of(text, "2048")[1:6] == [*missing, "1.90 ms"]
    assert row_of(text, "8192, 64")[1] == evaluation_tables.NOT_MEASURED
    for case in results["cases"]:
        case["operations"] = None
    assert row_of(report.markdown(results), "moeos, 1024, 32")[1] == "no GPU"


def test_runs_with_other_ranks_are_compared_where_they_are_alike(
    results: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    two = results | {
        "benchmark": "evaluation-cuda-2",
        "ranks": 2,
        "cases": [case_of(8192, 32, 2.0)],
        "commit": {"id": "fedcba9876543210", "changed_files": []},
    }
    other = results | {"benchmark": "evaluation-twin-8", "ranks": 8, "backend": "twin"}
    for one in (results, two, other):
        (tmp_path / f"{one['benchmark']}.json").write_text(json.dumps(one))
    page = tmp_path / "page.md"
    page.write_text(EMPTY)
    report.execute(tmp_path / "evaluation-cuda-4.json", page)
    text = page.read_text()
    assert row_of(text, "2")[1:7] == [
        *("2 ms", "2 ms to 2 ms", "4 ms", "2.00", "a made-up GPU", "commit fedcba987654"),
    ]
    assert row_of(text, "4")[1] == "1.25 ms"
    assert row_of(text, "4")[7:] == ["1.98 ms", "10.98 ms", "13.59 ms", "7.82 ms", "6.72 ms"]
    assert row_of(text, "8")[1] == evaluation_tables.NOT_MEASURED  # the twin's is not a GPU's
    assert row_of(text, "8")[7] == "2.33 ms"
    picture = tmp_path / "evaluation-cuda-4.svg"
    assert plots.digest(plots.evaluation_series(results)) in picture.read_text()
    assert f"]({picture.name})" in text
    assert plots.evaluation_series(results) == {
        "tokens": {"at": [1024, 8192], "moeos": [0.5, 1.25], "baseline": [1.0, 2.5]},
        "experts": {"at": [32], "moeos": [1.25], "baseline": [2.5]},
    }


def test_the_thesis_formula_is_what_the_thesis_measured() -> None:
    for row in thesis.MEMORY:
        assert row.capacity == row.tokens // row.experts
        assert row.rows == max(row.capacity, thesis.TILE_ROWS)
        assert evaluation_tables.formula_bytes(row.tokens, row.experts) / 2**20 == pytest.approx(
            row.symmetric, abs=0.03
        )
        assert row.total == pytest.approx(row.bookkeeping + row.symmetric, abs=0.015)


def test_our_memory_is_the_heap_of_both_rounds() -> None:
    section = evaluation_tables.memory()
    assert len(section.rows) == len(thesis.MEMORY)
    for row, shown in zip(thesis.MEMORY, section.rows, strict=True):
        theirs = [
            row.capacity,
            *(f"{v:.2f}" for v in (row.symmetric, row.bookkeeping, row.total)),
        ]
        assert shown[:5] == [f"{row.tokens}, {row.experts}", *map(str, theirs)]
        own = evaluation_tables.own_bytes(row.tokens, row.experts, 1.0)
        assert own["capacity"] == 2 * row.capacity  # two pairs of a token
        # A cell of tokens and one of results for each source, float32.
        cells = 2 * row.experts * own["capacity"] * thesis.HIDDEN * 4
        assert 0 < own["heap"] - cells < 2**20
        heap, queues, total = map(float, shown[7:10])
        assert total == pytest.approx(heap + queues, abs=0.011)
        assert own["heap"] / 2**20 == pytest.approx(heap, abs=0.006)
