# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory does not hold what they stand for are read right, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from moeos import Experts, MoELayer, World
from moeos.world import virtual
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.process_group import ranks_of_torch
from tests.processes import ForkedRanks

CFG = config(max_tokens=32)
WEIGHTS = draw_weights(CFG)
ROUTED = draw_call(CFG, 6, 0)
GIVEN = draw_given_call(CFG, 6, 0)
TOKENS = torch.tensor([4], dtype=torch.int32)


def negated(tensor: Tensor) -> Tensor:
    """As large values in other memory, which hold the opposite."""
    return torch._neg_view(-tensor)


def outcome(rank_main: Callable[[World], Any]) -> Any:
    """What it returns on one rank, in a process of its own: an address that is wrong ends it."""
    [ended] = ForkedRanks(lambda _: virtual.run(rank_main, ranks=1), 1).ended()
    assert isinstance(ended, list), f"the process ended with {ended!r}"
    return ended[0]


@pytest.mark.parametrize("before", [False, True], ids=["first", "behind a plain call"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_lazy_negatives_among_the_tokens_are_read_as_what_they_stand_for(
    before: bool, pieces: int
) -> None:
    assert GIVEN.ids is not None
    assert GIVEN.weights is not None
    given = {"topk_ids": negated(GIVEN.ids), "topk_weights": negated(GIVEN.weights)}

    def rank_main(world: World) -> list[Tensor]:
        layer = WEIGHTS.layer(world)
        if before:
            ROUTED(layer)
            GIVEN(layer)
        x = negated(ROUTED.x)
        batch = x.view(2, 3, -1)
        return [
            layer(x, pieces=pieces),
            layer(batch, pieces=pieces).flatten(0, 1),
            ROUTED(layer),
            layer(negated(GIVEN.x), **given, pieces=pieces),
            layer(GIVEN.x, **given, pieces=pieces),
            GIVEN(layer),
        ]

    outputs = virtual.run(rank_main, ranks=1)[0]
    for y, call in zip(outputs, [ROUTED] * 3 + [GIVEN] * 3, strict=True):
        assert_matches(WEIGHTS, call, y)


def test_zeros_without_memory_are_read_as_zeros() -> None:
    zeros = torch._efficientzerotensor
    assert GIVEN.ids is not None
    nothing = zeros(GIVEN.ids.shape)

    def rank_main(world: World) -> list[bool]:
        layer = WEIGHTS.layer(world)
        outputs = [
            layer(zeros(GIVEN.x.shape), GIVEN.ids, torch.ones(6, 2)),
            layer(GIVEN.x, GIVEN.ids, nothing),
        ]
        return [torch.equal(y, torch.zeros_like(GIVEN.x)) for y in outputs]

    assert outcome(rank_main) == [True, True]


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "a lazy negative": negated,
    "zeros without memory": lambda tensor: torch._efficientzerotensor(
        tensor.shape, dtype=tensor.dtype
    ),
}


@pytest.mark.parametrize("what", LAZY)
@pytest.mark.parametrize("name", ["out", "tokens", "w1", "w2", "gate.weight"])
def test_what_calls_keep_or_write_must_lie_in_memory_as_it_is(name: str, what: str) -> None:
    lazy = LAZY[what]

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        ROUTED(layer)
        arguments = {}
        if name == "out":
            arguments["out"] = lazy(torch.zeros_like(ROUTED.x))
        elif name == "tokens":
            arguments["tokens"] = lazy(TOKENS)
        else:
            layer.get_parameter(name).data = lazy(layer.get_parameter(name).data)
        with pytest.raises(ValueError, match=name) as raised:
            layer(ROUTED.x, **arguments)
        return str(raised.value)

    said = outcome(rank_main)
    assert said.startswith(f"{name} "), said
    assert f"pass {name}." in said, said


# --- memory that is not there -------------------------------------------------------------------


def cut(tensor: Tensor, offset: int, left: int) -> Tensor:
    """A tensor like this one, so far behind the begin of a storage that has `left` bytes."""
    room = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
    copy = room[offset:].view(tensor.shape).copy_(tensor)
    copy.untyped_storage().resize_(left)
    return copy


CUTS = {
    "freed": lambda tensor: cut(tensor, 0, 0),
    "freed behind others": lambda tensor: cut(tensor, 64, 0),
    "cut by a byte": lambda tensor: cut(tensor, 0, tensor.nbytes - 1),
    "functional": torch._to_functional_tensor,
}


@pytest.mark.parametrize("known", [False, True], ids=["first", "behind a plain call"])
@pytest.mark.parametrize("what", CUTS)
def test_tensors_without_all_of_their_memory_are_refused_by_name(what: str, known: bool) -> None:
    def rank_main(world: World) -> dict[str, str]:
        layer = WEIGHTS.layer(world)
        call: dict[str, Any] = {
            "x": GIVEN.x,
            "topk_ids": GIVEN.ids,
            "topk_weights": GIVEN.weights,
            "tokens": TOKENS,
            "out": torch.empty_like(GIVEN.x),
        }
        said = {}
        for name in (*call, "w1", "w2", "gate.weight"):
            if known:
                layer(**call)
            whole = call.get(name)
            if whole is None:
                parameter = layer.get_parameter(name)
                whole, parameter.data = parameter.data, CUTS[what](parameter.data)
            with pytest.raises(ValueError, match=name) as raised:
                layer(**{**call, name: CUTS[what](whole)} if name in call else call)
            said[name] = str(raised.value)
            if name not in call:
                layer.get_parameter(name).data = whole
        layer(**call)
        return said

    for name, sentence in outcome(rank_main).items():
        assert sentence.startswith(f"{name} reaches to byte "), sentence
        assert "memory of its own" in sentence


def test_a_graph_refuses_memory_that_is_not_there_too() -> None:
    """In this process: a child cannot compile where its parent has."""
    torch._dynamo.reset()

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        traced: Any = torch.compile(layer, backend="eager", fullgraph=True)
        traced(ROUTED.x)
        with pytest.raises(ValueError, match="x") as raised:
            traced(cut(ROUTED.x, 0, 0))
        return str(raised.value)

    [said] = virtual.run(rank_main, ranks=1)
    assert said.startswith("x reaches to byte ")


def test_what_outlives_a_transform_is_read_right_or_refused_by_name() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor * 1)
        return tensor

    def rank_main(world: World) -> list[str]:
        layer = WEIGHTS.layer(world)
        x = ROUTED.x
        func.vmap(keep)(torch.stack([x, x]))
        func.functionalize(keep)(x)
        func.jvp(keep, (x,), (x,))
        said = []
        for tensor in kept:
            try:
                assert_matches(WEIGHTS, ROUTED, layer(tensor))
                said.append("right")
            except ValueError as error:
                said.append(str(error))
        return said

    said = outcome(rank_main)
    assert len(said) == 3
    assert all(one == "right" or one.startswith("x reaches to byte ") for one in said), said


