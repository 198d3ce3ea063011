# SPDX-License-Identifier: Apache-2.0
"""A call takes x as users have it: any leading shape and strides, an output, more rows than fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moeos import Experts, MoELayer, World
from moeos.call import custom_op
from moeos.config import reference
from moeos.engines.base import CallTensors
from moeos.engines.twin.engine import TwinEngine
from moeos.world import virtual
from tests.layers import (
    PREFERENCES,
    Call,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import at_night

CFG = config(max_tokens=32, bias=True, selection_bias=True)
WEIGHTS = draw_weights(CFG)


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], dim=1)[:, 0]


def every_other_element(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def backwards_in_memory(x: Tensor) -> Tensor:
    """Negative strides cannot be; the rows of a sequence-first batch lie in another order."""
    return x.view(4, 5, -1).transpose(0, 1).contiguous().transpose(0, 1)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch and sequence": lambda x: x.view(4, 5, -1),
    "one sequence": lambda x: x.unsqueeze(0),
    "four dimensions": lambda x: x.view(2, 2, 5, -1),
    "sequence first": backwards_in_memory,
    "transposed": transposed,
    "gaps": with_gaps,
    "every other element": every_other_element,
    "batch with gaps": lambda x: with_gaps(x).view(4, 5, -1),
}


@pytest.mark.parametrize("routed", ["by the gate", "by the caller"])
@pytest.mark.parametrize("shape", SHAPES)
def test_x_of_any_shape_and_strides_gives_a_result_of_its_shape(shape: str, routed: str) -> None:
    def rank_main(world: World) -> None:
        draw = draw_call if routed == "by the gate" else draw_given_call
        call = draw(CFG, 20, world.rank)
        layer = WEIGHTS.layer(world)
        x = SHAPES[shape](call.x)
        for routing in ((call.ids, call.weights), led_by(x, call)):
            y = layer(x, *routing)
            assert y.shape == x.shape
            assert y.is_contiguous()
            assert_matches(WEIGHTS, call, y.reshape(20, -1))

    virtual.run(rank_main, ranks=2)


def led_by(x: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The call's routing with the leading dimensions of x."""
    if call.ids is None or call.weights is None:
        return None, None
    lead = x.shape[:-1]
    return call.ids.view(*lead, -1), call.weights.view(*lead, -1)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
def test_x_without_rows_gives_a_result_of_its_shape(shape: tuple[int, ...]) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        if world.rank == 0:
            assert layer(torch.zeros(*shape, CFG.hidden)).shape == (*shape, CFG.hidden)
            return
        call = draw_call(CFG, 20, 0)
        assert_matches(WEIGHTS, call, layer(call.x))

    virtual.run(rank_main, ranks=2)


def test_contiguous_x_of_any_shape_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = TwinEngine.forward

    def noted(engine: TwinEngine, tensors: CallTensors) -> None:
        seen.append(tensors.x.data_ptr())
        forward(engine, tensors)

    monkeypatch.setattr(TwinEngine, "forward", noted)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        x = draw_call(CFG, 20, 0).x
        for given in (x, x.view(4, 5, -1), x[2:], x.view(4, 5, -1)[1:]):
            layer(given)
            assert seen.pop() == given.data_ptr()

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("shape", ["batch and sequence", "gaps"])
def test_the_output_is_written_to_out_which_is_returned(shape: str) -> None:
    call = draw_given_call(CFG, 20, 0)
    x = SHAPES[shape](call.x)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        room = torch.full((24, CFG.hidden), torch.nan)
        out = room[2:22].view(x.shape)
        version = out._version
        assert layer(x, call.ids, call.weights, out=out) is out
        assert out._version > version  # so that autograd sees what was kept of it before
        assert_matches(WEIGHTS, call, out.reshape(20, -1))
        assert room[:2].isnan().all()
        assert room[22:].isnan().all()
        y = layer(x, call.ids, call.weights)
        assert y.data_ptr() != out.data_ptr()
        assert torch.equal(y, out)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("name", ["topk_weights", "w1", "gate.weight"])
def test_an_output_amid_another_argument_is_refused_by_its_name(name: str) -> None:
    call = draw_given_call(CFG, 4, 0)
    assert call.weights is not None
    room = torch.zeros(4 * CFG.hidden)
    weights = room[7 : 7 + call.weights.numel()].view(call.weights.shape)
    words = f"out shares memory with {name}, which"

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        outs = {
            "topk_weights": room,
            "w1": layer.w1.data.flatten()[: len(room)],
            "gate.weight": layer.gate.weight.data.flatten()[: len(room)],
        }
        out = outs[name].view(4, -1)
        with pytest.raises(ValueError, match=words):
            layer(call.x, call.ids, weights, out=out)
        arguments = (call.ids, weights, None, layer.w1, layer.b1, layer.w2, layer.b2, None)
        router = (layer.gate.weight, layer.gate.selection_bias, None, None)
        others = (None,) * 12
        with pytest.raises(ValueError, match=words):
            custom_op.forward_into(
                *(layer._order, layer.experts.key, call.x, *arguments, *router, *others, out),
                pairs=layer.cfg.top_k,
            )

    virtual.run(rank_main, ranks=1)


