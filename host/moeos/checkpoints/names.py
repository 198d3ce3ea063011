# SPDX-License-Identifier: Apache-2.0
"""Finds the layout of a block by the names of its tensors, and says what is wrong with them.

This file must not depend on tensors: no shape decides how a block is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from moeos.checkpoints import shared_names, stored_matrices
from moeos.checkpoints.shared_names import SharedNames
from moeos.checkpoints.stored_matrices import StoredFormat
from moeos.config.config import MoEConfig
from moeos.config.hf import layouts
from moeos.config.hf.families import FAMILIES
from moeos.config.hf.layouts import Layout

# As an expert's name is looked up: a number with a zero before it is of no expert.
_NUMBER = re.compile(r"(?<=^experts\.)(?:0|[1-9][0-9]{0,8})(?=\.)")
_NEAREST = 4


class Names(NamedTuple):
    """How a block is stored.

    Attributes:
        layout: the row of the table.
        formats: of each of the layout's matrices.
        selection_bias: its name below the prefix, or None.
        shared: how the shared experts are stored, of a layer that has some.
    """

    layout: Layout
    formats: Mapping[str, StoredFormat]
    selection_bias: str | None
    shared: SharedNames | None


class _Look(NamedTuple):
    """The names of a block that a layout uses; names are those below the prefix, with `{}` for an
    expert's number.
    """

    layout: Layout
    parts: Mapping[str, tuple[str, str]]
    """of a name: its matrix and what follows that"""
    unused: list[str]
    missing: list[str]
    """matrices and a router of which no part is there"""


def look_through(cfg: MoEConfig, names: Iterable[str], prefix: str, ignore: Sequence[str]) -> Names:
    """Raises unless each tensor under `prefix` is the layer's or to be ignored, and not both."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore is {ignore!r}; it must be a sequence of strings: [{ignore!r}]")
    if not isinstance(ignore, Collection) or not all(isinstance(name, str) for name in ignore):
        raise TypeError(f"ignore is {ignore!r}; it must be a sequence of strings, () for none")
    every = list(names)
    below: dict[str, list[str]] = {}
    for name in every:
        if not isinstance(name, str):
            raise TypeError(f"a name in the state_dict is {name!r}; it must be a string")
        if name.startswith(prefix):
            end = name[len(prefix) :]
            below.setdefault(_NUMBER.sub("{}", end), []).append(end)
    if _EXPERTS.isdisjoint(below):
        raise ValueError(_nothing_under(every, prefix))

    ignored = tuple(ignore)
    shared = shared_names.find(cfg, every, prefix) if cfg.shared_experts > 0 else None
    if shared is not None and shared.prefix == prefix:
        for name in shared.names(cfg):
            for end in below.pop(name, ()):
                shared_names.require_not_ignored(cfg, prefix + end, end.startswith(ignored), ignore)
    look = _best(cfg, below, ignored, prefix)
    layout = look.layout
    _require_known_experts(cfg, look, below, prefix)
    first = {name: ends[0] for name, ends in below.items()}
    # Nothing of a router is needed where the caller routes.
    needed = _own_names(layout) if cfg.routing != "caller" else set(layout.biases)
    for name in (*look.parts, *needed):
        for end in below.get(name, ()):
            if end.startswith(ignored):
                raise ValueError(
                    f"ignore is {list(ignore)} and {prefix}{end} is the layer's; it is needed"
                )
    if layout.gated != cfg.gated:
        works = "'swiglu'" if layout.gated else "one without a gate, such as 'relu2'"
        raise ValueError(f"activation is {cfg.activation!r}; these models need {works}")
    unused = [end for name in look.unused for end in below[name] if not end.startswith(ignored)]
    if unused and not look.missing:
        kept = {_NUMBER.sub("{}", end) for end in unused}
        others = [row.name for row in layouts.LAYOUTS if not kept.isdisjoint(_parts_of(row))]
        if others:
            raise ValueError(
                f"the experts under {prefix!r} are stored in 2 layouts at once ({layout.name}; "
                f"{others[0]}), {prefix}{unused[0]} among them; keep one"
            )
    if unused:
        raise ValueError(_not_used(unused, prefix, look, cfg))
    biases = [name for name in layout.selection_biases if name in first]
    if len(biases) > 1:
        both = " and ".join(prefix + name for name in biases)
        raise ValueError(f"{both} are both a selection bias; keep one")
    own = {name: end for name, end in first.items() if not end.startswith(ignored)}
    _require_allowed(cfg, layout, own, prefix)
    bias = biases[0] if biases else None
    return Names(layout, _formats_of(look, below, prefix), bias, shared)


