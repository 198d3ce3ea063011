# SPDX-License-Identifier: Apache-2.0
"""The torchtitan adapter, with a stand-in of torchtitan 0.3.0 or itself, compared with float64.

Where torchtitan is not installed it is the stand-in; `test_torchtitan_itself.py` runs these tests
where it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from moeos import MoEConfig
from moeos.config import reference
from tests.integrations.stand_ins import Tensors, in_fork, on_ranks
from tests.nightly import all_but

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 8, 2
OVERRIDE = "moeos.integrations.torchtitan.routed_experts"


class Dims:
    """What an adapter asks torchtitan's ParallelDims."""

    spmd_backend = "default"

    def __init__(self, mesh: DeviceMesh | None, tp: int = 1) -> None:
        self.mesh = mesh
        self.tp = tp
        self.tp_enabled = tp > 1
        self.ep_enabled = mesh is not None

    def get_optional_mesh(self, dims: str) -> DeviceMesh | None:
        assert dims == "ep"
        return self.mesh


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


def built(tensors: Tensors, arguments: dict[str, Any], inner: Any = None) -> Any:
    """A model's routed experts with the override, and the weights of all experts."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    from torchtitan.protocols.module import Module

    class Block(Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            routed_experts: RoutedExperts.Config

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.routed_experts = config.routed_experts.build()

    cfg = tensors.cfg
    sizes = {"dim": cfg.hidden, "hidden_dim": cfg.intermediate, "num_experts": cfg.experts}
    block = Block.Config(
        routed_experts=RoutedExperts.Config(
            inner_experts=(inner or GroupedExperts.Config)(**sizes),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=cfg.experts, top_k=cfg.top_k),
        )
    )
    applied = apply_overrides(OverrideConfig(imports=[(OVERRIDE, arguments)]), block)
    assert len(applied) == 1
    experts = block.build().routed_experts.to(cfg.dtype)
    halves = tensors.w1.split(cfg.intermediate, dim=1)
    parts = {"w1_EFD": halves[0], "w3_EFD": halves[1], "w2_EDF": tensors.w2}
    experts.inner_experts.load_state_dict(parts)
    return experts


def sharded(experts: Any, mesh: DeviceMesh) -> Any:
    """Its parameters as expert parallelism cuts them, and its mesh."""
    inner = experts.inner_experts
    for name, weight in list(inner.named_parameters()):
        placed = distribute_tensor(weight.data, mesh, [Shard(0)])
        inner.register_parameter(name, torch.nn.Parameter(placed))
    experts.parallelize(Dims(mesh))
    return experts


class Around(torch.nn.Module):
    """What a model has around its routed experts."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.experts(*inputs)
        return y


