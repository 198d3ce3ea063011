# SPDX-License-Identifier: Apache-2.0
"""Shared experts of a layer: what they compute, and what becomes of their weights, which all ranks
hold alike.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moeos import Experts, MoELayer, TwinOptions, World
from moeos.cli import estimate
from moeos.config.sizes import shared_cut
from moeos.engines.twin import engine as twin
from moeos.world import virtual
from tests.layers import (
    TOLERANCE,
    Call,
    Weights,
    assert_all_match,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
    reference,
)
from tests.nightly import in_turn
from tests.process_group import ranks_of_torch

pytestmark = pytest.mark.usefixtures("poisoned_output")

SHARED: dict[str, Any] = {"shared_experts": 2, "shared_intermediate": 40, "shared_gate": True}
CFG = config(**SHARED)
WEIGHTS = draw_weights(CFG)
NAMES = ("shared_w1", "shared_w2", "shared_gate")

RULES: dict[str, dict[str, Any]] = {
    "one": {"shared_experts": 1, "shared_intermediate": 96},
    "three, narrower than a routed one": {"shared_experts": 3, "shared_intermediate": 8},
    "wider than any tile": {"shared_experts": 1, "shared_intermediate": 600, "hidden": 264},
    "a gate": SHARED,
    "bfloat16": {**SHARED, "dtype": torch.bfloat16},
    "no gate rows": {**SHARED, "activation": "relu2"},
    "clamped": {**SHARED, "activation": "swigluoai", "swiglu_limit": 0.5},
    "biases of routed ones": {**SHARED, "bias": True},
    "weight on input": {**SHARED, "apply_router_weight_on_input": True, "top_k": 1},
    "zero experts": {**SHARED, "zero_experts": 4},
    "a capacity": {**SHARED, "capacity_factor": 0.25},
}


def outputs_of(weights: Weights, calls: list[list[Call]], **way: Any) -> list[list[Tensor]]:
    """What each rank's calls return."""

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    return virtual.run(rank_main, ranks=len(calls), **way)


def right(layer: MoELayer, weights: Weights = WEIGHTS) -> None:
    """Asserts that the layer computes with `weights` on this rank. Collective."""
    call = draw_call(CFG, 20, layer.world.rank)
    with torch.no_grad():
        assert_matches(weights, call, layer(call.x), f"rank {layer.world.rank}")


@pytest.mark.parametrize(("name", "ranks"), in_turn(RULES, [1, 2, 4]))
def test_every_token_has_what_the_reference_adds(name: str, ranks: int) -> None:
    cfg = config(max_tokens=300, **RULES[name])
    weights = draw_weights(cfg, seed=ranks)
    calls = [
        [
            draw_given_call(cfg, 1, 7 * rank),
            draw_given_call(cfg, 0 if rank == 0 else 65, 7 * rank + 1, unused=0.6),
            draw_given_call(cfg, 300, 7 * rank + 2),
            draw_given_call(cfg, 20, 7 * rank + 3, unused=1.0),
        ]
        for rank in range(ranks)
    ]
    if "capacity_factor" not in RULES[name]:
        for rank, own in enumerate(calls):
            own += [draw_call(cfg, 37, 7 * rank + 4), draw_call(cfg, 130, 7 * rank + 5)]
    twin = TwinOptions(processors=3)
    assert_all_match(weights, calls, outputs_of(weights, calls, twin=twin))


def test_a_token_of_no_expert_is_what_its_shared_experts_return() -> None:
    x = draw_call(CFG, 9, 0).x
    call = Call(x, torch.full((9, CFG.top_k), -1), torch.zeros(9, CFG.top_k))
    for rank, (y,) in enumerate(outputs_of(WEIGHTS, [[call]] * 2)):
        assert y.norm() > 0.1
        assert_matches(WEIGHTS, call, y, f"rank {rank}")


def test_rows_beyond_the_tokens_are_zeros_and_pieces_are_calls() -> None:
    call = draw_call(CFG, 300, 1)

    def rank_main(world: World) -> tuple[Tensor, Tensor]:
        layer = WEIGHTS.layer(world)
        few = layer(call.x[:100], tokens=torch.tensor([33], dtype=torch.int32))
        return few, layer(call.x, pieces=3)

    for few, every in virtual.run(rank_main, ranks=2):
        assert not few[33:].any()
        assert_matches(WEIGHTS, Call(call.x[:33]), few[:33])
        assert_matches(WEIGHTS, call, every)


