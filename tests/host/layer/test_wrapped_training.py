# SPDX-License-Identifier: Apache-2.0
"""Wrapped models whose experts train: gradients are those of one process with all tokens."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable import replicate, replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moeos
from moeos import MoELayer, World, training
from moeos.layer import wrappers
from tests.layers import config, draw_call, draw_weights
from tests.nightly import all_but, spread
from tests.process_group import ranks_of_torch

CFG = config(
    max_tokens=64,
    bias=True,
    router_bias=True,
    shared_experts=2,
    shared_intermediate=64,
    shared_gate=True,
)
WEIGHTS = draw_weights(CFG)
TOKENS = 16

_OF_WRAPPERS = re.compile(r"module\.|_fsdp_wrapped_module\.")
"""What they put into names."""

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A layer deep inside of a model, which trains whole."""

    def __init__(self, world: World, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(CFG.hidden, CFG.hidden)
        self.mlp = WEIGHTS.layer(world).requires_grad_()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = checkpoint(self.mlp, x, use_reentrant=False) if self.again else self.mlp(x)
        return x + y


class Model(nn.Module):
    def __init__(self, world: World, again: bool = False) -> None:
        super().__init__()
        self.block = Block(world, again)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


def whole_layer(world: World) -> MoELayer:
    return WEIGHTS.layer(world).requires_grad_()


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def static_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def searching_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def replicated(model: nn.Module) -> nn.Module:
    return replicate(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def fsdp2_of_layers(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, MoELayer):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh) if not isinstance(model, MoELayer) else model


def hybrid_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "shard"))
    return fully_shard(model, mesh=mesh)


def replicated_by_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    return replicate_with_fsdp.replicate(model, mesh=mesh)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


DDP = [ddp, static_ddp, searching_ddp, replicated]
FSDP = [fsdp2, fsdp2_of_layers]


@contextmanager
def alone() -> Iterator[World]:
    """A world of this process alone, whose experts lie whole here."""
    with moeos.init("twin", rank=0, size=1, store=dist.HashStore()) as world:
        yield world


def x_of(rank: int) -> Tensor:
    return draw_call(CFG, TOKENS, rank).x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """By name, whole, of a mean loss that is passed backward twice."""
    for _ in range(2):
        model(x).square().mean().backward()
    return kept_gradients(model)


def kept_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            assert grad is not None, name
            found[_OF_WRAPPERS.sub("", name)] = plain_of(grad).clone()
    return found


def experts_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in found.items() if name.split(".")[-1] in wrappers.EXPERTS}


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-6, f"{name}: {error}"


@pytest.mark.parametrize(
    ("wrap", "made"),
    all_but(
        [(ddp, whole_layer), (fsdp2, Model)], itertools.product([*DDP, *FSDP], [whole_layer, Model])
    ),
)
def test_gradients_of_experts_are_those_without_a_wrapper(
    wrap: Wrap, made: Callable[[World], nn.Module]
) -> None:
    def rank_main(world: World) -> bool:
        x = x_of(world.rank)
        expected = experts_of(gradients(made(world), x))
        found = experts_of(gradients(wrap(made(world)), x))
        assert found.keys() == expected.keys()
        assert len(found) == 4
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name
        return True

    assert all(ranks_of_torch(rank_main, 2))


def of_one_process(made: Callable[[World], nn.Module], ranks: int) -> dict[str, Tensor]:
    """Gradients of the mean loss of all ranks' tokens, with all experts in one place."""
    with alone() as world:
        return gradients(made(world), torch.cat([x_of(rank) for rank in range(ranks)]))


