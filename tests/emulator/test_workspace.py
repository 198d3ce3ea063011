# SPDX-License-Identifier: Apache-2.0
"""Layers of several shapes that share a heap and memory, on the emulated GPU."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from moeos._runtime import FailureKind
from moeos.compile.kernel_shape import KernelShape
from moeos.config import reference
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import Weights, config, draw_call, draw_weights

RANKS, PROCESSORS = 2, 3
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
SHAPES = (
    {"hidden": 256, "intermediate": 256, "experts": 8, "top_k": 2, "max_tokens": 100},
    {"hidden": 328, "intermediate": 136, "experts": 4, "top_k": 1, "max_tokens": 90, "bias": True},
    {
        "hidden": 512,
        "intermediate": 64,
        "experts": 12,
        "top_k": 3,
        "max_tokens": 30,
        "dtype": torch.float16,
    },
)


def layer_of(number: int, folder: Path) -> tuple[Weights, Path]:
    """The weights of a shape and its kernel, compiled in a new folder."""
    weights = draw_weights(config(**{"dtype": torch.bfloat16, **SHAPES[number]}), number)
    folder.mkdir()
    return weights, build(weights.cfg, RANKS, PROCESSORS, folder)


def sizes_of(weights: Weights) -> object:
    return KernelShape(
        cfg=weights.cfg, world_size=RANKS, processors=PROCESSORS, virtual_ranks=RANKS
    ).sizes


def shared(layers: list[tuple[Weights, Path]]) -> list[EmulatedLayer]:
    made = [EmulatedLayer(library, weights, RANKS) for weights, library in layers]
    made[0].share(made[1:], [sizes_of(weights) for weights, _ in layers])
    for number, layer in enumerate(made):
        layer.identities = [4096 * number + 1] * RANKS
    return made


@pytest.mark.nightly
def test_layers_of_three_shapes_interleaved_compute_what_each_does_alone(tmp_path: Path) -> None:
    layers = [layer_of(number, tmp_path / str(number)) for number in range(len(SHAPES))]
    together = shared(layers)
    alone = [EmulatedLayer(library, weights, RANKS) for weights, library in layers]
    drawn = random.Random(1)
    for step in range(14):
        index = drawn.randrange(len(layers))
        weights = layers[index][0]
        calls = [
            draw_call(weights.cfg, drawn.randrange(weights.cfg.max_tokens + 1), 10 * step + rank)
            for rank in range(RANKS)
        ]
        outputs = together[index](calls, seed=step)
        others = alone[index](calls, seed=100 + step)
        for call, y, other in zip(calls, outputs, others, strict=True):
            assert torch.equal(y, other), (step, index)
            error = reference.relative_error(y, weights.expected(call))
            assert error <= TOLERANCE[weights.cfg.dtype]
        stats = [together[index].stats(rank, PROCESSORS) for rank in range(RANKS)]
        assert [found.tokens for found in stats] == [len(call.x) for call in calls]


def test_ranks_that_say_they_make_different_calls_fail_by_name_on_all_of_them(
    tmp_path: Path,
) -> None:
    weights, library = layer_of(0, tmp_path / "0")
    layer = EmulatedLayer(library, weights, RANKS)
    calls = [draw_call(weights.cfg, 20, rank) for rank in range(RANKS)]
    layer(calls, seed=1)
    layer.identities = [5, 9]
    layer(calls, seed=2)
    for shown in layer.failures():
        kind, _, rank, peer, _, _, epoch, own, expected, seen, _ = struct.unpack_from(
            "<8I3Q", shown
        )
        assert FailureKind(kind) == FailureKind.CALL_DIFFERS
        assert (epoch, {rank, peer}, {expected, seen}) == (2, {0, 1}, {5, 9})
        assert own == expected == layer.identities[rank]
    layer.reset()
    layer.identities = [7, 7]
    for call, y in zip(calls, layer(calls, seed=3), strict=True):
        assert reference.relative_error(y, weights.expected(call)) <= TOLERANCE[torch.bfloat16]