def test_a_compiled_layer_computes_the_same() -> None:
    call = draw_call(CFG, 20, 1)

    torch._dynamo.reset()  # what tests before have compiled counts towards a limit

    def rank_main(world: World) -> Tensor:
        layer = WEIGHTS.layer(world)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        y: Tensor = compiled(call.x)
        return y

    for y in virtual.run(rank_main, ranks=1):
        assert_matches(WEIGHTS, call, y)


def test_all_ranks_start_with_the_same_shared_experts() -> None:
    def rank_main(world: World) -> list[Tensor]:
        layer = MoELayer(CFG, world)
        return [getattr(layer, name) for name in NAMES]

    first, *others = virtual.run(rank_main, ranks=4)
    for name, tensor in zip(NAMES, first, strict=True):
        assert len(set(tensor.flatten().tolist())) > tensor.numel() // 2, name
        bound = tensor.shape[-1] ** -0.5
        assert bound / 2 < float(tensor.abs().max()) <= bound
    for other in others:
        for one, tensor in zip(first, other, strict=True):
            assert torch.equal(one, tensor)
    [w1, w2, gate] = first
    assert (list(w1.shape), list(w2.shape), list(gate.shape)) == ([2, 80, 64], [2, 64, 40], [64])


def test_a_state_dict_has_them_whole_and_plain_on_every_rank() -> None:
    def rank_main(world: World) -> bool:
        state = WEIGHTS.layer(world).state_dict(prefix="m.")
        for name in NAMES:
            assert type(state[f"m.{name}"]) is Tensor
            assert torch.equal(state[f"m.{name}"], getattr(WEIGHTS, name))
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_checkpoint_of_a_model_is_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    def save(world: World) -> bool:
        dcp.save(nn.ModuleDict({"mlp": WEIGHTS.layer(world)}).state_dict(), checkpoint_id=tmp_path)
        return True

    def load(world: World) -> bool:
        model = nn.ModuleDict({"mlp": MoELayer(CFG, world)})
        state = model.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state)
        right(model["mlp"])  # type: ignore[arg-type]
        return True

    assert all(ranks_of_torch(save, 4))
    assert all(ranks_of_torch(load, 2))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_dtensors_of_any_placement_are_loaded_whole(assign: bool) -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        layer = MoELayer(CFG, world)
        state: dict[str, Any] = WEIGHTS.layer(world).state_dict()
        for name, place in zip(NAMES, (Shard(0), Replicate(), Shard(0)), strict=True):
            state[name] = distribute_tensor(getattr(WEIGHTS, name).clone(), mesh, [place])
        layer.load_state_dict(state, assign=assign)
        assert all(type(getattr(layer, name)) is nn.Parameter for name in NAMES)
        right(layer)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_state_dict_without_them_is_not_loaded() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        state = layer.state_dict()
        del state["shared_w2"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "shared_w2"'):
            layer.load_state_dict(state)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    "through",
    [
        lambda layer, world: copy.deepcopy(layer),
        lambda layer, world: copy.copy(layer),
        lambda layer, world: pickle.loads(pickle.dumps(layer)).bind(world),
    ],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_and_pickles_have_them(through: Callable[[MoELayer, World], MoELayer]) -> None:
    virtual.run(lambda world: right(through(WEIGHTS.layer(world), world)), ranks=2)


@pytest.mark.parametrize(
    "wrapped",
    [
        DistributedDataParallel,
        lambda model: fully_shard(model[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
    ],
    ids=["ddp", "fsdp2"],
)
def test_a_wrapped_model_computes_with_them(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    def rank_main(world: World) -> bool:
        model = nn.Sequential(nn.Linear(CFG.hidden, CFG.hidden), WEIGHTS.layer(world))
        wrapped(model)
        layer = model[1]
        assert isinstance(layer, MoELayer)
        right(layer)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_a_cast_to_another_dtype_names_them() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        for name in ("w1", "w2"):
            setattr(layer, name, None)
        with pytest.raises(TypeError, match=r"^shared_w1 would become torch\.float16; this MoEL"):
            layer.half()

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_missing_or_of_another_kind_is_named(compiled: bool) -> None:
    x = draw_call(CFG, 5, 0).x

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = torch.compile(layer, backend="eager") if compiled else layer
        for name in NAMES:
            was = getattr(layer, name)
            shape = ", ".join(map(str, was.shape))
            setattr(layer, name, None)
            with pytest.raises(ValueError, match=rf"^{name} is missing; .*: \[{shape}\]"):
                call(x)
            setattr(layer, name, nn.Parameter(was[:, None], requires_grad=False))
            with pytest.raises(ValueError, match=rf"^{name} has shape .*; it must be \[{shape}\]"):
                call(x)
            setattr(layer, name, nn.Parameter(was.bfloat16(), requires_grad=False))
            with pytest.raises(TypeError, match=rf"^{name} has dtype torch.bfloat16; it must be"):
                call(x)
            setattr(layer, name, was)
        transposed = layer.shared_w1.mT.contiguous()  # type: ignore[union-attr]
        layer.shared_w1 = nn.Parameter(transposed, requires_grad=False)
        with pytest.raises(ValueError, match=r"each expert's matrix transposed: .*all gate rows"):
            call(x)

    virtual.run(rank_main, ranks=1)


def test_memory_that_is_gone_is_named() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        assert layer.shared_w2 is not None
        layer.shared_w2.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"^shared_w2 reaches to byte"):
            layer(draw_call(CFG, 5, 0).x)

    virtual.run(rank_main, ranks=1)


def test_an_output_in_their_memory_is_refused() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        out = torch.empty(0)
        assert layer.shared_w1 is not None
        out.set_(layer.shared_w1.detach()).resize_(5, CFG.hidden)
        with pytest.raises(ValueError, match=r"^out shares memory with shared_w1"):
            layer(draw_call(CFG, 5, 0).x, out=out)

    virtual.run(rank_main, ranks=1)


def test_experts_alone_compute_none() -> None:
    def rank_main(world: World) -> None:
        message = r"^shared_experts is 2; Experts compute routed experts alone: make a MoELayer, or"
        with pytest.raises(ValueError, match=message):
            Experts(CFG, world)

    virtual.run(rank_main, ranks=1)


def test_their_n_tiles_are_those_of_each_of_them_and_of_their_gate() -> None:
    cfg = config(hidden=264, shared_experts=3, shared_intermediate=136, shared_gate=True)
    assert shared_cut(cfg, 128, 64) == {
        "shared_bytes": 3 * 136 * 4,
        "shared0_parts": 3 * 2 + 1,
        "shared0_narrow_parts": 3 * 3 + 1,
    }
    assert shared_cut(dataclasses.replace(cfg, shared_gate=False), 128) == {
        "shared_bytes": 3 * 136 * 4,
        "shared0_parts": 3 * 2,
    }
    assert shared_cut(config(), 128, 64) == {}


def test_a_plan_counts_their_weights_and_their_rows() -> None:
    plain = dataclasses.replace(CFG, shared_experts=0, shared_intermediate=0, shared_gate=False)
    held = sum(getattr(WEIGHTS, name).nbytes for name in NAMES)
    of_them = estimate.weight_bytes_per_rank(CFG, 2) - estimate.weight_bytes_per_rank(plain, 2)
    assert of_them == held
    sizes, without = (twin.sizes_of(cfg, 2, 1) for cfg in (CFG, plain))
    row = CFG.hidden * CFG.dtype.itemsize
    between = CFG.max_tokens * CFG.shared_experts * CFG.shared_intermediate * CFG.dtype.itemsize
    assert sizes.result_bytes - without.result_bytes == CFG.max_tokens * row
    assert sizes.intermediate_bytes - without.intermediate_bytes >= between
    work, less = (estimate.work_of(cfg, 2, 64) for cfg in (CFG, plain))
    of_each = 2 * (CFG.shared_w1_rows + CFG.shared_intermediate) * CFG.hidden
    assert work.shared_flops == 64 * (2 * of_each + 2 * CFG.hidden)
    assert less.shared_flops == 0
    assert work.weight_bytes - less.weight_bytes == held
    assert estimate.work_of(CFG, 2, 0).weight_bytes == 0


def test_the_tolerance_would_find_what_is_missing() -> None:
    call = draw_call(CFG, 50, 0)
    plain = dataclasses.replace(
        WEIGHTS,
        cfg=dataclasses.replace(CFG, shared_experts=0, shared_intermediate=0, shared_gate=False),
        shared_w1=None,
        shared_w2=None,
        shared_gate=None,
    )
    ungated = dataclasses.replace(
        WEIGHTS, cfg=dataclasses.replace(CFG, shared_gate=False), shared_gate=None
    )
    for other in (plain, ungated):
        error = reference.relative_error(other.expected(call), WEIGHTS.expected(call))
        assert error > 10 * TOLERANCE[torch.bfloat16]