def _require_known_experts(
    cfg: MoEConfig, look: _Look, below: Mapping[str, list[str]], prefix: str
) -> None:
    """Raises for a tensor of an expert that the config does not have."""
    for name, ends in below.items():
        # A file's tensors for experts that return x are skipped.
        padded = look.layout.zero_experts_padded and look.parts.get(name, ("",))[0] != (
            look.layout.second
        )
        experts = cfg.router_rows if padded else cfg.experts
        for end in ends:
            number = _NUMBER.search(end)
            if number is not None and int(number[0]) >= experts:
                raise ValueError(
                    f"{prefix}{end} is of an expert beyond the {cfg.experts} of this config"
                )


def no_selection_bias(prefix: str, layout: Layout, experts: int) -> str:
    """The error text for a missing selection bias that the config needs."""
    return (
        f"no selection bias is under {prefix!r}, such as {layout.selection_biases[0]!r}; this "
        f"config needs one with shape {[experts]}"
    )


def _best(
    cfg: MoEConfig, below: Mapping[str, list[str]], ignored: tuple[str, ...], prefix: str
) -> _Look:
    """The layout that uses all names and lacks none, or else the nearest one."""
    rows = _candidates(cfg)
    looks = [_look(layout, below, ignored) for layout in rows]
    least = min(len(look.missing) + len(look.unused) for look in looks)
    nearest = [look for look in looks if len(look.missing) + len(look.unused) == least]
    if least == 0:
        readings = {look.layout.reading: look.layout for look in nearest}
        if len(readings) > 1:
            said = " or ".join(sorted({row.name for row in readings.values()}))
            families = sorted(
                name
                for name, family in FAMILIES.items()
                if any(row.reading in readings for row in family.layouts)
            )
            raise ValueError(
                f"the names under {prefix!r} are those of several layouts ({said}), and shapes do "
                "not tell which: set the config's family to the model's, as "
                f"MoEConfig.from_hf does; it is one of {', '.join(families)}"
            )
    return nearest[0]


def _candidates(cfg: MoEConfig) -> tuple[Layout, ...]:
    if cfg.family is None:
        return layouts.LAYOUTS
    return FAMILIES[cfg.family].layouts


def _look(layout: Layout, below: Mapping[str, list[str]], ignored: tuple[str, ...]) -> _Look:
    used = _parts_of(layout)
    own = _own_names(layout)
    parts, unused = {}, []
    for name, ends in below.items():
        if name in used:
            parts[name] = used[name]
        elif name in own or not _in_scope(layout, name):
            continue
        # An expert's matrix cannot be ignored, so that it tells layouts apart.
        elif name in _EXPERTS or not all(end.startswith(ignored) for end in ends):
            unused.append(name)
    there = {matrix for matrix, _ in parts.values()}
    missing = [matrix for matrix in layout.matrices if matrix not in there]
    needed = (layout.router, layout.router_bias, layout.router_scale, layout.experts_norm)
    missing += [name for name in needed if name is not None and name not in below]
    return _Look(layout, parts, unused, missing)


def _in_scope(layout: Layout, name: str) -> bool:
    return not layout.scope or name.startswith(layout.scope)


def _parts_of(layout: Layout) -> dict[str, tuple[str, str]]:
    return stored_matrices.parts_of(layout.matrices, layout.formats)


def _own_names(layout: Layout) -> set[str]:
    """The names of a layout other than those of experts' matrices."""
    single = (layout.router, layout.router_bias, layout.expert_scale, layout.router_scale)
    names = (*single, layout.experts_norm, *layout.selection_biases, *layout.biases)
    return {name for name in names if name is not None}


_EXPERTS = {name for row in layouts.LAYOUTS for name in _parts_of(row)}
"""The names of all parts of an expert's matrices in any layout."""


def _formats_of(
    look: _Look, below: Mapping[str, Sequence[str]], prefix: str
) -> dict[str, StoredFormat]:
    found: dict[str, list[str]] = {matrix: [] for matrix in look.layout.matrices}
    for matrix, part in look.parts.values():
        found[matrix].append(part)
    rows = {}
    for matrix, parts in found.items():
        rows[matrix] = stored_matrices.BY_NAME["plain"]  # the loader says that it is missing
        if parts:
            allowed = look.layout.formats
            if stored_matrices.of_parts(parts, allowed) is None:
                _refuse_parts(matrix, parts, allowed, below, prefix)
            rows[matrix] = stored_matrices.require_format(matrix, parts, allowed)
    return rows


