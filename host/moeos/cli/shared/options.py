# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: which world they make, and how its ranks divide the work. A
layer's errors about these arguments are reworded for options.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from moeos.partition.policies import LAYOUTS, REDUCES
from moeos.partition.slicing import PARALLELS
from moeos.world.bootstrap import BACKENDS

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
        help="Number of ranks with slices of the same experts; it divides the ranks; default: all.",
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

_NAMES = "parallel|tensor_ranks|layout|reduce"
_VALUES = "|".join(map(re.escape, sorted({*PARALLELS, *LAYOUTS, *REDUCES})))
_SPOKEN = (
    (re.compile(rf"(?<!-)\b({_NAMES})='?(\w+)'?"), "--{} {}"),
    (re.compile(rf"(?<!-)\b({_NAMES}) is '?([^';]+)'?(?=[;:,]| and |$)"), "--{} is {}"),
    (re.compile(r"(?<!-)\b(layout|reduce)( says)\b"), "--{}{}"),
    (re.compile(r"(?<!-)\b(tensor_ranks)()\b"), "--{}{}"),
    (re.compile(rf"()'({_VALUES})'"), "{}{}"),
)
"""How a layer's errors name its arguments, by a name and what follows, and the options for them."""


def spoken(sentence: str) -> str:
    """The sentence with options of a command line in place of arguments of a layer."""
    for pattern, option in _SPOKEN:
        sentence = pattern.sub(
            lambda found, option=option: option.format(  # type: ignore[misc]
                found[1].replace("_", "-"), found[2]
            ),
            sentence,
        )
    return re.sub(r"\b([Pp])ass (?=--)", lambda found: f"{'gG'[found[1] == 'P']}ive ", sentence)
