# SPDX-License-Identifier: Apache-2.0
"""What the report says of the studies of a layer's options (bench.studies.options), of moeos
against a peer's kernel (bench.studies.peer), and of what deadlines and a trace cost
(tests/gpu/costs.py).

The peer's results have a row for each call: `who`, `shape`, `tokens`, `zipf` (0: uniform routing),
`us` and `err`, the relative error against float32 arithmetic on unquantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report import run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

STUDIES = ("gradients", "shared-experts", "topk", "weight-formats", "weight-layouts")
"""The studies' names, with which the names of their results begin."""
BY_FP8 = " by FP8"
"""The end of the names of contestants whose tokens are in FP8, too."""
PEER_PREFIX = "fp8-peer-"
PEER, OURS = "deepgemm-fp8", "moeos fp8fp8"
PEER_NAMES = {
    PEER: "DeepGEMM, FP8",
    "moeos bf16": "moeos, BF16",
    "moeos fp8": "FP8 weights",
    OURS: "FP8 by FP8",
}
"""Contestants, by what a table calls them."""
COSTS = "costs-1"
"""The name of the results of `python -m tests.gpu.costs`."""


def _gpus(results: Mapping[str, Any]) -> str:
    device = results["device"] if "device" in results else results["gpus"][0]
    return f"{results['ranks']} x {device}"


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured of options, on what machine and when."""
    return (
        f"{_gpus(results)}; {run.source(results)}. Medians of the slowest rank, contestants in "
        "turn; up to 512 tokens the L2 cache is flushed before a call."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """One table for each layer: tokens by contestants. Contestants whose tokens are in FP8 have a
    second table, next to the first contestant of all: one table would be too wide to read.
    """
    found = []
    for layer, of_layer in results["layers"].items():
        every = list(of_layer["results"][0]["seconds"])
        coded = [name for name in every if name.endswith(BY_FP8)]
        others = [name for name in every if name not in coded]
        for names in (others, [every[0], *coded] if coded else []):
            rows = [
                [str(case["tokens"]), *(run.median(case, name, "seconds") for name in names)]
                for case in of_layer["results"]
            ]
            if names:
                found.append(Section(f"{layer}, tokens", names, rows))
    return found


def peer_conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured against a peer, on what machine and when."""
    return (
        f"{_gpus(results)}; {run.source(results)}. Medians of the slowest rank. Routing is given; "
        "x is quantised inside moeos' time alone."
    )


def peer_sections(results: Mapping[str, Any]) -> list[Section]:
    """One table for each shape: calls by contestants, and ours against the peer's."""
    calls: dict[str, dict[tuple[int, float], dict[str, Any]]] = {}
    for row in results["rows"]:
        of_shape = calls.setdefault(row["shape"], {})
        of_shape.setdefault((row["tokens"], row["zipf"]), {})[row["who"]] = row
    columns = [*PEER_NAMES.values(), "FP8 by FP8 / DeepGEMM", "its error", "DeepGEMM's"]
    return [
        Section(
            f"{shape}, tokens",
            columns,
            [
                [
                    str(tokens) + (f", Zipf {zipf}" if zipf else ""),
                    *(output.duration(of_call[who]["us"] * 1e-6) for who in PEER_NAMES),
                    f"{of_call[OURS]['us'] / of_call[PEER]['us']:.2f}",
                    *(f"{of_call[who]['err']:.3f}" for who in (OURS, PEER)),
                ]
                for (tokens, zipf), of_call in of_shape.items()
            ],
        )
        for shape, of_shape in calls.items()
    ]


def cost_conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on the machine and the date of the costs of deadlines and a trace."""
    return (
        f"{results['device']}; {run.source(results)}. Medians of {results['rounds']} interleaved "
        f"rounds after {results['warm_up_rounds']} to warm up; in brackets the quartiles."
    )


def cost_sections(results: Mapping[str, Any]) -> list[Section]:
    """The one table of costs."""
    columns = ["no deadlines", "as it is", "with a trace", "deadlines add", "a trace adds"]
    rows = []
    for case in results["results"]:
        times = [
            f"{output.duration(case[each]['median'])} ({run.quartiles(case[each])})"
            for each in ("unwatched", "plain", "traced")
        ]
        added = [f"{100 * case[each]:+.1f} %" for each in ("watch", "trace")]
        rows.append([f"{case['layer']}, {case['tokens']}", *times, *added])
    return [Section("layer, tokens", columns, rows)]
