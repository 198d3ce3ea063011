# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: configs that take the place of others, by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

_known: dict[str, tuple[type, Callable[..., Any]]] = {}


@dataclasses.dataclass(kw_only=True)
class OverrideConfig:
    imports: list[Any] = dataclasses.field(default_factory=list)


def override(
    *,
    target: type,
    fqns: list[str] | None = None,
    description: str = "",
    exact: bool = False,
) -> Callable[[Any], Any]:
    def registered(factory: Any) -> Any:
        key = f"{factory.__module__}.{factory.__name__}"
        assert key not in _known
        _known[key] = target, factory
        return factory

    return registered


def derive(source: Any, target_cls: Any, **deltas: object) -> Any:
    names = {field.name for field in dataclasses.fields(target_cls) if field.init}
    assert set(deltas) <= names
    kept = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return target_cls(**({name: value for name, value in kept.items() if name in names} | deltas))


def apply_overrides(override_config: OverrideConfig, config_root: Any) -> list[str]:
    applied = []
    for entry in override_config.imports:
        key, arguments = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(key.rpartition(".")[0])
        target, factory = _known[key]
        for name, config, parent, field in list(config_root.traverse(target)):
            setattr(parent, field, factory(config, **arguments))
            applied.append(f"{key}: {name}")
    return applied
