# SPDX-License-Identifier: Apache-2.0
"""Suites: what one run of a study measures, from TOML files (configs/suites).

All have rounds and warm_up_rounds: how often each contestant runs, timed and before that.

A suite of shapes (`launch/bench gpu`):
    full_ranks: of the deployment that the layers belong to; see `Shape.config_on`.
    tokens: per rank; a shape may have its own.
    zipf_exponent, zipf_tokens: token counts that are also measured with Zipf's law over the
        experts instead of the gate; a shape may have its own.
    lone_token: also one token on rank 0 and none on the others; a shape may have its own.
    few_tokens: cases of up to this many tokens have a layer of their own, made for no more, as a
        program that decodes has. Without it a shape has one layer.
    [[shapes]]: name, and either config (a layer's TOML file, relative to the suite) or layer (a
        table with the fields of `MoEConfig`); its max_tokens is the shape's largest token count.
A suite of training (`launch/evaluate training`):
    trace_rounds: how often a traced call runs, which takes longer to read; without it `rounds`.
    [[layers]]: name; tokens, a list; layer, a table with the fields of `MoEConfig`; and maybe
        activations, each of which makes a layer. Without a max_tokens it is the largest token
        count; calls of more tokens have pieces.
    [[lists]]: name, experts, top_k, and tokens, a list: whose index lists are built; and maybe
        call_tokens, of a call of moeos at most.
A suite of slices (`launch/evaluate tensor`):
    trace_rounds; hidden, experts, top_k: of all layers.
    tokens: a list.
    slices: I of a rank, a list: layers of one rank, without a reduction.
    staged: of these, the one whose stages are noted, too.
    reduced: I of a rank of the layer that all ranks have in slices.
Must not depend on devices, ranks or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from moeos.cli.shared.routing import LARGEST_EXPONENT
from moeos.config.config import MoEConfig
from moeos.system.files import read_toml

LEAST_ROUNDS = 3
"""Quartiles need this many rounds."""
GATE = "gate"
"""The routing of a case in which the layer routes by its own gate."""

_ROUNDS = {"rounds": int, "warm_up_rounds": int}
_INHERITED = {"tokens": list, "zipf_exponent": float, "zipf_tokens": list, "lone_token": bool}
_OF_SHAPES = {**_ROUNDS, "full_ranks": int, "few_tokens": int, "shapes": list, **_INHERITED}
_SHAPE = {"name": str, "config": str, "layer": dict, **_INHERITED}
_OF_TRAINING = {**_ROUNDS, "trace_rounds": int, "layers": list, "lists": list}
_LAYER = {"name": str, "tokens": list, "layer": dict, "activations": list}
_LISTS = {"name": str, "tokens": list, "experts": int, "top_k": int, "call_tokens": int}
_OF_SLICES = {
    **{**_ROUNDS, "trace_rounds": int, "hidden": int, "experts": int, "top_k": int},
    **{"tokens": list, "slices": list, "staged": int, "reduced": int},
}

Suite = TypeVar("Suite")


def require_even(cfg: MoEConfig, ranks: int) -> None:
    """Raises `ValueError` where ranks would hold unequal numbers of experts, which the all-to-all
    that moeos is compared with does not do.
    """
    if cfg.experts % ranks != 0:
        raise ValueError(
            f"experts is {cfg.experts} and cannot be divided equally among {ranks} ranks, as the "
            f"all-to-all layer needs; start a number of ranks that divides {cfg.experts}"
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that is measured.

    Attributes:
        tokens: of each rank.
        lone: only rank 0 has them, the others have none.
        routing: `GATE`, or a pattern of `moeos.cli.shared.routing`, such as "zipf:1.2".
    """

    tokens: int
    lone: bool = False
    routing: str = GATE

    def tokens_of(self, rank: int) -> int:
        """S of one rank."""
        return 0 if self.lone and rank > 0 else self.tokens


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer and the calls of it that are measured; `cfg` is that of the full deployment."""

    name: str
    cfg: MoEConfig
    calls: tuple[Call, ...]

    def config_on(self, ranks: int, full_ranks: int) -> MoEConfig:
        """The layer on `ranks` ranks, with as many experts on each as in the full deployment.

        So with fewer ranks than `full_ranks` it has fewer experts, and as many rows for each.

        Raises `ValueError` where ranks would hold unequal numbers.
        """
        if ranks >= full_ranks:
            require_even(self.cfg, ranks)
            return self.cfg
        local = self.cfg.experts_per_rank(full_ranks)
        return dataclasses.replace(self.cfg, experts=local * ranks)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A suite of shapes; its name is the file's, without the ending."""

    name: str
    rounds: int
    warm_up_rounds: int
    full_ranks: int
    few_tokens: int
    shapes: tuple[Shape, ...]

    def layers_of(self, shape: Shape, ranks: int) -> dict[MoEConfig, tuple[Call, ...]]:
        """The layers that a shape is measured with on `ranks` ranks, and the calls of each.

        Raises `ValueError` as `Shape.config_on` does.
        """
        cfg = shape.config_on(ranks, self.full_ranks)
        if not 0 < self.few_tokens < cfg.max_tokens:
            return {cfg: shape.calls}
        few = dataclasses.replace(cfg, max_tokens=self.few_tokens)
        found: dict[MoEConfig, list[Call]] = {few: [], cfg: []}
        for call in shape.calls:
            found[few if call.tokens <= self.few_tokens else cfg].append(call)
        return {layer: tuple(calls) for layer, calls in found.items() if calls}

    def only(self, shapes: Collection[str], tokens: Collection[int]) -> Shapes:
        """The suite with the named shapes and token counts alone; an empty collection names all.

        A shape keeps its max_tokens, so it is the same layer.

        Raises `ValueError` for a shape or a token count that the suite does not have.
        """
        names = {shape.name for shape in self.shapes}
        counts = {call.tokens for shape in self.shapes for call in shape.calls}
        _require_known("--shapes", shapes, names)
        _require_known("--tokens", tokens, counts)
        kept = []
        for shape in self.shapes:
            calls = tuple(call for call in shape.calls if not tokens or call.tokens in tokens)
            if calls and (not shapes or shape.name in shapes):
                kept.append(dataclasses.replace(shape, calls=calls))
        if not kept:
            raise ValueError("--shapes and --tokens leave nothing of the suite")
        return dataclasses.replace(self, shapes=tuple(kept))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that is trained, and the token counts with which it is measured."""

    name: str
    cfg: MoEConfig
    tokens: tuple[int, ...]

    def of(self, dtype: torch.dtype) -> Layer:
        """The layer, computing in another dtype."""
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
class Training:
    """A suite of training; its name is the file's."""

    name: str
    rounds: int
    warm_up_rounds: int
    trace_rounds: int
    layers: tuple[Layer, ...]
    lists: tuple[Lists, ...]

    def only(self, names: Collection[str]) -> Training:
        """The suite with what has one of these names alone; without names, all of it.

        Raises `ValueError` for a name that is not there.
        """
        known = {one.name for one in self.layers} | {one.name for one in self.lists}
        _require_known("--names", names, known)
        if not names:
            return self
        return dataclasses.replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.name in names),
            lists=tuple(lists for lists in self.lists if lists.name in names),
        )


