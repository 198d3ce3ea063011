# SPDX-License-Identifier: Apache-2.0
"""What one run of the study of tensor parallelism measures, from TOML.

A suite's file has these keys:
    rounds, warm_up_rounds: how often each contestant runs, timed and before that.
    trace_rounds: how often a traced call does.
    hidden, experts, top_k: of all layers.
    tokens: a list, with a least one that layout="gathered" takes.
    slices: I of a rank, a list: layers of one rank, without a reduction.
    staged: of these, the one whose stages are noted, too.
    reduced: I of a rank of the layer that all ranks have in slices.
It knows nothing of devices or how anything is measured.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from moeos.config import MoEConfig
from moeos.files import read_toml

_LEAST_ROUNDS = 3  # for quartiles


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

    def config(self, intermediate: int, dtype: torch.dtype, most: int | None = None) -> MoEConfig:
        """A layer of so many values between its products, for up to `most` tokens."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=intermediate,
            experts=self.experts,
            top_k=self.top_k,
            max_tokens=max(self.tokens) if most is None else most,
            dtype=dtype,
        )


def read(path: Path) -> Suite:
    """The suite in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as the head of this module says.
    """
    values = read_toml(path)
    known = {field.name: str(field.type) for field in dataclasses.fields(Suite)}
    del known["name"]
    wrong = sorted(values.keys() ^ known.keys())
    if wrong:
        what = "missing" if wrong[0] in known else "not a key of a suite"
        raise ValueError(f"{path}: {wrong[0]} is {what}; a suite has {', '.join(known)}")
    made: dict[str, Any] = {}
    for name, kind in known.items():
        value = values[name]
        least = _LEAST_ROUNDS if name in ("rounds", "trace_rounds") else 1
        many = value if isinstance(value, list) and kind != "int" else [value]
        if not many or not all(type(one) is int and one >= least for one in many):
            what = "an integer" if kind == "int" else "a list of integers"
            raise ValueError(f"{path}: {name} is {value!r}; it must be {what} from {least} on")
        made[name] = value if kind == "int" else tuple(many)
    suite = Suite(name=path.stem, **made)
    if suite.staged not in suite.slices:
        raise ValueError(
            f"{path}: staged is {suite.staged}; it must be one of slices, {list(suite.slices)}"
        )
    return suite
