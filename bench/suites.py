# SPDX-License-Identifier: Apache-2.0
"""What the readers of all suites have in common: the keys of a table, numbers in it, and errors.

It knows TOML's types, and nothing of what a suite measures. Errors name no file: who reads one adds
its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

LEAST_ROUNDS = 3
"""For quartiles."""


def require_keys(
    values: Any, kinds: Mapping[str, type], needed: Collection[str], what: str
) -> None:
    """Raises `ValueError` or `TypeError` unless a table has keys of these types alone, and those
    that are needed.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{what} has {values!r}; each must be a table, [[{what}]]")
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(f"unknown key {key!r} in {what}; allowed: {', '.join(kinds)}")
        if type(value) is not kinds[key]:
            raise TypeError(f"{key} is {value!r}; it must be of type {kinds[key].__name__}")
    for key in sorted(needed):
        if key not in values:
            raise ValueError(f"{what} has no key {key}")


def require_least(values: Mapping[str, int], least: Mapping[str, int]) -> None:
    """Raises `ValueError` for a number below that of its name."""
    for name, at_least in least.items():
        if values[name] < at_least:
            raise ValueError(f"{name} is {values[name]}; it must be at least {at_least}")


def counts(name: str, values: Collection[object], least: int = 1) -> tuple[int, ...]:
    """Numbers of tokens, each at least so many. Raises `ValueError` unless they ascend."""
    found = [v for v in values if type(v) is int and v >= least]
    if len(found) < len(values) or sorted(set(found)) != found:
        raise ValueError(f"{name} is {values}; it must be token counts in ascending order")
    return tuple(found)


def some_counts(name: str, values: Collection[object]) -> tuple[int, ...]:
    """The same, of which there must be one."""
    if not values:
        raise ValueError(f"{name} is {values}; it must be token counts in ascending order")
    return counts(name, values)
