"""Makes a layer's config of a transformers config, by the table of families.

It takes the config as an object or as the dict that a config.json holds, and needs no transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moeos.checkpoints.families import BY_MODEL_TYPE, FAMILIES, NEUTRAL, Family, Read
from moeos.config import DTYPES, MoEConfig

Values = Mapping[str, Any]

_QUANTISED = {
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "compressed-tensors": "int4 or NVFP4",
    "modelopt": "NVFP4 or FP8",
}
_BLOCK = [128, 128]
_DTYPES = ("dtype", "torch_dtype")
_SHOWN = 8
# transformers' defaults of what says which layers have experts.
_FIRST_DENSE = {
    **{"deepseek_v3": 3, "kimi_k2": 3, "deepseek_v32": 3, "glm4_moe": 1, "glm_moe_dsa": 3},
    **{"deepseek_v2": 0, "dots1": 0, "minimax_m3_vl_text": 0, "deepseek_v4": 0},
}
_HASH_LAYERS = 3
_NEMOTRON_PATTERN = "ME*-"


def config_from_hf(config: object, layer: int | None, changes: Values) -> MoEConfig:
    """See `MoEConfig.from_hf`."""
    name, values = _family_of(_values_of(config))
    family = FAMILIES[name]
    fields: dict[str, Any] = {"layout": name, "routing": family.routing}
    if "dtype" not in changes:
        fields["dtype"] = _dtype_of(values)
    if layer is not None:
        _require_experts(values, family, layer)
        if family.hashed_in is not None and _type_of(values, layer) == family.hashed_in:
            fields["routing"] = "ids"
    known = {name for read in family.reads.values() for name in read.names}
    for field, working in {**NEUTRAL, **family.works}.items():
        if field not in known:
            _require_works(values, field, working)
    _require_quantisation(values.get("quantization_config"))
    for field, read in family.reads.items():
        fields[field] = _look_up(values, read, layer)
    if family.activations:
        fields["activation"] = _activation(values, family)
    fields |= family.rules
    if family.groups_if is not None and values.get(family.groups_if[0]) != family.groups_if[1]:
        fields |= {"expert_groups": 1, "top_groups": 1}
    if fields["routing"] == "ids":
        fields["selection_bias"] = False
    if "router_dtype" in fields:
        fields["router_dtype"] = DTYPES[fields["router_dtype"]]
    return MoEConfig(**(fields | dict(changes)))


def _values_of(config: object) -> Values:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise TypeError(
            f"config is a {type(config).__name__}; it must be a transformers config, or the dict "
            "that its config.json holds"
        )
    values: Values = to_dict()
    return values


def _family_of(values: Values) -> tuple[str, Values]:
    """The family of a config, or of the text model's within it, and the values of that one."""
    found = values.get("model_type")
    if found in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[found], values
    inner = values.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: values[key] for key in ("quantization_config", *_DTYPES) if key in values}
        if inner.get("model_type") in BY_MODEL_TYPE:
            return BY_MODEL_TYPE[inner["model_type"]], {**outer, **inner}
        found = inner.get("model_type")
    nearest = difflib.get_close_matches(str(found), BY_MODEL_TYPE, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"model_type is {found!r}; it must be one of {', '.join(BY_MODEL_TYPE)}; the nearest is "
        f"{nearest!r}"
    )


def _look_up(values: Values, read: Read, layer: int | None) -> Any:
    for field in read.names:
        found = values.get(field)
        if isinstance(found, (list, tuple)):
            if layer is None:
                raise ValueError(
                    f"{field} is {_shown(found)}, one number a layer; say which: "
                    "MoEConfig.from_hf(config, layer=0)"
                )
            if layer >= len(found):
                raise ValueError(f"{field} is {_shown(found)}; layer {layer} is beyond it")
            found = found[layer]
        if found is not None:
            return found
    if read.default is ...:
        raise ValueError(f"{read.names[0]} is missing; a config of this family needs it")
    return read.default


def _activation(values: Values, family: Family) -> str:
    for field in family.activation_names:
        found = values.get(field)
        if found is not None:
            if found not in family.activations:
                raise ValueError(_works(field, found, family.activations))
            return family.activations[found]
    return next(iter(family.activations.values()))


def _dtype_of(values: Values) -> torch.dtype:
    found = next((values[name] for name in _DTYPES if values.get(name) is not None), "bfloat16")
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(_works("dtype", found, DTYPES))
    return DTYPES[name]


def _require_works(values: Values, field: str, working: tuple[Any, ...]) -> None:
    found = values.get(field)
    if found is not None and found not in working:
        raise ValueError(_works(field, found, working))


