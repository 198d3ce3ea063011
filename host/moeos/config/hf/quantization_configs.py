# SPDX-License-Identifier: Apache-2.0
"""Finds the format of a layer's weights that a model's `quantization_config` means.

It knows the fields of transformers configs, and never sees a tensor: where a file has another
format than its config says, the loader names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moeos.config.element_formats import BLOCK, INT4_GROUP, MX_GROUP, NV_GROUP, WeightFormat
from moeos.config.hf import modules
from moeos.config.hf.fields import Values, shown
from moeos.config.hf.modules import Matrix, Modules

INTEGER_BITS = (4, 8)
"""Bits of integers that are packed into words."""

_FIELD = "quantization_config"
_BLOCK = [BLOCK, BLOCK]
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_ALGORITHMS: Mapping[str, WeightFormat] = {
    "FP8": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "NVFP4": "nvfp4",
}
_STRATEGIES: Mapping[str, WeightFormat] = {
    "channel": "fp8_channel",
    "tensor": "fp8_tensor",
    "block": "fp8_block128",
}
_OF_4_BITS: Mapping[int, WeightFormat] = {NV_GROUP: "nvfp4", MX_GROUP: "mxfp4"}


class Formats(NamedTuple):
    """The formats of a layer's routed and shared experts; None: not quantized."""

    experts: WeightFormat | None
    shared: WeightFormat | None


class _Unheld(ValueError):
    """A format that no layer holds, and that is dequantized when it is read."""


_FormatOf = Callable[[Matrix], "WeightFormat | _Unheld | None"]
"""The format of a matrix, None if not quantized. Raises `ValueError` if it cannot be read."""


def formats_of(
    values: Values, layers: Sequence[Modules], shared_too: bool, dequantize: bool
) -> Formats:
    """The formats that these layers' experts are shipped in.

    `shared_too`: shared experts are looked at. `dequantize`: formats that can be dequantized are
    not refused, and the returned value means nothing.

    Raises `ValueError` for a format that no layer holds, for several in one layer, and where layers
    differ.
    """
    found = values.get(_FIELD)
    if found is None:
        return Formats(None, None)
    config = table_of(_FIELD, found)
    method = config.get("quant_method")
    rule = _RULES.get(method) if isinstance(method, str) else None
    format_of = _other(config, method) if rule is None else rule(config, values)
    every: dict[Formats, list[int]] = {}
    for layer in layers:
        try:
            experts = _of_experts(layer.experts, format_of)
        except _Unheld as error:
            if dequantize:
                continue
            raise ValueError(str(error)) from None
        shared = _of_shared(layer.shared, format_of) if shared_too else None
        of_layer = Formats(experts, shared if shared == experts else None)
        every.setdefault(of_layer, []).append(layer.layer)
    if len(every) > 1 and not dequantize:
        said = "; ".join(
            f"weight_format {one.experts!r} and shared_weight_format {one.shared!r} for layers "
            f"{shown(numbers)}"
            for one, numbers in every.items()
        )
        raise ValueError(
            f"{_FIELD} means {said}: say which layer, MoEConfig.from_hf(config, layer="
            f"{next(iter(every.values()))[0]})"
        )
    return next(iter(every), Formats(None, None))


def _of_experts(every: Sequence[Matrix], format_of: _FormatOf) -> WeightFormat | None:
    """The common format of all matrices, which are ordered by expert."""
    found: dict[object, Matrix] = {}
    for matrix in every:
        found.setdefault(_key(format_of(matrix)), matrix)
    if len(found) == 1:
        (one,) = found.values()
        own = format_of(one)
        if isinstance(own, _Unheld):
            raise own
        return own
    said = " and ".join(
        f"{matrix.own[0]} in {'numbers' if own is None else own}"
        for own, matrix in [*found.items()][:2]
    )
    # A matrix has the tensors of one format for all experts, or they are read as none.
    each = len({matrix.own[0].rpartition(".")[2] for matrix in every})
    alike = all(
        _key(format_of(matrix)) == _key(format_of(every[at % each]))
        for at, matrix in enumerate(every)
    )
    said = f"{_FIELD} means {said}, and experts of a layer have one format"
    raise _Unheld(f"{said}: {_DEQUANTIZE}") if alike else ValueError(f"{said}: {_ELSEWHERE}")


def _key(own: WeightFormat | _Unheld | None) -> str | None:
    return "a format that no layer holds" if isinstance(own, _Unheld) else own


def _of_shared(every: Sequence[Matrix], format_of: _FormatOf) -> WeightFormat | None:
    """The common format of all matrices, or None: then each is dequantized when it is read."""
    found = {_key(format_of(matrix)): matrix for matrix in every}
    own = format_of(next(iter(found.values()))) if len(found) == 1 else None
    return None if isinstance(own, _Unheld) else own


def _left_out(config: Values, *fields: str) -> tuple[str, Sequence[str]]:
    """The first of these fields that says which modules are not quantized."""
    field = next((field for field in fields if config.get(field) is not None), fields[0])
    return f"{_FIELD}.{field}", modules.entries_of(f"{_FIELD}.{field}", config.get(field))


