# SPDX-License-Identifier: Apache-2.0
"""What the tensors of a call must be: shapes, dtypes, devices and strides, before anything is sent.

All callers of an engine use these checks. This file must not depend on ranks, how engines compute,
or the source of weights. The values of tensors are not read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS, TOKEN_GROUP, WeightFormat
from moeos.config.limits import DTYPES
from moeos.engines.calls import MAX_PIECES
from moeos.partition import sharding
from moeos.system import tensor_memory

WEIGHTS = ("w1", "b1", "w2", "b2", "w3")
"""The tensors of a call that experts compute with, in the operator's order."""
MATRICES = ("w1", "w2", "w3")
"""The weights that hold a matrix for each expert."""
ROUTER = ("gate.weight", "gate.selection_bias", "gate.bias", "gate.expert_scale")
"""The router's tensors, in the operator's order; they follow the weights."""
_BUFFERS = ("gate.selection_bias", "gate.expert_scale")
"""The router's tensors that are buffers; all others are parameters."""
SHARED = ("shared_w1", "shared_w2", "shared_gate")
"""The shared experts' tensors, in the operator's order; they follow the router's."""
SCALES = ("w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2")
"""The scales of quantized weights, in the operator's order; they follow the shared experts'."""
SHARED_SCALES = tuple(f"shared_{name}" for name in SCALES)
"""The scales of quantized shared experts; they follow `SCALES`."""
OWN = (*WEIGHTS, *ROUTER, *SHARED, *SCALES, *SHARED_SCALES)
"""All tensors that do not belong to a call's tokens, in the operator's order."""
_READ = ("x", "topk_ids", "topk_weights", "tokens", "x_scale", *OWN)
"""All tensors that a call reads."""
_NO_SCALE = ("cfg.weight_format is None", "weight_format=...")
_NO_SECOND = ("cfg.weight_format is not 'nvfp4'", "weight_format='nvfp4'")
_NO_SHARED_SCALE = ("cfg.shared_weight_format is None", "shared_weight_format=...")
_NO_SHARED_SECOND = (
    "cfg.shared_weight_format is not 'nvfp4'",
    "weight_format='nvfp4', shared_weight_format='nvfp4'",
)
_SHARED_FIELDS = ("cfg.shared_experts is 0", "shared_experts=1, shared_intermediate=...")
_FIELDS = {
    "b1": ("cfg.bias is False", "bias=True"),
    "b2": ("cfg.bias is False", "bias=True"),
    "w3": ("cfg.gate_up is not 'separate'", "gate_up='separate'"),
    "gate.selection_bias": ("cfg.selection_bias is False", "selection_bias=True"),
    "gate.bias": ("cfg.router_bias is False", "router_bias=True"),
    "gate.expert_scale": ("cfg.expert_scale is False", "expert_scale=True"),
    "shared_w1": _SHARED_FIELDS,
    "shared_w2": _SHARED_FIELDS,
    "shared_gate": ("cfg.shared_gate is False", "shared_gate=True"),
    "w1_scale": _NO_SCALE,
    "w2_scale": _NO_SCALE,
    "w1_scale_2": _NO_SECOND,
    "w2_scale_2": _NO_SECOND,
    "shared_w1_scale": _NO_SHARED_SCALE,
    "shared_w2_scale": _NO_SHARED_SCALE,
    "shared_w1_scale_2": _NO_SHARED_SECOND,
    "shared_w2_scale_2": _NO_SHARED_SECOND,
}
"""By tensor: the config that has none, and the setting that adds it."""

CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes of quantized weights, and one that is mistaken for them."""
X_CODES = torch.float8_e4m3fn
"""The dtype of tokens that the caller has quantized."""
X_SCALES = tuple(
    dtype
    for dtype in (torch.float32, torch.uint8, getattr(torch, "float8_e8m0fnu", None))
    if dtype is not None
)
"""The dtypes of their scales; torch 2.7 and newer has the third."""
_PACKED = (getattr(torch, "float4_e2m1fn_x2", None),)  # torch 2.8 and newer
"""Floating dtypes of which an element is several numbers, and that PyTorch converts to no other."""

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
"""Classes of tensors without behaviour of their own, and of None."""


class Expected(NamedTuple):
    """What a weight must be.

    Attributes:
        part: its role in a weight format, in words; "" outside of one.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    part: str = ""