def _require_quantisation(found: Any) -> None:
    if found is None:
        return
    values = _values_of(found)
    method = values.get("quant_method")
    if method not in _QUANTISED:
        raise ValueError(_works("quantization_config.quant_method", method, _QUANTISED))
    block = values.get("weight_block_size")
    if block is not None and [*block] != _BLOCK:
        raise ValueError(_works("quantization_config.weight_block_size", block, (_BLOCK,)))


def _works(field: str, found: Any, working: Iterable[Any]) -> str:
    allowed = " or ".join([*map(repr, working), "null"])
    return f"{field} is {found!r}; what works here is {allowed}"


def _shown(found: Iterable[Any]) -> str:
    listed = list(found)
    more = ", ..." if len(listed) > _SHOWN else ""
    return f"[{', '.join(map(str, listed[:_SHOWN]))}{more}]"


def _require_experts(values: Values, family: Family, layer: int) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer is {layer!r}; it must be of type int")
    layers = values.get("num_hidden_layers", values.get("num_layers"))
    said, has = _EXPERTS_IN[family.experts_in](values)
    if layer < 0 or (layers is not None and layer >= layers):
        raise ValueError(f"layer is {layer}; it must be at least 0 and below {layers}")
    if not has(layer):
        known = range(layers if layers is not None else layer + 1)
        sparse = [number for number in known if has(number)]
        raise ValueError(
            f"layer is {layer}, which has no routed experts, as {said}; those with experts are "
            f"{_shown(sparse)}"
        )


_Rule = tuple[str, Callable[[int], bool]]
"""Fields in words, and whether a layer has experts."""


def _every(values: Values) -> _Rule:
    return "every layer has", lambda layer: True


def _every_nth(values: Values) -> _Rule:
    dense, step = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
    return (
        f"mlp_only_layers is {_shown(dense)} and decoder_sparse_step is {step}",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
    )


def _after_first(values: Values) -> _Rule:
    first = _count(values, "first_k_dense_replace", _FIRST_DENSE.get(values["model_type"], 0))
    step = values.get("moe_layer_freq") or 1
    return (
        f"first_k_dense_replace is {first}",
        lambda layer: layer >= first and layer % step == 0,
    )


def _by_type(values: Values) -> _Rule:
    types = values.get("mlp_layer_types")
    if types is not None:
        return "mlp_layer_types says", lambda layer: types[layer] in ("sparse", "moe", "hash_moe")
    flags = values.get("moe_layer_freq")
    if isinstance(flags, (list, tuple)):
        return "moe_layer_freq says", lambda layer: bool(flags[layer])
    return _after_first(values)


def _listed(values: Values) -> _Rule:
    listed, step = values.get("moe_layers"), values.get("interleave_moe_layer_step") or 1
    if listed is not None:
        return f"moe_layers is {_shown(listed)}", lambda layer: layer in listed
    return f"interleave_moe_layer_step is {step}", lambda layer: (layer + 1) % step == 0


def _between(values: Values) -> _Rule:
    first = _count(values, "moe_layer_start_index", 1)
    last, step = _count(values, "moe_layer_end_index", -1), values.get("moe_layer_interval") or 1
    return (
        f"moe_layer_start_index is {first}, moe_layer_end_index {last}, moe_layer_interval {step}",
        lambda layer: layer >= first and (last < 0 or layer <= last) and (layer + 1) % step == 0,
    )


def _periodic(values: Values) -> _Rule:
    period = _count(values, "expert_layer_period", 2)
    offset = _count(values, "expert_layer_offset", 1)
    return (
        f"expert_layer_period is {period} and expert_layer_offset {offset}",
        lambda layer: layer % period == offset,
    )


def _by_pattern(values: Values) -> _Rule:
    types = values.get("layers_block_type") or values.get("layer_types")
    if types is None:
        pattern = values.get("hybrid_override_pattern") or _NEMOTRON_PATTERN
        return f"hybrid_override_pattern is {pattern!r}", lambda layer: pattern[layer] == "E"
    return "layers_block_type says", lambda layer: types[layer] == "moe"


_EXPERTS_IN: dict[str, Callable[[Values], _Rule]] = {
    "every": _every,
    "every_nth": _every_nth,
    "after_first": _after_first,
    "by_type": _by_type,
    "listed": _listed,
    "between": _between,
    "periodic": _periodic,
    "by_pattern": _by_pattern,
}


def _count(values: Values, field: str, default: int) -> int:
    found = values.get(field)
    return default if found is None else int(found)


def _type_of(values: Values, layer: int) -> str | None:
    """What `mlp_layer_types` calls a layer, or would."""
    types = values.get("mlp_layer_types")
    if types is not None:
        found: str = types[layer]
        return found
    return "hash_moe" if layer < _count(values, "num_hash_layers", _HASH_LAYERS) else None
