# SPDX-License-Identifier: Apache-2.0
"""Plots of a straggler study, as SVG: how many steps took how long, in each scenario."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report.straggler_tables import step_seconds
from moeos.cli import drawing

_COLUMNS = 3
_LINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "moeos": ("moeos", {"color": "#d62728", "linewidth": 2.0}),
    "baseline": ("all-to-all", {"color": "#1f77b4"}),
}


def file_name(results: Mapping[str, Any]) -> str:
    """Of the picture."""
    return f"{results['benchmark']}-ecdf.svg"


def digest(results: Mapping[str, Any]) -> str:
    """Of what the picture shows; it is in the file, so that one can see what that was drawn of."""
    shown = [
        [scenario["name"], *(step_seconds(scenario, name) for name in _LINES)]
        for scenario in results["scenarios"]
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(results: Mapping[str, Any], folder: Path) -> Path:
    """Draws the empirical distribution of the steps' times into a folder; the file.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if the file cannot be written.
    """
    matplotlib = drawing.matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    scenarios = results["scenarios"]
    rows = -(-len(scenarios) // _COLUMNS)
    columns = min(_COLUMNS, len(scenarios))
    file = folder / file_name(results)
    # The same numbers make the same file.
    with matplotlib.rc_context(
        {
            "svg.hashsalt": results["benchmark"],
            "svg.fonttype": "none",
            "font.sans-serif": ["DejaVu Sans"],
            "path.simplify_threshold": 1.0,
        }
    ):
        figure = drawing.figure(3.6 * columns, 2.9 * rows)
        every = figure.subplots(rows, columns, squeeze=False)
        for axes in every.flat[len(scenarios) :]:
            axes.set_visible(False)
        for axes, scenario in zip(every.flat, scenarios, strict=False):
            for name, (label, style) in _LINES.items():
                values = [1e3 * seconds for seconds in step_seconds(scenario, name)]
                axes.ecdf(values, label=label, **style)
            axes.set_title(scenario["name"], fontsize=9)
            axes.set_xlim(left=0)
            axes.set_xlabel("ms a step, slowest rank", fontsize=8)
            axes.grid(visible=True, alpha=0.3)
        every[0, 0].set_ylabel("share of the steps", fontsize=8)
        every[0, 0].legend(fontsize=8)
        figure.tight_layout()
        metadata = {"Date": None, "Creator": None, "Description": digest(results)}
        figure.savefig(file, format="svg", metadata=metadata)
    return file
