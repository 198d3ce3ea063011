# SPDX-License-Identifier: Apache-2.0
"""The codes and scales of a quantized experts module of transformers, as `moeos.Experts` has them.

Codes are the module's own memory, and so are scales of the dtype that a format has. Scales of FP8
in another dtype become float32 in each call: one number for 16384 weights. What no format is like
is refused by its name. Knows the parameters of `FP8Experts` and of MXFP4's experts. Must not depend
on worlds or calls, and keeps nothing of a module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeos.call import call_checks
from moeos.config.config import MoEConfig
from moeos.config.element_formats import BLOCK, FORMATS, Format, WeightFormat
from moeos.integrations import shared, transformers_weights
from moeos.integrations.transformers_weights import ModuleWeights

_E4M3, _E8M0 = torch.float8_e4m3fn, getattr(torch, "float8_e8m0fnu", torch.uint8)
_PAIRS = (torch.int8, torch.uint8)
"""The dtypes of bytes that hold two codes of 4 bits."""
_EXPONENTS = (_E8M0, torch.uint8)
_CONVERTED = (_E8M0, torch.bfloat16, torch.float16)
"""The dtypes of FP8 scales that become float32."""

_IN_NUMBERS = "FineGrainedFP8Config(dequantize=True)"


def is_coded(weight: Tensor) -> bool:
    """Whether a weight is codes of some format."""
    return weight.element_size() == 1


def format_of(module: Any, weights: ModuleWeights, where: str) -> WeightFormat | None:
    """The format of a module's weights; None if they are numbers. `shared.refusal` for what is no
    format of moeos. The tensors need no values.
    """
    scale_names = transformers_weights.scale_names_of(module)
    if not scale_names and not (is_coded(weights.w1) or is_coded(weights.w2)):
        return None
    scale_names = scale_names or transformers_weights.names_of_missing_scales(module)
    for name, scale in zip(scale_names, (weights.w1_scale, weights.w2_scale), strict=True):
        if not isinstance(scale, Tensor):
            raise shared.refusal(
                where,
                name,
                scale,
                "codes with a tensor of their scales do: load that of the checkpoint, or load the "
                f"model with {_IN_NUMBERS}",
            )
    if getattr(module, "activation_scheme", None) == "static":
        raise shared.refusal(
            where,
            "activation_scheme",
            "static",
            f"'dynamic' does, and {_IN_NUMBERS}: activations are not quantised",
        )
    names = transformers_weights.names_of(module)[:2]
    tensors = ((weights.w1, weights.w1_scale), (weights.w2, weights.w2_scale))
    found = {
        _of_matrix(module, name, scale_name, weight, scale, where)
        for name, scale_name, (weight, scale) in zip(names, scale_names, tensors, strict=True)
    }
    if len(found) > 1:
        dtypes = [weights.w1.dtype, weights.w2.dtype]
        raise shared.refusal(where, f"the dtype of {' and '.join(names)}", dtypes, "equal ones do")
    return found.pop()


def _of_matrix(
    module: Any, name: str, scale_name: str, weight: Tensor, scale: Any, where: str
) -> WeightFormat:
    if weight.dtype in _PAIRS:
        if scale.dtype not in _EXPONENTS:
            raise _another_dtype(where, scale_name, scale, f"{_E8M0} does (scale_fmt 'ue8m0')")
        return "mxfp4"
    if weight.dtype != _E4M3:
        works = f"beside {scale_name} {_E4M3} does: load with {_IN_NUMBERS}, or do not cast it"
        raise _another_dtype(where, name, weight, works)
    if scale.dtype not in (torch.float32, *_CONVERTED):
        works = f"{torch.float32} and {', '.join(map(str, _CONVERTED))} do"
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


def coded(weights: ModuleWeights, weight_format: WeightFormat) -> ModuleWeights:
    """A quantized module's tensors as views in the dtypes of the format, scales converted where
    they have another.
    """
    row = FORMATS[weight_format]
    w1, w2 = (_as(codes, row.code_dtype).flatten(2) for codes in weights[:2])
    scales = (_scale(scale, row) for scale in weights[4:])
    return ModuleWeights(w1, w2, weights.b1, weights.b2, *scales)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter's memory, which wants no gradient."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _scale(scale: Tensor | None, row: Format) -> Tensor:
    assert scale is not None
    if row.scale_dtype == torch.float32 and scale.dtype != torch.float32:
        scale = scale.detach().float()
    else:
        scale = _as(scale, row.scale_dtype)
    # transformers has the scale of a whole matrix as [X, halves, 1].
    found: Tensor = scale.squeeze(-1) if row.columns is None and scale.dim() == 3 else scale
    return found


def check(module: Any, cfg: MoEConfig, weights: ModuleWeights, where: str) -> None:
    """Raises for a parameter of another shape than the config has, by the module's name of it."""
    local = len(weights.w1)
    w1, b1, w2, b2, _ = call_checks.expected_weights(cfg, local)
    scales = call_checks.expected_scales(cfg, local)[:2]
    names = transformers_weights.names_of(module) + transformers_weights.scale_names_of(module)
    expected = [one for one in (w1, w2, b1, b2, *scales) if one is not None]
    tensors = [weights[place] for place, one in enumerate((w1, w2, b1, b2, *scales)) if one]
    for name, wanted, tensor in zip(names, expected, tensors, strict=True):
        try:
            device = weights.w1.device
            call_checks.check_weight(device, wanted._replace(name=name), tensor, "it is needed")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
