# SPDX-License-Identifier: Apache-2.0
"""Gradients that a trainer keeps next to its parameters: `main_grad`, as Megatron-Core names it.

A backward adds to `main_grad`, and leaves `grad` alone. This file must not depend on calls or
engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moeos.system import tensor_memory


def found(
    named: Mapping[str, Tensor | None],
    beside: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The `main_grad` of the parameters that have one and require a gradient, by name.

    Raises `TypeError` or `ValueError` for one that is not of its parameter's shape and device,
    contiguous or with the parameter's strides, and of fp32 or the parameter's dtype, or
    that shares memory with another tensor of the call or another `main_grad`. Breaks the graph of a
    compiler that could not add to it; `beside`: other tensors that are read and may require a
    gradient.
    """
    kept = {}
    for name, parameter in named.items():
        if parameter is None or not parameter.requires_grad:
            continue
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            if is_compiling():
                if hasattr(parameter, "grad_added_to_main_grad"):
                    _break(f"{name} has grad_added_to_main_grad, which no graph sets")
                check_form(f"main_grad of {name}", main_grad, parameter)
            else:
                check(f"main_grad of {name}", main_grad, parameter)
            kept[name] = main_grad
    if kept and is_compiling():
        others = (*beside.values(), *(one for name, one in named.items() if name not in kept))
        if not any(one is not None and one.requires_grad for one in others):
            # None of these gets a gradient from autograd, which would make no backward.
            _break(f"all that wants a gradient, such as {next(iter(kept))}, has a main_grad")
    elif kept:
        _check_apart(kept, {**named, **beside})
    return kept


def _check_apart(kept: Mapping[str, Tensor], read: Mapping[str, Tensor | None]) -> None:
    """Raises `ValueError` for a `main_grad` that is written over something else."""
    others = [*read.items()]
    for name, main_grad in kept.items():
        shares = tensor_memory.sharer(main_grad, others)
        if shares is not None:
            raise ValueError(
                f"main_grad of {name} shares memory with {shares}, so that a backward would write "
                f"over it: keep torch.zeros_like({name}), or a part of a buffer that is no other's"
            )
        others.append((f"main_grad of {name}", main_grad))


def _break(why: str) -> None:
    torch._dynamo.graph_break(
        msg=f"{why}: leave fullgraph=True away, and the graph breaks at the layer, whose backward "
        "adds to main_grad"
    )


def asked(accumulator: Any) -> bool:
    """Whether the running backward adds to the parameter of this node. A backward for chosen inputs
    may end before it, and `torch.autograd.grad` returns a gradient without adding it.
    """
    if torch._C._current_graph_task_id() < 0:  # no engine of autograd runs: all is asked for
        return True
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return False


def added(parameter: Tensor, main_grad: Tensor) -> Tensor | None:
    """Notes that a gradient was added to `main_grad`. Returns what autograd gets in its place.

    Megatron-Core's hooks wait for some gradient, and add no gradient of a parameter whose
    `grad_added_to_main_grad` is true. So where it has that attribute, autograd gets a tensor of any
    numbers, or of zeros where `zero_out_wgrad` asks for them.
    """
    torch.autograd.graph.increment_version(main_grad)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    zeros = getattr(parameter, "zero_out_wgrad", False)
    return torch.zeros_like(parameter) if zeros else torch.empty_like(parameter)


def check(what: str, main_grad: object, parameter: Tensor) -> None:
    """Raises `TypeError` or `ValueError` as `found` does."""
    main_grad = tensor_memory.require_dense(what, main_grad)
    check_form(what, main_grad, parameter)
    tensor_memory.require_memory(what, main_grad)
    tensor_memory.require_writable(what, main_grad)


def check_form(what: str, main_grad: Tensor, parameter: Tensor) -> None:
    """Raises as `check` does, but checks nothing about the memory of `main_grad`."""
    if main_grad.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {list(main_grad.shape)}; it must be the parameter's, "
            f"{list(parameter.shape)}"
        )
    if main_grad.dtype not in (torch.float32, parameter.dtype):
        raise TypeError(
            f"{what} has dtype {main_grad.dtype}; it must be torch.float32 or the parameter's, "
            f"{parameter.dtype}"
        )
    if main_grad.device != parameter.device:
        raise ValueError(
            f"{what} is on {main_grad.device}; it must be on the parameter's device, "
            f"{parameter.device}"
        )
    if not main_grad.is_contiguous() and main_grad.stride() != parameter.stride():
        raise ValueError(
            f"{what} has strides {main_grad.stride()}; it must be contiguous, or have the "
            f"parameter's, {parameter.stride()}: keep main_grad.contiguous()"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{what} requires a gradient: keep main_grad.detach()")
