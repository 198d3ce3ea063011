# SPDX-License-Identifier: Apache-2.0
"""What differentiates or batches a call raises by name, since a layer has no such rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx

from moeos import MoELayer, World
from moeos.world import virtual
from tests.layers import config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but

CFG = config(max_tokens=64, bias=True)
WEIGHTS = draw_weights(CFG)
X = draw_call(CFG, 4, 0).x
GIVEN = draw_given_call(CFG, 4, 0)

FORWARD_MODE = "MoELayer has no forward-mode derivative"
BACKWARD = "MoELayer has no backward"
VMAP = r"MoELayer cannot be used in torch\.vmap"


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def dual_x(layer: MoELayer) -> Tensor:
    return layer(forward_ad.make_dual(X, torch.ones_like(X)))


def dual_routing_weights(layer: MoELayer) -> Tensor:
    weights = forward_ad.make_dual(GIVEN.weights, torch.ones_like(GIVEN.weights))
    return layer(GIVEN.x, GIVEN.ids, weights)


def dual_w1(layer: MoELayer) -> Tensor:
    w1 = layer.w1.detach()
    dual = forward_ad.make_dual(w1, torch.ones_like(w1))
    return func.functional_call(layer, {"w1": dual}, (X,))


@pytest.mark.parametrize("call", [dual_x, dual_routing_weights, dual_w1])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_call_with_a_tangent_raises(call: Callable[[MoELayer], Tensor], grad: bool) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            with pytest.raises(RuntimeError, match=FORWARD_MODE):
                call(layer)
            layer(X)  # a call without one is made there as anywhere

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (lambda f: func.jvp(f, (X,), (torch.ones_like(X),)), FORWARD_MODE),
        (lambda f: func.jacfwd(f)(X), FORWARD_MODE),
        (lambda f: func.linearize(f, X), FORWARD_MODE),
        (lambda f: jacobian(f, X, strategy="forward-mode", vectorize=True), FORWARD_MODE),
        (lambda f: func.vjp(f, X), BACKWARD),
        (lambda f: func.jacrev(f)(X), BACKWARD),
        (lambda f: func.grad(lambda x: f(x).sum())(X), BACKWARD),
        (lambda f: func.hessian(lambda x: f(x).sum())(X), BACKWARD),
        (lambda f: func.vmap(f)(torch.stack([X, X])), VMAP),
    ],
    ids=["jvp", "jacfwd", "linearize", "jacobian", "vjp", "jacrev", "grad", "hessian", "vmap"],
)  # fmt: skip
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_transform_of_a_layer_raises(
    transform: Callable[[Callable[[Tensor], Tensor]], Any], sentence: str, grad: bool
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=sentence):
            transform(layer)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("backend", all_but(["aot_eager"], ["eager", "aot_eager"]))
def test_a_compiled_layer_raises_alike(backend: str) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        traced: Any = torch.compile(layer, backend=backend, fullgraph=True)
        traced(X)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD_MODE):
            dual_x(traced)
        with pytest.raises(RuntimeError, match=f"functorch|{FORWARD_MODE}"):  # PyTorch's own words
            func.jvp(traced, (X,), (torch.ones_like(X),))
        inside = torch.compile(
            lambda x: func.jvp(layer, (x,), (torch.ones_like(x),)), backend=backend
        )
        with pytest.raises(RuntimeError, match=FORWARD_MODE):
            inside(X)
        batched = torch.compile(lambda x: func.vmap(layer)(x), backend=backend)
        with pytest.raises(RuntimeError, match=VMAP):
            batched(torch.stack([X, X]))

    virtual.run(rank_main, ranks=1)


def test_functionalize_of_a_layer_raises_with_what_works() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        for call in (
            lambda: func.functionalize(layer)(X),
            lambda: func.functionalize(layer)(GIVEN.x, GIVEN.ids, GIVEN.weights),
            lambda: func.functionalize(lambda x: layer(x, out=torch.empty_like(x)))(X),
            lambda: make_fx(func.functionalize(layer))(X),
        ):
            with pytest.raises(RuntimeError, match=r"^MoELayer cannot be used in torch\.func\.fun"):
                call()
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(traced(X), layer(X))

    virtual.run(rank_main, ranks=1)


def test_what_is_detached_is_a_constant_of_a_derivative() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        y = layer(X)
        with torch.no_grad():
            value, tangent = func.jvp(lambda x: layer(x.detach()) * x, (X,), (torch.ones_like(X),))
        assert torch.equal(value, y * X)
        assert torch.equal(tangent, y)
        scaled = func.vmap(lambda s: layer(X) * s)(torch.tensor([1.0, 2.0]))
        assert torch.equal(scaled[1], 2 * y)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    "derive",
    [
        lambda y, x, many, _: torch.autograd.grad(y, x, many, is_grads_batched=True),
        lambda y, x, many, _: func.vmap(lambda one: torch.autograd.grad(y, x, one))(many),
        lambda y, x, many, layer: jacobian(layer, X, vectorize=True),
    ],
    ids=["is_grads_batched", "vmap", "jacobian"],
)
def test_a_batch_of_gradients_is_refused_with_what_works(derive: Callable[..., Any]) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        x = X.clone().requires_grad_()
        y = layer(x)
        many = torch.eye(y.numel())[:3].reshape(3, *y.shape)
        with pytest.raises(RuntimeError, match=r"a batch of them .*retain_graph=True, or pass vec"):
            derive(y, x, many, layer)
        x = X[:1].clone()
        one = x.clone().requires_grad_()
        again = layer(one)
        rows = torch.eye(again.numel()).reshape(-1, *again.shape)
        each = [torch.autograd.grad(again, one, row, retain_graph=True)[0] for row in rows[:4]]
        whole = jacobian(layer, x, vectorize=False).reshape(again.numel(), *x.shape)
        assert torch.equal(whole[:4], torch.stack(each))

    virtual.run(rank_main, ranks=1)
