# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor is memory that a kernel can read at its address.

Not all are: the shapes of sparse and nested tensors say nothing of memory, some tensors stand for
the negative of what lies there, and some have no memory, or less than their shape needs. Must not
depend on calls.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def require_dense(name: str, value: object) -> Tensor:
    """The value. Raises `TypeError` unless it is a tensor, `ValueError` unless shape and strides
    say where its elements lie.
    """
    if not isinstance(value, Tensor):
        refuse_proxy(value)
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
    if isinstance(value, (UninitializedBuffer, UninitializedParameter)):
        raise ValueError(
            f"{name} has no shape yet, as it is of a lazy module: call that module first"
        )
    if value.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; it must be one of equal rows: pass torch.cat of its parts"
        )
    if value.layout != torch.strided:
        raise ValueError(
            f"{name} has layout {value.layout}; it must be strided: pass {name}.to_dense()"
        )
    return value


def refuse_proxy(value: object) -> None:
    """Raises `TypeError` for what `torch.fx.symbolic_trace` passes in place of a value."""
    if isinstance(value, Proxy):
        raise TypeError(
            "the call got a torch.fx.Proxy, as symbolic_trace cannot trace it: use torch.export or "
            "torch.compile, or a Tracer whose is_leaf_module keeps the layer whole"
        )


def without_laziness(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose memory holds what the tensor stands for.

    Compiled code passes tensors through an operator, which makes such copies by itself. The running
    code is asked whether it is compiled, as another thread may be compiling.
    """
    if is_dynamo_compiling():
        return tensor
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_neg()


def require_no_laziness(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` unless the tensor's memory holds what it stands for."""
    if is_dynamo_compiling():
        return
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a lazy negative, whose memory holds other values: pass {name}.resolve_neg()"
        )
    if tensor._is_zerotensor():
        raise ValueError(f"{name} stands for zeros without memory: pass {name}.clone()")


def require_writable(name: str, tensor: Tensor) -> None:
    """Raises `RuntimeError`, as PyTorch does for it, where a tensor may only be read."""
    if is_dynamo_compiling():
        return
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} was made in inference mode, and may be written only there: pass {name}.clone()"
        )


def require_memory(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` unless all elements of a tensor lie in memory that it has."""
    if tensor.numel() == 0:
        return
    try:
        storage = tensor.untyped_storage()
        held = storage.nbytes() if storage.data_ptr() != 0 else 0
    except RuntimeError:  # PyTorch's own word for a tensor without any
        held = 0
    needed = tensor.storage_offset() * tensor.element_size() + extent(tensor)
    if held < needed:
        raise ValueError(
            f"{name} reaches to byte {needed} of its storage, which has {held}: the storage was "
            "freed or cut (untyped_storage().resize_), or is another tensor's (torch.func): pass a "
            "tensor with memory of its own"
        )


def sharer(written: Tensor, others: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The first of these names whose tensor has memory between the first and the last byte of a
    tensor that is written; None where all lie apart from it.
    """
    if written.numel() == 0:
        return None
    first = written.data_ptr()
    end = first + (written.nbytes if written.is_contiguous() else extent(written))
    for name, other in others:
        if other is not None and other.numel() > 0 and (begin := other.data_ptr()) < end:
            # A call checks its tensors here: those that are contiguous enter no function.
            size = other.nbytes if other.is_contiguous() else extent(other)
            if first < begin + size:
                return name
    return None


def extent(tensor: Tensor) -> int:
    """Bytes from the start of its first element to the end of its last one; it is not empty."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()  # which compiled code may ask, too
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()
