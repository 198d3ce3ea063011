# SPDX-License-Identifier: Apache-2.0
"""The shapes of the study of layouts, and what its document keeps; the times need a GPU."""

from __future__ import annotations

import pytest

from moeos.bench.studies import layouts
from moeos.kernel_shape import KernelShape


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
