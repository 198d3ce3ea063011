# SPDX-License-Identifier: Apache-2.0
"""A call that can be differentiated, as operators: compilers trace through it and its backward.

`moeos::record` is the call and `moeos::backward` is its backward. A compiler makes each of them as
often as the model does, and in its order. `record` seems to write `order`, as `moeos::forward`
does. `backward` cannot: calls of other graphs have written it since it was saved. It has an effect,
so it is never dropped, and reads what the one before it in its graph has returned, so the two never
change places. They compute what `moeos.call.autograd` does. This file must not depend on modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops import effects

from moeos.call import autograd, call_checks, custom_op, flops
from moeos.call.autograd import How, Kept
from moeos.system.dynamo import hidden

_NAMES = autograd.DERIVED
"""What `moeos::backward` returns gradients of."""
custom_op.library.define(
    f"record({custom_op.TENSORS}, {custom_op.HOW}, int slots, Tensor?[] main, bool turned=False, "
    "SymInt saved_rows=0, int saved_columns=0) -> "
    "(Tensor out, Tensor topk_ids, Tensor topk_weights, Tensor tokens, Tensor saved)"
)
custom_op.library.define(
    "backward(Tensor key, Tensor x, Tensor d_out, Tensor topk_ids, "
    "Tensor topk_weights, Tensor tokens, Tensor saved, Tensor?[] own, Tensor? after, *, "
    "bool[] wanted, int pairs, "
    "ScalarType? dtype_of_weights=None, int pieces=1, bool[] unrounded=[]) -> "
    f"({', '.join('Tensor' for _ in _NAMES)}, Tensor before)"
)


def call(
    order: Tensor,
    key: Tensor,
    x: Tensor,
    routing: Sequence[Tensor | None],
    own: Sequence[Tensor | None],
    *,
    slots: int,
    pairs: int,
    saved_rows: int,
    saved_columns: int,
    any_ids: bool,
    pieces: int,
    main: Sequence[Tensor | None],
    turned: bool,
) -> Tensor:
    """The output of a call of rows x, as an operator. `routing`: topk_ids, topk_weights and tokens;
    `slots` and `pairs`: of a token; `saved_rows`: of the engine's in this call, and `saved_columns`
    of each; `main`: of its own tensors what their gradients are added to in the backward, in place
    of a gradient, and which are `turned` where the caller's matrices are.
    """
    how = {"slots": slots, "pairs": pairs, "saved_rows": saved_rows, "any_ids": any_ids}
    how |= {"saved_columns": saved_columns, "pieces": pieces, "turned": turned}
    y: Tensor = record(order, key, x, *routing, *own, main=main, **how)[0]
    return y


_OF_COUNT = torch.device("cpu")
"""Where the numbers of tokens and of the call lie between a call and its backward, whatever the
layer's device: the host reads them in the backward, and must not wait for a GPU there."""

_last: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
"""What the last `moeos::backward` returned, by the mode under which AOTAutograd traces a graph."""


class _Asked(NamedTuple):
    """The keyword arguments of `moeos::record`. The dispatcher omits arguments that equal the
    schema's defaults.
    """

    slots: int
    pairs: int
    main: Sequence[Tensor | None]
    turned: bool = False
    saved_rows: int = 0
    saved_columns: int = 0
    any_ids: bool = False
    pieces: int = 1