@dataclasses.dataclass(frozen=True)
class Slices:
    """A suite of slices."""

    rounds: int
    warm_up_rounds: int
    trace_rounds: int
    hidden: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    slices: tuple[int, ...]
    staged: int
    reduced: int

    def config(self, intermediate: int, dtype: torch.dtype) -> MoEConfig:
        """A layer with this intermediate size."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=intermediate,
            experts=self.experts,
            top_k=self.top_k,
            max_tokens=max(self.tokens),
            dtype=dtype,
        )


def shapes(path: Path) -> Shapes:
    """The suite of shapes in a file. Raises as `_read` does."""
    return _read(path, _shapes)


def training(path: Path) -> Training:
    """The suite of training in a file. Raises as `_read` does."""
    return _read(path, _training)


def slices(path: Path) -> Slices:
    """The suite of slices in a file. Raises as `_read` does."""
    return _read(path, _slices)


def _read(path: Path, suite_of: Callable[[Path, Mapping[str, Any]], Suite]) -> Suite:
    """What a file says.

    Raises:
        OSError: the file, or a layer's, cannot be read.
        ValueError, TypeError: it is not as the head of this module says.
    """
    values = read_toml(path)
    try:
        return suite_of(path, values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _shapes(path: Path, values: Mapping[str, Any]) -> Shapes:
    _require_keys(values, _OF_SHAPES, ("rounds", "full_ranks", "shapes"), "a suite")
    given = {"warm_up_rounds": 0, "few_tokens": 0, **values}
    _require_least(given, rounds=LEAST_ROUNDS, warm_up_rounds=0, full_ranks=1, few_tokens=0)
    common = {key: values[key] for key in _INHERITED if key in values}
    found = []
    for entry in values["shapes"]:
        if not isinstance(entry, dict):
            raise TypeError(f"shapes has {entry!r}; each must be a table, [[shapes]]")
        found.append(_shape({**common, **entry}, path.parent))
    names = [shape.name for shape in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"shapes are {names}; there must be some, with different names")
    numbers = {key: given[key] for key in ("rounds", "warm_up_rounds", "full_ranks", "few_tokens")}
    return Shapes(name=path.stem, shapes=tuple(found), **numbers)


def _shape(values: Mapping[str, Any], folder: Path) -> Shape:
    _require_keys(values, _SHAPE, (), "a shape")
    if "name" not in values or ("config" in values) == ("layer" in values):
        raise ValueError(f"a shape has {sorted(values)}; it needs a name, and a config or a layer")
    tokens = _counts("tokens", values.get("tokens", []), 0)
    zipf_tokens = _counts("zipf_tokens", values.get("zipf_tokens", []), 0)
    if not tokens:
        raise ValueError(f"the shape {values['name']} has no tokens")
    calls = [Call(count) for count in tokens]
    if values.get("lone_token", False):
        calls.insert(0, Call(1, lone=True))
    if zipf_tokens and "zipf_exponent" not in values:
        raise ValueError("zipf_tokens needs a zipf_exponent")
    exponent = values.get("zipf_exponent", 1.0)
    if not 0 < exponent <= LARGEST_EXPONENT:
        raise ValueError(f"zipf_exponent is {exponent}; allowed: above 0, to {LARGEST_EXPONENT:g}")
    calls += [Call(count, routing=f"zipf:{exponent:g}") for count in zipf_tokens]
    if "config" in values:
        cfg = MoEConfig.from_toml(folder / values["config"])
    else:
        cfg = MoEConfig.from_table(values["layer"])
    most = max(1, *(call.tokens for call in calls))
    return Shape(values["name"], dataclasses.replace(cfg, max_tokens=most), tuple(calls))


def _training(path: Path, values: Mapping[str, Any]) -> Training:
    _require_keys(values, _OF_TRAINING, _ROUNDS, "a suite")
    given = {"trace_rounds": values["rounds"], **values}
    _require_least(given, rounds=LEAST_ROUNDS, warm_up_rounds=1, trace_rounds=LEAST_ROUNDS)
    layers = tuple(layer for entry in values.get("layers", []) for layer in _layers(entry))
    lists = tuple(_lists(entry) for entry in values.get("lists", []))
    if not layers and not lists:
        raise ValueError("a suite needs layers or lists, and this one has neither")
    rounds = {key: given[key] for key in ("rounds", "warm_up_rounds", "trace_rounds")}
    return Training(name=path.stem, layers=layers, lists=lists, **rounds)


def _layers(entry: Any) -> list[Layer]:
    _require_keys(entry, _LAYER, ("name", "tokens", "layer"), "layers")
    tokens = _counts("tokens", entry["tokens"])
    table = {"max_tokens": max(tokens), **entry["layer"]}
    made = [{"activation": one} for one in entry.get("activations", [])] or [{}]
    return [Layer(entry["name"], MoEConfig.from_table(table | one), tokens) for one in made]


def _lists(entry: Any) -> Lists:
    _require_keys(entry, _LISTS, set(_LISTS) - {"call_tokens"}, "lists")
    experts, top_k = entry["experts"], entry["top_k"]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; of {experts} experts it must be 1 to {experts}")
    tokens = _counts("tokens", entry["tokens"])
    [most] = _counts("call_tokens", [entry.get("call_tokens", max(tokens))])
    return Lists(entry["name"], experts, top_k, tokens, most)


def _slices(path: Path, values: Mapping[str, Any]) -> Slices:
    _require_keys(values, _OF_SLICES, _OF_SLICES, "a suite")
    least = dict.fromkeys((key for key, kind in _OF_SLICES.items() if kind is int), 1)
    _require_least(values, **least | {"rounds": LEAST_ROUNDS, "trace_rounds": LEAST_ROUNDS})
    lists = {key: _counts(key, values[key]) for key in ("tokens", "slices")}
    suite = Slices(**{**values, **lists})
    if suite.staged not in suite.slices:
        raise ValueError(
            f"staged is {suite.staged}; it must be one of slices, {list(suite.slices)}"
        )
    return suite


def _require_keys(
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


def _require_least(values: Mapping[str, Any], **least: int) -> None:
    for name, at_least in least.items():
        if values[name] < at_least:
            raise ValueError(f"{name} is {values[name]}; it must be at least {at_least}")


def _require_known(option: str, wanted: Collection[Any], known: Collection[Any]) -> None:
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        have = ", ".join(map(str, sorted(known)))
        raise ValueError(f"{option} has {unknown[0]!r}; the suite has {have}")


def _counts(name: str, values: Collection[object], least: int = 1) -> tuple[int, ...]:
    """Numbers of tokens, each at least `least`; with a least above 0 there must be one."""
    found = [v for v in values if type(v) is int and v >= least]
    if len(found) < len(values) or sorted(set(found)) != found or (least > 0 and not found):
        raise ValueError(f"{name} is {values}; it must be token counts in ascending order")
    return tuple(found)
