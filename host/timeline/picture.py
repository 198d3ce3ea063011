"""A call as a picture: time to the right, a line for each processor, tasks by colour, idle white.

A picture carries the digest of what it shows, so that it can be seen, without drawing it again,
whether it is of a trace that lies beside it. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy

from moeos import drawing
from moeos.timeline.call import (
    COMBINE,
    DISPATCH,
    GEMM0,
    GEMM1,
    REPLICATE,
    ROUTE,
    STAGES,
    CallTrace,
    kind_name,
)
from moeos.timeline.summary import RankSummary, ranks_of

_COLOURS = {  # in the order in which they are drawn
    DISPATCH: "#ff7f0e",
    REPLICATE: "#e377c2",
    ROUTE: "#9467bd",
    GEMM0: "#1f77b4",
    GEMM1: "#2ca02c",
    COMBINE: "#d62728",
}
_WIDTH, _DOTS = 11.0, 150
_MARGINS = 1.1  # inches above and below
_LEAST_INCHES, _MOST_INCHES, _INCHES_A_LINE = 0.5, 4.0, 0.1  # of a rank
_MOST_HEIGHT = 100.0


def digest(call: CallTrace) -> str:
    """Of what a picture of this call shows."""
    shown = call.parts[["rank", "processor", "kind", "work_begin", "work_end"]]
    columns = [numpy.ascontiguousarray(shown[name]) for name in shown.dtype.names or ()]
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def draw(call: CallTrace, title: str, file: Path) -> None:
    """Draws the call into a PNG file.

    On the GPU couriers run beside a processor's other tasks, and are drawn behind these.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if the file cannot be written.
    """
    heights = [
        min(_MOST_INCHES, max(_LEAST_INCHES, trace.processors * _INCHES_A_LINE))
        for trace in call.ranks
    ]
    figure = drawing.figure(_WIDTH, min(_MOST_HEIGHT, sum(heights) + _MARGINS))
    every = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, rank, summary in zip(every[:, 0], range(len(heights)), ranks_of(call), strict=True):
        _draw_rank(axes, call, rank, summary)
    every[0, 0].set_title(title, fontsize=10)
    every[-1, 0].set_xlabel("µs since the first event")
    every[-1, 0].set_xlim(0, max(call.length, 1) / 1000)
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


def _draw_rank(axes: Any, call: CallTrace, rank: int, summary: RankSummary) -> None:
    mine = call.parts[call.parts["rank"] == rank]
    for kind, colour in _COLOURS.items():
        parts = mine[mine["kind"] == kind]
        begin, end = parts["work_begin"] / 1000, parts["work_end"] / 1000
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
