# SPDX-License-Identifier: Apache-2.0
"""What the report says of the studies of a layer's options (moeos.bench.studies.options)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeos.bench.report.section import Section
from moeos.commands import output, provenance

STUDIES = ("gradients", "shared-experts", "topk", "weight-formats")
"""The names of their documents begin with one."""


def is_one(name: str) -> bool:
    """Whether a benchmark of this name is one of them."""
    return name.startswith(STUDIES)


def conditions(results: Mapping[str, Any]) -> str:
    """What was measured, on what and when, in one paragraph."""
    gpus = results["gpus"]
    return (
        f"{results['ranks']} x {gpus[0]}; {provenance.source(results['commit'])}. Medians of the "
        "slowest rank, contestants in turn; up to 512 tokens the L2 cache is flushed before a call."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """One table for each layer: tokens by contestants."""
    found = []
    for layer, of_layer in results["layers"].items():
        names = list(of_layer["results"][0]["seconds"])
        rows = [
            [str(case["tokens"]), *(output.duration(case["seconds"][n]["median"]) for n in names)]
            for case in of_layer["results"]
        ]
        found.append(Section(f"{layer}, tokens", names, rows))
    return found
