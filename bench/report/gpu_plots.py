# SPDX-License-Identifier: Apache-2.0
"""Plots of bench.gpu's results, as SVG: time against tokens, and share of the floor.

A picture carries the digest of the numbers that it shows, so that it can be seen, without drawing
it again, whether it is of the results as they are. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import bars
from moeos.cli import drawing

FOLDER = "plots"
"""Of the pictures, beside the results."""

LEAST_POINTS = 3
"""A shape with fewer token counts is not drawn."""

_LINES: Mapping[str, Mapping[str, Any]] = {
    "moeos": {"color": "#d62728", "marker": "o", "linewidth": 2.0},
    bars.IN_NUMBERS: {"color": "#ff9896", "marker": "v"},
    "NCCL + grouped GEMM": {"color": "#1f77b4", "marker": "s"},
    "G: grouped GEMMs alone": {"color": "#555555", "marker": "^", "linestyle": "--"},
    "F: dense GEMM rate": {"color": "#2ca02c", "linestyle": ":"},
    "W: weights from HBM": {"color": "#9467bd", "linestyle": ":"},
    "N: rows over NVLink": {"color": "#ff7f0e", "linestyle": ":"},
}


def file_name(results: Mapping[str, Any], shape: str) -> str:
    """Of a shape's picture."""
    return f"{results['benchmark']}-{shape}.svg"


def is_drawn(results: Mapping[str, Any], shape: str) -> bool:
    """Whether a shape has enough token counts for a picture."""
    return len(series(results, shape)["tokens"]) >= LEAST_POINTS


def series(results: Mapping[str, Any], shape: str) -> dict[str, list[float]]:
    """What a shape's picture shows, routed by the gate: token counts, and µs at each, by line; and
    "share", of the floor in moeos's time, in percent.
    """
    cases = _cases(results, shape)
    made: dict[str, list[float]] = {"tokens": [found["tokens"] for found in cases]}
    for line in _LINES:
        values = [_seconds(found, line) for found in cases]
        if None not in values:
            made[line] = [1e6 * value for value in values if value is not None]
    made["share"] = [100 * bars.floor_of(found) / bars.time_of(found) for found in cases]
    return made


def digest(results: Mapping[str, Any], shape: str) -> str:
    """Of what a shape's picture shows."""
    text = json.dumps(series(results, shape), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws a picture of each shape into a folder; the files.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if a file cannot be written.
    """
    shapes = [shape for shape in results["shapes"] if is_drawn(results, shape)]
    if not shapes:
        return []
    matplotlib = drawing.matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for shape in shapes:
        # The same numbers make the same file.
        with matplotlib.rc_context(
            {"svg.hashsalt": shape, "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
        ):
            files.append(folder / file_name(results, shape))
            _draw(results, shape, files[-1])
    return files


def _draw(results: Mapping[str, Any], shape: str, file: Path) -> None:
    figure = drawing.figure(10, 4.2)
    times, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    found = series(results, shape)
    tokens = found["tokens"]
    for line, style in _LINES.items():
        if line in found:
            times.plot(tokens, found[line], label=line, **style)
    times.set_yscale("log")
    times.set_ylim(bottom=0.5e6 * min(map(bars.floor_of, _cases(results, shape))))
    times.set_ylabel("µs, slowest rank")
    times.legend(fontsize=8)
    times.set_title(f"{shape}, {results['ranks']} × {results['runs'][0]['gpu']['name']}")
    shares.plot(tokens, found["share"], **_LINES["moeos"])
    shares.set_ylim(0, 100)
    shares.set_ylabel("max(F, W, N) in % of moeos's time")
    shares.set_title("share of the floor")
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens], fontsize=8)
        axes.set_xlabel("tokens per rank")
        axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    metadata = {"Date": None, "Creator": None, "Description": digest(results, shape)}
    figure.savefig(file, format="svg", metadata=metadata)


def _cases(results: Mapping[str, Any], shape: str) -> list[Mapping[str, Any]]:
    """What a picture shows: the gate's routing, the same number of tokens on each rank."""
    cases = [
        found
        for found in results["results"]
        if found["shape"] == shape and bars.gate_on_all_ranks(found) and found["tokens"] > 0
    ]
    return sorted(cases, key=lambda found: int(found["tokens"]))


def _seconds(found: Mapping[str, Any], line: str) -> float | None:
    time: float | None
    if line == "moeos":
        time = bars.time_of(found)
    elif line == bars.IN_NUMBERS:
        time = found["times"]["in_numbers"]["median"] if bars.has_formats(found) else None
    elif line == "NCCL + grouped GEMM":
        time = found["times"]["baseline"]["median"]
    else:
        time = bars.limits_of(found)[line[0]]
    return time