def call(experts: Any, x: Tensor, ids: Tensor, scores: Tensor, length: int = 1) -> Tensor:
    """As MoE calls its routed experts: [B, L, D], int64 ids, fp32 scores, rows of each expert."""
    rows = x.shape[0]
    counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    shape = (rows // length, length, -1)
    y: Tensor = experts(x.view(shape), scores.view(shape), ids.long().view(shape), counts)
    assert y.shape == (rows // length, length, HIDDEN)
    return y.view(rows, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routed_experts_of_one_rank_are_right_and_long_batches_are_cut(dtype: torch.dtype) -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config(dtype=dtype))
        experts = built(tensors, {"max_tokens": 16})
        errors = []
        with torch.inference_mode():
            for rows, length in ((12, 4), (1, 1), (50, 25), (16, 16)):
                x, (ids, scores) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
                errors.append(tensors.error(call(experts, x, ids, scores, length), x, ids, scores))
        return errors

    assert all(error <= 1 for error in on_ranks(live, 1)[0])


def test_a_fork_computes_by_a_world_of_its_own() -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config())
        experts = built(tensors, {})
        x, (ids, scores) = tensors.draw(5, HIDDEN), tensors.routing(5)

        def one_call() -> float:
            with torch.inference_mode():
                return tensors.error(call(experts, x, ids, scores), x, ids, scores)

        first = one_call()
        forked = in_fork(one_call)
        return [first, forked, one_call()]

    [errors] = on_ranks(live, 1)
    assert all(error <= 1 for error in errors), errors


# Of three the last has fewer, of five none.
@pytest.mark.parametrize("ranks", all_but([3, 5], [2, 3, 4, 5]))
def test_ranks_of_the_expert_parallel_mesh_compute_together(ranks: int) -> None:
    def live(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        tensors = Tensors(config())
        experts = sharded(built(tensors, {"deadline": 60.0}), mesh)
        errors = []
        with torch.no_grad():
            for step in range(3):
                for source in range(ranks):  # drawn alike by all
                    rows = 1 + (5 * source + 7 * step) % 20
                    x, (ids, scores) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
                    if source == rank:
                        mine = x, ids, scores
                errors.append(tensors.error(call(experts, *mine), *mine))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, ranks) for error in errors)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_of_an_optimizer_are_those_of_the_reference(ranks: int) -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config())
        experts = built(tensors, {"deadline": 60.0})
        if ranks > 1:
            sharded(experts, init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
        inner = experts.inner_experts
        optimizer = torch.optim.SGD(inner.parameters(), lr=3.0)
        parts = [*tensors.w1.split(INTERMEDIATE, dim=1), tensors.w2]
        stock = [part.double().requires_grad_() for part in parts]
        its = torch.optim.SGD(stock, lr=3.0)
        errors = []
        for _ in range(3):
            every = []  # drawn alike by all
            for _ in range(ranks):
                every.append((tensors.draw(12, HIDDEN), *tensors.routing(12)))
            losses, leaves = [], []
            for x, ids, scores in every:
                leaves.append((x.double().requires_grad_(), scores.double().requires_grad_()))
                gate = torch.zeros(EXPERTS, HIDDEN)
                w1 = torch.cat(stock[:2], dim=1)
                y = reference.moe(
                    leaves[-1][0], gate, w1, stock[2], tensors.cfg, ids, leaves[-1][1]
                )
                losses.append(y.square().mean())
            its.zero_grad()
            torch.stack(losses).sum().backward()
            its.step()
            x, ids, scores = every[rank]
            x.requires_grad_()
            scores.requires_grad_()
            optimizer.zero_grad()
            call(experts, x, ids, scores).square().mean().backward()
            optimizer.step()
            for found, leaf in zip((x.grad, scores.grad), leaves[rank], strict=True):
                errors.append(reference.relative_error(found, leaf.grad))
            cfg = tensors.cfg
            own = cfg.experts_of(rank, ranks)
            for name, whole in zip(("w1_EFD", "w3_EFD", "w2_EDF"), stock, strict=True):
                weight = getattr(inner, name)
                local = getattr(weight, "_local_tensor", weight).detach()
                expected = whole.detach()[own.start : own.stop]
                errors.append(reference.relative_error(local, expected))
        return errors

    assert all(error < 1e-5 for errors in on_ranks(live, ranks) for error in errors)


@pytest.mark.parametrize(("replicas", "ranks"), all_but([(2, 2)], [(2, 1), (3, 1), (2, 2)]))
def test_steps_of_experts_that_fully_shard_cuts_are_those_of_the_reference(
    replicas: int, ranks: int
) -> None:
    """As torchtitan applies it: to what is around the experts, with the gradients' sum. `ranks`:
    of expert parallelism.
    """

    def live(rank: int) -> list[float]:
        tensors = Tensors(config())
        experts = built(tensors, {"deadline": 60.0})
        mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "ep"))
        if ranks > 1:
            sharded(experts, mesh["ep"])
        block = Around(experts)
        fully_shard(block, mesh=mesh["dp"])
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
        inner = experts.inner_experts
        shape = inner.w1_EFD.to_local().shape
        optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1, weight_decay=0.0, fused=True)
        w1, w2 = (one.double().requires_grad_() for one in (tensors.w1, tensors.w2))
        its = torch.optim.AdamW([w1, w2], lr=0.1, weight_decay=0.0)
        gate = torch.zeros(EXPERTS, HIDDEN)
        errors = []
        for _ in range(3):
            every = [
                (tensors.draw(12, HIDDEN), *tensors.routing(12)) for _ in range(replicas * ranks)
            ]
            its.zero_grad()
            outputs = [
                reference.moe(x.double(), gate, w1, w2, tensors.cfg, ids, scores.double())
                for x, ids, scores in every
            ]
            torch.stack(outputs).square().sum().backward()
            optimizer.zero_grad()
            y = call(block, *every[rank])
            y.square().sum().backward()
            errors.append(reference.relative_error(y, outputs[rank].detach()))
            found = [one.grad.full_tensor() for one in (inner.w1_EFD, inner.w3_EFD, inner.w2_EDF)]
            expected = [*w1.grad.split(INTERMEDIATE, dim=1), w2.grad]
            errors += map(reference.relative_error, found, expected)
            optimizer.step()
            its.step()
            assert inner.w1_EFD.to_local().shape == shape  # cut again
            gate_rows, up_rows = w1.detach().split(INTERMEDIATE, dim=1)
            for one, whole in (
                (inner.w1_EFD, gate_rows),
                (inner.w3_EFD, up_rows),
                (inner.w2_EDF, w2.detach()),
            ):
                errors.append(reference.relative_error(one.full_tensor(), whole))
        return errors

    found = on_ranks(live, replicas * ranks)
    print(found[0])
    assert max(map(max, found)) < 1e-4, found[0]


