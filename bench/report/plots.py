# SPDX-License-Identifier: Apache-2.0
"""Plots of results, as SVG. Drawing needs matplotlib.

A picture carries the digest of the numbers that it shows, so that it can be compared with the
results without being drawn again. Equal numbers make equal files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import bars
from bench.report.straggler_tables import step_seconds
from moeos.cli import drawing

FOLDER = "plots"
"""The folder of a suite's pictures, next to the results."""

LEAST_POINTS = 3
"""A shape with fewer token counts is not drawn."""

_MOEOS: Mapping[str, Any] = {"color": "#d62728", "linewidth": 2.0}
_BASELINE: Mapping[str, Any] = {"color": "#1f77b4"}
_SHAPE_LINES: Mapping[str, Mapping[str, Any]] = {
    "moeos": {**_MOEOS, "marker": "o"},
    bars.IN_NUMBERS: {"color": "#ff9896", "marker": "v"},
    "NCCL + grouped GEMM": {**_BASELINE, "marker": "s"},
    "G: grouped GEMMs alone": {"color": "#555555", "marker": "^", "linestyle": "--"},
    "F: dense GEMM rate": {"color": "#2ca02c", "linestyle": ":"},
    "W: weights from HBM": {"color": "#9467bd", "linestyle": ":"},
    "N: rows over NVLink": {"color": "#ff7f0e", "linestyle": ":"},
}
_LEGENDS = {"moeos": "moeos", "baseline": "all-to-all"}
_COLUMNS = 3  # of the pictures of scenarios


def digest(shown: Any) -> str:
    """A digest of what a picture shows."""
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


@contextlib.contextmanager
def _pictures(folder: Path, salt: str, **settings: Any) -> Iterator[None]:
    """Settings by which equal numbers make equal files.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if a file cannot be written.
    """
    matplotlib = drawing.matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {"svg.hashsalt": salt, "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context({**fixed, **settings}):
        yield


def _save(figure: Any, file: Path, shown: str) -> Path:
    figure.tight_layout()
    metadata = {"Date": None, "Creator": None, "Description": shown}
    figure.savefig(file, format="svg", metadata=metadata)
    return file


def _ticks(axes: Any, at: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(value) for value in at], fontsize=8)


# --- a suite of shapes: time against tokens, and share of the floor ---


def shape_file(results: Mapping[str, Any], shape: str) -> str:
    """The name of a shape's picture."""
    return f"{results['benchmark']}-{shape}.svg"


def is_drawn(results: Mapping[str, Any], shape: str) -> bool:
    """Whether a shape has enough token counts for a picture."""
    return len(_cases(results, shape)) >= LEAST_POINTS


def shape_series(results: Mapping[str, Any], shape: str) -> dict[str, list[float]]:
    """The data of a shape's picture, routed by the gate: token counts, and µs at each, by line; and
    "share", of the floor in moeos's time, in percent.
    """
    cases = _cases(results, shape)
    made: dict[str, list[float]] = {"tokens": [found["tokens"] for found in cases]}
    for line in _SHAPE_LINES:
        values = [_seconds(found, line) for found in cases]
        if None not in values:
            made[line] = [1e6 * value for value in values if value is not None]
    made["share"] = [100 * bars.floor_of(found) / bars.time_of(found) for found in cases]
    return made


def shape_digest(results: Mapping[str, Any], shape: str) -> str:
    """A digest of what a shape's picture shows."""
    return digest(dict(sorted(shape_series(results, shape).items())))


