# SPDX-License-Identifier: Apache-2.0
"""Calls of gradients of experts in slices on the emulated GPU: those of the float64 reference, and
of ranks with the same tokens the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import Placement
from moeos.config import reference
from moeos.partition.slicing import Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.emulator.test_gradients import PATIENCE, PROCESSORS, EmulatedGradients, made
from tests.gradients import OF_EXPERTS, TOLERANCE, assert_match, expected_of
from tests.layers import Call, config, draw_given_call
from tests.nightly import all_but

_ON_INPUT = {
    "apply_router_weight_on_input": True,
    "top_k": 1,
    "scoring": "sigmoid",
    "renormalize": False,
}
SIZES: dict[str, Any] = {
    **{"dtype": torch.bfloat16, "hidden": 96, "intermediate": 192, "experts": 6, "top_k": 3},
    **{"max_tokens": 150, "bias": True},
}
SUMS: dict[str, tuple[dict[str, Any], int, int]] = {
    "two slices": ({}, 2, 1),
    "weights on inputs, more slices than choices": ({**_ON_INPUT, "intermediate": 128}, 4, 1),
    "two groups": ({"experts": 7, "max_tokens": 70}, 2, 2),
}
"""Of a config, what is not usual; into how many slices experts are cut; and how many groups of
ranks share out the experts."""
APART: dict[str, tuple[dict[str, Any], int, int]] = {
    "two slices": ({}, 2, 2),
    "weights on inputs": (_ON_INPUT, 3, 3),
    "two groups": ({"experts": 7, "max_tokens": 70}, 4, 2),
}
"""The same; how many ranks; and into how many slices experts are cut."""


def with_parts_of_shared(emulated: EmulatedGradients, tokens: int, seed: int) -> list[Tensor]:
    """Numbers of each slice that its sums begin with, of the next call: of x, and one of a token.
    Returns what is written over the latter.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = emulated._weights.cfg.hidden
    added, shared = [], []
    for _ in range(emulated._ranks):
        added.append(torch.randn(tokens, hidden, generator=generator))
        shared.append(torch.randn(tokens, generator=generator))
    emulated.of_shared = list(zip(added, shared, strict=True))
    return shared


@pytest.mark.parametrize("name", all_but((), SUMS))  # in every run slices have some tokens each
def test_gradients_are_added_up_over_slices(name: str, tmp_path: Path) -> None:
    changes, slices, groups = SUMS[name]
    cfg, slicing = config(**(SIZES | changes)), Slicing(slices)
    ranks = groups * slices
    emulated = made(cfg, ranks, tmp_path, slicing=slicing)
    for number, tokens in enumerate((cfg.max_tokens, 3, 0, 66)):
        drawn = [draw_given_call(cfg, tokens, 10 * number + group) for group in range(groups)]
        calls = [drawn[rank // slices] for rank in range(ranks)]
        of_all = tokens > 60
        shared = with_parts_of_shared(emulated, tokens, number) if of_all else []
        if not of_all:
            emulated.of_shared = None
        before = [one.clone() for one in shared]
        found = emulated.gradients(calls, number)
        added = [one for one, _ in emulated.of_shared or ()]
        check(emulated, calls, found, slicing, added)
        for rank, mine in enumerate(found):
            first = rank - slicing.slice_of(rank)
            for what in ("x", "topk_weights"):
                assert torch.equal(mine[what], found[first][what]), f"rank {rank}, {what}"
            if of_all:
                total = torch.stack(before[first : first + slices]).sum(0)
                assert torch.allclose(shared[rank], total, rtol=1e-6, atol=1e-6)
                assert torch.equal(shared[rank], shared[first])


@pytest.mark.parametrize("name", all_but(("two slices",), APART))
def test_a_token_has_the_gradients_of_all_its_slices(name: str, tmp_path: Path) -> None:
    changes, ranks, slices = APART[name]
    cfg, slicing = config(**(SIZES | changes)), Slicing(slices, apart=True)
    placement = slicing.placement(cfg.experts, ranks)
    emulated = made(cfg, placement, tmp_path, slicing=slicing)
    for number, tokens in enumerate((cfg.max_tokens, 5, 67, 0)):
        calls = [
            draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank) for rank in range(ranks)
        ]
        found = emulated.gradients(calls, number)
        wanted = {"x", "topk_weights", *OF_EXPERTS}
        assert_match(emulated._weights, calls, found, wanted, slicing=slicing)


@pytest.mark.parametrize("slicing", all_but((), (Slicing(2), Slicing(2, apart=True))), ids=str)
def test_what_a_forward_call_of_slices_saves_is_found(slicing: Slicing, tmp_path: Path) -> None:
    cfg, ranks = config(**SIZES, save="preactivation"), 2
    where = slicing.placement(cfg.experts, ranks) if slicing.apart else ranks
    places = where.most if isinstance(where, Placement) else 0
    folders = tmp_path / "forward", tmp_path / "backward"
    for folder in folders:
        folder.mkdir()
    library = build(cfg, ranks, PROCESSORS, folders[0], places=places, saves=True, slicing=slicing)
    backward = made(cfg, where, folders[1], saves=True, slicing=slicing)
    forward = EmulatedLayer(
        library,
        backward._weights,
        ranks,
        patience=PATIENCE,
        slicing=slicing,
        placement=where if isinstance(where, Placement) else None,
    )
    sources = slicing.place(0, ranks)[1]
    for number, (tokens, of_source) in enumerate(((150, 450), (64, 21))):
        seeds = [10 * number + (rank if slicing.apart else 0) for rank in range(ranks)]
        calls = [draw_given_call(cfg, tokens, seed) for seed in seeds]
        shape = sources, of_source, slicing.cut(cfg).w1_rows
        unsaved = torch.full(shape, torch.nan, dtype=cfg.dtype)
        forward.saved = [unsaved.clone() for _ in range(ranks)]
        forward.saved_of_source = backward.saved_of_source = of_source
        forward(calls, number)
        assert all(saved is not None and saved.isfinite().any() for saved in forward.saved)
        backward.saved = forward.saved
        check(backward, calls, backward.gradients(calls, number), slicing, [])
        backward.saved = [unsaved.clone() for _ in range(ranks)]
        # Nothing but saved rows are no numbers: who has used them has none, too.
        assert all(found["w2"].isnan().any() for found in backward.gradients(calls, number))


def check(
    emulated: EmulatedGradients,
    calls: list[Call],
    found: list[dict[str, Tensor]],
    slicing: Slicing,
    added: list[Tensor],
) -> None:
    """`added`: of each rank, what its slice adds to the gradient of x."""
    expected = expected_of(emulated._weights, calls, slicing)
    for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        first = rank - slicing.slice_of(rank)
        for part in added[first : first + slicing.slices]:
            wanted["x"] = wanted["x"] + part
        for name in ("x", "topk_weights", *OF_EXPERTS):
            error = reference.relative_error(mine[name], wanted[name])
            assert error <= TOLERANCE[emulated._weights.cfg.dtype], f"rank {rank}, {name}: {error}"
