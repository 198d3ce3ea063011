# SPDX-License-Identifier: Apache-2.0
"""A call as a picture: time to the right, a line for each processor, tasks by colour, idle white.

A picture carries the digest of what it shows, so that it can be compared with a trace without being
drawn again. Drawing needs matplotlib.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from moeos.cli import drawing
from moeos.cli.timeline.call import (
    COMBINE,
    DISPATCH,
    PRODUCT0,
    PRODUCT1,
    REPLICATE,
    ROUTE,
    STAGES,
    CallTrace,
    kind_name,
)
from moeos.cli.timeline.summary import RankSummary, ranks_of

_COLOURS = {  # in the order in which they are drawn
    DISPATCH: "#ff7f0e",
    REPLICATE: "#e377c2",
    ROUTE: "#9467bd",
    PRODUCT0: "#1f77b4",
    PRODUCT1: "#2ca02c",
    COMBINE: "#d62728",
}
_WIDTH, _DOTS = 11.0, 150
_MARGINS = 1.1  # inches above and below
_LEAST_INCHES, _MOST_INCHES, _INCHES_A_LINE = 0.5, 4.0, 0.1  # of a rank
_MOST_HEIGHT = 100.0
_BAR_INCHES = 0.3  # of a rank of another layer
_BAR_COLOUR = "#8c564b"


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment that a picture shows in a rank's lines.

    Attributes:
        rank: in whose lines.
        at: ns of the call's clock.
        text: next to it.
    """

    rank: int
    at: float
    text: str


@dataclasses.dataclass(frozen=True)
class OtherCall:
    """This call of another layer, drawn as one bar for each rank below the others.

    Attributes:
        name: the other layer's.
        begins: of each rank, ns from the step's begin to its call.
        ends: of each rank, ns from the step's begin to its call's end.
    """

    name: str
    begins: Sequence[float]
    ends: Sequence[float]


def digest(call: CallTrace) -> str:
    """A hash of what a picture of this call shows."""
    shown = call.parts[["rank", "processor", "kind", "work_begin", "work_end"]]
    columns = [numpy.ascontiguousarray(shown[name]) for name in shown.dtype.names or ()]
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def draw(
    call: CallTrace,
    title: str,
    file: Path,
    marks: Sequence[Mark] = (),
    beside: OtherCall | None = None,
) -> None:
    """Draws the call into a PNG file.

    On the GPU couriers run at the same time as a processor's other tasks, and are drawn behind
    these. Times are in us, and in ms where the picture is a millisecond long or longer.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if the file cannot be written.
    """
    heights = [
        min(_MOST_INCHES, max(_LEAST_INCHES, trace.processors * _INCHES_A_LINE))
        for trace in call.ranks
    ]
    length = max(call.length, 1, *(mark.at for mark in marks), *(beside.ends if beside else ()))
    unit, name = (1e6, "ms") if length >= 1e6 else (1e3, "µs")
    if beside is not None:
        heights.append(max(_LEAST_INCHES, len(beside.ends) * _BAR_INCHES))
    figure = drawing.figure(_WIDTH, min(_MOST_HEIGHT, sum(heights) + _MARGINS))
    every = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for rank, summary in enumerate(ranks_of(call)):
        axes = every[rank, 0]
        _draw_rank(axes, call, rank, summary, unit)
        for mark in marks:
            if mark.rank == rank:
                _draw_mark(axes, mark, unit, length)
    if beside is not None:
        _draw_bars(every[-1, 0], beside, unit)
    every[0, 0].set_title(title, fontsize=10)
    every[-1, 0].set_xlabel(f"{name} since the first event")
    every[-1, 0].set_xlim(0, length / unit)
    handles, labels = every[0, 0].get_legend_handles_labels()
    by_name = dict(zip(labels, handles, strict=True))
    names = [kind_name(kind) for kind in STAGES if (call.parts["kind"] == kind).any()]
    figure.legend(
        [by_name[name] for name in names],
        names,
        loc="outside upper right",
        ncols=len(names),
        fontsize=8,
    )
    figure.set_layout_engine("constrained")
    metadata = {"Software": None, "Description": digest(call)}
    figure.savefig(file, format="png", dpi=_DOTS, metadata=metadata)


def _draw_mark(axes: Any, mark: Mark, unit: float, length: float) -> None:
    axes.axvline(mark.at / unit, color="black", linewidth=1.2, linestyle="--")
    left = mark.at > length / 2  # where there is room
    axes.annotate(
        mark.text,
        (mark.at / unit, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=8,
    )


def _draw_bars(axes: Any, beside: OtherCall, unit: float) -> None:
    for rank, (begin, end) in enumerate(zip(beside.begins, beside.ends, strict=True)):
        axes.barh(rank, (end - begin) / unit, left=begin / unit, height=0.8, color=_BAR_COLOUR)
    axes.set_ylim(len(beside.ends) - 0.5, -0.5)
    axes.set_yticks(range(len(beside.ends)), [f"rank {rank}" for rank in range(len(beside.ends))])
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.set_ylabel(
        f"{beside.name},\nwaits included", rotation=0, ha="right", va="center", fontsize=8
    )


def _draw_rank(axes: Any, call: CallTrace, rank: int, summary: RankSummary, unit: float) -> None:
    mine = call.parts[call.parts["rank"] == rank]
    for kind, colour in _COLOURS.items():
        parts = mine[mine["kind"] == kind]
        begin, end = parts["work_begin"] / unit, parts["work_end"] / unit
        lines = parts["processor"]
        corners = numpy.stack(
            [
                numpy.stack([begin, lines - 0.5], axis=1),
                numpy.stack([end, lines - 0.5], axis=1),
                numpy.stack([end, lines + 0.5], axis=1),
                numpy.stack([begin, lines + 0.5], axis=1),
            ],
            axis=1,
        )
        axes.add_collection(
            drawing.polygons(corners, facecolors=colour, label=kind_name(kind), linewidths=0)
        )
    axes.set_ylim(summary.processors - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_ylabel(
        f"rank {rank}\nprocessors: {summary.processors}\n{100 * summary.share:.0f} % at work",
        rotation=0,
        ha="right",
        va="center",
        fontsize=8,
    )
