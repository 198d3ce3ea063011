"""What the tensors of a call must be: shapes, dtypes, devices and strides, before anything is sent.

One place for all that takes a call. It knows a config and a device, and nothing of ranks, engines
or where weights come from. What lies in the tensors is not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from moeos.config import MoEConfig

WEIGHTS = ("w1", "b1", "w2", "b2")
"""The tensors of a call that experts compute with, in the operator's order."""
ROUTER = ("gate.weight", "gate.selection_bias")
"""Those that a router chooses with, in the operator's order behind the weights."""


class Expected(NamedTuple):
    """What a weight must be."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def expected_weights(cfg: MoEConfig, experts: int) -> tuple[Expected | None, ...]:
    """Of one rank's `experts` experts, in the order of `WEIGHTS`; None where there is no such
    tensor.
    """

    def one(name: str, *shape: int) -> Expected:
        return Expected(name, torch.Size((experts, *shape)), cfg.dtype)

    return (
        one("w1", cfg.w1_rows, cfg.hidden),
        one("b1", cfg.w1_rows) if cfg.bias else None,
        one("w2", cfg.hidden, cfg.intermediate),
        one("b2", cfg.hidden) if cfg.bias else None,
    )


def expected_router(cfg: MoEConfig) -> tuple[Expected | None, ...]:
    """In the order of `ROUTER`; None where there is no such tensor."""
    weight, bias = ROUTER
    return (
        Expected(weight, torch.Size((cfg.experts, cfg.hidden)), cfg.gate_dtype),
        Expected(bias, torch.Size((cfg.experts,)), torch.float32) if cfg.selection_bias else None,
    )


def check_x(cfg: MoEConfig, device: torch.device, x: object) -> None:
    """Raises unless x is [S, H] of a call."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dim() != 2 or x.shape[1] != cfg.hidden:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [S, {cfg.hidden}]")
    if x.dtype != cfg.dtype:
        raise TypeError(f"x has dtype {x.dtype}; it must be {cfg.dtype}, the layer's")
    if x.device != device:
        raise ValueError(f"x is on {x.device}; it must be on {device}, the layer's device")
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}; it must be contiguous: pass x.contiguous()")
    if x.shape[0] > cfg.max_tokens:
        raise ValueError(
            f"x has {x.shape[0]} tokens; at most max_tokens, {cfg.max_tokens}, are allowed"
        )


def check_routing(
    cfg: MoEConfig, device: torch.device, rows: int, ids: object, weights: object
) -> None:
    """Raises unless ids and weights are the routing of so many rows."""
    if ids is None or weights is None:
        missing = "topk_ids" if ids is None else "topk_weights"
        raise ValueError(f"{missing} is None; topk_ids and topk_weights must be given together")
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.shape != (rows, cfg.top_k):
            shape = [rows, cfg.top_k]
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; it must be {shape}, [S, top_k]"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
        if name == "topk_ids" and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"topk_ids has dtype {tensor.dtype}; it must be torch.int32 or torch.int64"
            )
        if name == "topk_weights" and not tensor.is_floating_point():
            raise TypeError(
                f"topk_weights has dtype {tensor.dtype}; it must be a floating point type"
            )


def check_tokens(device: torch.device, tokens: object) -> None:
    """Raises unless tokens is the number of tokens of a call."""
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"tokens is a {type(tokens).__name__}; it must be a torch.Tensor")
    if tokens.dim() > 1 or tokens.numel() != 1:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; it must be [1] or []")
    if tokens.dtype != torch.int32:
        raise TypeError(f"tokens has dtype {tokens.dtype}; it must be torch.int32")
    if tokens.device != device:
        raise ValueError(f"tokens is on {tokens.device}; it must be on {device}")


def check_weight(device: torch.device, expected: Expected, tensor: object, absent: str) -> None:
    """Raises unless it is such a weight. `absent`: what is said where there is none."""
    name, shape, dtype = expected
    if tensor is None:
        raise ValueError(f"{name} is missing; {absent}: {list(shape)}")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.shape != shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}"
            f"{_transposed(name, tensor, shape)}"
        )
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
    if tensor.device != device:
        if tensor.is_meta:
            raise ValueError(
                f"{name} has no values, as it is on the meta device: call "
                f"layer.to_empty(device='{device.type}') and load_state_dict, or "
                "load_state_dict(..., assign=True)"
            )
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {tensor.stride()}; it must be contiguous: keep {name}.contiguous()"
        )


def check_derivatives(what: str, *tensors: torch.Tensor | None) -> None:
    """Raises where a derivative is asked of `what`, such as "MoELayer": there is none."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{what} has no backward, and a tensor requires a gradient: call it under "
                    "torch.no_grad(), or detach x, topk_weights and the parameters"
                )
    check_tangents(what, *tensors)


def check_tangents(what: str, *tensors: torch.Tensor | None) -> None:
    """Raises for a tensor with a tangent: PyTorch would take the output's for zero."""
    if forward_ad._current_level < 0:  # else each look at a tensor costs as much as a launch
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{what} has no forward-mode derivative, and a tensor has a tangent (from "
                "torch.func.jvp, jacfwd or linearize, or torch.autograd.forward_ad): detach it, "
                "or derive by finite differences"
            )


def _transposed(name: str, tensor: torch.Tensor, shape: torch.Size) -> str:
    """A remedy where a matrix of each expert has its rows and columns exchanged."""
    if len(shape) != 3 or tensor.shape != (shape[0], shape[2], shape[1]):
        return ""
    return f", each expert's matrix transposed: keep {name}.transpose(1, 2).contiguous()"
