# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts are added up over ranks that hold the same ones, or nothing is."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import init_device_mesh

import moeos
from moeos import MoELayer, Placement, World
from moeos.training import get_updated_expert_bias, reduce_expert_grads_, replicas
from tests.layers import config
from tests.nightly import in_turn
from tests.process_group import ranks_of_torch

CFG = config(max_tokens=16, experts=4)
IN_ORDER, TURNED = Placement(((0, 1, 2, 3),)), Placement(((3, 2, 1, 0),))


@contextmanager
def alone(deadline: float = 60.0) -> Iterator[World]:
    """A world of this process, which holds all experts."""
    with moeos.init("twin", rank=0, size=1, store=dist.HashStore(), deadline=deadline) as world:
        yield world


def group_of(world: World) -> Any:
    return next(iter(world.beside.values()))


def raised(do: Callable[[], object]) -> str:
    try:
        do()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _interrupted(*_: object, **__: object) -> NoReturn:
    raise LookupError("of a handler")


def given(layer: MoELayer) -> Tensor:
    """Gives w1 a gradient that says whose each part is."""
    layer.requires_grad_(True)
    experts = torch.tensor(layer.placement.ranks[0], dtype=CFG.dtype)
    layer.w1.grad = experts.view(-1, 1, 1).expand_as(layer.w1).contiguous()
    return layer.w1.grad


def test_replicas_whose_experts_lie_in_another_order_are_refused_on_all_ranks() -> None:
    def rank_main(world: World) -> str:
        with alone() as here:
            layer = MoELayer(CFG, here, placement=TURNED if world.rank == 1 else IN_ORDER)
            before = given(layer).clone()
            said = raised(
                lambda: reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)
            )
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            layer.replace(TURNED)
            reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)
            assert torch.equal(layer.w1.grad, before if world.rank == 1 else before.flip(0))
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first == second
    assert first.startswith("ConfigMismatch: ranks of group must hold the same experts")
    assert "rank 0 of torch.distributed has w1 " in first
    assert "of experts [0, 1, 2, 3] by the placement [[0, 1, 2, 3]]" in first
    assert "rank 1 has w1 " in first
    assert "of experts [3, 2, 1, 0] by the placement [[3, 2, 1, 0]]" in first


@pytest.mark.parametrize("unlike", ["shape", "number", "dtype"])
def test_replicas_of_unlike_tensors_are_refused_on_all_ranks(unlike: str) -> None:
    def rank_main(world: World) -> str:
        with alone() as here:
            other = world.rank == 1
            cfg = CFG
            if other and unlike == "shape":
                cfg = dataclasses.replace(CFG, intermediate=2 * CFG.intermediate)
            layer = MoELayer(cfg, here)
            given(layer)
            if other and unlike == "number":
                layer.w2.requires_grad_(False)
            if other and unlike == "dtype":
                layer.w2.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
                    layer.w2, dtype=torch.float64
                )
            return raised(
                lambda: reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)
            )

    first, second = ranks_of_torch(rank_main, 2)
    assert first == second
    assert first.startswith("ConfigMismatch: ")
    assert {"shape": "w1 [", "number": "only 1 of 2", "dtype": "torch.float64"}[unlike] in first


def test_an_error_of_one_rank_is_told_to_its_replicas() -> None:
    def rank_main(world: World) -> str:
        with alone() as here, alone() as another:
            layer = MoELayer(CFG, here)
            given(layer)
            mine = another if world.rank == 1 else here
            said = raised(
                lambda: reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=mine)
            )
            reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)
            return said

    first, second = ranks_of_torch(rank_main, 2)
    told = "rank 1 of torch.distributed cannot add up gradients of experts: ValueError: w1 is of"
    assert told in first
    assert second.startswith("ValueError: w1 is of a layer of")


@pytest.mark.parametrize("kind", ["an inference tensor", "elements that share memory"])
def test_a_gradient_that_cannot_be_written_is_refused_before_any_rank_has_sums(kind: str) -> None:
    def rank_main(world: World) -> tuple[str, bool]:
        with alone() as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()
            if world.rank == 1 and kind == "an inference tensor":
                with torch.inference_mode():
                    layer.w2.grad = torch.ones_like(layer.w2)
            elif world.rank == 1:
                layer.w2.grad = torch.ones(()).to(layer.w2).expand_as(layer.w2)
            else:
                layer.w2.grad = torch.ones_like(layer.w2)
            said = raised(
                lambda: reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)
            )
            return said, torch.equal(layer.w1.grad, before)

    found = ranks_of_torch(rank_main, 2)
    for said, same in found:
        assert kind in said
        assert "set parameter.grad to a clone of it" in said
        assert same


