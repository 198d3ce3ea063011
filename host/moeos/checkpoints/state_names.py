# SPDX-License-Identifier: Apache-2.0
"""The names under which a layer keeps its tensors: as parameters, so in state dicts, too.

A tensor of a weight format has the format in its name, such as w1_mxfp4. Codes of one format look
like those of another, and even their scales may have equal shapes. A reader that goes by names
alone (`torch.distributed.checkpoint`, accelerate) then misses a name instead of taking one format
for another. This file must not depend on layers or on what tensors hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moeos.call import call_checks
from moeos.config.config import MoEConfig
from moeos.config.element_formats import NAMES

_FIELDS = {
    **dict.fromkeys(("w1", "w2", *call_checks.SCALES), "weight_format"),
    **dict.fromkeys(("shared_w1", "shared_w2", *call_checks.SHARED_SCALES), "shared_weight_format"),
}
"""The config fields with the formats of the tensors that a call knows by these names."""

OWN = tuple(name for name in call_checks.OWN if name not in call_checks.ROUTER)
"""The names, as a call knows them and in the call's order, of a layer's tensors but the gate's."""


def state_name(cfg: MoEConfig, name: str) -> str:
    """The parameter of a layer that a call knows as `name`."""
    field = _FIELDS.get(name)
    return name if field is None else _named(name, getattr(cfg, field))


def take_other_formats(cfg: MoEConfig, state: dict[str, Any], prefix: str) -> list[str]:
    """Removes from a state dict the tensors named for a format other than the layer's, or for none.
    Returns why they must not be loaded, for each format. The layer's own names may be there as
    well: some readers add what a model has and a file lacks.
    """
    said = []
    for field, number in (
        ("weight_format", cfg.experts),
        ("shared_weight_format", cfg.shared_experts),
    ):
        own = getattr(cfg, field)
        named = [name for name, of in _FIELDS.items() if of == field]
        for other in (None, *NAMES):
            if number == 0 or other == own:
                continue
            found = _keys_of(state, prefix, [_named(name, other) for name in named])
            if found:
                first = found[0].removeprefix(prefix)
                tensor = state[found[0]]
                said.append(prefix + _refusal(field, own, other, first, tensor))
                for key in found:
                    del state[key]
    return said


def _named(name: str, weight_format: str | None) -> str:
    return name if weight_format is None else f"{name}_{weight_format}"


def _keys_of(state: Mapping[str, Any], prefix: str, names: Collection[str]) -> list[str]:
    """The keys of these tensors, or of single experts' such as w1.3."""
    begin = len(prefix)
    return [key for key in state if key.startswith(prefix) and key[begin:].split(".")[0] in names]


def _refusal(field: str, own: str | None, other: str | None, key: str, tensor: object) -> str:
    if other is not None:
        return (
            f"{key} is of {field} {other!r}, and the layer of {own!r}: make it with "
            f"MoEConfig({field}={other!r})"
        )
    dtype = getattr(tensor, "dtype", None)
    name, _, expert = key.partition(".")
    wanted = ".".join(filter(None, (_named(name, own), expert)))
    if dtype in call_checks.CODES:
        return (
            f"{key} has dtype {dtype} and a name without a format, as the state dicts of versions "
            f"before had codes of any; the layer has {field} {own!r}: where they are of that, load "
            f"{key} as {wanted}, and the scales likewise"
        )
    return (
        f"{key} has dtype {dtype}, numbers, and the layer has {field} {own!r}: make a layer "
        f"without a format, and moeos.quantize it, or set {field}=None"
    )