class _Differentiable(torch.autograd.Function):
    """`moeos::record`, recorded by autograd."""

    @staticmethod
    def forward(
        ctx: Any, asked: _Asked, order: Tensor, key: Tensor, x: Tensor, *others: Any
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out, *kept = record(
                order, key, x, *others, **asked._replace(main=[], turned=False)._asdict()
            )
        _, weights, _, *own = others
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.pieces, ctx.pairs, ctx.turned = asked.pieces, asked.pairs, asked.turned
        # Calls of other graphs may add to it before this one's backward does: so its version is not
        # checked. It is not a saved tensor, and is marked so for AOTAutograd.
        ctx.main = dict(zip(call_checks.OWN, asked.main, strict=False))
        for main_grad in asked.main:
            _leave_unchecked(main_grad)
        ctx.dtype_of_weights = None if weights is None else weights.dtype
        autograd.keep(ctx, key, x, *kept, *own)
        return out, *kept

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        autograd.check_first_derivative()
        key, x, ids, used, tokens, saved, *own = autograd.kept_by(ctx)
        wanted = [ctx.needs_input_grad[place] for place in _PLACES]
        if ctx.dtype_of_weights is not None:  # then the gate has no part in it
            for number, name in enumerate(_NAMES):
                wanted[number] &= name not in call_checks.ROUTER
        main = [ctx.main.get(name) for name in _NAMES]
        graph = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
        *derived, before = backward(
            *(
                key,
                x,
                autograd.received(d_outs[0]),
                ids,
                used,
                tokens,
                saved,
                own,
                graph and _last.get(graph),
            ),
            wanted=wanted,
            pairs=ctx.pairs,
            dtype_of_weights=ctx.dtype_of_weights,
            pieces=ctx.pieces,
            unrounded=[
                one is not None and one.dtype == torch.float32 and name in call_checks.WEIGHTS
                for name, one in zip(_NAMES, main, strict=True)
            ],
        )
        if graph is not None:
            _last[graph] = before
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for name, place, one, its, gradient in zip(
            _NAMES, _PLACES, wanted, main, derived, strict=True
        ):
            if one and its is not None:
                turned = ctx.turned and name in call_checks.MATRICES
                its.add_(gradient.transpose(1, 2) if turned else gradient)
            elif one:
                found[place] = gradient
        return tuple(found)


def _leave_unchecked(tensor: Tensor | None) -> None:
    """Marks a tensor of a traced graph as one that may change before the backward. PyTorch before
    2.13 does not read the mark, and raises then.
    """
    if tensor is None:
        return
    from torch.fx.experimental import proxy_tensor  # takes a second, and a tracer has it

    for proxy in proxy_tensor._get_proxies(tensor):
        proxy.node.meta["saved_tensor_with_no_vc_check"] = True


_FIRST_OWN = 1 + 3 + custom_op.ROUTING
_PLACES = (3, 5, *range(_FIRST_OWN, _FIRST_OWN + len(_NAMES) - 2))
"""Indices of the tensors in `_NAMES` among the inputs of `_Differentiable.forward`: what was asked,
order, key, x, the routing and the call's own tensors.
"""


def _differentiate(order: Tensor, key: Tensor, x: Tensor, *others: Any, **how: Any) -> Any:
    if torch.is_grad_enabled() and call_checks.wants_gradient(x, *others):
        return _Differentiable.apply(_Asked(**how), order, key, x, *others)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return record(order, key, x, *others, **how)


@hidden
def _run(order: Tensor, key: Tensor, x: Tensor, *others: Any, **how: Any) -> tuple[Tensor, ...]:
    asked = _Asked(**how)
    ids, weights, tokens, *own = others
    out, recording = autograd.record(
        _how(key, asked.pieces, ids, tokens, any_ids=asked.any_ids), x, weights, own
    )
    # An operator must not return one of its inputs.
    kept_ids, kept_weights = (
        tensor.clone() if any(tensor is one for one in (ids, weights)) else tensor
        for tensor in (recording.topk_ids, recording.topk_weights)
    )
    count = torch.tensor([recording.tokens, recording.of], dtype=torch.int64, device=_OF_COUNT)
    return out, kept_ids, kept_weights, count, recording.saved


@hidden
def _run_backward(
    key: Tensor,
    x: Tensor,
    d_out: Tensor,
    ids: Tensor,
    used: Tensor,
    tokens: Tensor,
    saved: Tensor,
    own: Sequence[Tensor | None],
    after: Tensor | None,
    *,
    wanted: Sequence[bool],
    pairs: int,
    dtype_of_weights: torch.dtype | None = None,
    pieces: int = 1,
    unrounded: Sequence[bool] = (),
) -> tuple[Tensor, ...]:
    count, of = tokens.tolist()
    kept = Kept(x, d_out, ids, used, count, saved, dtype_of_weights, of)
    rest = (False,) * (len(own) + 2 - len(wanted))
    with _autograd():
        in_fp32 = {name for name, one in zip(_NAMES, unrounded, strict=False) if one}
        found = autograd.derive(
            _how(key, pieces), kept, own, (False, *wanted, *rest), unrounded=in_fp32
        )
    return (
        *(found[place] if one else x.new_empty(0) for place, one in enumerate(wanted, autograd.X)),
        x.new_empty(0),
    )


def _autograd() -> AbstractContextManager[Any]:
    """Autograd within an operator that runs below it, as under a mode of dispatch."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded - torch._C.DispatchKeySet(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def _how(
    key: Tensor,
    pieces: int,
    ids: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    any_ids: bool = False,
) -> How:
    engine = custom_op.engine_of(key)
    return How(engine, engine.cfg, ids, tokens, any_ids, pieces)


def _describe(
    order: Tensor, key: Tensor, x: Tensor, *others: Tensor | None, **how: Any
) -> tuple[Tensor, ...]:
    """The fake implementation of `record`, for tracing."""
    custom_op.refuse_onnx()
    asked = _Asked(**how)
    slots = (x.shape[0], asked.slots)
    return (
        torch.empty_like(x),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty(slots, dtype=torch.float32),
        x.new_empty(2, dtype=torch.int64, device=_OF_COUNT),
        x.new_empty((asked.saved_rows, asked.saved_columns)),
    )


def _describe_backward(
    key: Tensor,
    x: Tensor,
    d_out: Tensor,
    ids: Tensor,
    used: Tensor,
    *others: Any,
    wanted: Sequence[bool],
    dtype_of_weights: torch.dtype | None = None,
    unrounded: Sequence[bool] = (),
    **how: Any,
) -> tuple[Tensor, ...]:
    """The fake implementation of `backward`, for tracing."""
    _, _, own, _ = others
    weights = used.to(dtype_of_weights or used.dtype)
    in_fp32 = [*unrounded, *(False,) * len(wanted)]
    return (
        *(
            torch.empty_like(tensor, dtype=torch.float32 if exact else None)
            if one and tensor is not None
            else x.new_empty(0)
            for one, exact, tensor in zip(wanted, in_fp32, (x, weights, *own), strict=False)
        ),
        x.new_empty(0),
    )


for _device in ("CPU", "CUDA"):
    custom_op.library.impl("record", _run, _device)
    custom_op.library.impl("backward", _run_backward, _device)
custom_op.library.impl("record", _differentiate, "Autograd")
torch.library.register_fake("moeos::record", _describe, lib=custom_op.library)
torch.library.register_fake("moeos::backward", _describe_backward, lib=custom_op.library)

record = torch.ops.moeos.record.default
"""The operator: order [1] and the engine's key, then as `moeos.call.custom_op.forward`. Returns the
output, the routing as backward needs it, which is ids, their weights and two numbers, of
tokens and of the call, and what the first product made of `saved_rows` rows.
"""
backward = torch.ops.moeos.backward.default
"""The operator: the engine's key, x, the gradient of the output, what `record` has returned after
the output, the call's own tensors, and what the backward before in this graph has returned last.
"""
effects._register_effectful_op(backward, effects._EffectType.ORDERED)
flops.count(_NAMES)