def test_a_replica_that_does_not_come_is_named_at_the_deadline_and_learns_of_it() -> None:
    def rank_main(world: World) -> str:
        with alone(deadline=1.0) as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            reduce()
            if world.rank == 1:
                world.control.barrier()  # too late
            said = raised(reduce)
            if world.rank == 0:
                world.control.barrier()
            world.control.barrier()
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            reduce()
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first.startswith("PeerTimeout: rank 0 of 2 waited 1 s for the comparison of experts")
    assert "rank 1 did not arrive" in first
    assert "Nothing has been added up here" in first
    assert second.startswith("PeerTimeout: rank 1 stopped waiting for the comparison of experts")
    assert "rank 0 gave up: PeerTimeout: rank 0 of 2 waited 1 s" in second


def test_what_a_handler_raises_amid_the_comparison_is_told_and_a_later_call_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handler(*_: object) -> NoReturn:
        raise LookupError("of a handler")

    def rank_main(world: World) -> str:
        signal.signal(signal.SIGUSR1, handler)
        with alone() as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            reduce()
            control = group_of(here).control
            if world.rank == 0:
                really = control.allgather

                def allgather(*arguments: Any, **named: Any) -> Any:
                    signal.raise_signal(signal.SIGUSR1)
                    return really(*arguments, **named)

                monkeypatch.setattr(control, "allgather", allgather)
            said = raised(reduce)
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            reduce()
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first == "LookupError: of a handler"
    assert "rank 0 gave up: LookupError in reduce_expert_grads_" in second