def test_fake_tensors_give_fake_results_whatever_is_fake() -> None:
    def rank_main(world: World) -> list[str]:
        layer = WEIGHTS.layer(world)
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, out = torch.empty_like(GIVEN.x), torch.empty_like(GIVEN.x)
        made = [layer(x), layer(x, GIVEN.ids, GIVEN.weights), layer(GIVEN.x, out=out)]
        return [type(y).__name__ for y in made]

    assert outcome(rank_main) == [FakeTensor.__name__] * 3


def test_fake_tensors_are_trained_with_as_with_a_stock_module() -> None:
    def rank_main(world: World) -> list[Any]:
        layer = WEIGHTS.layer(world).requires_grad_()
        stock = nn.Linear(CFG.hidden, CFG.hidden)
        found = []
        for module in (layer, stock):
            with FakeTensorMode(allow_non_fake_inputs=True):
                x = torch.empty_like(GIVEN.x).requires_grad_()
                y = module(x)
                y.sum().backward()
            assert all(type(one.grad) is FakeTensor for one in module.parameters())
            assert all(one.grad.shape == one.shape for one in module.parameters())
            found.append((type(y).__name__, y.shape, type(x.grad).__name__, x.grad.shape))
            module.zero_grad()
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty_like(GIVEN.x)
            layer(fake, GIVEN.ids, GIVEN.weights).sum().backward()  # routed by the caller
        y = layer(fake)  # behind its mode
        found.append(type(y).__name__)
        return found

    layer, stock, behind = outcome(rank_main)
    assert layer == stock
    assert behind == FakeTensor.__name__


