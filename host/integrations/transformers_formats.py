# SPDX-License-Identifier: Apache-2.0
"""The codes and scales of a quantised experts module of transformers, as `moeos.Experts` has them.

Codes are the module's own memory, and so are scales of the dtype that a format has. Scales of FP8
in another dtype become float32: a number for 16384 weights. What no format is like is refused by
its name. This file knows the parameters of `FP8Experts` and of MXFP4's experts, and makes no call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeos import call_checks
from moeos.config import MoEConfig
from moeos.formats import BLOCK, FORMATS, Format, WeightFormat
from moeos.integrations import shared, transformers_weights
from moeos.integrations.transformers_weights import Weights

_E4M3, _E8M0 = torch.float8_e4m3fn, getattr(torch, "float8_e8m0fnu", torch.uint8)
_PAIRS = (torch.int8, torch.uint8)
"""Of bytes that are two codes of 4 bits."""
_EXPONENTS = (_E8M0, torch.uint8)
_WIDENED = (_E8M0, torch.bfloat16, torch.float16)
"""Scales of FP8 that become float32."""

_IN_NUMBERS = "FineGrainedFP8Config(dequantize=True)"


class Widened(NamedTuple):
    """Scales that were made float32, and which state of the module's own they were made of."""

    state: tuple[int, int]
    scale: Tensor


def is_coded(weight: Tensor) -> bool:
    """Whether a weight is codes of some format."""
    return weight.element_size() == 1


def format_of(module: Any, where: str) -> WeightFormat | None:
    """What a module's weights are in; None if in numbers. `shared.refusal` for what is no format of
    moeos. The parameters need no values.
    """
    scale_names = transformers_weights.scale_names_of(module)
    if not scale_names:
        return None
    if getattr(module, "activation_scheme", None) == "static":
        raise shared.refusal(
            where,
            "activation_scheme",
            "static",
            f"'dynamic' does, and {_IN_NUMBERS}: activations are not quantised",
        )
    names = transformers_weights.names_of(module)[:2]
    found = {_of_matrix(module, *pair, where) for pair in zip(names, scale_names, strict=True)}
    if len(found) > 1:
        dtypes = [getattr(module, name).dtype for name in names]
        raise shared.refusal(where, f"the dtype of {' and '.join(names)}", dtypes, "equal ones do")
    return found.pop()


def _of_matrix(module: Any, name: str, scale_name: str, where: str) -> WeightFormat:
    weight, scale = getattr(module, name), getattr(module, scale_name)
    if weight.dtype in _PAIRS:
        if scale.dtype not in _EXPONENTS:
            raise _another_dtype(where, scale_name, scale, f"{_E8M0} does (scale_fmt 'ue8m0')")
        return "mxfp4"
    if weight.dtype != _E4M3:
        works = f"beside {scale_name} {_E4M3} does: load with {_IN_NUMBERS}, or do not cast it"
        raise _another_dtype(where, name, weight, works)
    if scale.dtype not in (torch.float32, *_WIDENED):
        works = f"{torch.float32} and {', '.join(map(str, _WIDENED))} do"
        raise _another_dtype(where, scale_name, scale, works)
    if module.block_size is None:
        return "fp8_tensor"
    if [*module.block_size] != [BLOCK, BLOCK]:
        works = f"{[BLOCK, BLOCK]} and None do, and {_IN_NUMBERS}"
        raise shared.refusal(where, "block_size", module.block_size, works)
    halves, rows = (2, weight.shape[1] // 2) if name == "gate_up_proj" else (1, weight.shape[1])
    if halves > 1 and rows % BLOCK != 0:
        raise shared.refusal(
            where,
            "the intermediate size",
            rows,
            f"multiples of {BLOCK} do, as else gate and up share a block, and {_IN_NUMBERS}",
        )
    return "fp8_block128"


def _another_dtype(where: str, name: str, tensor: Tensor, works: str) -> ValueError:
    return shared.refusal(where, f"the dtype of {name}", tensor.dtype, works)


def widen(module: Any, weight_format: WeightFormat | None) -> dict[str, Widened]:
    """The scales of a module that have to be made float32, by name."""
    if weight_format is None or FORMATS[weight_format].scale_dtype != torch.float32:
        return {}
    made = {}
    for name in transformers_weights.scale_names_of(module):
        scale = getattr(module, name)
        if scale.dtype != torch.float32 and not scale.is_inference():
            made[name] = Widened(_state(scale), scale.detach().float())
            if scale.is_cuda:  # another thread may read it on another stream
                torch.cuda.current_stream(scale.device).synchronize()
    return made


def weights_of(
    module: Any, weight_format: WeightFormat | None, widened: dict[str, Widened]
) -> Weights:
    """The parameters of a module that is in place, as views wherever they can be. What `widen` has
    made is taken while the module's own has not changed.
    """
    if weight_format is None:
        return transformers_weights.weights_of(module)
    row = FORMATS[weight_format]
    names = transformers_weights.names_of(module)
    w1, w2 = (_as(getattr(module, name), row.code_dtype) for name in names[:2])
    b1, b2 = (getattr(module, name) for name in names[2:]) if module.has_bias else (None, None)
    scales = (
        _scale(getattr(module, name), row, widened.get(name))
        for name in transformers_weights.scale_names_of(module)
    )
    return Weights(w1.flatten(2), w2.flatten(2), b1, b2, *scales)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter's memory, which wants no gradient."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _scale(scale: Tensor, row: Format, widened: Widened | None) -> Tensor:
    if row.scale_dtype != torch.float32 or scale.dtype == torch.float32:
        scale = _as(scale, row.scale_dtype)
    elif widened and not torch.compiler.is_compiling() and _state(scale) == widened.state:
        scale = widened.scale
    else:  # also in a graph, which has the conversion in it
        scale = scale.detach().float()
    # Of a whole matrix transformers has [X, halves, 1].
    return scale.squeeze(-1) if row.columns is None and scale.dim() == 3 else scale


def _state(tensor: Tensor) -> tuple[int, int]:
    """What is another where a tensor has other memory, or was changed in place."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def check(module: Any, cfg: MoEConfig, weights: Weights, where: str) -> None:
    """Raises for a parameter of another shape than the config has, by the module's name of it."""
    local = len(weights.w1)
    w1, _, w2, *_ = call_checks.expected_weights(cfg, local)
    scale_1, scale_2, *_ = call_checks.expected_scales(cfg, local)
    names = transformers_weights.names_of(module)[:2] + transformers_weights.scale_names_of(module)
    tensors = (weights.w1, weights.w2, weights.w1_scale, weights.w2_scale)
    for name, wanted, tensor in zip(names, (w1, w2, scale_1, scale_2), tensors, strict=True):
        assert wanted is not None
        try:
            device = weights.w1.device
            call_checks.check_weight(device, wanted._replace(name=name), tensor, "it is needed")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
