# SPDX-License-Identifier: Apache-2.0
"""What one run of the study of tensor parallelism measures, from TOML.

A suite's file has these keys:
    rounds, warm_up_rounds: how often each contestant runs, timed and before that.
    trace_rounds: how often a traced call does.
    hidden, experts, top_k: of all layers.
    tokens: a list.
    slices: I of a rank, a list: layers of one rank, without a reduction.
    staged: of these, the one whose stages are noted, too.
    reduced: I of a rank of the layer that all ranks have in slices.
It knows nothing of devices or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench import suites
from bench.suites import LEAST_ROUNDS
from moeos.config.config import MoEConfig
from moeos.system.files import read_toml

_SUITE = {
    **{"rounds": int, "warm_up_rounds": int, "trace_rounds": int},
    **{"hidden": int, "experts": int, "top_k": int, "tokens": list, "slices": list},
    **{"staged": int, "reduced": int},
}


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a suite's file says; `name` is the file's."""

    name: str
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
        """A layer of so many values between its products."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=intermediate,
            experts=self.experts,
            top_k=self.top_k,
            max_tokens=max(self.tokens),
            dtype=dtype,
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
    suites.require_keys(values, _SUITE, _SUITE, "a suite")
    numbers = {key: value for key, value in values.items() if _SUITE[key] is int}
    rounds = {"rounds": LEAST_ROUNDS, "trace_rounds": LEAST_ROUNDS}
    suites.require_least(numbers, dict.fromkeys(numbers, 1) | rounds)
    lists = {key: suites.some_counts(key, values[key]) for key in ("tokens", "slices")}
    suite = Suite(name=name, **{**values, **lists})
    if suite.staged not in suite.slices:
        raise ValueError(
            f"staged is {suite.staged}; it must be one of slices, {list(suite.slices)}"
        )
    return suite
