# SPDX-License-Identifier: Apache-2.0
"""The layer's call as an operator of PyTorch, `moeos::forward`: compilers trace through it.

`moeos::forward_into` writes into the caller's output, and also takes x as codes. Where nothing
traces, transforms or watches what PyTorch does, a call need not go through an operator: see
`unwatched`.

An engine is identified by its key: a tensor of its own, found by its address. A number would be a
constant of the graph, and each layer would need a graph of its own; a tensor is an input, so one
graph serves all layers of a kind. The key lies on the layer's device: the GPU alone could not
replay a graph with a CPU tensor. This file must not depend on modules, nor on anything of an engine
but that it makes a call.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

from moeos.call.call_checks import check_apart, check_tangents
from moeos.engines.base import CallTensors, Engine
from moeos.system.dynamo import hidden

# Engines by the address of their key. A key lives as long as its engine, and as a graph that uses
# it: so at its address lies nothing else.
_at: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[Engine, Tensor] = weakref.WeakKeyDictionary()
# Engines by the number that a key holds: for copies of keys, such as those of a copied graph.
# Numbers are drawn, so that a graph from another process finds no engine here.
_numbered: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

# A call changes memory that is not among its tensors: the heaps of all ranks. `order` stands for
# them. By the schema each call writes `order`, so no compiler may drop a call whose output is not
# used, make one of two equal calls, or let two calls change places, all of which would leave the
# peers waiting.
library = torch.library.Library("moeos", "DEF")
"""Holds all operators of moeos."""
TENSORS = (
    "Tensor(a!) order, Tensor key, Tensor x, Tensor? topk_ids, Tensor? topk_weights, "
    "Tensor? tokens, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? w3, Tensor? gate, "
    "Tensor? selection_bias, Tensor? router_bias, Tensor? expert_scale, "
    "Tensor? shared_w1, Tensor? shared_w2, Tensor? shared_gate, "
    "Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_scale_2, Tensor? w2_scale_2, "
    "Tensor? shared_w1_scale, Tensor? shared_w2_scale, "
    "Tensor? shared_w1_scale_2, Tensor? shared_w2_scale_2"
)
ROUTING = 3
"""The number of tensors of the routing, from topk_ids on; the caller's own follow."""
HOW = "*, int pairs, bool any_ids=False, int pieces=1"
"""`pairs`: of a token, with experts or their slices, which is for `moeos.call.flops` alone."""
library.define(f"forward({TENSORS}, {HOW}) -> Tensor")
library.define(f"forward_into({TENSORS}, Tensor? x_scale, Tensor(b!) out, {HOW}) -> ()")


# Each look-up of a name costs a call as much as the function itself.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled


def unwatched() -> bool:
    """Whether nothing observes operators: then a call may go to its engine without one, which costs
    the host a third as much.

    Compilers, tracers, modes of dispatch (fake tensors, flop counters), transforms of torch.func,
    levels of forward-mode derivatives and profilers do. So do tensor subclasses, which the caller
    must check for.
    """
    return not (
        is_compiling()
        or _dispatch_modes() > 0
        or (_function_modes() > 0 and not _only_a_default_device())
        or _transform() is not None
        or _tracer() is not None
        or _is_profiled()
        or forward_ad._current_level >= 0
    )


def modes_watch() -> bool:
    """Whether dispatch modes, such as a flop counter, observe operators, and no compiler does."""
    return not is_compiling() and _dispatch_modes() > 0


def is_transformed() -> bool:
    """Whether torch.func transforms what is called, or a tracer records it. A compiler cannot ask:
    where it gives up a graph, the code that runs does."""
    return not is_compiling() and (_transform() is not None or _tracer() is not None)


def refuse_functionalize() -> None:
    """Raises `RuntimeError` within `torch.func.functionalize`, which takes no operator that writes.
    Compilers make a call functional in another way.
    """
    level = None if is_compiling() else _transform()
    if level is not None and level.key() == TransformType.Functionalize:
        raise RuntimeError(
            "MoELayer cannot be used in torch.func.functionalize, which takes no operator that "
            "writes, as a call does: make the call outside of it, or use torch.export or "
            "torch.compile, whose graphs are functional with a call in them"
        )


def refuse_onnx() -> None:
    """Raises `RuntimeError` within `torch.onnx.export`, which would say that it does not know an
    operator.
    """
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "MoELayer and Experts cannot be exported to ONNX, in which no operator makes a call of "
            "several ranks: use torch.export.export, whose program runs in processes that have the "
            "layer. A model of transformers is exported by torch.onnx's default exporter after "
            "model.set_experts_implementation('batched_mm')"
        )


def _only_a_default_device() -> bool:
    """Whether the only mode of functions is a default device, on which a call makes nothing."""
    modes = torch._C._get_function_stack_at
    return _function_modes() == 1 and isinstance(modes(0), DeviceContext)


def register(engine: Engine, device: torch.device) -> Tensor:
    """The key, on `device`, by which `forward` finds the engine for as long as it lives."""
    number = secrets.randbits(63)
    key = _stays(torch.full((1,), number, dtype=torch.int64, device=device))
    _at[key.data_ptr()] = engine
    _numbered[number] = engine
    _keys[engine] = key
    return key


def key_of(engine: Engine) -> Tensor:
    """The key that `register` has returned."""
    return _keys[engine]


@functools.cache
def order_on(device: torch.device) -> Tensor:
    """The tensor, one for each device, that a call of any layer there seems to write; see above."""
    return _stays(torch.zeros(1, dtype=torch.int32, device=device))


def _stays(tensor: Tensor) -> Tensor:
    """Marks a tensor whose address is part of what it means. The graphs that
    `torch.compile(mode="reduce-overhead")` records would read a copy, whose number the host cannot
    ask for in a capture, and be given up for an order that is written.

    As `torch._dynamo.mark_static_address` does it, whose import takes a second.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def call(
    engine: Engine,
    x: Tensor,
    out: Tensor,
    routing: Sequence[Tensor | None],
    own: Sequence[Any],
    any_ids: bool,
    pieces: int,
) -> None:
    """Makes a call of an engine, without an operator: of `routing`, topk_ids, topk_weights, tokens
    and x_scale, and of `own`, what `moeos.call.call_checks.OWN` lists.
    """
    topk_ids, topk_weights, tokens, x_scale = routing
    w1, b1, w2, b2, w3, gate, selection_bias, router_bias, expert_scale, *rest = own
    # This equals CallTensors(...), whose extra function call would cost as much as a lock. The
    # order is that of the fields.
    fields = (
        *(x, out, gate, selection_bias, topk_ids, topk_weights, w1, b1, w2, b2),
        *(tokens, any_ids, pieces, router_bias, expert_scale, *rest, x_scale, w3),
    )
    engine.forward(tuple.__new__(CallTensors, fields))


# Where Dynamo gave up a frame that calls an operator, it goes on with the frames within, and would
# trace the engine.
@hidden
def _run(
    order: Tensor,
    key: Tensor,
    x: Tensor,
    *others: Tensor | None,
    pairs: int,
    any_ids: bool = False,
    pieces: int = 1,
) -> Tensor:
    engine = engine_of(key)
    engine.require_open()  # before PyTorch raises its own error for a child without CUDA
    out = torch.empty_like(x)
    _call(engine, x, others, None, out, any_ids, pieces)
    return out


@hidden
def _run_into(
    order: Tensor,
    key: Tensor,
    x: Tensor,
    *others: Any,
    pairs: int,
    any_ids: bool = False,
    pieces: int = 1,
) -> None:
    *inputs, x_scale, out = others
    check_apart(out, x, (*inputs[:ROUTING], x_scale), inputs[ROUTING:])
    _call(engine_of(key), x, inputs, x_scale, out, any_ids, pieces)


def _call(
    engine: Engine,
    x: Tensor,
    inputs: Sequence[Tensor | None],
    x_scale: Tensor | None,
    out: Tensor,
    any_ids: bool,
    pieces: int,
) -> None:
    # The operator checks tangents itself, but below the transforms of torch.func, which hide them:
    # so its caller checks as well.
    check_tangents("MoELayer", x, x_scale, *inputs)
    call(engine, x, out, (*inputs[:ROUTING], x_scale), inputs[ROUTING:], any_ids, pieces)


def engine_of(key: Tensor) -> Engine:
    """The engine of a key. Raises `RuntimeError` if there is none."""
    engine = _at.get(key.data_ptr())
    if engine is None:
        engine = _numbered.get(int(key.item()))
    if engine is None:
        raise RuntimeError(
            "the layer of this graph is gone, or was never in this process: keep it while its "
            "graph is used, and make the graph in the process that uses it"
        )
    return engine


def _describe(
    order: Tensor, key: Tensor, x: Tensor, *others: Tensor | None, **how: object
) -> Tensor:
    """The fake implementation of `forward`: the output is like x."""
    refuse_onnx()
    return torch.empty_like(x)


def _describe_into(*_: Tensor | None, **how: object) -> None:
    """The fake implementation of `forward_into`: it returns nothing."""
    refuse_onnx()


def _refuse_vmap(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "MoELayer cannot be used in torch.vmap (or what calls it, such as torch.func.jacfwd): a "
        "call is one for all ranks; flatten the batch into the rows of x"
    )


for _device in ("CPU", "CUDA"):
    library.impl("forward", _run, _device)
    library.impl("forward_into", _run_into, _device)
torch.library.register_fake("moeos::forward", _describe, lib=library)
torch.library.register_fake("moeos::forward_into", _describe_into, lib=library)
for _name in ("moeos::forward", "moeos::forward_into"):
    torch.library.register_vmap(_name, _refuse_vmap, lib=library)

forward = torch.ops.moeos.forward.default
"""The operator: order [1], the engine's key, then the tensors of `CallTensors` but `out` and
`x_scale`."""
forward_into = torch.ops.moeos.forward_into.default
"""Takes `x_scale` and `out` after the tensors of `forward`."""
