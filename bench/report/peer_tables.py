# SPDX-License-Identifier: Apache-2.0
"""What the report says of moeos beside a peer's kernel, on the same tokens, weights and routing.

A document's rows are calls: `who`, `shape`, `tokens`, `zipf` (0: uniform routing), `us` and `err`,
the relative error against float32 arithmetic on unquantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section

PREFIX = "fp8-peer-"
PEER, OURS = "deepgemm-fp8", "moeos fp8fp8"
NAMES = {
    PEER: "DeepGEMM, FP8",
    "moeos bf16": "moeos, BF16",
    "moeos fp8": "FP8 weights",
    OURS: "FP8 by FP8",
}
"""Contestants, by what a table calls them."""


def conditions(results: Mapping[str, Any]) -> str:
    """What was measured, on what and when, in one paragraph."""
    return (
        f"{results['ranks']} x {results['gpus'][0]}; {provenance.source(results['commit'])}. "
        "Medians of the slowest rank. Routing is given; x is quantised inside moeos' time alone."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """One table for each shape: calls by contestants, and ours against the peer's."""
    calls: dict[str, dict[tuple[int, float], dict[str, Any]]] = {}
    for row in results["rows"]:
        of_shape = calls.setdefault(row["shape"], {})
        of_shape.setdefault((row["tokens"], row["zipf"]), {})[row["who"]] = row
    columns = [*NAMES.values(), "FP8 by FP8 / DeepGEMM", "its error", "DeepGEMM's"]
    return [
        Section(
            f"{shape}, tokens",
            columns,
            [
                [
                    str(tokens) + (f", Zipf {zipf}" if zipf else ""),
                    *(output.duration(of_call[who]["us"] * 1e-6) for who in NAMES),
                    f"{of_call[OURS]['us'] / of_call[PEER]['us']:.2f}",
                    *(f"{of_call[who]['err']:.3f}" for who in (OURS, PEER)),
                ]
                for (tokens, zipf), of_call in of_shape.items()
            ],
        )
        for shape, of_shape in calls.items()
    ]