def _fp8(config: Values, values: Values) -> _FormatOf:
    left_out = modules.by_prefix(*_left_out(config, "modules_to_not_convert", "ignored_layers"))
    block = config.get("weight_block_size")
    fp4 = "fp4" in (values.get("expert_dtype"), config.get("expert_dtype"))

    def format_of(matrix: Matrix) -> WeightFormat | _Unheld | None:
        if left_out(matrix):
            return None
        if block is not None and (not isinstance(block, (list, tuple)) or [*block] != _BLOCK):
            raise _unread(f"{_FIELD}.weight_block_size", block, (_BLOCK, None))
        if config.get("fmt") not in (None, "e4m3"):
            return _unheld(f"{_FIELD}.fmt", config["fmt"], ("e4m3",))
        if block is None:
            return "fp8_tensor"
        return "mxfp4" if fp4 and matrix.around else "fp8_block128"

    return format_of


def _mxfp4(config: Values, values: Values) -> _FormatOf:
    left_out = modules.by_prefix(*_left_out(config, "modules_to_not_convert"))
    return lambda matrix: None if left_out(matrix) or not matrix.around else "mxfp4"


def _modelopt(config: Values, values: Values) -> _FormatOf:
    left_out = modules.by_glob(*_left_out(config, "ignore", "exclude_modules"))
    found = config.get("quant_algo")

    def format_of(matrix: Matrix) -> WeightFormat | None:
        if left_out(matrix):
            return None
        if not isinstance(found, str) or found not in _ALGORITHMS:
            raise _unread(f"{_FIELD}.quant_algo", found, _ALGORITHMS)
        return _ALGORITHMS[found]

    return format_of


def _other(config: Values, method: object) -> _FormatOf:
    """The matrices that a method unknown to moeos does not quantize."""
    left_out = modules.by_prefix(*_left_out(config, *_LEFT_OUT))

    def format_of(matrix: Matrix) -> None:
        if not left_out(matrix):
            raise _unread(f"{_FIELD}.quant_method", method, _RULES)

    return format_of


def _compressed_tensors(config: Values, values: Values) -> _FormatOf:
    field = f"{_FIELD}.config_groups"
    groups = table_of(field, config.get("config_groups"))
    left_out = modules.by_target(*_left_out(config, "ignore"))
    of_target: dict[str, tuple[str, Any]] = {}
    for name, group in groups.items():
        table = table_of(f"{field}.{name}", group)
        targets = modules.entries_of(f"{field}.{name}.targets", table.get("targets", ["Linear"]))
        weights = f"{field}.{name}.weights"
        of_target |= {target: (weights, table.get("weights")) for target in targets}
    target_of = modules.best_target(f"{field}.targets", [*of_target])

    def format_of(matrix: Matrix) -> WeightFormat | _Unheld | None:
        target = None if left_out(matrix) else target_of(matrix)
        if target is None:
            return None
        weights, found = of_target[target]
        return None if found is None else _of_group(weights, table_of(weights, found))

    return format_of


def _of_group(field: str, weights: Values) -> WeightFormat | _Unheld:
    kind, bits = weights.get("type"), weights.get("num_bits")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if (kind, bits) not in [("float", 8), ("float", 4), *(("int", bits) for bits in INTEGER_BITS)]:
        raise _unread(field, f"{kind} of {bits} bits", ("float of 8 or 4 bits", "int of 8 or 4"))
    block = weights.get("block_structure")
    if strategy == "block" and (not isinstance(block, (list, tuple)) or [*block] != _BLOCK):
        raise _unread(f"{field}.block_structure", block, (_BLOCK,))
    if weights.get("actorder") in ("group", True):
        raise _unread(f"{field}.actorder", weights["actorder"], ("static", None))
    if (kind, bits) == ("float", 8):
        held = _STRATEGIES.get(str(strategy))
        if held is not None:
            return held
        return _unheld(f"{field}.strategy", strategy, _STRATEGIES)
    if kind == "float":
        if not isinstance(group, int) or group not in _OF_4_BITS:
            raise _unread(f"{field}.group_size", group, _OF_4_BITS)
        return _OF_4_BITS[group]
    if bits != 4:
        return _unheld(field, f"int of {bits} bits", ("int of 4 bits",))
    if group != INT4_GROUP:
        return _unheld(f"{field}.group_size", group, (INT4_GROUP,))
    if weights.get("symmetric") not in (None, True):
        return _unheld(f"{field}.symmetric", weights["symmetric"], (True,))
    return "int4_group32"


_RULES: Mapping[str, Callable[[Values, Values], _FormatOf]] = {
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


_DEQUANTIZE = "pass dequantize=True (in TOML hf_dequantize = true) to read them in numbers"
_ELSEWHERE = (
    "dequantize the experts with the library that wrote them, and leave quantization_config out of "
    "the config"
)


def _said(found: Iterable[object]) -> str:
    return " or ".join("null" if one is None else repr(one) for one in found)


def _unheld(field: str, found: object, held: Iterable[object]) -> _Unheld:
    return _Unheld(
        f"{field} is {found!r}; a layer holds weights as they are shipped with {_said(held)}: "
        f"{_DEQUANTIZE}"
    )


def _unread(field: str, found: object, read: Iterable[object]) -> ValueError:
    return ValueError(f"{field} is {found!r}; what is read here is {_said(read)}: {_ELSEWHERE}")
