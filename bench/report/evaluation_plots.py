# SPDX-License-Identifier: Apache-2.0
"""Plots of an evaluation, as SVG: time against tokens, and against experts.

A picture carries the digest of the numbers that it shows. Drawing needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeos.cli import drawing

_LINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "moeos": ("moeos", {"color": "#d62728", "marker": "o", "linewidth": 2.0}),
    "baseline": ("all-to-all", {"color": "#1f77b4", "marker": "s"}),
}


def file_name(results: Mapping[str, Any]) -> str:
    """Of the picture."""
    return f"{results['benchmark']}.svg"


def series(results: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """What the picture shows: "tokens" and "experts", each with "at" and, by contestant, the
    milliseconds there.
    """
    return {
        "tokens": _series(results, "tokens", "experts", results["scaling_experts"]),
        "experts": _series(results, "experts", "tokens", results["scaling_tokens"]),
    }


def _series(
    results: Mapping[str, Any], along: str, fixed: str, value: int
) -> dict[str, list[float]]:
    asked = results[along]
    cases: Sequence[Mapping[str, Any]] = sorted(
        (case for case in results["cases"] if case[fixed] == value and case[along] in asked),
        key=lambda case: int(case[along]),
    )
    return {
        "at": [case[along] for case in cases],
        **{name: [1e3 * case["times"][name]["median"] for case in cases] for name in _LINES},
    }


def digest(results: Mapping[str, Any]) -> str:
    """Of what the picture shows."""
    return hashlib.sha256(json.dumps(series(results)).encode()).hexdigest()


def draw(results: Mapping[str, Any], folder: Path) -> Path:
    """Draws the picture into a folder; the file.

    Raises `RuntimeError` if matplotlib is missing, and `OSError` if the file cannot be written.
    """
    matplotlib = drawing.matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(results)
    titles = {
        "tokens": ("tokens a rank", f"{results['scaling_experts']} experts in all"),
        "experts": ("experts in all", f"{results['scaling_tokens']} tokens a rank"),
    }
    # The same numbers make the same file.
    with matplotlib.rc_context(
        {
            "svg.hashsalt": results["benchmark"],
            "svg.fonttype": "none",
            "font.sans-serif": ["DejaVu Sans"],
        }
    ):
        figure = drawing.figure(10, 4.2)
        for axes, (along, found) in zip(
            figure.subplots(1, 2), series(results).items(), strict=True
        ):
            label, title = titles[along]
            for name, (legend, style) in _LINES.items():
                axes.plot(found["at"], found[name], label=legend, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(found["at"], [str(value) for value in found["at"]], fontsize=8)
            axes.set_xlabel(label)
            axes.set_title(f"{title}, {results['ranks']} ranks, {results['backend']}", fontsize=10)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("ms, slowest rank")
            axes.legend(fontsize=8)
            axes.grid(visible=True, alpha=0.3)
        figure.tight_layout()
        metadata = {"Date": None, "Creator": None, "Description": digest(results)}
        figure.savefig(file, format="svg", metadata=metadata)
    return file
