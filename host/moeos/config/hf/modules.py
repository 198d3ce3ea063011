# SPDX-License-Identifier: Apache-2.0
"""The names of a model's expert matrices, and the rules by which a `quantization_config` selects
some of them.

Must not depend on formats or tensors: it knows the names of a family's modules.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moeos.config.hf.families import Family


class Matrix(NamedTuple):
    """A matrix of an expert. Files and transformers' modules may call it differently, so that each
    has several names.

    Attributes:
        own: its module's names.
        around: those of the module that is all routed experts; none of a shared one.
    """

    own: tuple[str, ...]
    around: tuple[str, ...] = ()


Rule = Callable[[Matrix], bool]
"""Whether a matrix is selected."""

_WITHIN = ("model.language_model.", "language_model.model.", "model.")
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_LINEAR = ("Linear", "Module")
"""The classes of a matrix' module, as compressed-tensors compares them."""


class Modules(NamedTuple):
    """The matrices of one layer's experts.

    Attributes:
        layer: its number.
        experts: of the routed ones, one expert after the other.
        shared: of the shared ones.
    """

    layer: int
    experts: Sequence[Matrix]
    shared: Sequence[Matrix]


def of_layer(family: Family, layer: int, experts: Iterable[int], *, within: bool) -> Modules:
    """The matrices of a layer. `within`: the model has other inputs in addition to text."""
    stems = dict.fromkeys((*_WITHIN, *family.stems) if within else family.stems)
    before = [f"{stem}layers.{layer}." for stem in stems]
    blocks = [f"{begin}{block}." if block else begin for begin in before for block in family.blocks]
    row = next((row for row in family.layouts if not row.stacked), family.layouts[0])
    around = tuple(f"{block}experts" for block in blocks)
    routed = [
        Matrix(tuple(block + _module_of(name).format(expert) for block in blocks), around)
        for expert in ((0,) if row.stacked else experts)
        for name in row.matrices
    ]
    shared = None if family.shared is None else family.shared.layouts[0]
    begins = before if shared is not None and shared.beside else blocks
    others = [
        Matrix(tuple(begin + _module_of(name) for begin in begins))
        for name in (() if shared is None else shared.matrices)
    ]
    return Modules(layer, routed, others)


def _module_of(matrix: str) -> str:
    return matrix.removesuffix(".weight")


def by_prefix(field: str, entries: Sequence[str]) -> Rule:
    """The rule of transformers' `should_convert_module`: an entry is a regular expression that
    matches a name from its start to the end of one of its parts, or the end of a name.
    """
    plain = {entry for entry in entries if _PLAIN.fullmatch(entry)}
    others = [entry for entry in entries if entry not in plain]
    patterns = [_compiled(field, entry, rf"(?:{entry}){_BOUNDARY}") for entry in others]

    def means(name: str) -> bool:
        # A plain entry is looked up, as there may be one for each of thousands of matrices.
        begins = (name[:at] for at, letter in enumerate(name) if letter == ".")
        return (
            any(begin in plain for begin in begins)
            or any(name[at:] in plain for at in range(len(name)))
            or any(pattern.match(name) for pattern in patterns)
            or any(name.endswith(entry) for entry in others)
        )

    return _any(means)


def by_target(field: str, entries: Sequence[str]) -> Rule:
    """The rule of compressed-tensors' `is_match`: an entry is a whole name, a regular expression
    after "re:", or the class of a matrix' module.
    """
    best = best_target(field, entries)
    return lambda matrix: best(matrix) is not None


def best_target(field: str, entries: Sequence[str]) -> Callable[[Matrix], str | None]:
    """The target that compressed-tensors takes where several mean a matrix: a whole name before a
    regular expression, and that before a class.
    """
    whole = {entry for entry in entries if not entry.startswith("re:")}
    patterns = [
        (entry, _compiled(field, entry, entry.removeprefix("re:")))
        for entry in sorted(set(entries) - whole)
    ]
    linear = next((name for name in _LINEAR if name in whole), None)

    def best(matrix: Matrix) -> str | None:
        named = next((name for name in matrix.own if name in whole), None)
        matched = (entry for entry, one in patterns if any(map(one.match, matrix.own)))
        return named or next(matched, linear)

    return best


def by_glob(field: str, entries: Sequence[str]) -> Rule:
    """The rule of modelopt's exclusions: an entry is a pattern of `fnmatch`, or a whole module."""
    whole = {entry for entry in entries if not set(entry) & set("*?[")}
    globs = [re.compile(fnmatch.translate(entry)) for entry in entries if entry not in whole]

    def means(name: str) -> bool:
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return any(one in whole for one in around) or any(one.match(name) for one in globs)

    return _any(means)


def _any(means: Callable[[str], bool]) -> Rule:
    return lambda matrix: any(means(name) for name in (*matrix.own, *matrix.around))


def _compiled(field: str, entry: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{field} has {entry!r}, which is no regular expression: {error}"
        ) from None


def entries_of(field: str, found: object) -> Sequence[str]:
    """A list of strings; none where it is null."""
    if found is None:
        return ()
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
        raise TypeError(f"{field} is {found!r}; it must be a list of strings")
    return found
