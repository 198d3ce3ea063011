# SPDX-License-Identifier: Apache-2.0
"""What a rank of the GPU benchmark computes on the host: the limits of a case, and its layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.gpu.one_rank import (
    LARGEST_ERROR,
    LARGEST_ROUNDED_ERROR,
    coded_and_plain,
    limits,
)
from moeos import MoEConfig, MoELayer, World
from moeos.config import reference
from moeos.world import virtual
from tests.layers import config, draw_given_call

CFG = MoEConfig(hidden=64, intermediate=32, experts=8, top_k=2, max_tokens=16)
RATES = {"F": 1e9, "W": 1e8, "N": 1e7}


def load(rows: int, experts: int, from_peers: int, to_peers: int) -> dict[str, int]:
    return {"rows": rows, "experts": experts, "from_peers": from_peers, "to_peers": to_peers}


def test_limits_are_those_of_the_rank_with_most() -> None:
    found = limits(CFG, 16, [load(20, 3, 5, 11), load(12, 4, 11, 5)], RATES)
    router = 2 * 16 * 8 * 64
    weights = (64 + 32) * 64
    assert found["F"] == pytest.approx((router + 2 * 20 * weights) / 1e9)
    assert found["W"] == pytest.approx(4 * weights * 2 / 1e8)
    assert found["N"] == pytest.approx(16 * 64 * 2 / 1e7)


def test_one_gpu_has_no_links() -> None:
    assert limits(CFG, 16, [load(32, 8, 0, 0)], RATES | {"N": None})["N"] is None


def test_codes_are_read_as_they_are_stored_and_multiplied_at_twice_the_rate() -> None:
    cfg = MoEConfig(hidden=128, intermediate=64, experts=8, top_k=2, max_tokens=16)
    coded = dataclasses.replace(cfg, weight_format="fp8_channel", activation_format="fp8_group128")
    of_ranks = [load(20, 3, 5, 11), load(12, 4, 11, 5)]
    found, plain = limits(coded, 16, of_ranks, RATES), limits(cfg, 16, of_ranks, RATES)
    assert found["F"] == pytest.approx(plain["F"] / 2)  # type: ignore[operator]
    scales = 4 * (2 * 64 + 128)
    assert found["W"] == pytest.approx(4 * (3 * 128 * 64 + scales) / 1e8)
    # Of rank 1: a row there is 128 codes and a scale, padded, and a result 128 numbers of 2 bytes.
    assert found["N"] == pytest.approx((5 * 144 + 11 * 256) / 1e7)
    wide = dataclasses.replace(coded, hidden=256)
    returned = dataclasses.replace(wide, result_format="fp8_group128")
    links = [limits(each, 16, of_ranks, RATES)["N"] for each in (wide, returned)]
    assert links == pytest.approx([(5 * 272 + 11 * size) / 1e7 for size in (512, 384)])


@pytest.mark.parametrize(
    ("formats", "most"),
    [
        ({}, 0.0),
        ({"weight_format": "mxfp4"}, LARGEST_ERROR),
        (
            {"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
            LARGEST_ROUNDED_ERROR,
        ),
    ],
)
def test_a_layer_with_formats_stands_beside_one_with_the_numbers_of_its_codes(
    formats: dict[str, str], most: float
) -> None:
    cfg = config(hidden=128, intermediate=192, dtype=torch.bfloat16, **formats)
    call = draw_given_call(cfg, 100, 1)

    def rank_main(world: World) -> float:
        layers = coded_and_plain(MoELayer(cfg.in_numbers(), world), cfg)
        assert [*layers] == ["moeos", "in_numbers"][: 1 + (cfg.weight_format is not None)]
        assert layers["moeos"].cfg == cfg
        y, plain = (call(one) for one in (layers["moeos"], [*layers.values()][-1]))
        return reference.relative_error(y, plain)

    errors = virtual.run(rank_main, ranks=2)
    assert max(errors) <= most
    if cfg.activation_format is not None:
        assert min(errors) > most / 4  # the bound is no wider than it has to be
