# SPDX-License-Identifier: Apache-2.0
"""A norm of gradients is that of the whole model: experts of all ranks, and once what all hold."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import moeos
from moeos import MoELayer, PeerTimeout, World, training
from moeos.world import virtual
from tests.layers import config
from tests.process_group import ranks_of_torch

CFG = config(experts=5, max_tokens=64, bias=True)
EXPERTS = ("w1", "w2", "b1", "b2")
NORMS = [1.0, 2.0, 3.0, math.inf]


class Model(nn.Module):
    """A layer, something beside it, and weights of experts that no layer holds."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.norm = nn.Linear(CFG.hidden, CFG.hidden)
        self.mlp = MoELayer(CFG, world)
        self.own = nn.Parameter(torch.zeros(1 + world.rank, 3))
        self.unused = nn.Parameter(torch.zeros(3))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(world: World) -> Model:
    """Gradients as after data parallelism: equal on all ranks but of experts."""
    model = Model(world)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        parts = name.split(".")
        if parts[-1] in EXPERTS:
            mine = CFG.experts_of(world.rank, world.size)
            every = drawn(seed, CFG.experts, *parameter.shape[1:])
            parameter.grad = every[mine.start : mine.stop].clone()
        elif name == "own":
            parameter.grad = drawn(100 + world.rank, *parameter.shape)
        elif name != "unused":
            parameter.grad = drawn(seed, *parameter.shape)
    return model


def whole_norm(ranks: int, p: float) -> float:
    """Of all gradients there are, each once, in float64."""

    def rank_main(world: World) -> list[Tensor]:
        return [
            parameter.grad.double().flatten()
            for name, parameter in with_gradients(world).named_parameters()
            if parameter.grad is not None
            and (world.rank == 0 or name.split(".")[-1] in (*EXPERTS, "own"))
        ]

    every = [one for mine in virtual.run(rank_main, ranks=ranks) for one in mine]
    return float(torch.linalg.vector_norm(torch.cat(every), p))


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_norm_is_that_of_all_ranks_experts(ranks: int, p: float) -> None:
    def rank_main(world: World) -> Tensor:
        model = with_gradients(world)
        return training.get_total_norm(model.parameters(), p, world=world, experts=[model.own])

    found = virtual.run(rank_main, ranks=ranks)
    assert len({float(one) for one in found}) == 1
    assert found[0].dtype == torch.float32
    assert float(found[0]) == pytest.approx(whole_norm(ranks, p), rel=1e-5)


def test_what_is_no_parameter_raises_and_says_what_to_pass() -> None:
    """It would count as nothing, or experts as what all ranks hold, and ranks would differ."""

    def rank_main(world: World) -> None:
        model = with_gradients(world)
        parameters, own = list(model.parameters()), model.own
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            (parameters, own, TypeError, "experts is one tensor"),
            (parameters, ["own"], TypeError, "experts has a str"),
            (parameters, {"own": own}, TypeError, "experts has a str"),
            (parameters, [own.data], ValueError, "experts has a tensor .* not among parameters"),
            (model.named_parameters(), (), TypeError, "parameters has a tuple"),
            (model.state_dict().values(), (), ValueError, "that is no parameter and has no grad"),
            ([one.data for one in parameters], (), ValueError, "so pass model.parameters"),
        ]
        for given, experts, kind, text in wrong:
            with pytest.raises(kind, match=text):
                training.get_total_norm(given, world=world, experts=experts)
        with pytest.raises(TypeError, match="parameters has a str"):
            training.clip_grad_norm_(model.state_dict(), 1.0, world=world)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not among parameters"):
            training.reduce_expert_grads_(parameters, world=world, experts=[own.data])

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("most", [0.5, 1e9])
def test_all_gradients_are_scaled_by_one_factor(most: float) -> None:
    def rank_main(world: World) -> None:
        model, before = with_gradients(world), with_gradients(world)
        parameters = list(model.parameters())
        norm = training.clip_grad_norm_(parameters * 2, most, world=world, experts=[model.own])
        factor = min(1.0, most / (float(norm) + 1e-6))
        for one, other in zip(parameters, before.parameters(), strict=True):
            if one.grad is None:
                assert other.grad is None
                continue
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad * factor)
        again = training.get_total_norm(parameters, world=world, experts=[model.own])
        assert float(again) == pytest.approx(min(most, float(norm)), rel=1e-4)

    virtual.run(rank_main, ranks=3)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_world_of_processes_has_the_same_norm(grouped: bool) -> None:
    def rank_main(world: World) -> float:
        if grouped:
            with moeos.init("twin", group=dist.group.WORLD, deadline=60.0) as other:
                model = with_gradients(other)
                return float(
                    training.get_total_norm(model.parameters(), world=other, experts=[model.own])
                )
        model = with_gradients(world)
        return float(training.get_total_norm(model.parameters(), world=world, experts=[model.own]))

    wanted = whole_norm(2, 2.0)
    assert ranks_of_torch(rank_main, 2) == [pytest.approx(wanted, rel=1e-5)] * 2


