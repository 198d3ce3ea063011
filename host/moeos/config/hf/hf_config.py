# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's config of a transformers config, by the table of families.

It takes the config as an object or as the dict that a config.json holds, and needs no transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from moeos.config.hf import modules, quantization_configs, sparse_layers
from moeos.config.hf.families import BY_MODEL_TYPE, FAMILIES, NEUTRAL, Family, Read, SharedExperts
from moeos.config.hf.fields import Values, count, listed, require_works, shown, works
from moeos.config.limits import DTYPES, MAX_EXPERTS

_SIZES = ("hidden", "intermediate", "experts", "top_k", "zero_experts")
"""Fields that must not be null: no model's code takes null for its default."""
_DTYPES = ("dtype", "torch_dtype")


Config = TypeVar("Config")


def config_from_hf(
    make: Callable[..., Config],
    config: object,
    layer: int | None,
    shared: bool,
    dequantize: bool,
    changes: Values,
) -> Config:
    """See `MoEConfig.from_hf`; `make` makes a config of its fields."""
    for switch, value in (("shared", shared), ("dequantize", dequantize)):
        if not isinstance(value, bool):
            raise TypeError(f"{switch} is {value!r}; it must be True or False")
    outer = quantization_configs.table_of("config", config)
    name, values = _family_of(outer)
    family = FAMILIES[name]
    fields: dict[str, Any] = {"family": name, "routing": family.routing}
    if "dtype" not in changes:
        fields["dtype"] = _dtype_of(values)
    if layer is not None:
        sparse_layers.require_experts(values, family.experts_in, layer, family.predicts)
        if (
            family.hashed_in is not None
            and sparse_layers.type_of(values, layer) == family.hashed_in
        ):
            fields["routing"] = "ids"
    reads = dict(family.reads)
    if family.latent is not None and values.get(family.latent) is not None:
        reads["hidden"] = Read((family.latent,))
        fields["routing"] = "caller"
        shared = False
    known = {family.latent, *(name for read in reads.values() for name in read.names)}
    for field, working in {**NEUTRAL, **family.works}.items():
        if field not in known:
            require_works(values, field, working)
    for field, read in reads.items():
        fields[field] = _look_up(values, read, layer, is_size=field in _SIZES)
    if family.activations:
        fields["activation"] = _activation(values, family)
    if shared and family.shared is not None:
        fields |= _shared(values, family.shared, layer)
        reads["shared_intermediate"] = family.shared.width
    fields |= family.rules
    if family.groups_if is not None and values.get(family.groups_if[0]) != family.groups_if[1]:
        fields |= {"expert_groups": 1, "top_groups": 1}
    if fields["routing"] != "layer":
        fields["selection_bias"] = False  # the layer does not choose
    if "router_dtype" in fields:
        fields["router_dtype"] = DTYPES[fields["router_dtype"]]
    try:
        fields |= _formats(
            values, family, layer, fields | dict(changes), dequantize, values is not outer
        )
        return make(**(fields | dict(changes)))
    except (TypeError, ValueError) as error:
        wrong = reads.get(str(error).partition(" ")[0])
        called = "" if wrong is None else f"{wrong.names[0]}: "
        raise type(error)(f"{called}{error}") from None


def _formats(
    values: Values,
    family: Family,
    layer: int | None,
    fields: Values,
    dequantize: bool,
    within: bool,
) -> dict[str, Any]:
    """The fields of formats; none where the caller has said them. `within`: the text model is part
    of a model of several inputs.
    """
    if values.get("quantization_config") is None:
        return {}
    experts = min(count(fields, "experts", 0), MAX_EXPERTS)
    # Two experts of each layer show whether layers differ.
    own = range(experts) if layer is not None else (0, experts - 1)
    numbers = sparse_layers.with_experts(values, family.experts_in) if layer is None else [layer]
    every = [modules.of_layer(family, number, own, within=within) for number in numbers]
    said = dequantize or "weight_format" in fields
    has_shared = fields.get("shared_experts", 0) == 1
    found = quantization_configs.formats_of(values, every, has_shared, said)
    return {} if said else {"weight_format": found.experts, "shared_weight_format": found.shared}


def _family_of(values: Values) -> tuple[str, Values]:
    """The family of a config, or of the text model's within it, and the values of that one."""
    found = str(values.get("model_type"))
    if found in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[found], values
    inner = values.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: values[key] for key in ("quantization_config", *_DTYPES) if key in values}
        found = str(inner.get("model_type", f"{found}_text"))
        if found in BY_MODEL_TYPE:
            return BY_MODEL_TYPE[found], {**outer, **inner, "model_type": found}
    nearest = difflib.get_close_matches(found, BY_MODEL_TYPE, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"model_type is {found!r}; it must be one of {', '.join(BY_MODEL_TYPE)}; the nearest is "
        f"{nearest!r}"
    )


def _look_up(values: Values, read: Read, layer: int | None, *, is_size: bool) -> Any:
    null: str | None = None
    for field in read.names:
        found = values.get(field)
        if isinstance(found, (list, tuple)):
            if layer is None:
                raise ValueError(
                    f"{field} is {shown(found)}, one number a layer; say which: "
                    "MoEConfig.from_hf(config, layer=0)"
                )
            found = found[layer] if listed(values, field, layer) else None
        if found is not None:
            return found
        if field in values:
            null = null or field
    if is_size and null is not None:
        raise ValueError(f"{null} is None; it must be a number")
    if read.default is ...:
        raise ValueError(f"{read.names[0]} is missing; a config of this family needs it")
    return read.default


def _shared(values: Values, shared: SharedExperts, layer: int | None) -> dict[str, Any]:
    """The fields of shared experts; none where the config says that there are none."""
    width = 1
    for read in (shared.width, shared.count):
        if read is not None:
            # Where a family has none by default, its own config says so by null.
            has_some = read.default != 0
            found = {read.names[0]: _look_up(values, read, layer, is_size=has_some)}
            width *= count(found, read.names[0], 0)
    if width == 0:
        return {}
    return {"shared_experts": 1, "shared_intermediate": width, "shared_gate": shared.gate}


def _activation(values: Values, family: Family) -> str:
    for field in family.activation_names:
        found = values.get(field)
        if found is not None:
            if not isinstance(found, str) or found not in family.activations:
                raise ValueError(works(field, found, family.activations))
            return family.activations[found]
    return next(iter(family.activations.values()))


def _dtype_of(values: Values) -> torch.dtype:
    found = next((values[name] for name in _DTYPES if values.get(name) is not None), "bfloat16")
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(works("dtype", found, DTYPES))
    return DTYPES[name]