@pytest.mark.parametrize(
    ("leaves", "others_begin"),
    in_turn(["before the call", "early in it"], ["the first call", "a later call"]),
)
def test_ranks_of_which_one_missed_a_call_meet_again(
    leaves: str, others_begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank_main(world: World) -> list[str]:
        with alone(deadline=1.0) as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()
            said = []

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            def reduce_on_all() -> None:
                said.append(raised(reduce))
                world.control.barrier()

            if others_begin == "a later call":
                reduce_on_all()
            if world.rank == 0:
                reduce_on_all()
            elif leaves == "before the call":
                world.control.barrier()
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(replicas, "_group_of", _interrupted)
                    reduce_on_all()
            for _ in range(3):
                reduce_on_all()
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            return said[-3:]

    for said in ranks_of_torch(rank_main, 2):
        if others_begin == "a later call":
            assert said[0].startswith("PeerTimeout: ")
            assert "A rank that was not in the call that failed may be told so" in said[0]
            del said[0]
        assert set(said) == {"nothing"}


@pytest.mark.parametrize("amid", ["StoreControl", "OfHosts"])
def test_ranks_of_which_one_was_interrupted_while_they_connected_meet_again(
    amid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank_main(world: World) -> list[str]:
        with alone(deadline=1.0) as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()
            said = []
            for attempt in range(3):
                with monkeypatch.context() as patch:
                    if attempt == 0 and world.rank == 1:
                        patch.setattr(replicas, amid, _interrupted)
                    said.append(
                        raised(
                            lambda: reduce_expert_grads_(
                                layer.parameters(), dist.group.WORLD, world=here
                            )
                        )
                    )
                world.control.barrier()
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first[0].startswith("PeerTimeout: ")
    assert second[0] == "LookupError: of a handler"
    assert first[1:] == second[1:] == ["nothing"] * 2


@pytest.mark.parametrize("comes", ["amid the sums", "behind the last word"])
def test_whenever_a_handler_raises_all_gradients_of_all_ranks_are_sums_or_none_is(
    comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> NoReturn:
        raise LookupError("of a handler")

    def rank_main(world: World) -> list[Any]:
        signal.signal(signal.SIGUSR1, handler)
        with alone(deadline=300.0) as here:
            layer = MoELayer(CFG, here)
            given(layer)
            layer.w2.grad = torch.ones_like(layer.w2)

            def reduce() -> None:
                reduce_expert_grads_(
                    layer.parameters(), dist.group.WORLD, world=here, average=False
                )

            reduce()
            group = group_of(here)
            sums, take = group.by_hosts.sums, replicas._take

            def interrupted_sums(*arguments: Any) -> Tensor:
                summed: Tensor = sums(*arguments)
                if world.rank == 0:
                    signal.raise_signal(signal.SIGUSR1)
                return summed

            def interrupted_take(*arguments: Any) -> None:
                if world.rank == 0:
                    signal.raise_signal(signal.SIGUSR1)
                take(*arguments)

            before = [layer.w1.grad.clone(), layer.w2.grad.clone()]  # type: ignore[union-attr]
            if comes == "amid the sums":
                monkeypatch.setattr(group.by_hosts, "sums", interrupted_sums)
            else:
                monkeypatch.setattr(replicas, "_take", interrupted_take)
            said = raised(reduce)
            times = 1 if comes == "amid the sums" else 2
            for one, was in zip((layer.w1, layer.w2), before, strict=True):
                assert torch.equal(one.grad, times * was)  # type: ignore[arg-type]
            monkeypatch.undo()
            reduce()
            for one, was in zip((layer.w1, layer.w2), before, strict=True):
                assert torch.equal(one.grad, 2 * times * was)  # type: ignore[arg-type]
            return [said]

    [first], [second] = ranks_of_torch(rank_main, 2)
    assert first == "LookupError: of a handler"
    if comes == "amid the sums":
        assert "rank 0 gave up: LookupError in reduce_expert_grads_" in second
    else:
        assert second == "nothing"


def test_a_rank_that_stands_behind_the_comparison_is_told_of_at_the_deadline_in_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank_main(world: World) -> str:
        with alone(deadline=1.0) as here:
            layer = MoELayer(CFG, here)
            before = given(layer).clone()

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            reduce()
            if world.rank == 1:
                really = replicas._agreed

                def stand(*arguments: Any) -> list[Tensor]:
                    agreed = really(*arguments)
                    world.control.barrier()  # until the other one has given up
                    return agreed

                monkeypatch.setattr(replicas, "_agreed", stand)
            said = raised(reduce)
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            if world.rank == 0:
                world.control.barrier()
            world.control.barrier()
            monkeypatch.undo()
            reduce()
            assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first.isascii()
    assert first.startswith(
        "PeerTimeout: rank 0 of 2: the sums of experts' gradients ended without"
    )
    named = "rank 1 did not come (stuck, in another call, or ended: then start all ranks again)"
    assert f"within 1 s: {named}. Nothing has been added up here" in first
    assert second.startswith("PeerTimeout: rank 1 stopped waiting for the sums of experts'")
    assert "rank 0 gave up: PeerTimeout: rank 0 of 2: the sums" in second


def test_a_call_behind_one_that_failed_says_what_it_waits_for() -> None:
    def rank_main(world: World) -> list[str]:
        with alone(deadline=1.0) as here:
            layer = MoELayer(CFG, here)
            given(layer)

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            reduce()
            said = [raised(reduce) for _ in range(2)] if world.rank == 0 else []
            world.control.barrier()
            return said

    first, _ = ranks_of_torch(rank_main, 2)
    assert "rank 0 of 2 waited 1 s for the comparison of experts" in first[0]
    assert "rank 0 of 2 waited 1 s for the comparison of experts" in first[1]
    assert not any("world" in said for said in first)
    assert all("Nothing has been added up here" in said for said in first)


def test_a_world_that_is_closed_amid_the_comparison_ends_it() -> None:
    def rank_main(world: World) -> list[str]:
        with alone(deadline=300.0) as here:
            layer = MoELayer(CFG, here)
            given(layer)
            said: list[str] = []

            def reduce() -> None:
                reduce_expert_grads_(layer.parameters(), dist.group.WORLD, world=here)

            reduce()
            if world.rank == 0:
                waiting = threading.Thread(target=lambda: said.append(raised(reduce)))
                waiting.start()
                while not here.gate.busy:
                    time.sleep(0.01)
                here.close()
                waiting.join()
                said.append(raised(reduce))
            world.control.barrier()
            return said

    first, second = ranks_of_torch(rank_main, 2)
    assert first[0] == "RuntimeError: the world of rank 0 was closed during this call"
    assert first[1].startswith("RuntimeError: the world of rank 0 is closed")
    assert second == []


def test_a_dimension_of_a_mesh_is_a_group_and_a_whole_mesh_is_refused_by_its_names() -> None:
    def rank_main(world: World) -> str:
        one = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "dp"))
        with alone() as here:
            layer = MoELayer(CFG, here)
            for group in (one, two["dp"]):
                before = given(layer).clone()
                reduce_expert_grads_(layer.parameters(), group, world=here)
                assert torch.equal(layer.w1.grad, before)  # type: ignore[arg-type]
            counts = torch.tensor([1, 0]) if world.rank == 0 else torch.tensor([0, 3])
            assert get_updated_expert_bias(counts, torch.zeros(2), 1.0, one).tolist() == [1.0, -1.0]
            not_one: Any = "dp"
            with pytest.raises(TypeError, match="group is 'dp'; it must be a process group"):
                reduce_expert_grads_(layer.parameters(), not_one, world=here)
            return raised(lambda: reduce_expert_grads_(layer.parameters(), two, world=here))

    for said in ranks_of_torch(rank_main, 2):
        assert said.startswith("ValueError: group is a DeviceMesh of 2 dimensions ('ep', 'dp')")
        assert "such as mesh['dp']" in said
