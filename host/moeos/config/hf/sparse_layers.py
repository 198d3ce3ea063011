# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have routed experts: a rule for each way in which configs say it.

It knows fields of transformers configs. Must not depend on what a block computes.
"""

from __future__ import annotations

from collections.abc import Callable

from moeos.config.hf.fields import Values, count, listed, require_works, shown

Rule = tuple[str, Callable[[int], bool]]
"""Fields in words, and whether a layer has experts."""

# transformers' defaults.
_FIRST_DENSE = {"deepseek_v3": 3, "kimi_k2": 3, "deepseek_v32": 3, "glm4_moe": 1, "glm_moe_dsa": 3}
_HASH_LAYERS = 3
_NEMOTRON_PATTERN = "ME*-"
_SPARSE = ("sparse", "moe", "hash_moe")


def require_experts(values: Values, rule: str, layer: int, predicts: str | None) -> None:
    """Raises unless the layer has routed experts; `rule` is a key of RULES, and `predicts` the
    field that says how many layers with experts follow those of the model, or None.
    """
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer is {layer!r}; it must be of type int")
    layers = _layers(values)
    more = 0 if predicts is None else count(values, predicts, 0)
    if layer < 0 or (layers and layer >= layers + more):
        and_more = f", as {predicts} is {more}" if more else ""
        raise ValueError(
            f"layer is {layer}; it must be at least 0 and below {layers + more}{and_more}"
        )
    if layers and layer >= layers:
        return
    said, has = RULES[rule](values)
    if not has(layer):
        sparse = [number for number in range(layers or layer) if has(number)]
        raise ValueError(
            f"layer is {layer}, which has no routed experts, as {said}; those with experts are "
            f"{shown(sparse)}"
        )


def _layers(values: Values) -> int:
    """How many layers the model has; 0: its config does not say."""
    return count(values, "num_hidden_layers", count(values, "num_layers", 0, 1), 1)


def with_experts(values: Values, rule: str) -> list[int]:
    """The model's layers that have routed experts; one where its config does not say how many it
    has.
    """
    _, has = RULES[rule](values)
    return [number for number in range(_layers(values)) if has(number)] or [0]


def type_of(values: Values, layer: int) -> object:
    """The name that `mlp_layer_types` has, or would have, for a layer."""
    types = listed(values, "mlp_layer_types")
    if types is not None:
        return types[layer] if layer < len(types) else None
    return "hash_moe" if layer < count(values, "num_hash_layers", _HASH_LAYERS) else None


def _every(values: Values) -> Rule:
    return "no layer has", lambda layer: True


def _every_nth(values: Values) -> Rule:
    dense = listed(values, "mlp_only_layers") or ()
    step = count(values, "decoder_sparse_step", 1, 1)
    return (
        f"mlp_only_layers is {shown(dense)} and decoder_sparse_step is {step}",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
    )


def _after_first(values: Values) -> Rule:
    first = count(values, "first_k_dense_replace", _FIRST_DENSE.get(values["model_type"], 0))
    require_works(values, "moe_layer_freq", (1,))
    return f"first_k_dense_replace is {first}", lambda layer: layer >= first


def _by_type(values: Values) -> Rule:
    for field in ("mlp_layer_types", "moe_layer_freq"):
        if isinstance(values.get(field), int):
            continue
        if listed(values, field) is not None:
            return f"{field} says", lambda layer, field=field: _is_sparse(values, field, layer)
    return _after_first(values)


def _is_sparse(values: Values, field: str, layer: int) -> bool:
    found = listed(values, field, layer)
    return found is not None and (found[layer] in _SPARSE or found[layer] == 1)


def _listed(values: Values) -> Rule:
    sparse = listed(values, "moe_layers")
    step = count(values, "interleave_moe_layer_step", 1, 1)
    if sparse is not None:
        return f"moe_layers is {shown(sparse)}", lambda layer: layer in sparse
    return f"interleave_moe_layer_step is {step}", lambda layer: (layer + 1) % step == 0


def _between(values: Values) -> Rule:
    first = count(values, "moe_layer_start_index", 1)
    last = count(values, "moe_layer_end_index", -1, -1)
    step = count(values, "moe_layer_interval", 1, 1)
    return (
        f"moe_layer_start_index is {first}, moe_layer_end_index {last}, moe_layer_interval {step}",
        lambda layer: layer >= first and (last < 0 or layer <= last) and (layer + 1) % step == 0,
    )


def _periodic(values: Values) -> Rule:
    period = count(values, "expert_layer_period", 2, 1)
    offset = count(values, "expert_layer_offset", 1)
    return (
        f"expert_layer_period is {period} and expert_layer_offset {offset}",
        lambda layer: layer % period == offset,
    )


def _by_pattern(values: Values) -> Rule:
    for field in ("layers_block_type", "layer_types"):
        if listed(values, field) is not None:
            return f"{field} says", lambda layer, field=field: _is_sparse(values, field, layer)
    pattern = values.get("hybrid_override_pattern") or _NEMOTRON_PATTERN
    if not isinstance(pattern, str):
        raise TypeError(f"hybrid_override_pattern is {pattern!r}; it must be of type str")
    return (
        f"hybrid_override_pattern is {pattern!r}",
        lambda layer: pattern[layer : layer + 1] == "E",
    )


RULES: dict[str, Callable[[Values], Rule]] = {
    "every": _every,
    "every_nth": _every_nth,
    "after_first": _after_first,
    "by_type": _by_type,
    "listed": _listed,
    "between": _between,
    "periodic": _periodic,
    "by_pattern": _by_pattern,
}
"""The rules by the name in a family's row."""
