# SPDX-License-Identifier: Apache-2.0
"""A signal's handler raises amid what ranks do together: the others hear of it, and wait for
nobody."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

import moeos
from moeos import MoELayer, Placement, World, checkpoints
from moeos.system.held_signals import HeldSignals
from moeos.training import GradScaler, get_total_norm
from moeos.world import agreement, interruption
from moeos.world.control import SoloControl, _PolledControl
from tests.layers import config
from tests.processes import ForkedRanks, free_port, torchrun_environment

FAR = 300.0  # seconds: a deadline that no test lives to see
CFG = config(max_tokens=16, experts=4, hidden=128, intermediate=64)
ORDERED = Placement.chunk(4, 2)


class Boom(Exception):
    """What a signal's handler raises."""


def handler(*_: object) -> NoReturn:
    raise Boom


def two_ranks(rank_main: Callable[[World], Any]) -> list[Any]:
    port = free_port()

    def live(rank: int) -> Any:
        torch.set_num_threads(1)
        signal.signal(signal.SIGUSR1, handler)
        os.environ.update(torchrun_environment(rank, 2, port))
        world = moeos.init("twin", deadline=FAR)
        try:
            return rank_main(world)
        finally:
            world.close()  # and whoever serves the store waits for the other

    return ForkedRanks(live, 2).ended(60.0)


def raised(do: Callable[[], object]) -> str:
    try:
        do()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def first_backward(world: World, layer: MoELayer) -> None:
    layer.requires_grad_(True)
    layer(torch.zeros(2, CFG.hidden, dtype=CFG.dtype)).sum().backward()


def unscaled(world: World, layer: MoELayer) -> None:
    layer.w1.requires_grad_(True).grad = torch.zeros_like(layer.w1)
    scaler = GradScaler("cpu", world=world, enabled=True)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([layer.w1]))


def inputs_checked(world: World, layer: MoELayer) -> None:
    layer.check_inputs(torch.zeros(2, CFG.hidden, dtype=CFG.dtype))


WORK: dict[str, tuple[str, Callable[[World, MoELayer], object]]] = {
    "a layer": ("the making of a MoELayer", lambda world, _: MoELayer(CFG, world)),
    "experts": ("the making of Experts", lambda world, _: moeos.Experts(CFG, world)),
    "a copy": ("a copy of a MoELayer", lambda _, layer: copy.deepcopy(layer)),
    "replace": ("MoELayer.replace", lambda _, layer: layer.replace(ORDERED)),
    "reset": ("reset", lambda world, _: world.reset()),
    "a workspace": ("the end of a workspace", lambda world, _: world.workspace.close()),
    "backward": ("the first backward of a layer", first_backward),
}


def armed_signal(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What, once it is given an element, lets rank 0's next exchange begin with a signal."""
    really = _PolledControl.allgather
    armed: list[bool] = []

    def allgather(self: Any, *arguments: Any, **named: Any) -> Any:
        if armed and self.rank == 0:
            armed.clear()
            signal.raise_signal(signal.SIGUSR1)
        return really(self, *arguments, **named)

    monkeypatch.setattr(_PolledControl, "allgather", allgather)
    return armed


@pytest.mark.parametrize("work", WORK)
def test_an_exception_of_a_handler_between_exchanges_ends_the_peers_waits(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, do = WORK[work]
    armed = armed_signal(monkeypatch)

    def rank_main(world: World) -> str:
        layer = MoELayer(CFG, world, placement=ORDERED)
        armed.append(True)
        return raised(lambda: do(world, layer))

    own, peers = two_ranks(rank_main)
    assert own == "Boom: "
    assert peers.startswith("PeerTimeout: rank 1 stopped waiting for")
    assert f"rank 0 gave up: Boom in {what}" in peers
    assert "close it on all of them, and make it and its layers again" in peers


COMPARISONS: dict[str, tuple[str, Callable[[World, MoELayer], object]]] = {
    "inputs": ("the comparison of inputs", inputs_checked),
    "norm": ("get_total_norm", lambda world, layer: get_total_norm(layer.w1, world=world)),
    "scaler": ("GradScaler", unscaled),
}


@pytest.mark.parametrize("work", COMPARISONS)
def test_behind_an_exception_amid_a_comparison_reset_lets_all_go_on(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, do = COMPARISONS[work]
    armed = armed_signal(monkeypatch)

    def rank_main(world: World) -> list[str]:
        layer = MoELayer(CFG, world, placement=ORDERED)
        said = []
        for _ in range(2):
            do(world, layer)
            world.control.barrier()
            armed.append(True)
            said.append(raised(lambda: do(world, layer)))
            armed.clear()
            if world.rank == 1:
                said.append(raised(lambda: do(world, layer)))
            world.reset()
        do(world, layer)
        layer(torch.zeros(2, CFG.hidden, dtype=CFG.dtype))
        return said

    own, peers = two_ranks(rank_main)
    assert own == ["Boom: "] * 2
    for first, again in zip(peers[::2], peers[1::2], strict=True):
        assert first.startswith("PeerTimeout: rank 1 stopped waiting for")
        assert f"rank 0 gave up: Boom in {what}" in first
        assert again.startswith("PeerTimeout: rank 1 cannot begin")
        assert first.endswith("All ranks may call world.reset() and go on")


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_a_signal_amid_reading_a_block_ends_the_peers_waits(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_block(*_: object) -> dict[str, torch.Tensor]:
        signal.raise_signal(signal.SIGUSR1)
        return {}

    def rank_main(world: World) -> str:
        if world.rank == 0:
            monkeypatch.setattr(checkpoints, "load_block", load_block)
        else:
            monkeypatch.setattr(checkpoints, "load_block", lambda *_: {})
        monkeypatch.setattr(MoELayer, "load_state_dict", lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: (_ for _ in ()).throw(kind))
        return raised(lambda: MoELayer.from_hf(CFG, world, {}, "block"))

    own, peers = two_ranks(rank_main)
    assert own == f"{kind.__name__}: "
    assert "rank 0 gave up: KeyboardInterrupt in MoELayer.from_hf" in peers or (
        kind is Boom and "rank 0 cannot take the weights under 'block'" in peers
    )


def test_an_exception_of_a_handler_before_replace_compares_ends_the_peers_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def require(_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def rank_main(world: World) -> str:
        layer = MoELayer(CFG, world, placement=ORDERED)
        if world.rank == 0:
            monkeypatch.setattr(agreement, "require_placement", require)
        return raised(lambda: layer.replace(ORDERED))

    own, peers = two_ranks(rank_main)
    assert own == "Boom: "
    assert "rank 0 gave up: Boom in MoELayer.replace" in peers


def test_an_error_that_is_no_handlers_and_one_that_is_told_abort_nothing() -> None:
    class Control(SoloControl):
        def abort(self, reason: str) -> None:
            aborts.append(reason)

    aborts: list[str] = []
    held = HeldSignals()

    def wrong() -> None:
        raise Boom

    def tells() -> None:
        with held:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for do in (wrong, tells):
            with pytest.raises(Boom):
                interruption.told(Control(), "work", do, held)
        assert aborts == []
        with pytest.raises(Boom):
            interruption.told(Control(), "work", lambda: signal.raise_signal(signal.SIGUSR1))
        assert aborts == ["Boom in work"]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
