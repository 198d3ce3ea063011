"""The layer's call as an operator of PyTorch, `moeos::forward`: compilers trace through it.

An engine is told by a number, since a graph holds tensors and numbers alone. This file knows
nothing of modules, and of an engine only that it makes a call.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch
from torch import Tensor

from moeos.engines.base import CallTensors, Engine

_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_handles = itertools.count()

# A call changes what is not among its tensors: the heaps of all ranks. `order` stands for them. By
# the schema each call writes it, so no compiler may drop a call whose output is not used, make one
# of two equal calls, or let two calls change places, all of which would leave the peers waiting.
_library = torch.library.Library("moeos", "DEF")
_library.define(
    "forward(Tensor(a!) order, int engine, Tensor x, Tensor? topk_ids, Tensor? topk_weights, "
    "Tensor? tokens, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor gate, "
    "Tensor? selection_bias) -> Tensor"
)


def register(engine: Engine) -> int:
    """A number that `forward` finds the engine by, for as long as the engine lives."""
    handle = next(_handles)
    _engines[handle] = engine
    return handle


@functools.cache
def order_on(device: torch.device) -> Tensor:
    """The tensor, one for each device, that a call of any layer there seems to write; see above."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _run(
    order: Tensor,
    engine: int,
    x: Tensor,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    tokens: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    gate: Tensor,
    selection_bias: Tensor | None,
) -> Tensor:
    found = _engines.get(engine)
    if found is None:
        raise RuntimeError(f"the layer of engine {engine} is gone; keep it while its graph is used")
    out = torch.empty_like(x)
    found.forward(
        CallTensors(x, out, gate, selection_bias, topk_ids, topk_weights, w1, b1, w2, b2, tokens)
    )
    return out


def _describe(order: Tensor, engine: int, x: Tensor, *others: Tensor | None) -> Tensor:
    """What tracing needs to know: the output is as x."""
    return torch.empty_like(x)


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _run, _key)
torch.library.register_fake("moeos::forward", _describe, lib=_library)

forward = torch.ops.moeos.forward.default
"""The operator: order [1], the engine's number, then the tensors of `CallTensors` but `out`."""
