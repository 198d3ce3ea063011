# SPDX-License-Identifier: Apache-2.0
"""Reads fields of a transformers config with a check of their types, and says what is wrong.

A field that is absent and one that is null mean the same: what the family takes for it. Null is
refused for a layer's sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Values = Mapping[str, Any]

_SHOWN = 8


def count(values: Values, field: str, default: int, least: int = 0) -> int:
    """A whole number, at least `least`."""
    found = values.get(field)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"{field} is {found!r}; it must be of type int")
    if found < least:
        raise ValueError(f"{field} is {found}; it must be at least {least}")
    return found


def listed(values: Values, field: str, layer: int | None = None) -> Sequence[Any] | None:
    """A list, or None; with `layer` it must have an entry for this layer."""
    found = values.get(field)
    if found is None:
        return None
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"{field} is {found!r}; it must be a list")
    if layer is not None and layer >= len(found):
        raise ValueError(f"{field} is {shown(found)}; layer {layer} is beyond it")
    return found


def require_works(values: Values, field: str, working: Iterable[Any]) -> None:
    """Raises unless a field has one of the values for which this layer is computed."""
    found = values.get(field)
    if found is not None and not any(found == value for value in working):
        raise ValueError(works(field, found, working))


def works(field: str, found: Any, working: Iterable[Any]) -> str:
    """The error's sentence for a value that has no rule."""
    allowed = " or ".join([*map(repr, working), "null"])
    return f"{field} is {found!r}; what works here is {allowed}"


def shown(found: Iterable[Any]) -> str:
    """The first of a list."""
    every = list(found)
    more = ", ..." if len(every) > _SHOWN else ""
    return f"[{', '.join(map(str, every[:_SHOWN]))}{more}]"