# --- pieces -------------------------------------------------------------------------------------


ROWS = ((96, 0, 33, 5), (70, 32, 0, 96), (1, 64, 31, 90), (0, 96, 96, 64))
"""[rank][call]: as many as three pieces have, and fewer."""


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "routed"),
    [
        ("uniform", "by the gate"),
        ("one-expert", "by the gate"),
        *((kind, "by the caller") for kind in ("uniform", "one-expert", "empty-rank")),
    ],
)
def test_a_long_call_in_pieces_is_right_whatever_the_ranks_have(
    ranks: int, routed: str, kind: str
) -> None:
    cfg = dataclasses.replace(CFG, selection_bias=False)
    if ranks == 1 and kind == "empty-rank":
        kind = "idle-experts"
    preference = PREFERENCES[kind](cfg.experts, ranks)
    given = routed == "by the caller"
    weights = draw_weights(cfg, preference=None if given else preference)

    def draw(rows: int, seed: int) -> Call:
        if given:
            return draw_given_call(cfg, rows, seed, preference)
        return draw_call(cfg, rows, seed)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        for number, rows in enumerate(ROWS[world.rank]):
            call = draw(rows, 4 * number + world.rank)
            y = layer(call.x, call.ids, call.weights, pieces=3)
            assert_matches(weights, call, y, f"rank {world.rank}, call {number}")
            short = draw(min(rows, 32), number)
            assert_matches(weights, short, layer(short.x, short.ids, short.weights))

    virtual.run(rank_main, ranks=ranks)


@pytest.mark.parametrize("rows", [0, 31, 33, 64, 96])
def test_a_number_of_tokens_counts_through_all_pieces(rows: int) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = draw_call(CFG, rows, world.rank)
        for count in sorted({0, rows // 2, min(rows, 32), rows}):
            tokens = torch.tensor([count], dtype=torch.int32)
            y = layer(call.x, tokens=tokens, pieces=3)
            assert_matches(WEIGHTS, Call(call.x[:count]), y[:count])
            assert not y[count:].any()

    virtual.run(rank_main, ranks=2)


def test_pieces_write_to_one_output_of_any_leading_shape() -> None:
    call = draw_given_call(CFG, 90, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        out = torch.full((9, 10, CFG.hidden), torch.nan)
        y = layer(call.x.view(9, 10, -1), call.ids, call.weights, out=out, pieces=4)
        assert y is out
        assert_matches(WEIGHTS, call, out.view(90, -1))

    virtual.run(rank_main, ranks=1)


def test_a_capacity_is_that_of_a_piece() -> None:
    cfg = config(max_tokens=32, capacity_factor=0.5)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 70, 0)

    def rank_main(world: World) -> Tensor:
        y: Tensor = weights.layer(world)(call.x, pieces=3)
        return y

    [y] = virtual.run(rank_main, ranks=1)
    for first in (0, 32, 64):
        piece = Call(call.x[first : first + 32])
        assert weights.drops(piece) > 0
        assert_matches(weights, piece, y[first : first + 32])


@pytest.mark.parametrize("bad", ["id", "tokens above", "tokens below"])
def test_what_is_wrong_in_a_later_piece_raises_before_the_first_is_sent(bad: str) -> None:
    """The peer waits in its first piece meanwhile."""

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = draw_given_call(CFG, 90, world.rank)
        assert call.ids is not None
        if world.rank == 1:
            ids, count = call.ids.clone(), 90
            if bad == "id":
                ids[80, 1] = CFG.experts
                words = r"topk_ids\[80, 1\] is 8"
            else:
                count = 91 if bad == "tokens above" else -1
                words = f"tokens is {count}; x has 90 rows"
            tokens = torch.tensor([count], dtype=torch.int32)
            with pytest.raises(ValueError, match=words):
                layer(call.x, ids, call.weights, tokens=tokens, pieces=3)
        assert_matches(WEIGHTS, call, layer(call.x, call.ids, call.weights, pieces=3))

    virtual.run(rank_main, ranks=2)


# --- weights and ids of several types -----------------------------------------------------------


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "weights", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_routing_of_any_type_and_strides_is_read_as_it_is(
    ids: torch.dtype, weights: torch.dtype
) -> None:
    call = draw_given_call(CFG, 20, 0)
    assert call.ids is not None
    assert call.weights is not None
    given = Call(call.x, call.ids, call.weights.to(weights))

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        assert given.weights is not None
        for arrange in (Tensor.contiguous, transposed, with_gaps):
            y = layer(call.x, arrange(call.ids.to(ids)), arrange(given.weights))
            assert_matches(WEIGHTS, given, y)

    virtual.run(rank_main, ranks=1)


# --- contexts -----------------------------------------------------------------------------------


def test_a_layer_works_in_inference_mode_with_tensors_from_in_and_outside() -> None:
    call = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        experts = Experts(dataclasses.replace(CFG, selection_bias=False), world)
        own = (layer.w1, layer.w2, layer.b1, layer.b2)
        with torch.inference_mode():
            inside = call.x.clone()
            out = torch.empty_like(inside)
            inner = tuple(None if tensor is None else tensor.clone() for tensor in own)
            for x in (call.x, inside):
                for y in (
                    layer(x, call.ids, call.weights),
                    layer(x, call.ids, call.weights, out=out),
                    experts(x, call.ids, call.weights, *own),
                    experts(x, call.ids, call.weights, *inner),
                ):
                    assert y.is_inference()
                    assert_matches(WEIGHTS, call, y)
        for y in (
            layer(inside, call.ids, call.weights),
            experts(inside, call.ids, call.weights, *inner),
        ):
            assert_matches(WEIGHTS, call, y)

    virtual.run(rank_main, ranks=1)


def test_an_output_of_inference_mode_is_refused_outside_of_it_before_anything_is_sent() -> None:
    """PyTorch refuses it when it is written, which is behind the call that all ranks have made."""
    call = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> Tensor:
        layer = WEIGHTS.layer(world)
        with torch.inference_mode():
            out = torch.empty_like(call.x)
            layer(call.x, call.ids, call.weights, out=out)
        call(layer)
        if world.rank == 1:
            with pytest.raises(RuntimeError, match=r"^out was made in inference mode.*out\.clone"):
                layer(call.x, call.ids, call.weights, out=out)
        return call(layer)

    for y in virtual.run(rank_main, ranks=2, deadline=10.0):
        assert_matches(WEIGHTS, call, y)


def test_a_layer_made_in_inference_mode_works_in_and_outside_of_it() -> None:
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        with torch.inference_mode():
            layer = WEIGHTS.layer(world)
            assert_matches(WEIGHTS, call, layer(call.x))
        assert_matches(WEIGHTS, call, layer(call.x))

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_casts_x_to_the_layers_dtype(dtype: torch.dtype, given: torch.dtype) -> None:
    cfg = config(max_tokens=32, dtype=dtype)
    weights = draw_weights(cfg)
    x = draw_call(cfg, 20, 0).x.to(given)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            with pytest.raises(TypeError, match=r"x has dtype torch\.int64"):
                layer(x.long())
        assert_matches(weights, Call(x.to(dtype)), y)
        if given != dtype:
            with pytest.raises(TypeError, match="x has dtype"):
                layer(x)

    virtual.run(rank_main, ranks=1)


# --- compiled -----------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("backend", ["aot_eager", at_night("inductor")])
def test_all_of_it_is_traced_without_a_break(backend: str) -> None:
    call = draw_given_call(CFG, 90, 0)
    batch = call.x.view(9, 10, -1)

    def program(layer: MoELayer, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = layer(x, call.ids, call.weights, pieces=3)
        layer(x, call.ids, call.weights, out=out, pieces=3)
        strided = layer(x.transpose(0, 1)[:2])
        return first, out * 2, strided

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        counter = CompileCounterWithBackend(backend)
        out = torch.empty_like(batch)
        traced = torch.compile(program, fullgraph=True, backend=counter)
        first, doubled, strided = traced(layer, batch, out)
        assert_matches(WEIGHTS, call, first.view(90, -1))
        assert_matches(WEIGHTS, call, out.view(90, -1))
        assert torch.equal(doubled, out * 2)
        some = batch.transpose(0, 1)[:2]
        assert strided.shape == some.shape
        assert_matches(WEIGHTS, Call(some.reshape(18, -1)), strided.reshape(18, -1))
        assert counter.frame_count == 1

    virtual.run(rank_main, ranks=1)


@pytest.mark.usefixtures("nothing_compiled")
def test_experts_in_a_graph_take_an_output_and_pieces_too() -> None:
    cfg = dataclasses.replace(CFG, selection_bias=False)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 90, 0)

    def rank_main(world: World) -> None:
        layer, experts = weights.layer(world), Experts(cfg, world)

        def program(x: Tensor, out: Tensor) -> Tensor:
            own = (layer.w1, layer.w2, layer.b1, layer.b2)
            experts(x, call.ids, call.weights, *own, out=out, pieces=3)
            return experts(x, call.ids, call.weights, *own, pieces=3)

        traced = torch.compile(program, fullgraph=True, backend="aot_eager")
        out = torch.full((9, 10, cfg.hidden), torch.nan)
        for y in (traced(call.x.view(9, 10, -1), out), out):
            assert_matches(weights, call, y.view(90, -1))

    virtual.run(rank_main, ranks=1)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_graph_is_right_under_autocast_and_in_inference_mode() -> None:
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        traced = torch.compile(lambda x: layer(x), fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16):
            for x in (call.x, call.x.double()):
                assert_matches(WEIGHTS, call, traced(x))
        with torch.inference_mode():
            for x in (call.x, call.x.clone()):
                assert_matches(WEIGHTS, call, traced(x))

    virtual.run(rank_main, ranks=1)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("what", ["a layer", "experts"])
def test_the_mode_of_fewest_launches_is_as_any(what: str) -> None:
    """On the CPU it has no graphs to record; tests/gpu has them."""
    weights = draw_weights(dataclasses.replace(CFG, selection_bias=False))
    call = draw_given_call(weights.cfg, 20, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        experts = Experts(weights.cfg, world)

        def program(x: Tensor) -> Tensor:
            if what == "a layer":
                y: Tensor = layer(x, call.ids, call.weights)
                return y
            return experts(x, call.ids, call.weights, layer.w1, layer.w2, layer.b1, layer.b2)

        traced = torch.compile(program, fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for _ in range(3):
                assert_matches(weights, call, traced(call.x))

    virtual.run(rank_main, ranks=1)


def test_the_operator_with_an_output_is_as_its_schema_and_its_fake_say() -> None:
    given = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        arguments: tuple[Any, ...] = (layer._order, layer.experts.key, given.x, given.ids)
        arguments += (given.weights, None, layer.w1, layer.b1, layer.w2, layer.b2, None)
        arguments += (layer.gate.weight, layer.gate.selection_bias, None, None)
        arguments += (None,) * 12
        arguments += (torch.empty_like(given.x),)
        torch.library.opcheck(
            custom_op.forward_into, arguments, {"pairs": 1, "any_ids": True, "pieces": 2}
        )

    virtual.run(rank_main, ranks=1)


# --- with an operator, and without --------------------------------------------------------------


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    """Gets torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def calls_of_operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes calls that go through the operator from now on."""
    calls: list[str] = []
    for name in ("forward", "forward_into"):
        original = getattr(custom_op, name)

        def noted(*args: Any, _call: Any = original, _name: str = name, **how: Any) -> Any:
            calls.append(_name)
            return _call(*args, **how)

        monkeypatch.setattr(custom_op, name, noted)
    return calls


class Named(Tensor):
    """A class of its own, which is told of every function that gets it."""


def test_an_eager_call_needs_no_operator_unless_something_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    through = calls_of_operators(monkeypatch)
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        expected = layer(call.x)
        layer(call.x, out=torch.empty_like(call.x))
        with torch.no_grad(), torch.inference_mode(), torch.device("meta"):
            layer(call.x)
        assert through == []

        with Watching() as watching:
            assert torch.equal(layer(call.x), expected)
            layer(call.x, out=torch.empty_like(call.x))
        assert "moeos.forward.default" in watching.seen
        assert "moeos.forward_into.default" in watching.seen
        with torch.profiler.profile() as profile:
            layer(call.x)
        assert any(event.key == "moeos::forward" for event in profile.key_averages())
        with Functions():
            assert torch.equal(layer(call.x), expected)
        assert isinstance(layer(call.x.as_subclass(Named)), Named)
        assert through == ["forward", "forward_into", "forward", "forward", "forward"]

    virtual.run(rank_main, ranks=1)


def test_experts_with_given_routing_match_the_layer_that_routes() -> None:
    """The gate's routing by the reference, given to experts, is the layer's own."""
    cfg = dataclasses.replace(CFG, selection_bias=False)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer, experts = weights.layer(world), Experts(cfg, world)
        call = draw_call(cfg, 20, world.rank)
        routing = reference.route(call.x, weights.gate, cfg)
        y = experts(
            call.x.view(4, 5, -1),
            routing.ids.view(4, 5, -1),
            routing.weights,
            layer.w1,
            layer.w2,
            layer.b1,
            layer.b2,
        )
        assert_matches(weights, call, y.view(20, -1))
        assert_matches(weights, call, layer(call.x))

    virtual.run(rank_main, ranks=2)
