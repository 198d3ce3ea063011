# SPDX-License-Identifier: Apache-2.0
"""Own rows that first products read where the caller left their tokens, on the emulated GPU, and
rows between the products that lie in the order of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeos.compile.kernel_shape import KernelShape
from moeos.partition.policies import Policy
from moeos.partition.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 2
LAYERS: dict[str, tuple[dict[str, Any], int, int]] = {
    # Experts with few rows and with many.
    "a rank alone": ({"hidden": 256, "experts": 5}, 1, 1),
    # Rows that end amid a step; tiles have rows of both ranks, side by side.
    "two ranks": ({"hidden": 264, "experts": 4}, 2, 1),
    "two slices": ({"hidden": 256, "experts": 4}, 1, 2),
    "rings": ({"hidden": 256, "experts": 4, "row_map": "ragged"}, 2, 1),
    "shared experts": (
        {"hidden": 256, "experts": 4, "shared_experts": 1, "shared_intermediate": 128},
        2,
        1,
    ),
    "capacity": (
        {"hidden": 256, "experts": 4, "row_map": "capacity", "capacity_factor": 1.0},
        2,
        1,
    ),
}
"""Of a config, what is not usual; how many ranks share out the experts, and how many slices."""
COPIED, GATHERED = "expert_major_persistent", "gathered"
IN_EVERY_RUN = ("two ranks", (GATHERED,))
"""A layer, and its kernels: the night compiles the one that copies rows, too, for its bits."""


@pytest.mark.parametrize(
    ("name", "layouts"),
    all_but([IN_EVERY_RUN], [IN_EVERY_RUN, *((name, (GATHERED, COPIED)) for name in LAYERS)]),
)
def test_rows_that_are_gathered_give_the_bits_of_copied_ones(
    name: str, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    changes, groups, slices = LAYERS[name]
    sizes = {"intermediate": 128, "top_k": 2, "max_tokens": 300, "dtype": torch.bfloat16}
    cfg = config(**(sizes | changes))
    weights, ranks = draw_weights(cfg), groups * slices
    layers = {}
    for layout in layouts:
        slicing = Slicing(slices, policy=Policy(layout))  # type: ignore[arg-type]
        folder = tmp_path / layout
        folder.mkdir()
        library = build(
            cfg,
            ranks,
            PROCESSORS,
            folder,
            slicing=slicing,
            ring_rows=1 if name == "rings" else None,
        )
        layers[layout] = EmulatedLayer(library, weights, ranks, patience=40, slicing=slicing)
    gathered, copied = layers[GATHERED], layers.get(COPIED)
    for number, tokens in enumerate((300, 40, 1, 0, 9)):
        draw = draw_given_call if number == 1 else draw_call
        calls = [draw(cfg, tokens, number + 10 * group) for group in range(groups)]
        of_ranks = [calls[rank // slices] for rank in range(ranks)]
        outputs = gathered(of_ranks, number)
        others = outputs if copied is None else copied(of_ranks, number)
        for y, same, call in zip(outputs, others, of_ranks, strict=True):
            assert_matches(weights, call, y, f"call {number}")
            assert torch.equal(y, same), f"call {number}"
    slicing = Slicing(slices, policy=Policy(GATHERED))  # type: ignore[arg-type]
    shape = KernelShape(
        cfg=slicing.cut(cfg),
        world_size=groups,
        processors=PROCESSORS,
        virtual_ranks=ranks,
        slicing=slicing,
    )
    assert shape.sizes.gathers_own_rows
    if ranks == 1 and copied is not None:  # nobody has written into its cell
        begin = shape.sizes.first_cell
        cell = slice(begin, begin + shape.sizes.cell_places * shape.sizes.row_bytes)
        assert not gathered._heaps[0][cell].any()
        assert copied._heaps[0][cell].any()


TOKEN_MAJOR: dict[str, tuple[dict[str, Any], int]] = {
    # Rows between the products end amid a step of either kind of tiles.
    "a rank alone": ({"intermediate": 200, "experts": 5, "bias": True}, 1),
    "two slices, a shared expert": (
        {"experts": 4, "shared_experts": 1, "shared_intermediate": 128},
        2,
    ),
    "more experts than a processor plans by": ({"experts": 130, "intermediate": 64}, 1),
    "pairs that are dropped": (
        {"experts": 4, "row_map": "capacity", "capacity_factor": 0.5},
        1,
    ),
}
"""Of a config, what is not usual; how many slices."""


ORDERED = "token_major"


@pytest.mark.parametrize(
    ("name", "layouts"),
    all_but((), ((name, (ORDERED, GATHERED)) for name in TOKEN_MAJOR)),
)
def test_rows_between_the_products_lie_in_the_order_of_tokens(
    name: str, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    changes, slices = TOKEN_MAJOR[name]
    sizes = {"hidden": 256, "intermediate": 128, "top_k": 2, "max_tokens": 300}
    cfg = config(**(sizes | changes), dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    layers = {}
    for layout in layouts:
        slicing = Slicing(slices, policy=Policy(layout))  # type: ignore[arg-type]
        folder = tmp_path / layout
        folder.mkdir()
        library = build(cfg, slices, PROCESSORS, folder, slicing=slicing)
        layers[layout] = EmulatedLayer(library, weights, slices, patience=40, slicing=slicing)
    ordered, gathered = layers[ORDERED], layers.get(GATHERED)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (300, 1, 0, 9)]
    calls.append(draw_given_call(cfg, 40, 1))  # whose choices are known here, in their order
    for number, call in enumerate(calls):
        of_ranks = [call] * slices
        outputs = ordered(of_ranks, number)
        others = outputs if gathered is None else gathered(of_ranks, number)
        for y, same in zip(outputs, others, strict=True):
            assert_matches(weights, call, y, f"call {number}")
            assert torch.equal(y, same), f"call {number}"
    if slices > 1 or cfg.capacity_factor is not None:
        return
    ids = weights.routing(calls[-1]).flatten()
    x = calls[-1].x.double().repeat_interleave(cfg.top_k, 0)
    h = torch.einsum("ph,pnh->pn", x, weights.w1.double()[ids])
    if weights.b1 is not None:
        h += weights.b1.double()[ids]
    gate, up = h.chunk(2, 1)
    expected = (torch.nn.functional.silu(gate) * up)[ids >= 0]
    rows = ordered._between[0].view(torch.bfloat16)[: len(ids) * cfg.intermediate]
    between = rows.view(len(ids), cfg.intermediate)[ids >= 0]
    assert 0 < len(expected) < len(ids)  # a pair without an expert has a place, too
    assert (between - expected).norm() < 1e-2 * expected.norm()