def test_a_rank_that_does_not_come_is_named_at_the_worlds_deadline() -> None:
    def rank_main(world: World) -> bool:
        with moeos.init("twin", group=dist.group.WORLD, deadline=4.0) as other:
            layer = MoELayer(CFG, other).requires_grad_(True)
            if world.rank == 0:
                with pytest.raises(PeerTimeout, match=r"4 s for the norm .* rank 1 did not"):
                    training.clip_grad_norm_(layer.parameters(), 1.0, world=other)
            world.control.barrier()
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_what_fsdp_has_cut_counts_whole_and_is_scaled() -> None:
    def rank_main(world: World) -> bool:
        plain = with_gradients(world)
        wanted = training.get_total_norm(plain.parameters(), world=world, experts=[plain.own])
        model = with_gradients(world)
        grads = {name: one.grad for name, one in model.norm.named_parameters()}
        fully_shard(model.norm)
        for name, parameter in model.norm.named_parameters():
            given = grads[name]
            parameter.grad = torch.distributed.tensor.distribute_tensor(
                given,
                parameter.device_mesh,
                parameter.placements,  # type: ignore[attr-defined]
            )
        found = training.clip_grad_norm_(model.parameters(), 0.25, world=world, experts=[model.own])
        assert float(found) == pytest.approx(float(wanted), rel=1e-6)
        again = training.get_total_norm(model.parameters(), world=world, experts=[model.own])
        assert float(again) == pytest.approx(0.25, rel=1e-4)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_norm_that_is_not_finite_on_one_rank_raises_on_all() -> None:
    def rank_main(world: World) -> None:
        model = with_gradients(world)
        if world.rank == 1:
            assert model.mlp.w1.grad is not None
            model.mlp.w1.grad[0, 0, 0] = math.inf
        before = model.mlp.w2.grad
        assert before is not None
        before = before.clone()
        with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
            training.clip_grad_norm_(
                model.parameters(), 1.0, error_if_nonfinite=True, world=world, experts=[model.own]
            )
        assert torch.equal(before, model.mlp.w2.grad)  # type: ignore[arg-type]

    virtual.run(rank_main, ranks=2)


def test_small_floats_are_summed_in_float32() -> None:
    def rank_main(world: World) -> float:
        parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        return float(training.get_total_norm(parameter, world=world))

    assert virtual.run(rank_main, ranks=1)[0] == pytest.approx(math.sqrt(1000), rel=1e-6)


def test_ranks_without_gradients_take_part() -> None:
    def rank_main(world: World) -> float:
        parameter = nn.Parameter(torch.zeros(3))
        if world.rank == 1:
            parameter.grad = torch.full((3,), 2.0)
        return float(training.get_total_norm([parameter], world=world, experts=[parameter]))

    assert virtual.run(rank_main, ranks=2) == [pytest.approx(math.sqrt(12))] * 2


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan])
def test_a_norm_that_is_none_is_named(p: float) -> None:
    def rank_main(world: World) -> None:
        with pytest.raises(ValueError, match="it must be above 0"):
            training.get_total_norm([], p, world=world)

    virtual.run(rank_main, ranks=1)


def test_experts_of_another_world_are_named() -> None:
    def rank_main(world: World) -> Any:
        layer = MoELayer(CFG, world)

        def other_main(other: World) -> None:
            with pytest.raises(ValueError, match="pass the world of the layers"):
                training.get_total_norm(layer.parameters(), world=other)

        virtual.run(other_main, ranks=1)

    virtual.run(rank_main, ranks=1)


def test_experts_of_a_layer_without_a_world_count_on_each_rank() -> None:
    def rank_main(world: World) -> float:
        layer = pickle.loads(pickle.dumps(MoELayer(CFG, world)))
        layer.w1.grad = torch.zeros_like(layer.w1)
        layer.w1.grad[0, 0, 0] = 3.0 + world.rank
        return float(training.get_total_norm(layer.parameters(), world=world))

    assert virtual.run(rank_main, ranks=2) == [5.0, 5.0]


def test_what_is_added_up_in_main_grad_counts_and_is_clipped() -> None:
    def rank_main(world: World) -> None:
        plain, main = with_gradients(world), with_gradients(world)
        for parameter in main.parameters():
            if parameter.grad is not None:
                parameter.main_grad = parameter.grad.float()
                parameter.grad = torch.full_like(parameter, math.nan)  # of a trainer's hooks
        norms = [
            training.clip_grad_norm_(one.parameters(), 0.5, world=world, experts=[one.own])
            for one in (plain, main)
        ]
        assert torch.equal(*norms)
        for one, other in zip(plain.parameters(), main.parameters(), strict=True):
            if one.grad is not None:
                assert torch.equal(one.grad, other.main_grad)

    virtual.run(rank_main, ranks=2)
