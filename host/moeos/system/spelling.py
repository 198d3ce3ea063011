# SPDX-License-Identifier: Apache-2.0
"""The nearest right word for one that is wrong.

Must not depend on where the words come from.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The first name that begins with the word, else the one that is spelt most like it."""
    names = list(allowed)
    begun = (name for name in names if word and name.startswith(word.lower()))
    return next(begun, None) or difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]


def told_nearest(what: str) -> Callable[[Function], Function]:
    """Makes a function's error for an unknown argument name the nearest one, as Python does from
    3.13 on. `what`: the owner of the arguments, in the error.
    """

    def decorate(function: Function) -> Function:
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is not parameter.POSITIONAL_ONLY and name != "self"
        ]
        known = frozenset(names)

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            for name in named:
                if name not in known:
                    raise TypeError(
                        f"{what} has no argument {name!r}; the nearest is {nearest(name, names)!r}"
                    )
            return function(*given, **named)

        return call  # type: ignore[return-value]

    return decorate
