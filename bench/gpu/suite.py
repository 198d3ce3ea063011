# SPDX-License-Identifier: Apache-2.0
"""Suites: the layers, token counts and routings that one run of a benchmark measures, from TOML.

A suite's file has these keys:
    rounds, warm_up_rounds: how often each contestant runs, timed and before that.
    full_ranks: of the deployment that the layers belong to; see `Shape.config_on`.
    tokens: per rank; a shape may have its own.
    zipf_exponent, zipf_tokens: token counts that are also measured with Zipf's law over the
        experts instead of the gate; a shape may have its own.
    lone_token: also one token on rank 0 and none on the others; a shape may have its own.
    few_tokens: cases of up to so many have a layer of their own, made for so many, as a program
        that decodes has. Without it a shape has one layer.
    [[shapes]]: name, and either config (a layer's TOML file, relative to the suite) or layer (a
        table with the fields of `MoEConfig`); its max_tokens is the shape's largest token count.
It knows nothing of devices, ranks or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench import suites
from bench.suites import LEAST_ROUNDS
from moeos.cli.shared.routing import LARGEST_EXPONENT
from moeos.config.config import MoEConfig
from moeos.system.files import read_toml

GATE = "gate"
"""The routing of a case in which the layer routes by its own gate."""

_INHERITED = {"tokens": list, "zipf_exponent": float, "zipf_tokens": list, "lone_token": bool}
_OWN = {
    **{"rounds": int, "warm_up_rounds": int, "full_ranks": int, "few_tokens": int},
    "shapes": list,
}
_SHAPE = {"name": str, "config": str, "layer": dict}


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
class Case:
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
    cases: tuple[Case, ...]

    def config_on(self, ranks: int, full_ranks: int) -> MoEConfig:
        """The layer on so many ranks, with as many experts on each as in the full deployment.

        So with fewer ranks than `full_ranks` it has fewer experts, and as many rows for each.

        Raises `ValueError` where ranks would hold unequal numbers.
        """
        if ranks >= full_ranks:
            require_even(self.cfg, ranks)
            return self.cfg
        local = self.cfg.experts_per_rank(full_ranks)
        return dataclasses.replace(self.cfg, experts=local * ranks)


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a suite's file says; its name is the file's, without the ending."""

    name: str
    rounds: int
    warm_up_rounds: int
    full_ranks: int
    few_tokens: int
    shapes: tuple[Shape, ...]

    def layers_of(self, shape: Shape, ranks: int) -> dict[MoEConfig, tuple[Case, ...]]:
        """The layers that a shape is measured with on so many ranks, and the cases of each.

        Raises `ValueError` as `Shape.config_on` does.
        """
        cfg = shape.config_on(ranks, self.full_ranks)
        if not 0 < self.few_tokens < cfg.max_tokens:
            return {cfg: shape.cases}
        few = dataclasses.replace(cfg, max_tokens=self.few_tokens)
        found: dict[MoEConfig, list[Case]] = {few: [], cfg: []}
        for case in shape.cases:
            found[few if case.tokens <= self.few_tokens else cfg].append(case)
        return {layer: tuple(cases) for layer, cases in found.items() if cases}

    def only(self, shapes: Collection[str], tokens: Collection[int]) -> Suite:
        """The same with the named shapes and token counts alone; an empty collection names all.

        A shape keeps its max_tokens, so it is the same layer.

        Raises `ValueError` for a shape or a token count that the suite does not have.
        """
        names = {shape.name for shape in self.shapes}
        counts = {case.tokens for shape in self.shapes for case in shape.cases}
        for what, wanted, known in (("shapes", shapes, names), ("tokens", tokens, counts)):
            unknown = set(wanted) - set(known)
            if unknown:
                have = ", ".join(map(str, sorted(known)))
                raise ValueError(f"--{what} has {unknown.pop()!r}; the suite has {have}")
        kept = []
        for shape in self.shapes:
            cases = tuple(case for case in shape.cases if not tokens or case.tokens in tokens)
            if cases and (not shapes or shape.name in shapes):
                kept.append(dataclasses.replace(shape, cases=cases))
        if not kept:
            raise ValueError("--shapes and --tokens leave nothing of the suite")
        return dataclasses.replace(self, shapes=tuple(kept))


def token_counts(text: str) -> tuple[int, ...]:
    """The numbers of an option --tokens.

    Raises `ValueError` for anything else.
    """
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise ValueError(f"--tokens is {text!r}; it must be numbers, comma between") from None


def read(path: Path) -> Suite:
    """The suite in a file.

    Raises:
        OSError: the file, or a layer's, cannot be read.
        ValueError, TypeError: it is not as the head of this module says.
    """
    values = read_toml(path)
    try:
        return _suite(values, path)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _suite(values: Mapping[str, Any], path: Path) -> Suite:
    suites.require_keys(values, _OWN | _INHERITED, ("rounds", "full_ranks", "shapes"), "a suite")
    numbers = {"warm_up_rounds": 0, "few_tokens": 0, **values}
    least = {"rounds": LEAST_ROUNDS, "warm_up_rounds": 0, "full_ranks": 1, "few_tokens": 0}
    suites.require_least(numbers, least)
    common = {key: values[key] for key in _INHERITED if key in values}
    for entry in values["shapes"]:
        if not isinstance(entry, dict):
            raise TypeError(f"shapes has {entry!r}; each must be a table, [[shapes]]")
    shapes = tuple(_shape({**common, **entry}, path.parent) for entry in values["shapes"])
    names = [shape.name for shape in shapes]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"shapes are {names}; there must be some, with different names")
    return Suite(
        path.stem,
        numbers["rounds"],
        numbers["warm_up_rounds"],
        numbers["full_ranks"],
        numbers["few_tokens"],
        shapes,
    )


def _shape(values: Mapping[str, Any], folder: Path) -> Shape:
    suites.require_keys(values, _SHAPE | _INHERITED, (), "a shape")
    if "name" not in values or ("config" in values) == ("layer" in values):
        raise ValueError(f"a shape has {sorted(values)}; it needs a name, and a config or a layer")
    tokens = suites.counts("tokens", values.get("tokens", []), 0)
    zipf_tokens = suites.counts("zipf_tokens", values.get("zipf_tokens", []), 0)
    if not tokens:
        raise ValueError(f"the shape {values['name']} has no tokens")
    cases = [Case(count) for count in tokens]
    if values.get("lone_token", False):
        cases.insert(0, Case(1, lone=True))
    if zipf_tokens and "zipf_exponent" not in values:
        raise ValueError("zipf_tokens needs a zipf_exponent")
    exponent = values.get("zipf_exponent", 1.0)
    if not 0 < exponent <= LARGEST_EXPONENT:
        raise ValueError(f"zipf_exponent is {exponent}; allowed: above 0, to {LARGEST_EXPONENT:g}")
    cases += [Case(count, routing=f"zipf:{values['zipf_exponent']:g}") for count in zipf_tokens]
    cfg = dataclasses.replace(
        _layer(values, folder), max_tokens=max(1, max(case.tokens for case in cases))
    )
    return Shape(values["name"], cfg, tuple(cases))


def _layer(values: Mapping[str, Any], folder: Path) -> MoEConfig:
    if "config" in values:
        return MoEConfig.from_toml(folder / values["config"])
    return MoEConfig.from_table(values["layer"])
