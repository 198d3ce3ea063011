# SPDX-License-Identifier: Apache-2.0
"""Which calls a launch may make, on the emulated GPU: one after the other, and not for ever."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeos._runtime import FailureKind
from moeos.config import reference
from tests.emulator.emulated import EmulatedLayer, build
from tests.layers import Call, Weights, config, draw_call, draw_weights
from tests.nightly import all_but

PROCESSORS = {1: 4, 2: 3}
"""By ranks."""
LAST_EPOCH = (1 << 32) - 2
TOKENS = 16
TOLERANCE = 8e-3


@pytest.fixture(scope="module")
def weights() -> Weights:
    sizes = {"hidden": 256, "intermediate": 256, "experts": 8, "top_k": 2, "max_tokens": 100}
    return draw_weights(config(dtype=torch.bfloat16, **sizes), 1)


Library = Callable[[int], Path]


@pytest.fixture(scope="module")
def library(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Compiles the kernel of so many ranks, once."""

    @functools.cache
    def build_once(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("attendance")
        return build(weights.cfg, ranks, PROCESSORS[ranks], folder)

    return build_once


def draw_calls(weights: Weights, ranks: int, number: int, tokens: int = TOKENS) -> list[Call]:
    return [draw_call(weights.cfg, tokens, 100 * number + rank) for rank in range(ranks)]


def failures(layer: EmulatedLayer) -> list[tuple[FailureKind, int]]:
    """The kind, and the call, of what each rank has shown its host."""
    found = [struct.unpack_from("<8I", shown) for shown in layer.failures()]
    return [(FailureKind(fields[0]), fields[6]) for fields in found]


def is_right(weights: Weights, calls: list[Call], outputs: list[torch.Tensor]) -> bool:
    return all(
        reference.relative_error(y, weights.expected(call)) <= TOLERANCE
        for call, y in zip(calls, outputs, strict=True)
    )


@pytest.mark.parametrize(("ranks", "tokens"), all_but((), [(1, 4), (2, 16), (1, 100), (2, 4)]))
def test_when_all_epochs_are_spent_every_rank_says_so_before_anything_is_wrong(
    ranks: int, tokens: int, weights: Weights, library: Library
) -> None:
    """The twin, of the same source, says so in every run: tests/native/test_calls.cpp."""
    layer = EmulatedLayer(library(ranks), weights, ranks)
    layer.set_epoch(LAST_EPOCH - 1)
    for number in range(2):
        calls = draw_calls(weights, ranks, number, tokens)
        outputs = layer(calls, number)
        assert failures(layer) == [(FailureKind.NONE, 0)] * ranks
        assert is_right(weights, calls, outputs)
    for number in range(2, 5):
        layer(draw_calls(weights, ranks, number, tokens), number)
        assert failures(layer) == [(FailureKind.EPOCHS_SPENT, LAST_EPOCH + 1)] * ranks
    layer.reset()
    calls = draw_calls(weights, ranks, 5, tokens)
    assert is_right(weights, calls, layer(calls, 5))


APART = [0, 1_000, 20_000, 100_000, 120_000, 130_000, 150_000]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "apart_ns"), itertools.product(PROCESSORS, APART))
def test_two_launches_at_once_fail_by_name_or_are_right(
    ranks: int, apart_ns: int, weights: Weights, library: Library
) -> None:
    for seed in range(2):
        layer = EmulatedLayer(library(ranks), weights, ranks)
        calls = draw_calls(weights, ranks, 0)
        assert is_right(weights, calls, layer(calls, seed))
        launches = [draw_calls(weights, ranks, number) for number in (1, 2)]
        outputs = layer.at_once(launches, seed, apart_ns)
        kinds = {kind for kind, _ in failures(layer)}
        if kinds == {FailureKind.NONE}:  # the second began when the first had ended
            assert all(map(is_right, [weights] * 2, launches, outputs))
            assert apart_ns > 100_000  # a call takes some 130 us
            continue
        assert kinds == {FailureKind.CALLS_AT_ONCE}
        layer(calls, seed)
        assert {kind for kind, _ in failures(layer)} == {FailureKind.CALLS_AT_ONCE}
        layer.reset()
        assert is_right(weights, calls, layer(calls, seed))
        assert {kind for kind, _ in failures(layer)} == {FailureKind.NONE}


@pytest.mark.nightly
def test_many_launches_at_once_end(weights: Weights, library: Library) -> None:
    layer = EmulatedLayer(library(2), weights, 2)
    launches = [draw_calls(weights, 2, number) for number in range(4)]
    layer.at_once(launches, 7, 30_000)
    assert {kind for kind, _ in failures(layer)} == {FailureKind.CALLS_AT_ONCE}