def draw_shapes(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws a picture of each shape into a folder; the files."""
    shapes = [shape for shape in results["shapes"] if is_drawn(results, shape)]
    return [_draw_shape(results, shape, folder) for shape in shapes]


def _draw_shape(results: Mapping[str, Any], shape: str, folder: Path) -> Path:
    with _pictures(folder, shape):
        figure = drawing.figure(10, 4.2)
        times, shares = figure.subplots(1, 2, width_ratios=(3, 2))
        found = shape_series(results, shape)
        tokens = found["tokens"]
        for line, style in _SHAPE_LINES.items():
            if line in found:
                times.plot(tokens, found[line], label=line, **style)
        times.set_yscale("log")
        times.set_ylim(bottom=0.5e6 * min(map(bars.floor_of, _cases(results, shape))))
        times.set_ylabel("µs, slowest rank")
        times.legend(fontsize=8)
        times.set_title(f"{shape}, {results['ranks']} × {results['runs'][0]['gpu']['name']}")
        shares.plot(tokens, found["share"], **_SHAPE_LINES["moeos"])
        shares.set_ylim(0, 100)
        shares.set_ylabel("max(F, W, N) in % of moeos's time")
        shares.set_title("share of the floor")
        for axes in (times, shares):
            _ticks(axes, tokens)
            axes.set_xlabel("tokens per rank")
            axes.grid(visible=True, alpha=0.3)
        return _save(figure, folder / shape_file(results, shape), shape_digest(results, shape))


def _cases(results: Mapping[str, Any], shape: str) -> list[Mapping[str, Any]]:
    """The conditions of a picture: the gate's routing, the same number of tokens on each rank."""
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


# --- an evaluation: time against tokens, and against experts ---


def evaluation_file(results: Mapping[str, Any]) -> str:
    """The name of an evaluation's picture."""
    return f"{results['benchmark']}.svg"


def evaluation_series(results: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """The data of the picture: "tokens" and "experts", each with "at" and, by contestant, the
    milliseconds there.
    """
    fixed = {"tokens": ("experts", "scaling_experts"), "experts": ("tokens", "scaling_tokens")}
    return {
        along: _along(results, along, other, results[value])
        for along, (other, value) in fixed.items()
    }


def _along(
    results: Mapping[str, Any], along: str, fixed: str, value: int
) -> dict[str, list[float]]:
    asked = results[along]
    cases: Sequence[Mapping[str, Any]] = sorted(
        (case for case in results["cases"] if case[fixed] == value and case[along] in asked),
        key=lambda case: int(case[along]),
    )
    return {
        "at": [case[along] for case in cases],
        **{name: [1e3 * case["times"][name]["median"] for case in cases] for name in _LEGENDS},
    }


def draw_evaluation(results: Mapping[str, Any], folder: Path) -> Path:
    """Draws an evaluation's picture into a folder; the file."""
    titles = {
        "tokens": ("tokens a rank", f"{results['scaling_experts']} experts in all"),
        "experts": ("experts in all", f"{results['scaling_tokens']} tokens a rank"),
    }
    styles = {"moeos": {**_MOEOS, "marker": "o"}, "baseline": {**_BASELINE, "marker": "s"}}
    series = evaluation_series(results)
    with _pictures(folder, results["benchmark"]):
        figure = drawing.figure(10, 4.2)
        for axes, (along, found) in zip(figure.subplots(1, 2), series.items(), strict=True):
            label, title = titles[along]
            for name, legend in _LEGENDS.items():
                axes.plot(found["at"], found[name], label=legend, **styles[name])
            _ticks(axes, found["at"])
            axes.set_xlabel(label)
            axes.set_title(f"{title}, {results['ranks']} ranks, {results['backend']}", fontsize=10)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("ms, slowest rank")
            axes.legend(fontsize=8)
            axes.grid(visible=True, alpha=0.3)
        return _save(figure, folder / evaluation_file(results), digest(series))


# --- a straggler study: how many steps took how long, in each scenario ---


def straggler_file(results: Mapping[str, Any]) -> str:
    """The name of a straggler study's picture."""
    return f"{results['benchmark']}-ecdf.svg"


def straggler_digest(results: Mapping[str, Any]) -> str:
    """A digest of what a straggler study's picture shows."""
    return digest(
        [
            [scenario["name"], *(step_seconds(scenario, name) for name in _LEGENDS)]
            for scenario in results["scenarios"]
        ]
    )


def draw_stragglers(results: Mapping[str, Any], folder: Path) -> Path:
    """Draws the empirical distribution of the steps' times into a folder; the file."""
    scenarios = results["scenarios"]
    rows = -(-len(scenarios) // _COLUMNS)
    columns = min(_COLUMNS, len(scenarios))
    with _pictures(folder, results["benchmark"], **{"path.simplify_threshold": 1.0}):
        figure = drawing.figure(3.6 * columns, 2.9 * rows)
        every = figure.subplots(rows, columns, squeeze=False)
        for axes in every.flat[len(scenarios) :]:
            axes.set_visible(False)
        for axes, scenario in zip(every.flat, scenarios, strict=False):
            for (name, label), style in zip(_LEGENDS.items(), (_MOEOS, _BASELINE), strict=True):
                values = [1e3 * seconds for seconds in step_seconds(scenario, name)]
                axes.ecdf(values, label=label, **style)
            axes.set_title(scenario["name"], fontsize=9)
            axes.set_xlim(left=0)
            axes.set_xlabel("ms a step, slowest rank", fontsize=8)
            axes.grid(visible=True, alpha=0.3)
        every[0, 0].set_ylabel("share of the steps", fontsize=8)
        every[0, 0].legend(fontsize=8)
        return _save(figure, folder / straggler_file(results), straggler_digest(results))