def expected_weights(cfg: MoEConfig, experts: int) -> tuple[Expected | None, ...]:
    """What one rank's `experts` experts hold, in the order of `WEIGHTS`; None for a tensor that the
    config lacks.
    """

    def bias(name: str, length: int) -> Expected | None:
        shape = torch.Size((experts, length))
        return Expected(name, shape, cfg.dtype) if cfg.bias else None

    def matrix(name: str, rows: int, columns: int) -> Expected:
        if cfg.transposed:
            rows, columns = columns, rows
        return _matrices(cfg, "weight_format", name, experts, rows, columns)

    separate = cfg.gate_up == "separate"
    return (
        matrix("w1", cfg.intermediate if separate else cfg.w1_rows, cfg.hidden),
        bias("b1", cfg.w1_rows),
        matrix("w2", cfg.hidden, cfg.intermediate),
        bias("b2", cfg.hidden),
        matrix("w3", cfg.intermediate, cfg.hidden) if separate else None,
    )


def _matrices(
    cfg: MoEConfig, field: str, name: str, number: int, rows: int, columns: int
) -> Expected:
    """`number` matrices, in the format that the config's `field` names."""
    format_name: WeightFormat | None = getattr(cfg, field)
    if format_name is None:
        return Expected(name, torch.Size((number, rows, columns)), cfg.dtype)
    row = FORMATS[format_name]
    shape = torch.Size((number, *row.code_shape(rows, columns)))
    return Expected(name, shape, row.code_dtype, f"codes of {field} {row.name!r}")


def expected_scales(cfg: MoEConfig, experts: int) -> tuple[Expected | None, ...]:
    """The scales of one rank's `experts` experts, in the order of `SCALES`; None for a tensor that
    the config lacks.
    """
    return _scales(cfg, "weight_format", SCALES, experts, cfg.intermediate)


def expected_shared_scales(cfg: MoEConfig) -> tuple[Expected | None, ...]:
    """The shared experts' scales, in the order of `SHARED_SCALES`; None for a tensor that the
    config lacks.
    """
    number, width = cfg.shared_experts, cfg.shared_intermediate
    return _scales(cfg, "shared_weight_format", SHARED_SCALES, number, width)


def _scales(
    cfg: MoEConfig, field: str, names: Sequence[str], number: int, width: int
) -> tuple[Expected | None, ...]:
    """The scales of `number` MLPs of intermediate size `width`, in the format that the config's
    `field` names.
    """
    format_name: WeightFormat | None = getattr(cfg, field)
    if format_name is None:
        return (None,) * len(names)
    row = FORMATS[format_name]
    part = f"scales of {field} {row.name!r}"
    matrices = ((cfg.halves, width, cfg.hidden), (1, cfg.hidden, width))
    w1, w2, w1_2, w2_2 = names
    return (
        *(
            Expected(name, torch.Size((number, *row.scale_shape(*of))), row.scale_dtype, part)
            for name, of in zip((w1, w2), matrices, strict=True)
        ),
        *(
            Expected(name, torch.Size((number, halves)), torch.float32, part)
            if row.scale_2
            else None
            for name, (halves, _, _) in zip((w1_2, w2_2), matrices, strict=True)
        ),
    )


def expected_router(cfg: MoEConfig) -> tuple[Expected | None, ...]:
    """The router's tensors, in the order of `ROUTER`; None for a tensor that the config lacks."""
    weight, *others = ROUTER
    rows = cfg.router_rows
    present = (cfg.selection_bias, cfg.router_bias, cfg.expert_scale)
    return (
        Expected(weight, torch.Size((rows, cfg.hidden)), cfg.gate_dtype),
        *(
            Expected(name, torch.Size((rows,)), torch.float32) if there else None
            for name, there in zip(others, present, strict=True)
        ),
    )


def expected_shared(cfg: MoEConfig) -> tuple[Expected | None, ...]:
    """The shared experts' tensors, in the order of `SHARED`; None for a tensor that the config
    lacks.
    """
    n, field = cfg.shared_experts, "shared_weight_format"
    if n == 0:
        return (None,) * len(SHARED)
    w1, w2, gate = SHARED
    return (
        _matrices(cfg, field, w1, n, cfg.shared_w1_rows, cfg.hidden),
        _matrices(cfg, field, w2, n, cfg.hidden, cfg.shared_intermediate),
        Expected(gate, torch.Size((cfg.hidden,)), cfg.dtype) if cfg.shared_gate else None,
    )


def turned(own: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """A call's own tensors with rows and columns of each expert's matrix exchanged, as views."""
    return tuple(
        one.transpose(1, 2)
        if name in MATRICES and isinstance(one, torch.Tensor) and one.dim() == 3
        else one
        for name, one in zip(OWN, own, strict=True)
    )


def check_scattered(tokens: object, out: object, pieces: int) -> None:
    """Raises for what a call of a layer with output='scattered' cannot have."""
    for name, value, absent in (
        ("tokens", tokens, None),
        ("out", out, None),
        ("pieces", pieces, 1),
    ):
        if value is not absent and value != absent:
            raise ValueError(
                f"{name} is given, and output is 'scattered': each rank returns its part of the "
                f"rows of x. Leave {name} out, or make the layer with output='replicated'"
            )


def rows_of(
    cfg: MoEConfig, device: torch.device, x: object, pieces: int = 1, *, coded: bool = False
) -> torch.Tensor:
    """x as the rows of a call: contiguous [rows, H], of which it is a view wherever it can be.

    Raises unless x is [..., H], at least 2-D, with no more rows than its pieces can have. `coded`:
    it is codes, which have scales.
    """
    x = _require_dense("x", x)
    dimensions = x.dim()
    if dimensions < 2 or x.shape[-1] != cfg.hidden:
        raise ValueError(
            f"x has shape {list(x.shape)}; it must be [..., {cfg.hidden}], at least 2-D"
        )
    if coded:
        _require_codes(cfg, x.dtype)
    elif x.dtype != cfg.dtype:
        _refuse_codes(cfg, x.dtype)
        is_cast = x.is_floating_point() and x.dtype not in _PACKED
        if not (is_cast and torch.is_autocast_enabled(device.type)):
            raise TypeError(f"x has dtype {x.dtype}; it must be {cfg.dtype}, the layer's")
        x = x.to(cfg.dtype)
    if x.device != device:
        raise ValueError(f"x is on {x.device}; it must be on {device}, the layer's device")
    x = tensor_memory.without_laziness(x)
    if dimensions > 2:
        x = x.reshape(-1, cfg.hidden)
    if not x.is_contiguous():
        x = x.contiguous()
    if x.shape[0] > pieces * cfg.max_tokens:
        most = f"max_tokens, {cfg.max_tokens}"
        if pieces > 1:
            most = f"pieces * max_tokens, {pieces} * {cfg.max_tokens}"
        raise ValueError(
            f"x has {x.shape[0]} tokens; at most {most}, are allowed: "
            f"pass pieces={-(-x.shape[0] // cfg.max_tokens)} or more on all ranks"
        )
    return x


def _require_codes(cfg: MoEConfig, dtype: torch.dtype) -> None:
    if dtype != X_CODES:
        raise TypeError(
            f"x has dtype {dtype}; with x_scale it must be {X_CODES}, the codes of "
            f"activation_format {cfg.activation_format!r}: leave x_scale None where x is in "
            f"{cfg.dtype}"
        )


def _refuse_codes(cfg: MoEConfig, dtype: torch.dtype) -> None:
    """Raises for codes without scales, which autocast would treat as numbers."""
    if cfg.activation_format is None or dtype not in CODES:
        return
    if dtype == X_CODES:
        raise ValueError(
            f"x has dtype {dtype}, and x_scale is None: pass the scales of its codes, or x in "
            f"{cfg.dtype}"
        )
    raise TypeError(
        f"x has dtype {dtype}; it must be {cfg.dtype}, the layer's, or {X_CODES} with x_scale"
    )


def check_may_be_coded(cfg: MoEConfig, topk_ids: object, *, weigh: object) -> None:
    """Raises for scales of x, where a layer has no use for codes, or needs x itself."""
    if cfg.activation_format is None:
        raise ValueError(
            "x_scale is given, and cfg.activation_format is None: leave it None, or make this with "
            "MoEConfig(activation_format='fp8_group128')"
        )
    if topk_ids is None or weigh:
        said = "topk_ids is None" if topk_ids is None else "weigh is True"
        raise ValueError(
            f"x_scale is given, and {said}: a router reads no codes; pass topk_ids and "
            "topk_weights, or x without scales"
        )
    for name, found in (
        ("shared_experts", cfg.shared_experts),
        ("zero_experts", cfg.zero_experts),
        ("apply_router_weight_on_input", cfg.apply_router_weight_on_input),
    ):
        if found:
            raise ValueError(
                f"x_scale is given, and {name} is {found}, which needs x itself: leave x_scale "
                f"None, and pass x in {cfg.dtype}"
            )


def scale_of(
    cfg: MoEConfig, device: torch.device, lead: torch.Size, rows: int, scale: object
) -> torch.Tensor:
    """The scales of the codes of `rows` rows: contiguous [rows, H / 128], fp32 or bytes (E8M0).

    Raises unless it is so, or [*lead, H / 128] with the leading dimensions of x.
    """
    scale = _require_dense("x_scale", scale)
    groups = cfg.hidden // TOKEN_GROUP
    if scale.shape not in ((rows, groups), (*lead, groups)):
        raise ValueError(
            f"x_scale has shape {list(scale.shape)}; it must be {[*lead, groups]}, a scale for "
            f"{TOKEN_GROUP} elements of x"
        )
    if scale.dtype not in X_SCALES:
        allowed = ", ".join(map(str, X_SCALES))
        raise TypeError(f"x_scale has dtype {scale.dtype}; it must be one of {allowed}")
    if scale.device != device:
        raise ValueError(f"x_scale is on {scale.device}; it must be on {device}")
    scale = tensor_memory.without_laziness(scale).reshape(rows, groups).contiguous()
    return scale if scale.dtype == torch.float32 else scale.view(torch.uint8)


def routing_of(
    cfg: MoEConfig,
    device: torch.device,
    lead: torch.Size,
    rows: int,
    ids: object,
    weights: object,
    *,
    weigh: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids and weights, both [rows, k]; no weights where the gate weighs.

    Raises unless they are the routing of `rows` rows, [rows, k], or [*lead, k] with the leading
    dimensions of x.
    """
    if weigh and weights is not None:
        raise ValueError("topk_weights is given, and weigh is True: the gate weighs; pass one")
    if ids is None:
        raise ValueError(
            "topk_ids is None, and weigh is True: the gate weighs experts that topk_ids names"
            if weigh
            else "topk_ids is None; topk_ids and topk_weights must be given together"
        )
    if weights is None and not weigh:
        raise ValueError(
            "topk_weights is None; give them with topk_ids, or, where a MoELayer's gate weighs the "
            "experts, weigh=True"
        )
    ids = _by_row(cfg, device, lead, rows, "topk_ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids has dtype {ids.dtype}; it must be torch.int32 or torch.int64")
    if weigh:
        return ids, None
    weights = _by_row(cfg, device, lead, rows, "topk_weights", weights)
    if not weights.is_floating_point() or weights.dtype in _PACKED:
        raise TypeError(f"topk_weights has dtype {weights.dtype}; it must be a floating point type")
    return ids, weights


def _by_row(
    cfg: MoEConfig, device: torch.device, lead: torch.Size, rows: int, name: str, tensor: object
) -> torch.Tensor:
    tensor = _require_dense(name, tensor)
    shape = (rows, cfg.slots)
    if tensor.shape != shape:
        if tensor.shape != (*lead, cfg.slots):
            of_token = "top_k" if cfg.rounding is None else "slots"
            either = f" or {[*lead, cfg.slots]}" if len(lead) > 1 else ""
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}{either}, "
                f"[rows, {of_token}]"
            )
        tensor = tensor.reshape(shape)
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
    return tensor_memory.without_laziness(tensor)


def check_pieces(pieces: object) -> None:
    """Raises unless it is a number of pieces."""
    if isinstance(pieces, bool) or not isinstance(pieces, int):
        raise TypeError(f"pieces is {pieces!r}; it must be an integer")
    if not 1 <= pieces <= MAX_PIECES:
        raise ValueError(f"pieces is {pieces}; it must be 1 to {MAX_PIECES}")


def check_weigh(weigh: object) -> None:
    """Raises unless it is True or False."""
    if not isinstance(weigh, bool):
        tensor_memory.refuse_proxy(weigh)
        raise TypeError(f"weigh is a {type(weigh).__name__}; it must be True or False")


def check_out(cfg: MoEConfig, device: torch.device, x: torch.Tensor, out: object) -> None:
    """Raises unless out is like the output for x."""
    out = _require_dense("out", out)
    if out.shape != x.shape:
        raise ValueError(f"out has shape {list(out.shape)}; it must be x's, {list(x.shape)}")
    if out.dtype != cfg.dtype:
        raise TypeError(f"out has dtype {out.dtype}; it must be {cfg.dtype}, the layer's")
    if out.device != device:
        raise ValueError(f"out is on {out.device}; it must be on {device}, the layer's device")
    if not out.is_contiguous():
        raise ValueError(
            f"out has strides {out.stride()}; it must be contiguous: leave it away, and copy what "
            "is returned"
        )
    tensor_memory.require_no_laziness("out", out)
    tensor_memory.require_writable("out", out)


def check_apart(
    out: torch.Tensor,
    x: torch.Tensor,
    routing: Sequence[torch.Tensor | None],
    own: Sequence[torch.Tensor | None],
) -> None:
    """Raises `ValueError` for a tensor of a call with memory between out's first and last byte, and
    where out has not all of its memory.
    """
    tensor_memory.require_memory("out", out)
    name = tensor_memory.sharer(out, zip(_READ, (x, *routing, *own), strict=True))
    if name is not None:
        raise ValueError(
            f"out shares memory with {name}, which a call reads while it writes out: pass another "
            "out, or leave it away"
        )


def check_memory(
    x: torch.Tensor,
    routing: Sequence[torch.Tensor | None],
    own: Sequence[torch.Tensor | None],
) -> None:
    """Raises `ValueError` for a tensor that a call reads and that has not all of its memory.

    Where calls are launched as those before (`moeos.call.known_tensors`), engines ask again.
    """
    for name, tensor in zip(_READ, (x, *routing, *own), strict=True):
        if tensor is not None:
            tensor_memory.require_memory(name, tensor)


def check_tokens(device: torch.device, tokens: object) -> None:
    """Raises unless tokens is the number of tokens of a call."""
    tokens = _require_dense("tokens", tokens)
    if tokens.dim() > 1 or tokens.numel() != 1:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}; it must be [1] or [], with one number: how "
            "many of x's rows are tokens"
        )
    if tokens.dtype != torch.int32:
        raise TypeError(f"tokens has dtype {tokens.dtype}; it must be torch.int32")
    if tokens.device != device:
        raise ValueError(f"tokens is on {tokens.device}; it must be on {device}")
    tensor_memory.require_no_laziness("tokens", tokens)


def check_weights(
    device: torch.device,
    expected: Sequence[Expected | None],
    tensors: Sequence[torch.Tensor | None],
    absent: str,
    holder: torch.nn.Module | None,
) -> None:
    """Raises unless all of these are as expected. `absent`: the error text where one is missing, if
    its `holder` has nothing under its name.
    """
    for name, wanted, tensor in zip(OWN, expected, tensors, strict=True):
        if wanted is not None:
            if tensor is None and holder is not None:
                _require_own(holder, name)
            check_weight(device, wanted, tensor, absent)
        elif tensor is not None:
            said, needed = _FIELDS[name]
            raise ValueError(
                f"{name} is given, and {said}: leave it None, or make this with MoEConfig({needed})"
            )


_NORMS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")
"""The modules of PyTorch whose hooks put a tensor where a parameter was, and keep its `name`."""


def _require_own(holder: torch.nn.Module, name: str) -> None:
    """Raises for an attribute that stands where a parameter or a buffer should be: a call reads
    these two alone.
    """
    inner, _, tensor = name.rpartition(".")
    module: torch.nn.Module = holder.get_submodule(inner) if inner else holder
    found = getattr(module, tensor, None)
    if found is None:
        return
    where = f"layer.{inner}" if inner else "layer"
    if tensor in getattr(module, "parametrizations", ()):
        passed = ""
        if name in WEIGHTS:
            passed = (
                f", or pass {where}.{tensor} to moeos.Experts, whose gradients reach the adapter"
            )
        raise TypeError(
            f"{name} is parametrised, as by an active adapter of PEFT, and a call reads parameters "
            "alone: merge the adapter (merge_and_unload() of PEFT), keep its value by torch.nn."
            f"utils.parametrize.remove_parametrizations({where}, {tensor!r}){passed}"
        )
    for hook in module._forward_pre_hooks.values():
        by = type(hook).__module__
        if by in _NORMS and getattr(hook, "name", None) == tensor:
            raise TypeError(
                f"{name} is what {by} makes of other parameters, and a call reads parameters "
                f"alone: keep its value by torch.nn.utils.remove_{by.rpartition('.')[2]}"
                f"({where}, {tensor!r})"
            )
    if f"{tensor}_orig" in module._parameters:
        raise TypeError(
            f"{name} is pruned, and a call reads parameters alone: keep its value by "
            f"torch.nn.utils.prune.remove({where}, {tensor!r})"
        )
    kind = type(found).__name__
    again = f"{where}.{tensor} = torch.nn.Parameter(value, requires_grad=False)"
    needed = "parameter"
    if name in _BUFFERS:
        again = f"{where}.register_buffer({tensor!r}, value)"
        needed = "buffer"
    raise TypeError(
        f"{name} is a {kind} and no {needed} of its module, of which a call knows nothing: keep "
        f"its value, del {where}.{tensor}, and then {again}"
    )


def check_weight(device: torch.device, expected: Expected, tensor: object, absent: str) -> None:
    """Raises unless a tensor is as expected. `absent`: what is said where there is none."""
    name, shape, _, part = expected
    if tensor is None:
        raise ValueError(f"{name} is missing; {absent}: {list(shape)}")
    if isinstance(tensor, (list, tuple)):
        raise TypeError(
            f"{name} is a {type(tensor).__name__} of {len(tensor)}, and a call takes one tensor "
            f"{list(shape)}: make the experts' parameters views of one tensor and pass that, or "
            "pass torch.stack of them, which copies them in each call"
        )
    tensor = _require_dense(name, tensor)
    # A format's first: where it is another, the shape is no mistake of its own.
    wrong = wrong_dtype(expected, tensor.dtype)
    if part and wrong:
        raise TypeError(wrong)
    if tensor.shape != shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}"
            f"{_transposed(name, tensor, shape)}"
        )
    if wrong:
        raise TypeError(wrong)
    if part and tensor.requires_grad:
        raise RuntimeError(
            f"{name} requires a gradient, and the {part} have none: pass {name}.detach(), or call "
            f"{name}.requires_grad_(False)"
        )
    if tensor.device != device:
        if tensor.is_meta:
            raise ValueError(
                f"{name} has no values, as it is on the meta device: call "
                f"layer.to_empty(device='{device.type}') and load_state_dict, or "
                "load_state_dict(..., assign=True); where accelerate offloads the model, pass it "
                "preload_module_classes=['MoELayer']"
            )
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
    if not tensor.is_contiguous():
        turned = ""
        if name in MATRICES and not part and tensor.transpose(1, 2).is_contiguous():
            turned = (
                ", or make moeos.Experts with the other MoEConfig(transposed=...), which read all "
                "matrices where they lie in calls with turned=True"
            )
        raise ValueError(
            f"{name} has strides {tensor.stride()}; it must be contiguous: keep "
            f"{name}.contiguous(){turned}"
        )
    tensor_memory.require_no_laziness(name, tensor)


def wrong_dtype(expected: Expected, found: torch.dtype) -> str:
    """What is said of a weight of another dtype; "" of one that is right."""
    name, _, dtype, part = expected
    if found == dtype:
        return ""
    said = f"{name} has dtype {found}; it must be {dtype}"
    field = "shared_weight_format" if name in SHARED else "weight_format"
    is_weight = name in (*WEIGHTS, *SHARED)
    if not part:
        coded = is_weight and found in CODES
        return said + (f", or this be made with MoEConfig({field}=...)" if coded else "")
    if is_weight and found in DTYPES.values():
        return (
            f"{said}, {part}: make a layer without a format, and moeos.quantize it, or set "
            f"{field}=None"
        )
    return f"{said}, {part}"


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether backward of a call of these will be asked for."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def check_backward(
    what: str,
    cfg: MoEConfig,
    why: str | None,
    out: torch.Tensor | None,
    routing: Sequence[object],
    own: Sequence[object],
) -> None:
    """Raises where a call of `what`, such as "MoELayer", has no backward. `why`: what its machine
    says, or None; `routing`: x, topk_ids, topk_weights and tokens.
    """
    remedy = "call it under torch.no_grad(), or detach x, topk_weights and the parameters"
    named = [*zip(_READ, routing, strict=False), *zip(OWN, own, strict=True)]
    odd = next((one for one in named if not (type(one[1]) in PLAIN or is_fake(one[1]))), None)
    if cfg.weight_format is not None:
        why = f" of layers with weight_format {cfg.weight_format!r}"
    elif cfg.activation_format is not None:
        why = f" of layers with activation_format {cfg.activation_format!r}, which rounds"
    elif out is not None:
        why = " of a call with out"
        remedy = "call it under torch.no_grad(), or leave out away and copy what is returned"
    elif why is None and odd is not None:
        name, tensor = odd
        why = f" of a {type(tensor).__name__}, which {name} is"
        plain = f"{name}.as_subclass(torch.Tensor)"
        if isinstance(tensor, torch.nn.Parameter):
            plain = f"torch.nn.Parameter({name}.data.as_subclass(torch.Tensor))"
        remedy = f"keep a plain {plain} in its place, or {remedy}"
    if why is not None:
        raise RuntimeError(
            f"{what} has no backward{why}, and a tensor requires a gradient: {remedy}"
        )


def is_fake(tensor: object) -> bool:
    """Whether it is a FakeTensor; without their module imported there is none."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def tangents_are_taken() -> bool:
    """Whether this is within a level of forward-mode derivatives: else no tensor has a tangent, and
    each look at one costs as much as a launch.
    """
    level: int = forward_ad._current_level
    return level >= 0


def check_tangents(what: str, *tensors: torch.Tensor | None) -> None:
    """Raises for a tensor with a tangent: PyTorch would take the output's for zero."""
    if not tangents_are_taken():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{what} has no forward-mode derivative, and a tensor has a tangent (from "
                "torch.func.jvp, jacfwd or linearize, or torch.autograd.forward_ad): detach it, "
                "or derive by finite differences"
            )


def _require_dense(name: str, value: object) -> torch.Tensor:
    """The value; raises as `tensor_memory.require_dense` does, and `TypeError` for a DTensor."""
    tensor = tensor_memory.require_dense(name, value)
    if not is_dynamo_compiling() and sharding.is_dtensor(tensor):
        raise TypeError(
            f"{name} is a DTensor, and a call takes each rank's own plain tensor: pass "
            f"{name}.to_local(), or {name}.full_tensor() where this rank needs all of it. Where "
            "fully_shard has cut it, call the module that it wrapped, the layer or one around it"
        )
    return tensor


def _transposed(name: str, tensor: torch.Tensor, shape: torch.Size) -> str:
    """A remedy where a matrix of each expert has its rows and columns exchanged."""
    if len(shape) != 3 or tensor.shape != (shape[0], shape[2], shape[1]):
        return ""
    order = ", where of a gated activation all gate rows come before the up rows"
    return (
        f", each expert's matrix transposed: keep {name}.transpose(1, 2).contiguous()"
        f"{order if name in ('w1', 'shared_w1') else ''}; moeos.Experts take it as it lies with "
        "MoEConfig(transposed=True)"
    )
