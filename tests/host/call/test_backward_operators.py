# SPDX-License-Identifier: Apache-2.0
"""A compiled model trains as the model does: in one graph, with each backward once and in order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moeos import MoELayer, World
from moeos.call import backward_operators, call_checks
from moeos.config import reference
from moeos.engines.base import CallTensors, GradientTensors, Recording
from moeos.engines.twin.engine import TwinEngine
from moeos.world import virtual
from tests.layers import config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but, at_night

CFG = config(bias=True, router_bias=True, shared_experts=1, shared_intermediate=32)
WEIGHTS = draw_weights(CFG)
OTHERS = draw_weights(CFG, 1)

OF_X = [("eager", True), ("aot_eager", False)]
"""Of which each runs always: a backend, and whether x has a gradient. Inductor compiles C++ for ten
seconds; `test_custom_op.py` has it in every run."""
quick_backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", at_night("inductor")])

saves = pytest.mark.parametrize("save", ["nothing", "preactivation"])

Calls = list[tuple[str, int, int]]
"""Direction, number of the layer, rows."""


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What engines were asked for, in order."""
    made: Calls = []
    record, backward = TwinEngine.record, TwinEngine.backward

    def recorded(engine: TwinEngine, tensors: CallTensors) -> Recording:
        made.append(("forward", engine.number, len(tensors.x)))
        return record(engine, tensors)

    def derived(engine: TwinEngine, tensors: GradientTensors) -> None:
        made.append(("backward", engine.number, len(tensors.x)))
        backward(engine, tensors)

    monkeypatch.setattr(TwinEngine, "record", recorded)
    monkeypatch.setattr(TwinEngine, "backward", derived)
    return made


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function as one graph; a graph break is an error."""
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    return made


def taken(x: Tensor, layer: MoELayer) -> dict[str, Tensor]:
    """The gradients so far, which are gone afterwards."""
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    if x.grad is not None:
        found["x"] = x.grad.clone()
    layer.zero_grad()
    x.grad = None
    return found


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert reference.relative_error(found[name], gradient) < 1e-5, name


BACKENDS_OF_SAVES = [("nothing", "aot_eager"), ("preactivation", "eager")]
"""Of which each runs always: what is saved, and a backend."""


@pytest.mark.parametrize(
    ("save", "backend"),
    all_but(
        BACKENDS_OF_SAVES,
        itertools.product(["nothing", "preactivation"], ["eager", "aot_eager", "inductor"]),
    ),
)
def test_a_compiled_model_has_the_gradients_of_the_model(save: Any, backend: str) -> None:
    weights = dataclasses.replace(WEIGHTS, cfg=dataclasses.replace(CFG, save=save))

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        x = draw_call(CFG, 30 - 20 * world.rank, world.rank).x.requires_grad_()

        def program(x: Tensor) -> Tensor:
            return (0.5 * layer(2 * x) + layer(x[1:]).sum(dim=0)).sin()

        program(x).sum().backward()
        expected = taken(x, layer)
        compiled(program, backend)(x).sum().backward()
        found = taken(x, layer)
        assert found.keys() >= {"x", "w1", "gate.bias", "shared_w2"}
        assert_alike(found, expected)

    virtual.run(rank_main, ranks=2, deadline=120.0)  # one thread compiles at a time


@pytest.mark.parametrize(
    ("backend", "of_x"),
    all_but(OF_X, itertools.product(["eager", "aot_eager", "inductor"], [True, False])),
)
def test_backwards_are_neither_dropped_nor_reordered(
    backend: str, of_x: bool, calls: Calls
) -> None:
    """Equal calls stay two, and those that could change places do not."""

    def rank_main(world: World) -> None:
        one, two = (weights.layer(world).requires_grad_() for weights in (WEIGHTS, OTHERS))
        x = draw_call(CFG, 20, 0).x.requires_grad_(of_x)

        def program(x: Tensor) -> Tensor:
            one(x[:7])  # without a backward, as nobody has its output
            return one(x) + one(x) + two(x) + two(x[:9]).sum()

        program(x).sum().backward()
        expected = [*calls]
        assert [call for call in expected if call[0] == "backward"] == [
            *(("backward", 1, 9), ("backward", 1, 20)),
            *(("backward", 0, 20), ("backward", 0, 20)),
        ]
        traced = compiled(program, backend)
        for _ in range(2):
            calls.clear()
            traced(x).sum().backward()
            assert calls == expected

    virtual.run(rank_main, ranks=1)


class _Ignores(torch.autograd.Function):
    """Its gradient does not depend on that of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> Tensor:
        return torch.zeros_like(d_outs[0])


