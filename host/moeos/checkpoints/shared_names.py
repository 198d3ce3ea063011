# SPDX-License-Identifier: Apache-2.0
"""Finds a block's shared experts by the names of their tensors.

Like `names.py` this file must not depend on tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moeos.checkpoints import stored_matrices
from moeos.checkpoints.stored_matrices import StoredFormat
from moeos.config.config import MoEConfig
from moeos.config.hf import layouts
from moeos.config.hf.families import FAMILIES
from moeos.config.hf.layouts import SharedLayout


class SharedNames(NamedTuple):
    """How a block's shared experts are stored.

    Attributes:
        layout: the row of the table.
        formats: of each of the layout's matrices.
        prefix: what stands before their names.
    """

    layout: SharedLayout
    formats: Mapping[str, StoredFormat]
    prefix: str

    def names(self, cfg: MoEConfig) -> list[str]:
        """The names that may exist after the prefix."""
        gate = [self.layout.gate] if cfg.shared_gate and self.layout.gate is not None else []
        return [*stored_matrices.parts_of(self.layout.matrices, self.layout.formats), *gate]


def find(cfg: MoEConfig, every: Sequence[str], prefix: str) -> SharedNames:
    """The row that lacks the fewest matrices, of a layer that has shared experts.

    Raises `ValueError` where no row has any, and for parts that are no format.
    """
    rows = [row for row in _candidates(cfg) if row.gated == cfg.gated]
    if not rows:
        raise ValueError(
            f"shared_experts is {cfg.shared_experts}, and blocks of family {cfg.family!r} have "
            f"none that activation {cfg.activation!r} fits: set shared_experts=0"
        )
    names = set(every)
    best = min(rows, key=lambda row: len(_missing(row, names, prefix)))
    if len(_missing(best, names, prefix)) == len(best.matrices):
        raise ValueError(
            f"shared_experts is {cfg.shared_experts}, and there is no shared expert such as "
            f"{_before(rows[0], prefix)}{rows[0].second}: set shared_experts=0, or pass "
            "shared=False to MoEConfig.from_hf, if you add them yourself"
        )
    before = _before(best, prefix)
    found: dict[str, StoredFormat] = {}
    for matrix, parts in _there(best, names, prefix).items():
        found[matrix] = stored_matrices.PLAIN  # the loader says that it is missing
        if parts:
            shown = before + stored_matrices.part_name(matrix, parts[0])
            found[matrix] = stored_matrices.require_format(shown, parts, best.formats)
    return SharedNames(best, found, before)


def require_not_ignored(cfg: MoEConfig, name: str, is_ignored: bool, ignore: Sequence[str]) -> None:
    """Raises `ValueError` for a tensor of the shared experts that the caller wants ignored."""
    if is_ignored:
        raise ValueError(
            f"ignore is {[*ignore]} and {name} is the layer's, whose shared_experts is "
            f"{cfg.shared_experts}: leave it out of ignore, or set shared_experts=0 "
            "(MoEConfig.from_hf: shared=False) and add shared experts yourself"
        )


def why_unused(cfg: MoEConfig, name: str) -> str:
    """Why a config leaves a tensor unused that may be of shared experts; "" if it does not."""
    rows = layouts.SHARED
    if cfg.shared_experts == 0 and any(
        name in stored_matrices.parts_of(row.matrices, row.formats) for row in rows
    ):
        return ", whose shared_experts is 0"
    if not cfg.shared_gate and name in {row.gate for row in rows}:
        return ", whose shared_gate is False"
    return ""


def _candidates(cfg: MoEConfig) -> Sequence[SharedLayout]:
    if cfg.family is None:
        return layouts.SHARED
    shared = FAMILIES[cfg.family].shared
    return () if shared is None else shared.layouts


def _before(row: SharedLayout, prefix: str) -> str:
    """The prefix of a row's names: a block's prefix, or that of the module around it."""
    if not row.beside:
        return prefix
    around = prefix.removesuffix(".").rpartition(".")[0]
    return f"{around}." if around else ""


def _there(row: SharedLayout, names: set[str], prefix: str) -> dict[str, list[str]]:
    """The parts of each of a row's matrices that are there."""
    before = _before(row, prefix)
    there: dict[str, list[str]] = {matrix: [] for matrix in row.matrices}
    for name, (matrix, part) in stored_matrices.parts_of(row.matrices, row.formats).items():
        if before + name in names:
            there[matrix].append(part)
    return there


def _missing(row: SharedLayout, names: set[str], prefix: str) -> list[str]:
    return [matrix for matrix, parts in _there(row, names, prefix).items() if not parts]
