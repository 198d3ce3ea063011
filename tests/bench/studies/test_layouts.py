# SPDX-License-Identifier: Apache-2.0
"""The shapes of the study of layouts, and what its document keeps; the times need a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.studies import layouts
from moeos import MoEConfig
from moeos.compile.kernel_shape import KernelShape
from moeos.system.files import read_toml

ROOT = Path(__file__).parents[3]
MEASURED, SUITE = (
    Path(__file__).parent / "measured",
    ROOT / "configs" / "suites" / "fine-grained.toml",
)
COMMITTED = json.loads((MEASURED / "layouts-1.json").read_text())
TREES = json.loads((MEASURED / "own-rows-1.json").read_text())


def test_a_seed_draws_the_same_shapes_whatever_their_number() -> None:
    shapes = layouts.drawn()
    assert len(shapes) == layouts.SHAPES
    assert layouts.drawn(shapes=3) == shapes[:3]
    assert layouts.drawn(seed=layouts.SEED + 1) != shapes


@pytest.mark.parametrize("number", range(layouts.SHAPES))
def test_a_gpu_has_each_shape_by_both_layouts(number: int) -> None:
    cfg = layouts.drawn()[number]
    assert {layouts.chosen(cfg), layouts.other(cfg)} == {"gathered", "expert_major_persistent"}
    shape = KernelShape(cfg=cfg, world_size=1, processors=131)
    assert shape.sizes.gathers_own_rows == (layouts.chosen(cfg) == "gathered")
    assert cfg.max_tokens // layouts.FEWER > 0


def test_a_run_of_a_few_shapes_keeps_what_is_known_of_others() -> None:
    before = layouts.document({}, {"0": {"results": [1]}, "1": {"results": [2]}})
    after = layouts.document(before, {"1": {"results": [3]}})
    assert after["layers"] == {"0": {"results": [1]}, "1": {"results": [3]}}
    assert after["seed"] == layouts.SEED


@pytest.mark.parametrize("number", range(layouts.SHAPES))
def test_auto_is_within_the_bar_of_the_faster_layout_of_each_measured_shape(number: int) -> None:
    cfg = layouts.drawn()[number]
    measured: dict[str, Any] = COMMITTED["layers"][str(number)]
    sizes = ("hidden", "intermediate", "experts", "top_k", "max_tokens")
    assert [measured["config"][name] for name in sizes] == [getattr(cfg, name) for name in sizes]
    largest = measured["results"][0]
    assert largest["tokens"] == cfg.max_tokens
    then = largest["auto"]  # by the costs of that commit
    others = {"gathered": "expert_major_persistent", "expert_major_persistent": "gathered"}
    seconds = {name: times["median"] for name, times in largest["seconds"].items()}
    by_layout = {then: seconds["auto"], others[then]: seconds[others[then]]}
    assert by_layout[layouts.chosen(cfg)] <= layouts.BAR * min(by_layout.values())


@pytest.mark.parametrize("result", TREES["results"], ids=lambda of: f"{of['shape']}:{of['tokens']}")
def test_auto_is_within_the_bar_of_the_faster_layout_of_published_layers(
    result: dict[str, Any],
) -> None:
    shapes = read_toml(SUITE)["shapes"]
    layer = next(shape["layer"] for shape in shapes if shape["name"] == result["shape"])
    cfg = MoEConfig(**layer, max_tokens=result["tokens"], dtype=torch.bfloat16)
    by_layout = {name: times["median"] for name, times in result["times"].items()}
    chosen = "gathered" if layouts.chosen(cfg) == "gathered" else "copied"
    assert by_layout[chosen] <= layouts.BAR * min(by_layout.values())
