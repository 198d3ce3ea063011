# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: functions that plugins put around others, by name."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: list[tuple[str, Callable[..., Any], HookType]] = []  # noqa: RUF012

    @classmethod
    def register(
        cls,
        target: str,
        hook: Callable[..., Any],
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        cls._hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook, kind in cls._hooks:
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, _wrapped(getattr(owner, name), hook, kind))
        cls._hooks.clear()


def _wrapped(original: Any, hook: Any, kind: HookType) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        assert kind is HookType.AFTER
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper
