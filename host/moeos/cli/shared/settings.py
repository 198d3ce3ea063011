# SPDX-License-Identifier: Apache-2.0
"""The table [run] of a config: what a command does where its options do not say otherwise.

`MoEConfig.from_toml` reads the rest of the file. This file knows only one number of a layer: the
tokens that a call takes.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from moeos.config.config import MoEConfig
from moeos.system.files import read_toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Keys of the table [run].

    Attributes:
        tokens: of each rank and call; None is the layer's max_tokens.
        iterations: calls.
        vary_tokens: draws the tokens of each rank and call from 0 to `tokens`.
        text: paths and patterns of documents whose bytes are the tokens, relative to the config's
            folder; empty for random x.
    """

    tokens: int | None = None
    iterations: int = 10
    vary_tokens: bool = False
    text: tuple[str, ...] = ()


def read_settings(path: Path) -> RunSettings:
    """The table [run] of a TOML file that `MoEConfig.from_toml` accepts; the defaults without one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a TOML file, or a key is unknown.
        TypeError: a value has the wrong type.
    """
    values = read_toml(path).get("run", {})
    kinds = {"tokens": int, "iterations": int, "vary_tokens": bool, "text": list}
    for key, value in values.items():
        if key not in kinds:
            nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{path}: unknown key {key!r} in [run]; the nearest valid one is {nearest!r}"
            )
        if type(value) is not kinds[key]:
            raise TypeError(
                f"{path}: {key} in [run] is {value!r}; it must be of type {kinds[key].__name__}"
            )
    text = values.pop("text", [])
    if not all(isinstance(pattern, str) for pattern in text):
        raise TypeError(f"{path}: text in [run] is {text!r}; it must be a list of paths")
    return RunSettings(**values, text=tuple(text))


def check_tokens(tokens: int, cfg: MoEConfig, advice: str = "") -> None:
    """Raises `ValueError`, with the advice, if a rank cannot pass this many in a call."""
    if not 0 <= tokens <= cfg.max_tokens:
        raise ValueError(
            f"tokens is {tokens}; allowed: 0 to max_tokens, {cfg.max_tokens}, of this rank{advice}"
        )
