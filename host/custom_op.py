"""The layer's call as an operator of PyTorch, `moeos::forward`: compilers trace through it.

An engine is told by its key: a tensor of its own, found by its address. A number would be a
constant of the graph, and each layer would need a graph of its own; a tensor is an input, so one
graph serves all layers of a kind. It lies where the layer's tensors do: a graph with a tensor of
the CPU could not be replayed by the GPU alone. This file knows nothing of modules, and of an engine
only that it makes a call.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from typing import NoReturn

import torch
from torch import Tensor

from moeos.call_checks import check_tangents
from moeos.engines.base import CallTensors, Engine

# By the address of the key. A key lives as long as its engine, and as a graph that uses it: so at
# its address lies nothing else.
_at: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_keys: weakref.WeakKeyDictionary[Engine, Tensor] = weakref.WeakKeyDictionary()
# By the number that a key holds: for its copies, such as those of a copied graph. Drawn, so that a
# graph from another process finds none here.
_numbered: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

# A call changes what is not among its tensors: the heaps of all ranks. `order` stands for them. By
# the schema each call writes it, so no compiler may drop a call whose output is not used, make one
# of two equal calls, or let two calls change places, all of which would leave the peers waiting.
_library = torch.library.Library("moeos", "DEF")
_library.define(
    "forward(Tensor(a!) order, Tensor key, Tensor x, Tensor? topk_ids, Tensor? topk_weights, "
    "Tensor? tokens, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? gate, "
    "Tensor? selection_bias, *, bool any_ids=False) -> Tensor"
)


def register(engine: Engine, device: torch.device) -> Tensor:
    """The key, on `device`, by which `forward` finds the engine for as long as it lives."""
    number = secrets.randbits(63)
    key = torch.full((1,), number, dtype=torch.int64, device=device)
    _at[key.data_ptr()] = engine
    _numbered[number] = engine
    _keys[engine] = key
    return key


@functools.cache
def order_on(device: torch.device) -> Tensor:
    """The tensor, one for each device, that a call of any layer there seems to write; see above."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _run(
    order: Tensor,
    key: Tensor,
    x: Tensor,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    tokens: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    gate: Tensor | None,
    selection_bias: Tensor | None,
    *,
    any_ids: bool = False,
) -> Tensor:
    # The operator asks by itself, but below the transforms of torch.func, which hide tangents from
    # it: so who calls it asks as well.
    check_tangents("MoELayer", x, topk_weights, w1, b1, w2, b2, gate, selection_bias)
    engine = _at.get(key.data_ptr())
    if engine is None:
        engine = _numbered.get(int(key.item()))
    if engine is None:
        raise RuntimeError(
            "the layer of this graph is gone, or was never in this process: keep it while its "
            "graph is used, and make the graph in the process that uses it"
        )
    engine.require_open()  # before PyTorch says in its own words that a child has no CUDA
    out = torch.empty_like(x)
    engine.forward(
        CallTensors(
            x=x,
            out=out,
            gate=gate,
            selection_bias=selection_bias,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            w1=w1,
            b1=b1,
            w2=w2,
            b2=b2,
            tokens=tokens,
            any_ids=any_ids,
        )
    )
    return out


def _describe(
    order: Tensor, key: Tensor, x: Tensor, *others: Tensor | None, any_ids: bool = False
) -> Tensor:
    """What tracing needs to know: the output is as x."""
    return torch.empty_like(x)


def _refuse_vmap(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "MoELayer cannot be used in torch.vmap (or what calls it, such as torch.func.jacfwd): a "
        "call is one for all ranks; flatten the batch into the rows of x"
    )


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _run, _key)
torch.library.register_fake("moeos::forward", _describe, lib=_library)
torch.library.register_vmap("moeos::forward", _refuse_vmap, lib=_library)

forward = torch.ops.moeos.forward.default
"""The operator: order [1], the engine's key, then the tensors of `CallTensors` but `out`."""
