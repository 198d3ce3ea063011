# SPDX-License-Identifier: Apache-2.0
"""What the report says of the training study: its numbers, the papers', and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from bench.clocks import timing
from bench.report import papers, report, training_tables
from tests.processes import ROOT

PAGE = ROOT / "docs" / "evaluation" / "training.md"
FLOPS = 2 * 3 * 32768 * 8 * 2048 * 768


def contestant(milliseconds: float) -> dict[str, Any]:
    """Made up: backward takes three times as long as forward."""
    return {
        "distance": None,
        "saved_bytes": 3 << 20,
        "peak_bytes": 5 << 20,
        "forward": timing([milliseconds / 1e3] * 3),
        "backward": timing([3 * milliseconds / 1e3] * 3),
    }


def results_of(paper: str, layer: str, tokens: int = 32768, **changed: Any) -> dict[str, Any]:
    """Made up, of a paper's suite."""
    case = {
        "layer": layer,
        "hidden": 2048,
        "intermediate": 768,
        "experts": 128,
        "top_k": 8,
        "activation": "swiglu",
        "gated": True,
        "dtype": "bfloat16",
        "tokens": tokens,
        "pieces": 1,
        "forward_flops": FLOPS,
        "contestants": {
            "grouped_mm": contestant(4.0),
            "nothing": contestant(2.0),
            "preactivation": {"left_out": "the GPU saves nothing"},
        },
    }
    return {
        "benchmark": f"training-{paper}-cuda-1",
        "commit": {"id": "0123456789abcdef", "changed_files": []},
        "device": "NVIDIA H200",
        "processors": 131,
        "machine": {"cores": 16},
        "versions": {"torch": "2.13.0"},
        "rounds": 8,
        "warm_up_rounds": 2,
        "trace_rounds": 3,
        "layers": [case | changed],
        "lists": [],
    }


def cells(section: Any) -> dict[str, str]:
    """Of the only row, by column."""
    [row] = section.rows
    return dict(zip([section.title, *section.columns], row, strict=True))


def test_rates_count_twice_the_products_backward() -> None:
    rates, *_ = report.sections(results_of(papers.SONICMOE, "DeepSeek-V3.2-Exp"))
    found = cells(rates)
    tflops = FLOPS / 2e-3 / 1e12
    assert found["moeos, saves nothing: forward"] == f"{tflops:.4g}"
    assert found["moeos, saves nothing: backward"] == f"{tflops * 2 / 3:.4g}"
    assert found["moeos, saves h: forward"] == training_tables.LEFT_OUT
    assert found["SonicMoE, one H100: forward"] == "534.8"
    assert found["SonicMoE, one H100: backward"] == "480.1"
    assert "other machines than ours" in rates.heading


def test_steps_are_compared_with_grouped_mm_in_the_same_run() -> None:
    _, steps, *_ = report.sections(results_of(papers.MOEBLAZE, papers.SCALING_LAYER, 131072))
    found = cells(steps)
    assert found["moeos, saves nothing"] == "8 ms"
    assert found["grouped_mm"] == "16 ms"
    assert found["grouped_mm / moeos, saves nothing"] == "2.00"
    assert found["grouped_mm / moeos, saves h"] == ""
    assert found["MoEBlaze, one H100"] == "7.7 ms"
    assert found["MegaBlocks, one H100"] == "22.5 ms"


def test_what_ran_out_of_memory_there_says_so() -> None:
    _, steps, memory, _ = report.sections(
        results_of(papers.MOEBLAZE, papers.SCALING_LAYER, 524288, pieces=9)
    )
    assert steps.rows[0][0].endswith("swiglu, 524288 in 9 pieces")
    assert cells(steps)["MegaBlocks, one H100"] == "out of memory"
    assert cells(memory)["MoEBlaze, one H100: saved"] == "6 918 MB"
    assert cells(memory)["MegaBlocks, one H100: saved"] == "out of memory"


def test_memory_stands_beside_what_x_and_h_alone_take() -> None:
    _, _, memory, _ = report.sections(results_of(papers.SONICMOE, "Qwen3-30B-A3B"))
    found = cells(memory)
    assert found["moeos, saves nothing: saved"] == "3 MiB"
    assert found["moeos, saves nothing: peak"] == "5 MiB"
    assert found["x and h alone"] == "896 MiB"  # 32768 * (2048 + 8 * 2 * 768) * 2 bytes


@pytest.mark.parametrize("tokens", [131072, 1048576])
def test_lists_stand_beside_a_sort_and_the_paper(tokens: int) -> None:
    case = {
        "name": "Qwen3",
        "experts": 128,
        "top_k": 8,
        "tokens": tokens,
        "calls": 4,
        **{
            name: timing([milliseconds / 1e3] * 3)
            for name, milliseconds in (
                *(("map", 0.5), ("rows", 1.0), ("steps", 2.0)),
                *(("sorted_lists", 3.0), ("sort", 4.0)),
            )
        },
    }
    results = results_of(papers.MOEBLAZE, "conf1") | {"layers": [], "lists": [case]}
    [lists] = report.sections(results)
    found = cells(lists)
    assert found["torch.sort / routing map"] == "8.00"
    assert found["torch.sort / first rows"] == "4.00"
    of_paper = found["MoEBlaze, one H100: three steps"], found["MoEBlaze, one H100: by a sort"]
    assert of_paper == (("2.1 ms", "5.1 ms") if tokens == 1048576 else ("", ""))