@quick_backends
def test_a_backward_is_made_though_its_gradient_is_unused(backend: str, calls: Calls) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        x = draw_call(CFG, 20, 0).x.requires_grad_()
        traced = compiled(lambda x: layer(_Ignores.apply(x)), backend)
        traced(x).sum().backward()
        assert calls == [("forward", 0, 20), ("backward", 0, 20)]

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("backend", all_but(["aot_eager"], ["eager", "aot_eager", "inductor"]))
def test_calls_in_flight_of_graphs_of_their_own(backend: str, calls: Calls) -> None:
    """As of a model whose blocks are compiled one by one."""

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world).requires_grad_()
        traced = compiled(lambda x: layer(x) * 2.0, backend)
        x = draw_call(CFG, 20, world.rank).x.requires_grad_()
        (2.0 * layer(2.0 * layer(x))).sum().backward()
        expected = taken(x, layer)
        traced(traced(x)).sum().backward()
        found = taken(x, layer)
        assert_alike(found, expected)

    virtual.run(rank_main, ranks=2, deadline=120.0)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    all_but(
        [("aot_eager", torch.float64), ("eager", torch.bfloat16)],
        itertools.product(
            ["eager", "aot_eager", "inductor"], [torch.float32, torch.float64, torch.bfloat16]
        ),
    ),
    ids=str,
)
def test_weights_of_the_caller(backend: str, dtype: torch.dtype) -> None:
    given = draw_given_call(CFG, 20, 0)
    assert given.weights is not None
    weights = given.weights.to(dtype)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world).requires_grad_()
        found = []
        for program in (layer, compiled(layer, backend)):
            x, leaf = given.x.clone().requires_grad_(), weights.clone().requires_grad_()
            program(x, given.ids, leaf).sum().backward()
            assert leaf.grad is not None
            assert leaf.grad.dtype == dtype
            assert layer.gate.weight.grad is None  # which says nothing of it
            found.append(leaf.grad)
        assert torch.equal(*found)

    virtual.run(rank_main, ranks=1)


def test_what_differs_in_a_call_needs_no_graph_of_its_own() -> None:
    def rank_main(world: World) -> int:
        layer = WEIGHTS.layer(world).requires_grad_()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        traced = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for rows in (20, 3, 64):
            x = draw_call(CFG, rows, rows).x
            layer(x).sum().backward()
            expected = taken(x, layer)
            traced(x).sum().backward()
            for name, gradient in taken(x, layer).items():
                assert torch.equal(gradient, expected[name])
        graphs: int = counter.frame_count
        return graphs

    assert virtual.run(rank_main, ranks=1) == [1]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    all_but(
        [("aot_eager", torch.float32), ("eager", torch.bfloat16)],
        itertools.product(["eager", "aot_eager", "inductor"], [torch.float32, torch.bfloat16]),
    ),
    ids=str,
)
def test_a_graph_adds_to_main_grads(backend: str, dtype: torch.dtype) -> None:
    """Of calls under way, too, whose backwards come in any order; sums are not rounded on the way,
    as they are not outside of a graph."""
    weights = draw_weights(dataclasses.replace(CFG, dtype=dtype))

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        with_main = {name: p for name, p in layer.named_parameters() if name != "b2"}
        x = draw_call(weights.cfg, 20, 0).x.requires_grad_()

        def found(program: Callable[..., Tensor]) -> dict[str, Tensor]:
            for parameter in with_main.values():
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
            first, second = program(x), program(2.0 * x)
            first.sum().backward()
            second.sum().backward()
            found = taken(x, layer)
            assert found.keys() == {"x", "b2"}
            return found | {name: p.main_grad for name, p in with_main.items()}

        assert_alike(found(compiled(layer, backend)), found(layer))

    virtual.run(rank_main, ranks=1)


def test_a_graph_adds_to_each_main_grad_whatever_is_asked_for() -> None:
    """Its backward is one function of all gradients."""

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world).requires_grad_()
        x = draw_call(CFG, 20, 0).x.requires_grad_()
        layer(x).sum().backward()
        expected = taken(x, layer)
        layer.w1.main_grad = torch.zeros_like(layer.w1)
        (d_x,) = torch.autograd.grad(compiled(layer, "aot_eager")(x).sum(), [x])
        assert_alike({"x": d_x, "w1": layer.w1.main_grad}, {n: expected[n] for n in ("x", "w1")})

    virtual.run(rank_main, ranks=1)


