# SPDX-License-Identifier: Apache-2.0
"""Ranks that scale losses skip a step together, or none does."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moeos
from moeos import MoELayer, World, training
from moeos.partition.sharding import local_part
from moeos.training import scaling
from moeos.world import virtual
from tests.layers import config
from tests.process_group import ranks_of_torch

CFG = config(experts=4, max_tokens=32)
SCALE = 1024.0


def in_turn(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def at_once(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)


@pytest.mark.parametrize("step", [in_turn, at_once])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_all_ranks_skip_a_step_where_one_has_an_infinity(
    step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None], fused: bool, value: float
) -> None:
    def rank_main(world: World) -> list[bool]:
        layer = MoELayer(CFG, world)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        stepped = []
        for bad in (False, True, False):
            before = layer.gate.weight.detach().clone()
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, SCALE)
            if bad and world.rank == 1:
                layer.w2.grad[0, 0, 0] = value
            scaler.scale(torch.zeros(()))  # which begins a scaler
            step(scaler, optimizer)
            scaler.update()
            stepped.append(not torch.equal(layer.gate.weight, before))
        assert scaler.get_scale() == SCALE / 2
        return stepped

    assert virtual.run(rank_main, ranks=2) == [[True, False, True]] * 2


@pytest.mark.parametrize("step", [in_turn, at_once])
@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_whose_optimizer_has_no_gradient_does_as_the_others(
    step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None], fused: bool
) -> None:
    def rank_main(world: World) -> tuple[list[bool], float]:
        layer = MoELayer(CFG, world)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        stepped = []
        for bad in (False, True):
            before = layer.w1.detach().clone()
            if world.rank == 0:
                layer.w1.grad = torch.full_like(layer.w1, math.inf if bad else SCALE)
            scaler.scale(torch.zeros(()))
            step(scaler, optimizer)
            scaler.update()
            stepped.append(not torch.equal(layer.w1, before))
        return stepped, scaler.get_scale()

    assert virtual.run(rank_main, ranks=2) == [
        ([True, False], SCALE / 2),
        ([False, False], SCALE / 2),
    ]


def test_an_error_of_one_rank_comes_to_all_and_nobody_unscales() -> None:
    def rank_main(world: World) -> str:
        layer = MoELayer(CFG, world)
        layer.w1.grad = torch.full_like(layer.w1, SCALE)
        if world.rank == 1:
            layer.w2.main_grad = torch.ones_like(layer.w2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        with pytest.raises((RuntimeError, ValueError)) as raised:
            scaler.unscale_(optimizer)
        assert torch.equal(layer.w1.grad, torch.full_like(layer.w1, SCALE))
        return f"{raised.type.__name__}: {raised.value}"

    first, second = virtual.run(rank_main, ranks=2)
    assert first.startswith("ValueError: rank 1 cannot take the gradients of a GradScaler: Runtime")
    assert second.startswith("RuntimeError: rank 1: group 0 of the optimizer has a parameter")


@pytest.mark.parametrize(
    "amid", ["the look", "behind the exchange", "before the last word", "the scaling"]
)
def test_gradients_are_unscaled_once_and_on_all_ranks_whenever_a_signal_comes(
    amid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def rank_main(world: World) -> list[bool]:
        signal.signal(signal.SIGUSR1, handler)
        layer = MoELayer(CFG, world)
        layer.w1.grad = torch.full_like(layer.w1, SCALE)
        optimizer = torch.optim.SGD([layer.w1], lr=1.0)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        really, times = torch.amp.GradScaler._unscale_grads_, []

        def unscale(*arguments: Any) -> Any:
            found = really(*arguments)
            times.append(True)
            if len(times) == (1 if amid == "the look" else 2):
                signal.raise_signal(signal.SIGUSR1)
            return found

        if world.rank == 0 and amid == "behind the exchange":
            over_ranks = scaling.over_ranks

            def all_over_ranks(*arguments: Any) -> Any:
                total = over_ranks(*arguments)
                signal.raise_signal(signal.SIGUSR1)
                return total

            monkeypatch.setattr(scaling, "over_ranks", all_over_ranks)
        elif world.rank == 0 and amid == "before the last word":
            last_word = scaler._require_on_all

            def interrupted(*arguments: Any) -> None:
                signal.raise_signal(signal.SIGUSR1)
                last_word(*arguments)

            monkeypatch.setattr(scaler, "_require_on_all", interrupted)
        elif world.rank == 0:
            monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", unscale)
        before_it = signal.getsignal(signal.SIGUSR1)
        told = False
        try:
            scaler.unscale_(optimizer)
        except (KeyboardInterrupt, moeos.PeerTimeout):
            told = True
        assert signal.getsignal(signal.SIGUSR1) == before_it
        monkeypatch.undo()
        world.reset()
        if amid != "the scaling":
            assert torch.equal(layer.w1.grad, torch.full_like(layer.w1, SCALE))
            scaler.unscale_(optimizer)
        assert torch.equal(layer.w1.grad, torch.ones_like(layer.w1))
        before = layer.w1.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        return [told, torch.equal(layer.w1, before - 1.0)]

    assert ranks_of_torch(rank_main, 2) == [[True, True], [amid != "the scaling", True]]


def test_a_main_grad_is_refused_by_name() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        layer.w2.main_grad = torch.ones_like(layer.w2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"rank \d: group 0 .* with a main_grad"):
            scaler.unscale_(optimizer)

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize("step", [in_turn, at_once])
def test_one_optimizer_has_dtensors_of_fully_shard_beside_plain_experts(
    step: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None],
) -> None:
    def rank_main(world: World) -> list[list[float]]:
        layer = MoELayer(CFG, world)
        other = fully_shard(nn.Linear(4, 4, bias=False))
        parameters: list[Any] = [other.weight, layer.w1]
        assert [isinstance(one, DTensor) for one in parameters] == [True, False]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = training.GradScaler("cpu", world=world, init_scale=SCALE)
        steps = []
        for bad in (None, layer.w1, other.weight):
            before = [local_part(one).clone() for one in parameters]
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, scaler.get_scale() if steps else SCALE)
                if parameter is bad and world.rank == 1:
                    local_part(parameter.grad).fill_(math.inf)
            scaler.scale(torch.zeros(()))
            step(scaler, optimizer)
            scaler.update()
            changes = [was - local_part(one) for was, one in zip(before, parameters, strict=True)]
            steps.append([round(float(one.mean()), 3) for one in changes])
        return steps

    assert ranks_of_torch(rank_main, 2) == [[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]] * 2
