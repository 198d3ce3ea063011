# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: which world they make, what its ranks share out, and how."""

from __future__ import annotations

from typing import Annotated

import typer

from moeos.bootstrap import BACKENDS
from moeos.policies import LAYOUTS, REDUCES
from moeos.slicing import PARALLELS

Backend = Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}.")]
ParallelOption = Annotated[
    str,
    typer.Option(
        "--parallel",
        help=f"What ranks share out, whole experts or slices of each: {', '.join(PARALLELS)}.",
    ),
]
TensorRanks = Annotated[
    int | None,
    typer.Option(
        "--tensor-ranks",
        help="Of the ranks, those with slices of the same experts, which divides them; else all.",
    ),
]
LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        help="With --parallel expert or tensor, where products read a rank's own rows: "
        + ", ".join(LAYOUTS)
        + ".",
    ),
]
ReduceOption = Annotated[
    str,
    typer.Option(
        "--reduce",
        help="With --parallel tensor, who adds up partial sums: " + ", ".join(REDUCES) + ".",
    ),
]
Deadline = Annotated[float, typer.Option(help="Seconds after which a wait for another rank fails.")]
VirtualRanks = Annotated[
    int | None, typer.Option(help="Ranks of this one process, on its cores or its GPU.")
]