def test_the_norm_of_gradients_is_that_of_all_ranks_experts() -> None:
    """As torchtitan takes it, of DTensors over the expert-parallel mesh: all ranks clip alike."""
    ranks = 2

    def live(rank: int) -> tuple[float, float]:
        tensors = Tensors(config())
        experts = built(tensors, {"deadline": 60.0})
        sharded(experts, init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
        every = [(tensors.draw(12, HIDDEN), *tensors.routing(12)) for _ in range(ranks)]
        call(experts, *every[rank]).square().mean().backward()
        norm: Any = torch.nn.utils.get_total_norm(
            [weight.grad for weight in experts.inner_experts.parameters()]
        )
        w1, w2 = (whole.double().requires_grad_() for whole in (tensors.w1, tensors.w2))
        gate = torch.zeros(EXPERTS, HIDDEN)
        for x, ids, scores in every:
            reference.moe(x, gate, w1, w2, tensors.cfg, ids, scores).square().mean().backward()
        expected = torch.nn.utils.get_total_norm([w1.grad, w2.grad])
        return float(norm.full_tensor()), float(expected)

    found = on_ranks(live, ranks)
    assert found[0][0] == found[1][0]
    for norm, expected in found:
        assert norm == pytest.approx(expected, rel=1e-5)


def test_weights_that_change_between_a_call_and_its_backward_are_found() -> None:
    def live(rank: int) -> bool:
        tensors = Tensors(config())
        experts = built(tensors, {})
        y = call(experts, tensors.draw(9, HIDDEN), *tensors.routing(9))
        with torch.no_grad():
            experts.inner_experts.w3_EFD.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return True

    assert on_ranks(live, 1) == [True]


@pytest.mark.parametrize("mode", [{"fullgraph": True}, {}], ids=["whole", "broken"])
def test_a_first_call_is_compiled_where_its_graph_may_be_broken(mode: dict[str, Any]) -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config())
        experts = built(tensors, {})
        compiled = torch.compile(experts, backend="aot_eager", **mode)
        x, (ids, scores) = tensors.draw(9, HIDDEN), tensors.routing(9)
        errors = []
        with torch.no_grad():
            if mode:
                with pytest.raises(Exception, match="in_a_call_before_torch_compile"):
                    call(compiled, x, ids, scores)
                torch._dynamo.reset()
                call(experts, x, ids, scores)
            for _ in range(2):
                errors.append(tensors.error(call(compiled, x, ids, scores), x, ids, scores))
        return errors

    assert all(error <= 1 for error in on_ranks(live, 1)[0])


def refused(function: Any, ranks: int = 1) -> str:
    with pytest.raises(ValueError, match="which moeos does not do") as raised:
        on_ranks(function, ranks)
    assert str(raised.value).isascii()
    assert str(raised.value).startswith("torchtitan with moeos.integrations.torchtitan: ")
    return str(raised.value)


def test_experts_of_another_kind_are_refused_by_name() -> None:
    def live(rank: int) -> None:
        from torchtitan.models.common.moe import GroupedExperts

        class GptOssGroupedExperts(GroupedExperts):
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config(GroupedExperts.Config):
                swiglu_limit: float = 7.0

        built(Tensors(config()), {}, GptOssGroupedExperts.Config)

    assert "inner_experts is " in refused(live)


def test_tensor_parallelism_of_experts_is_refused() -> None:
    def live(rank: int) -> None:
        built(Tensors(config()), {}).parallelize(Dims(None, tp=2))

    assert "tensor_parallel_degree of the experts is 2" in refused(live)


def test_weights_of_another_dtype_than_the_tokens_are_refused() -> None:
    def live(rank: int) -> None:
        tensors = Tensors(config())
        with torch.no_grad():
            x = tensors.draw(3, HIDDEN).bfloat16()
            call(built(tensors, {}), x, *tensors.routing(3))

    assert "the dtype of w1_EFD is torch.float32" in refused(live)


def test_more_tokens_than_max_tokens_are_refused_where_others_wait() -> None:
    def live(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        tensors = Tensors(config())
        experts = sharded(built(tensors, {"max_tokens": 4}), mesh)
        with torch.no_grad():
            call(experts, tensors.draw(5, HIDDEN), *tensors.routing(5))

    assert "tokens of a call is 5" in refused(live, 2)


def test_weights_cut_within_experts_are_refused() -> None:
    def live(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        tensors = Tensors(config())
        experts = built(tensors, {})
        inner = experts.inner_experts
        placed = distribute_tensor(inner.w1_EFD.data, mesh, [Shard(1)])
        inner.register_parameter("w1_EFD", torch.nn.Parameter(placed))
        with torch.no_grad():
            call(experts, tensors.draw(5, HIDDEN), *tensors.routing(5))

    assert "placements of w1_EFD is " in refused(live, 2)


def test_fully_shard_of_the_parameters_own_module_is_refused() -> None:
    """Its `forward`, before which it would gather them, is not what computes."""

    def live(rank: int) -> None:
        tensors = Tensors(config())
        experts = built(tensors, {})
        fully_shard(experts.inner_experts, mesh=init_device_mesh("cpu", (1,)))
        call(experts, tensors.draw(5, HIDDEN), *tensors.routing(5))

    assert "fully_shard of inner_experts is True" in refused(live)
