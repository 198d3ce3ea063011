# SPDX-License-Identifier: Apache-2.0
"""Which format of a layer's weights a model's `quantization_config` means.

It knows the fields of transformers configs, and never sees a tensor: where a file has another
format than its config says, the loader names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moeos.checkpoints.fields import Values, works
from moeos.formats import BLOCK, INT4_GROUP, NV_GROUP, WeightFormat

_FIELD = "quantization_config"
_METHODS = {
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "compressed-tensors": "int4 or NVFP4",
    "modelopt": "NVFP4 or FP8",
}
_BLOCK = [BLOCK, BLOCK]
_ALGORITHMS: Mapping[str, WeightFormat] = {"FP8": "fp8_tensor", "NVFP4": "nvfp4"}
_STRATEGIES: Mapping[str, WeightFormat] = {"channel": "fp8_channel", "tensor": "fp8_tensor"}


def require_known(values: Values) -> Values | None:
    """The `quantization_config`, or None; raises for one in which no rule here reads weights."""
    found = values.get(_FIELD)
    if found is None:
        return None
    config = table_of(_FIELD, found)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(works(f"{_FIELD}.quant_method", method, _METHODS))
    block = config.get("weight_block_size")
    if block is not None and (not isinstance(block, (list, tuple)) or [*block] != _BLOCK):
        raise ValueError(works(f"{_FIELD}.weight_block_size", block, (_BLOCK,)))
    return config


def weight_format_of(values: Values) -> WeightFormat | None:
    """The format that a config's experts are shipped in; None where nothing is quantised.

    Raises `ValueError` for one that no layer holds.
    """
    config = require_known(values)
    return None if config is None else _RULES[config["quant_method"]](config, values)


def holds_shared(values: Values) -> bool:
    """Whether a model's shared experts are in its experts' format: those of `quant_method` fp8
    whose config leaves no shared expert out. Others leave them out by rules of their own.
    """
    config = require_known(values)
    if config is None or config["quant_method"] != "fp8" or values.get("expert_dtype") == "fp4":
        return False
    left_out = config.get("modules_to_not_convert") or ()
    return not any("shared" in name and not name.endswith("_gate") for name in left_out)


def _fp8(config: Values, values: Values) -> WeightFormat:
    if config.get("fmt") not in (None, "e4m3"):
        raise _unheld(f"{_FIELD}.fmt", config["fmt"], ("e4m3",))
    if config.get("weight_block_size") is None:
        return "fp8_tensor"
    return "mxfp4" if values.get("expert_dtype") == "fp4" else "fp8_block128"


def _mxfp4(config: Values, values: Values) -> WeightFormat:
    return "mxfp4"


def _modelopt(config: Values, values: Values) -> WeightFormat:
    found = config.get("quant_algo")
    if not isinstance(found, str) or found not in _ALGORITHMS:
        raise _unheld(f"{_FIELD}.quant_algo", found, _ALGORITHMS)
    return _ALGORITHMS[found]


def _compressed_tensors(config: Values, values: Values) -> WeightFormat:
    field = f"{_FIELD}.config_groups"
    groups = table_of(field, config.get("config_groups"))
    weights = {
        name: table_of(f"{field}.{name}", group).get("weights") for name, group in groups.items()
    }
    found = {
        _of_group(f"{field}.{name}.weights", table_of(f"{field}.{name}.weights", one))
        for name, one in weights.items()
        if one is not None
    }
    if len(found) != 1:
        raise _unheld(field, [*groups], ("groups whose weights are all of one format",))
    return found.pop()


def _of_group(field: str, weights: Values) -> WeightFormat:
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind == ("float", 8):
        strategy = weights.get("strategy")
        if not isinstance(strategy, str) or strategy not in _STRATEGIES:
            raise _unheld(f"{field}.strategy", strategy, _STRATEGIES)
        return _STRATEGIES[strategy]
    groups: Mapping[tuple[object, object], tuple[int, WeightFormat]] = {
        ("float", 4): (NV_GROUP, "nvfp4"),
        ("int", 4): (INT4_GROUP, "int4_group32"),
    }
    row = next((row for known, row in groups.items() if known == kind), None)
    if row is None:
        wanted = ("float of 8 or 4 bits", "int of 4")
        raise _unheld(field, f"{kind[0]} of {kind[1]} bits", wanted)
    if weights.get("group_size") != row[0]:
        raise _unheld(f"{field}.group_size", weights.get("group_size"), (row[0],))
    if weights.get("symmetric") not in (None, True):
        raise _unheld(f"{field}.symmetric", weights["symmetric"], (True,))
    return row[1]


_RULES: Mapping[str, Callable[[Values, Values], WeightFormat]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}


def table_of(field: str, found: Any) -> Values:
    """A config's values, by name. Raises `TypeError` for what is none."""
    if isinstance(found, Mapping):
        return found
    to_dict = getattr(found, "to_dict", None)
    if to_dict is None:
        raise TypeError(
            f"{field} is a {type(found).__name__}; it must be a transformers config, or the dict "
            "that its config.json holds"
        )
    values: Values = to_dict()
    return values


def _unheld(field: str, found: object, held: Iterable[object]) -> ValueError:
    said = " or ".join(map(repr, held))
    return ValueError(
        f"{field} is {found!r}; a layer holds weights as they are shipped with {said}: pass "
        "dequantize=True (in TOML hf_dequantize = true) to read them in numbers"
    )