def assert_those_of_one_process(
    found: dict[str, Tensor], expected: dict[str, Tensor], rank: int, ranks: int
) -> None:
    """Of experts, those of this of the ranks that share them."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        whole = expected[name]
        if name in experts_of(expected):
            whole = whole.chunk(ranks)[rank]
        assert_close(gradient, whole, name)


@pytest.mark.parametrize(
    ("wrap", "again"),
    all_but(
        [(ddp, False), (fsdp2, True), (fsdp1, False)],
        [
            *itertools.product((ddp, replicated, *FSDP), (False, True)),
            *((wrap, False) for wrap in (hybrid_fsdp2, replicated_by_fsdp2, fsdp1)),
        ],
    ),
)
def test_a_wrapped_model_has_the_gradients_of_one_process(wrap: Wrap, again: bool) -> None:
    def made(world: World) -> nn.Module:
        return Model(world, again)

    def rank_main(world: World) -> bool:
        model = wrap(made(world))
        for _ in range(2):
            gradients(model, x_of(world.rank))
            model.zero_grad()
        accumulated = gradients(model, x_of(world.rank))
        training.reduce_expert_grads_(model.parameters(), world=world)
        found = accumulated | experts_of(kept_gradients(model))
        assert_those_of_one_process(found, of_one_process(made, 2), world.rank, 2)
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("wrap", spread(3, [ddp, replicated, *FSDP]))
def test_steps_of_an_optimizer_are_those_of_one_process(wrap: Wrap) -> None:
    def stepped(model: nn.Module, x: Tensor, world: World) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            training.reduce_expert_grads_(model.parameters(), world=world)
            optimizer.step()
        return {_OF_WRAPPERS.sub("", name): one for name, one in model.named_parameters()}

    def rank_main(world: World) -> bool:
        found = stepped(wrap(Model(world)), x_of(world.rank), world)
        with alone() as here:
            expected = stepped(Model(here), torch.cat([x_of(0), x_of(1)]), here)
        assert isinstance(found["block.mlp.gate.weight"], DTensor) == (wrap in FSDP)
        assert isinstance(found["block.mlp.shared_w1"], DTensor) == (wrap in FSDP)
        values = {name: plain_of(one) for name, one in found.items()}
        with torch.no_grad():
            assert_those_of_one_process(values, expected, world.rank, 2)
        return True

    assert all(ranks_of_torch(rank_main, 2))


@pytest.mark.parametrize("wrap", all_but([ddp, fsdp2], [*DDP, fsdp1, *FSDP]))
def test_experts_that_lie_whole_on_each_process_train_as_any_parameter_or_are_told_of(
    wrap: Wrap,
) -> None:
    def rank_main(world: World) -> bool:
        with alone() as here, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = wrap(Model(here))
            gradients(model, x_of(world.rank))
            if wrap not in DDP:
                assert [str(one.message) for one in told if "MoELayer" in str(one.message)]
                training.reduce_expert_grads_(model.parameters(), dist.group.WORLD, world=here)
            else:
                assert not told
                training.reduce_expert_grads_(model.parameters(), world=here)
            found = kept_gradients(model)
        assert_those_of_one_process(found, of_one_process(Model, 2), 0, 1)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def hybrid_fsdp1(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
    )


@pytest.mark.parametrize(
    "wrap", all_but([ddp, hybrid_fsdp1], [ddp, replicated, fsdp1, hybrid_fsdp1, *FSDP])
)
def test_replicas_of_experts_are_told_of_once_and_reduced_over_their_group(wrap: Wrap) -> None:
    def rank_main(world: World) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        replicas, peers = mesh["dp"].get_group(), mesh["ep"].get_group()
        with (
            moeos.init("twin", group=peers, deadline=60.0) as part,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            model = wrap(nn.Sequential(Model(part), Model(part)))
            gradients(model, x_of(world.rank))
            with pytest.raises(ValueError, match="hold other experts"):
                training.reduce_expert_grads_(model.parameters(), peers, world=part)
            training.reduce_expert_grads_(model.parameters(), replicas, world=part)
            found = kept_gradients(model)
            rank = part.rank

        def made(here: World) -> nn.Module:
            return nn.Sequential(Model(here), Model(here))

        assert_those_of_one_process(found, of_one_process(made, 4), rank, 2)
        [text] = [str(one.message) for one in told if "MoELayer" in str(one.message)]
        assert f"this is its rank {rank}" in text
        return text

    for text in ranks_of_torch(rank_main, 4):
        assert "reduces gradients over 4 ranks" in text
        assert "a world of size 2" in text


@pytest.mark.parametrize("kind", ["slices", "replicas", "w2 alone"])
def test_what_is_told_of_replicas_works_for_the_layer(kind: str) -> None:
    cfg = config(max_tokens=64)
    twice = moeos.Placement([[0, 1, 2, 3, 4], [4, 5, 6, 7]])
    works = {
        "slices": "parallel='expert'",
        "replicas": "gives each expert one rank",
        "w2 alone": "after backward call",
    }

    def rank_main(world: World) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        with (
            moeos.init("twin", group=mesh["ep"].get_group(), deadline=60.0) as part,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            if kind == "slices":
                layer = MoELayer(cfg, part, parallel="tensor")
            else:
                layer = MoELayer(cfg, part, placement=twice if kind == "replicas" else None)
            model = nn.Sequential(nn.Linear(8, 8), layer).requires_grad_()
            layer.w1.requires_grad_(kind != "w2 alone")
            DistributedDataParallel(model)
        [text] = [str(one.message) for one in told if "MoELayer" in str(one.message)]
        return text

    for text in ranks_of_torch(rank_main, 4):
        assert works[kind] in text
        assert ("after backward call" in text) == (kind == "w2 alone")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("_init_utils", "_get_ignored_params"),
        ("fully_sharded_data_parallel", "_init_param_handle_from_module"),
        ("_fully_shard._fsdp_init", "_get_managed_states"),
        ("_fully_shard._fsdp_param_group", "FSDPParamGroup"),
    ],
)
def test_names_that_torch_has_no_more_are_told_of(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp = "torch.distributed.fsdp."
    for where in {module, "_fully_shard._fully_shard"}:
        monkeypatch.delattr(sys.modules[fsdp + where], name, raising=False)
    with pytest.raises(RuntimeError, match=rf"torch \S+ has no {name} in {fsdp}{module}"):
        wrappers._install_fsdp()


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_nothing_is_told_of_experts_that_are_frozen_or_lie_on_all_ranks(wrap: Wrap) -> None:
    def rank_main(world: World) -> bool:
        with alone() as here, warnings.catch_warnings():
            warnings.simplefilter("error")
            wrap(Model(world))
            frozen = Model(here)
            frozen.block.mlp.requires_grad_(False)
            wrap(frozen)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_sums_over_replicas_have_the_bits_of_all_and_leave_all_else_alone() -> None:
    def rank_main(world: World) -> bool:
        with alone() as here:
            layer = whole_layer(here)
            assert layer.b1 is not None
            own = {name: torch.randn(one.shape) for name, one in layer.named_parameters()}
            for name, parameter in layer.named_parameters():
                parameter.grad = own[name].clone()
            layer.w1.main_grad = torch.full_like(layer.w1, 2.0)  # type: ignore[attr-defined]
            layer.w2.grad = own["w2"].mT.contiguous().mT  # not contiguous
            if world.rank == 1:
                layer.b1.grad = None
            layer.b2.requires_grad_(False)  # type: ignore[union-attr]
            training.reduce_expert_grads_(
                layer.parameters(), dist.group.WORLD, world=here, average=False
            )
            for name, parameter in layer.named_parameters():
                if name in ("w2", "b1"):
                    continue
                assert torch.equal(parameter.grad, own[name]), name  # type: ignore[arg-type]
            summed = own["w2"].clone()
            dist.all_reduce(summed)
            assert torch.equal(layer.w2.grad, summed)
            assert layer.w1.main_grad.eq(4.0).all()  # type: ignore[attr-defined, operator]
            assert layer.b1.grad is not None
            first = layer.b1.grad.clone()
            dist.broadcast(first, 0)
            assert torch.equal(layer.b1.grad, first)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def plain_of(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(plain_of(found), plain_of(expected)), name


def cleared(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("wrap", all_but([ddp, fsdp2], [plain, ddp, *FSDP]))
def test_what_fully_shard_has_cut_is_read_by_any_wrapper(wrap: Wrap, tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        model, other = fsdp2(Model(world)), cleared(wrap(Model(world)))
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "model")
        inner = other.module if isinstance(other, DistributedDataParallel) else other
        state = inner.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "model")
        inner.load_state_dict(state)
        assert_equal_parameters(other, model)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_functions_of_state_dicts_know_what_fully_shard_has_cut(tmp_path: Path) -> None:
    def rank_main(world: World) -> bool:
        model, other = fsdp2(Model(world)), cleared(fsdp2(Model(world)))
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if world.rank == 0:
            assert torch.equal(full["block.mlp.w1"], WEIGHTS.w1)
            assert torch.equal(full["block.mlp.shared_w1"], WEIGHTS.shared_w1)
            assert torch.equal(full["block.mlp.gate.weight"], WEIGHTS.gate)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, full, options=options)
        assert_equal_parameters(other, model)

        adam, adam_of_other = (torch.optim.AdamW(one.parameters()) for one in (model, other))
        model(x_of(world.rank)).sum().backward()
        adam.step()
        saved = get_optimizer_state_dict(model, adam)
        dcp.save(saved, checkpoint_id=tmp_path / "adam")
        state = get_optimizer_state_dict(other, adam_of_other)
        dcp.load(state, checkpoint_id=tmp_path / "adam")
        set_optimizer_state_dict(other, adam_of_other, state)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            first, second = adam.state[one]["exp_avg"], adam_of_other.state[two]["exp_avg"]
            assert torch.equal(plain_of(first), plain_of(second))
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_layer_whose_weights_come_after_fully_shard_is_right() -> None:
    def rank_main(world: World) -> bool:
        with torch.device("meta"):
            model = Model(world)
        fsdp2(model).to_empty(device="cpu")
        expected = Model(world)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, get_model_state_dict(expected, options=full), options=options)
        assert torch.equal(model(x_of(world.rank)), expected(x_of(world.rank)))
        return True

    assert all(ranks_of_torch(rank_main, 2))


class Mixed(nn.Module):
    """A layer in bfloat16 amid float32."""

    def __init__(self, world: World, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(CFG.hidden, CFG.hidden)
        cfg = dataclasses.replace(CFG, dtype=torch.bfloat16, router_bias=False, **changes)
        self.mlp = MoELayer(cfg, world)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.before(x))
        return y


def test_mixed_precision_around_a_layer_is_right_or_refused() -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        x = x_of(world.rank)
        model = Mixed(world)
        fully_shard(model.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(x).sum().backward()
        assert isinstance(model.mlp.gate.weight.grad, DTensor)
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            fully_shard(Mixed(world), mesh=mesh, mp_policy=policy)(x)
        with pytest.raises(TypeError, match=r"x has dtype torch\.bfloat16"):
            fully_shard(Model(world), mesh=mesh, mp_policy=policy)(x)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_what_fsdp_cannot_do_with_a_layer_is_refused_by_name() -> None:
    def rank_main(world: World) -> bool:
        x, device = x_of(world.rank), torch.device("cpu")
        with pytest.raises(ValueError, match="pass use_orig_params=True"):
            FullyShardedDataParallel(Model(world), device_id=device)
        model = Model(world)
        gate = list(model.block.mlp.gate.parameters())
        with pytest.raises(ValueError, match="pass use_orig_params=True"):
            FullyShardedDataParallel(model, device_id=device, ignored_states=gate)
        with pytest.raises(TypeError, match=r"gate\.weight is a Tensor and no parameter"):
            fsdp1(Model(world, again=True))(x).sum().backward()
        model = Model(world)
        fsdp2(model)
        with pytest.raises(TypeError, match="call the module that it wrapped"):
            model.block.mlp(x)
        return True

    assert all(ranks_of_torch(rank_main, 2))