def _refuse_parts(
    matrix: str,
    parts: Sequence[str],
    allowed: Sequence[str],
    below: Mapping[str, Sequence[str]],
    prefix: str,
) -> None:
    """Raises for parts of a matrix that are no format, by the name of an expert that has the part
    that the fewest experts have.
    """

    def numbers(part: str) -> dict[str, str]:
        """Names of a part, by their expert's number."""
        ends = below[stored_matrices.part_name(matrix, part)]
        return {match[0] if (match := _NUMBER.search(end)) else "": end for end in ends}

    by_part = {part: numbers(part) for part in parts}
    rarest = min(by_part.values(), key=len)
    number = next(iter(rarest))
    own = [part for part in parts if number in by_part[part]]
    shown = prefix + by_part[own[0]][number]
    stored_matrices.require_format(shown, own, allowed)
    for other in [one for names in by_part.values() for one in names]:
        theirs = [part for part in parts if other in by_part[part]]
        if theirs != own:
            raise ValueError(
                f"{shown} has the parts {', '.join(sorted(own))}, and "
                f"{prefix}{by_part[theirs[0]][other]} has {', '.join(sorted(theirs))}: the "
                "matrices of all experts must have one format"
            )


def _require_allowed(cfg: MoEConfig, layout: Layout, first: Mapping[str, str], prefix: str) -> None:
    """Raises for a tensor that the layer does not have by its config."""
    flags = {
        "bias": layout.biases,
        "selection_bias": layout.selection_biases,
        "router_bias": (layout.router_bias,),
        "expert_scale": (layout.expert_scale,),
    }
    for flag, names in flags.items():
        there = next((name for name in names if name is not None and name in first), None)
        if there is None or getattr(cfg, flag):
            continue
        if cfg.routing == "caller" and flag != "bias":
            raise ValueError(
                f"{prefix}{first[there]} is not used by the layer, whose caller routes: pass "
                f"ignore=[{_ignorable(there)!r}]"
            )
        raise ValueError(f"{prefix}{first[there]} needs a config with {flag}=True")


def _not_used(unused: list[str], prefix: str, look: _Look, cfg: MoEConfig) -> str:
    """The error text for unused tensors: the first of them, and a remedy."""
    name = next((name for name in unused if name in look.layout.callers), unused[0])
    others = f", and {len(unused) - 1} more tensors under {prefix!r}," if len(unused) > 1 else ""
    if name in look.layout.callers:
        return f"{prefix}{name}{others} is not used by the layer: {look.layout.callers[name]}"
    part = name.split(".")[0]
    own = {row.split(".")[0] for row in (*look.layout.matrices, look.layout.router)}
    if part not in own and not look.missing:
        return (
            f"{prefix}{name}{others} is not used by the layer{shared_names.why_unused(cfg, name)}; "
            f"if it is computed elsewhere, pass ignore=[{_ignorable(name)!r}]"
        )
    known = {*look.missing, *_parts_of(look.layout), *_own_names(look.layout)}
    alike = difflib.get_close_matches(_NUMBER.sub("{}", name), known, n=_NEAREST, cutoff=0.0)
    missing = f", in which {', '.join(map(repr, look.missing))} is missing" if look.missing else ""
    of = f"family {cfg.family!r}" if cfg.family is not None else f"the layout {look.layout.name!r}"
    return (
        f"{prefix}{name}{others} is not understood in {of}{missing}; the nearest names are "
        f"{', '.join(map(repr, alike))}"
    )


def _ignorable(name: str) -> str:
    first, dot, _ = name.partition(".")
    return first + dot


def _nothing_under(names: Sequence[str], prefix: str) -> str:
    ends = sorted(_EXPERTS, key=len, reverse=True)
    patterns = "|".join(re.escape(end).replace(r"\{\}", r"\d+") for end in ends)
    expert = re.compile(rf"(|.*\.)(?:{patterns})")
    matches = (expert.fullmatch(name) for name in names)
    found = dict.fromkeys(match[1] for match in matches if match is not None)
    if not found:
        return f"prefix is {prefix!r}; no name in the state_dict is that of an expert's weight"
    nearest = difflib.get_close_matches(prefix, found, n=_NEAREST, cutoff=0.0)
    return (
        f"prefix is {prefix!r} and no expert's weight is under it; of the {len(found)} prefixes "
        f"that have some, the nearest are {', '.join(map(repr, nearest))}"
    )
