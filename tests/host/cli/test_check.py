# SPDX-License-Identifier: Apache-2.0
"""The check: it passes what the reference computes and nothing else, on every rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeos import MoEConfig, MoELayer, World
from moeos.cli import check
from moeos.cli.check import Checker, CheckResult, share_weights
from moeos.cli.workload import Batch
from moeos.config import reference
from moeos.config.reference import TOLERANCE
from moeos.world import virtual
from tests.layers import config, draw_call, draw_given_call

RANKS = 2


def check_calls(
    cfg: MoEConfig, batches: list[list[Batch]], broken: tuple[int, int] | None = None
) -> list[CheckResult]:
    """The check's results by rank; `broken` is a rank and call whose output is changed a little."""

    def run(world: World) -> CheckResult:
        torch.manual_seed(3)
        layer = MoELayer(cfg, world)
        checker = Checker(layer, len(batches[world.rank]))
        for number, batch in enumerate(batches[world.rank]):
            out = layer(batch.x, batch.topk_ids, batch.topk_weights)
            if (world.rank, number) == broken:
                out[-1] *= 1.2
            checker.keep(batch, out)
        return checker.compare()

    return virtual.run(run, ranks=RANKS)


def batches_of(cfg: MoEConfig, tokens: tuple[int, ...]) -> list[list[Batch]]:
    return [
        [Batch(draw_call(cfg, n, 10 * rank + number).x) for number, n in enumerate(tokens)]
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True, "activation": "gelu"}, {"scoring": "sigmoid", "selection_bias": True}],
    ids=["plain", "biases", "selection-bias"],
)
def test_a_correct_layer_is_within_the_tolerance(
    dtype: torch.dtype, changes: dict[str, object]
) -> None:
    cfg = config(dtype=dtype, **changes)
    for result in check_calls(cfg, batches_of(cfg, (40, 0, 7))):
        assert max(result.errors) <= TOLERANCE[dtype]
        assert result.errors[1] == 0.0
        assert result.checked + result.near_ties == result.tokens == 47


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_codes_is_within_a_tolerance_of_its_own(dtype: torch.dtype) -> None:
    codes = {"weight_format": "fp8_block128", "activation_format": "fp8_group128"}
    cfg = config(hidden=128, intermediate=64, dtype=dtype, **codes)
    plain = dataclasses.replace(cfg, activation_format=None)
    assert reference.tolerance_of(cfg) > reference.tolerance_of(plain) == TOLERANCE[dtype]
    for result in check_calls(cfg, batches_of(cfg, (40, 0, 7))):
        assert max(result.errors) <= reference.tolerance_of(cfg)


@pytest.mark.parametrize("broken", [(0, 0), (1, 2)])
def test_one_wrong_row_is_an_error_of_its_rank_and_call_alone(broken: tuple[int, int]) -> None:
    cfg = config(dtype=torch.bfloat16)
    results = check_calls(cfg, batches_of(cfg, (40, 12, 30)), broken)
    for rank, result in enumerate(results):
        for number, error in enumerate(result.errors):
            assert (error > TOLERANCE[torch.bfloat16]) == ((rank, number) == broken)


def test_routing_of_the_caller_and_unused_slots_are_checked() -> None:
    cfg = config()
    batches = []
    for rank in range(RANKS):
        call = draw_given_call(cfg, 50, rank, unused=0.3)
        batches.append([Batch(call.x, call.ids, call.weights)])
    for result in check_calls(cfg, batches):
        assert result.errors[0] <= TOLERANCE[torch.float32]
        assert result.checked == 50


def test_dropped_pairs_are_missing_in_the_reference_as_well() -> None:
    cfg = config(capacity_factor=0.5)
    for result in check_calls(cfg, batches_of(cfg, (64, 33))):
        assert max(result.errors) <= TOLERANCE[torch.float32]


def test_large_runs_are_checked_by_a_sample_that_reaches_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = config(dtype=torch.bfloat16)
    flops_of_a_token = 2 * cfg.top_k * 3 * cfg.intermediate * cfg.hidden
    monkeypatch.setattr(check, "_MAX_FLOPS", 20 * flops_of_a_token)
    results = check_calls(cfg, batches_of(cfg, (60, 60)), broken=(1, 1))
    assert [result.checked for result in results] == [20, 20]
    assert results[1].errors[1] > TOLERANCE[torch.bfloat16]


def test_tokens_whose_experts_are_tied_are_left_out() -> None:
    cfg = config()

    def run(world: World) -> CheckResult:
        layer = MoELayer(cfg, world)
        layer.gate.weight.data[:] = layer.gate.weight[0]  # all experts are tied
        layer.gate.weight.data[0, 0] += 1.0
        layer.gate.weight.data[1, 0] += 1.0
        x = draw_call(cfg, 10, world.rank).x  # begins with 1: experts 0 and 1 are not tied
        x[:4, 0] = 0.0
        checker = Checker(layer, 1)
        checker.keep(Batch(x), layer(x))
        return checker.compare()

    for result in virtual.run(run, ranks=RANKS):
        assert (result.checked, result.near_ties) == (6, 4)
        assert result.errors[0] <= TOLERANCE[torch.float32]


def test_every_rank_sees_the_weights_of_all_experts_in_their_order() -> None:
    cfg = dataclasses.replace(config(experts=6), bias=True)

    def run(world: World) -> tuple[MoELayer, dict[str, torch.Tensor]]:
        layer = MoELayer(cfg, world)
        for bias in (layer.b1, layer.b2):
            assert bias is not None
            bias.data.uniform_()
        every = {name: weight.clone() for name, weight in share_weights(layer).items()}
        world.control.barrier()
        return layer, every

    ranks = virtual.run(run, ranks=3)
    for name in ("w1", "w2", "b1", "b2"):
        expected = torch.cat([getattr(layer, name) for layer, _ in ranks])
        for _, every in ranks:
            assert torch.equal(every[name], expected)