# --- layouts ------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, ".to_dense()"),
    "compressed": (Tensor.to_sparse_csr, ".to_dense()"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "torch.cat of its parts"),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        "torch.cat of its parts",
    ),
    "lazy": (lambda t: nn.UninitializedParameter(requires_grad=False), "call that module first"),
}


@pytest.mark.parametrize("what", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "tokens", "out", "gate.weight"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_tensors_of_other_layouts_are_refused_by_name(name: str, what: str) -> None:
    change, remedy = LAYOUTS[what]

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call: dict[str, Any] = {
            "x": GIVEN.x,
            "topk_ids": GIVEN.ids,
            "topk_weights": GIVEN.weights,
            "tokens": TOKENS,
            "out": torch.empty_like(GIVEN.x),
        }
        if name == "tokens":
            call[name] = change(TOKENS[None])
        elif name in call:
            call[name] = change(call[name])
        else:
            changed = change(layer.gate.weight.data)
            layer.gate.weight = nn.Parameter(changed, False) if what != "lazy" else changed
        with pytest.raises(ValueError, match=f"^{name} .*{remedy}"):
            layer(**call)

    virtual.run(rank_main, ranks=1)


def test_dtensors_are_refused_by_name_alike_on_all_ranks() -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        layer = WEIGHTS.layer(world)
        mine = WEIGHTS.of_rank(world.rank, world.size)
        experts = Experts(CFG, world)
        given = {"x": GIVEN.x, "topk_ids": GIVEN.ids, "topk_weights": GIVEN.weights}
        calls: dict[str, Callable[[Tensor], object]] = {
            **{name: functools.partial(_call_with, layer, given, name) for name in given},
            "tokens": functools.partial(_call_with, layer, {**given, "tokens": TOKENS}, "tokens"),
            "out": functools.partial(_call_with, layer, {**given, "out": GIVEN.x.clone()}, "out"),
            "w1": lambda w1: experts(GIVEN.x, GIVEN.ids, GIVEN.weights, w1, mine.w2),
            "gate.weight": lambda gate: func.functional_call(
                layer, {"gate.weight": gate}, (GIVEN.x,)
            ),
        }
        tensors = {
            **given,
            "tokens": TOKENS,
            "out": GIVEN.x,
            "w1": mine.w1,
            "gate.weight": mine.gate,
        }
        for name, call in calls.items():
            for placement in (Replicate(), Shard(0)):
                dtensor = DTensor.from_local(tensors[name], mesh, [placement], run_check=False)
                said = rf"^{name} is a DTensor, .*: pass {name}\.to_local\(\), or {name}\.full"
                with pytest.raises(TypeError, match=said):
                    call(dtensor)
        assert_matches(WEIGHTS, GIVEN, GIVEN(layer))
        return True

    assert all(ranks_of_torch(rank_main, 2))


def _call_with(layer: MoELayer, given: dict[str, Any], name: str, tensor: Tensor) -> object:
    return layer(**{**given, name: tensor})


def test_experts_ask_the_same_of_their_callers_weights() -> None:
    def rank_main(world: World) -> list[str]:
        experts = Experts(CFG, world)
        w1, w2 = WEIGHTS.w1, WEIGHTS.w2
        y = experts(GIVEN.x, GIVEN.ids, GIVEN.weights, w1, w2)
        assert_matches(WEIGHTS, GIVEN, y)
        said = []
        for wrong in (negated(w1), cut(w1, 0, 0)):
            with pytest.raises(ValueError, match="w1") as raised:
                experts(GIVEN.x, GIVEN.ids, GIVEN.weights, wrong, w2)
            said.append(str(raised.value))
        return said

    lazy, freed = outcome(rank_main)
    assert lazy.startswith("w1 is a lazy negative")
    assert freed.startswith("w1 reaches to byte ")


def test_a_call_without_rows_needs_no_memory() -> None:
    empty = Call(cut(ROUTED.x[:0], 0, 0))

    def rank_main(world: World) -> tuple[int, ...]:
        layer: MoELayer = WEIGHTS.layer(world)
        return tuple(empty(layer).shape)

    assert outcome(rank_main) == (0, CFG.hidden)
