# SPDX-License-Identifier: Apache-2.0
"""What one run of the training study measures, from TOML.

A suite's file has these keys:
    rounds, warm_up_rounds: how often each contestant runs, timed and before that.
    trace_rounds: how often a traced call does, which takes longer to read; without it `rounds`.
    [[layers]]: name; tokens, a list; layer, a table with the fields of `MoEConfig`; and maybe
        activations, each of which makes a layer. Without a max_tokens it is the largest token
        count; calls of more tokens have pieces.
    [[lists]]: name, experts, top_k, and tokens, a list: whose index lists are built; and maybe
        call_tokens, of a call of moeos at most.
It knows nothing of devices or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import suites
from bench.suites import LEAST_ROUNDS
from moeos.config.config import MoEConfig
from moeos.system.files import read_toml

_SUITE = {
    **{"rounds": int, "warm_up_rounds": int, "trace_rounds": int},
    **{"layers": list, "lists": list},
}
_LAYER = {"name": str, "tokens": list, "layer": dict, "activations": list}
_LISTS = {"name": str, "tokens": list, "experts": int, "top_k": int, "call_tokens": int}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, and the token counts with which it is measured."""

    name: str
    cfg: MoEConfig
    tokens: tuple[int, ...]

    def of(self, dtype: torch.dtype) -> Layer:
        """The same, which computes in another dtype."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, dtype=dtype))


@dataclasses.dataclass(frozen=True)
class Lists:
    """A routing whose index lists are built, of some token counts; a call of moeos has at most
    `call_tokens` of them.
    """

    name: str
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    call_tokens: int


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a suite's file says; `name` is the file's."""

    name: str
    rounds: int
    warm_up_rounds: int
    trace_rounds: int
    layers: tuple[Layer, ...]
    lists: tuple[Lists, ...]

    def only(self, names: Collection[str]) -> Suite:
        """The same with what has one of these names alone; without names, all of it.

        Raises `ValueError` for a name that is not there.
        """
        known = {layer.name for layer in self.layers} | {lists.name for lists in self.lists}
        unknown = sorted(set(names) - known)
        if unknown:
            have = ", ".join(sorted(known))
            raise ValueError(f"--names has {unknown[0]!r}; the suite has {have}")
        if not names:
            return self
        return dataclasses.replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.name in names),
            lists=tuple(lists for lists in self.lists if lists.name in names),
        )


def read(path: Path) -> Suite:
    """The suite in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError: it is not as the head of this module says.
    """
    values = read_toml(path)
    try:
        return _suite(path.stem, values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _suite(name: str, values: Mapping[str, Any]) -> Suite:
    suites.require_keys(values, _SUITE, {"rounds", "warm_up_rounds"}, "a suite")
    numbers = {"trace_rounds": values["rounds"], **values}
    suites.require_least(
        numbers,
        {"rounds": LEAST_ROUNDS, "warm_up_rounds": 1, "trace_rounds": LEAST_ROUNDS},
    )
    layers = [layer for entry in values.get("layers", []) for layer in _layers(entry)]
    lists = [_lists(entry) for entry in values.get("lists", [])]
    if not layers and not lists:
        raise ValueError("a suite needs layers or lists, and this one has neither")
    rounds, warm_up = numbers["rounds"], numbers["warm_up_rounds"]
    return Suite(name, rounds, warm_up, numbers["trace_rounds"], tuple(layers), tuple(lists))


def _layers(entry: Any) -> list[Layer]:
    suites.require_keys(entry, _LAYER, {"name", "tokens", "layer"}, "layers")
    tokens = suites.some_counts("tokens", entry["tokens"])
    table = {"max_tokens": max(tokens), **entry["layer"]}
    made = [{"activation": one} for one in entry.get("activations", [])] or [{}]
    return [Layer(entry["name"], MoEConfig.from_table(table | one), tokens) for one in made]


def _lists(entry: Any) -> Lists:
    suites.require_keys(entry, _LISTS, set(_LISTS) - {"call_tokens"}, "lists")
    experts, top_k = entry["experts"], entry["top_k"]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; of {experts} experts it must be 1 to {experts}")
    tokens = suites.some_counts("tokens", entry["tokens"])
    [most] = suites.some_counts("call_tokens", [entry.get("call_tokens", max(tokens))])
    return Lists(entry["name"], experts, top_k, tokens, most)