def test_a_main_grad_is_added_to_where_the_graph_breaks() -> None:
    """No backward would come of a graph whose every gradient is added elsewhere."""

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        layer.w1.requires_grad_()
        x = draw_call(CFG, 20, 0).x
        layer(x).sum().backward()
        expected = taken(x, layer)
        layer.w1.main_grad = torch.zeros_like(layer.w1)
        torch.compile(lambda x: layer(x), backend="aot_eager")(x).sum().backward()
        assert layer.w1.grad is None
        assert torch.equal(layer.w1.main_grad, expected["w1"])

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("megatron", [False, True], ids=["alone", "megatron"])
def test_a_main_grad_that_no_whole_graph_adds_to_is_refused_by_name(megatron: bool) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        layer.w2.requires_grad_()
        x = draw_call(CFG, 20, 0).x
        traced = compiled(layer, "aot_eager")
        traced(x).sum().backward()
        expected = taken(x, layer)
        layer.w2.main_grad = torch.zeros_like(layer.w2)  # the graph is not used again
        said = "all that wants a gradient, such as w2, has a main_grad"
        if megatron:
            layer.requires_grad_()
            layer.w2.grad_added_to_main_grad = False
            said = "w2 has grad_added_to_main_grad, which no graph sets"
        said = rf"Message: {said}: leave fullgraph=True away"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
            traced(x)
        layer.requires_grad_(False)
        layer.w2.requires_grad_()
        del layer.w2.main_grad
        traced(x).sum().backward()
        assert_alike(taken(x, layer), expected)

    virtual.run(rank_main, ranks=1)


def test_a_mode_of_dispatch_sees_operators() -> None:
    """The gate and the shared experts are derived by autograd within one of them."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), how: Any = None) -> Any:
            seen.append(operator)
            return operator(*args, **(how or {}))

    seen: list[Any] = []

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world).requires_grad_()
        x = draw_call(CFG, 20, 0).x.requires_grad_()
        layer(x).sum().backward()
        expected = taken(x, layer)
        with Names():
            layer(x).sum().backward()
        assert_alike(taken(x, layer), expected)
        assert [one for one in seen if one.namespace == "moeos"] == [
            backward_operators.record,
            backward_operators.backward,
        ]

    virtual.run(rank_main, ranks=1)


def test_a_second_derivative_of_a_graph_is_refused() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        x = draw_call(CFG, 20, 0).x.requires_grad_()
        y = compiled(layer, "eager")(x).sum()
        with pytest.raises(RuntimeError, match="create_graph is True"):
            torch.autograd.grad(y, x, create_graph=True)

    virtual.run(rank_main, ranks=1)


def test_a_backward_on_a_gpu_need_not_wait_for_a_number_of_tokens() -> None:
    """Of a graph on a GPU that number alone lies where the host reads it."""
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        order, key = (torch.empty(1, dtype=d, device=device) for d in (torch.int32, torch.int64))
        x = torch.empty(5, CFG.hidden, device=device)
        w1 = torch.empty(CFG.experts, CFG.w1_rows, CFG.hidden, device=device)
        w2 = torch.empty(CFG.experts, CFG.hidden, CFG.intermediate, device=device)
        own = (w1, None, w2, *(None,) * (len(call_checks.OWN) - 3))
        y, ids, weights, tokens, saved = backward_operators.record(
            *(order, key, x, None, None, None, *own),
            slots=CFG.slots,
            pairs=CFG.top_k,
            main=[],
            saved_rows=3,
        )
    assert {one.device for one in (y, ids, weights, saved)} == {device}
    assert tokens.device == torch.device("cpu")


@saves
def test_the_operators_are_as_their_schemas_and_fakes_say(save: Any) -> None:
    given = draw_given_call(CFG, 20, 0)
    weights = dataclasses.replace(WEIGHTS, cfg=dataclasses.replace(CFG, save=save))

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        own = (
            *(layer.w1, layer.b1, layer.w2, layer.b2, None),
            *(layer.gate.weight, None, layer.gate.bias, None),
            *(layer.shared_w1, layer.shared_w2, None, *(None,) * 8),
        )
        key, checks = layer.experts.key, ("test_schema", "test_faketensor")
        asked = (layer._order, key, given.x, given.ids, given.weights, None, *own)
        rows = layer.experts.engine.saved_rows.of_call(20, 1)
        assert (rows == 0) == (save == "nothing")
        pairs = {"pairs": CFG.top_k}
        how = {"slots": CFG.slots, "main": [], "saved_rows": rows, "saved_columns": CFG.w1_rows}
        how |= pairs
        torch.library.opcheck(backward_operators.record, asked, how, test_utils=checks)
        y, *kept = backward_operators.record(*asked, **how)
        given_back = (key, given.x, torch.ones_like(y), *kept, own, None)
        of_gate = [False] * 4  # the caller weighs
        wanted = [True] * 6 + [False] + of_gate + [True] * 2 + [False]  # w3 is not there
        rest = {"wanted": wanted, "dtype_of_weights": torch.float32} | pairs
        torch.library.opcheck(backward_operators.backward, given_back, rest, test_utils=checks)

    virtual.run(rank_main, ranks=1)
