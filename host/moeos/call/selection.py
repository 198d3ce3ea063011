# SPDX-License-Identifier: Apache-2.0
"""The best k of each row, where equal ones have an order: what routers choose experts with.

On GPUs a kernel of its own; else, and where PyTorch traces, plain PyTorch. This file must not
depend on layers, configs or ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from moeos.engines.cuda import topk as topk_kernel
from moeos.engines.cuda.topk import Softmax

MAX_LOGITS = 4096
MAX_CHOSEN = 32


class TopK(NamedTuple):
    """What `topk` chose of each row.

    Attributes:
        values: [..., k], the greatest first.
        indices: int64 [..., k], where they are in their row.
    """

    values: Tensor
    indices: Tensor


def topk(logits: Tensor, k: int, *, softmax: Softmax | None = None) -> TopK:
    """The k greatest of each row; of equal ones the lower index comes first.

    `torch.topk` leaves open which of equal ones it takes. So ranks, devices and versions may differ
    there; here they do not. 0 and -0 are equal, and NaN is above all numbers. The values can be
    differentiated. On a GPU it is one launch, of logits that lie side by
    side and have at most 32 bits.

    Args:
        logits: [..., E], floating point, 1 <= E <= 4096.
        k: 1 <= k <= E, at most 32.
        softmax: None: values are logits. "all": the softmax over the whole row, of those that are
            chosen. "chosen": the softmax over the chosen logits alone, which is the same divided by
            its sum.

    Returns:
        values in the dtype of `logits`, or with a softmax in float32 (of float64 in float64).

    Raises:
        TypeError: logits are no floating point numbers, or k is no integer.
        ValueError: E, k or `softmax` is not as above.
        RuntimeError: the kernel cannot be compiled for this GPU.
    """
    if not logits.is_floating_point():
        raise TypeError(f"logits have dtype {logits.dtype}; it must be a floating point type")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k is {k!r}; it must be an integer")
    row = logits.shape[-1] if logits.dim() > 0 else 0
    if not 1 <= row <= MAX_LOGITS:
        raise ValueError(
            f"logits have shape {list(logits.shape)}; the last dimension must be 1 to {MAX_LOGITS}"
        )
    if not 1 <= k <= min(row, MAX_CHOSEN):
        raise ValueError(f"k is {k}; of {row} logits it must be 1 to {min(row, MAX_CHOSEN)}")
    if softmax is not None and softmax not in get_args(Softmax):
        raise ValueError(f"softmax is {softmax!r}; it must be None, 'all' or 'chosen'")
    if topk_kernel.takes(logits):
        return TopK(*_OnGpu.apply(logits, k, softmax))  # type: ignore[no-untyped-call]
    indices = _best(logits.detach(), k)
    return TopK(_values(logits, indices, softmax), indices)


class _OnGpu(torch.autograd.Function):
    """What the kernel chooses; its derivative is that of the same values by PyTorch."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, softmax: Softmax | None) -> tuple[Tensor, Tensor]:
        values, indices = topk_kernel.run(logits, k, softmax)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(logits, indices)
        ctx.softmax = softmax
        return values, indices

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, indices = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            values = _values(logits, indices, ctx.softmax)
        [d_logits] = torch.autograd.grad(values, logits, d_outputs[0], create_graph=again)
        return d_logits, None, None


def _values(logits: Tensor, indices: Tensor, softmax: Softmax | None) -> Tensor:
    """`TopK.values` of what was chosen."""
    if softmax is None:
        return logits.gather(-1, indices)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softmax == "all":
        return wide.softmax(dim=-1).gather(-1, indices)
    return wide.gather(-1, indices).softmax(dim=-1)


def _best(logits: Tensor, k: int) -> Tensor:
    """Where the k greatest of each row are: int64 [..., k]."""
    if logits.dtype == torch.float64:  # which leaves no bits for an index
        numbers = logits.masked_fill(logits == 0, 0.0)
        return numbers.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    row = logits.shape[-1]
    numbers = logits.float()
    numbers = numbers.masked_fill(numbers == 0, 0.0).masked_fill(numbers.isnan(), torch.nan)
    bits = numbers.view(torch.int32)
    # As integers, negative numbers have the opposite order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = row - 1
    from_end = last - torch.arange(row, device=logits.device)
    keys = ordered * row + from_end  # no two of a row are equal
    return last - keys.topk(k, dim=-1).values.remainder(row)
