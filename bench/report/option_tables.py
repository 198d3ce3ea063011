# SPDX-License-Identifier: Apache-2.0
"""What the report says of the studies of a layer's options (bench.studies.options)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section

STUDIES = ("gradients", "shared-experts", "topk", "weight-formats")
"""The names of their documents begin with one."""
BY_FP8 = " by FP8"
"""So end the names of contestants whose tokens are in FP8, too."""


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
    """One table for each layer: tokens by contestants. Those whose tokens are in FP8 have a second
    one, beside the first contestant of all, or the table would be too wide to be read."""
    found = []
    for layer, of_layer in results["layers"].items():
        every = list(of_layer["results"][0]["seconds"])
        coded = [name for name in every if name.endswith(BY_FP8)]
        others = [name for name in every if name not in coded]
        for names in (others, [every[0], *coded] if coded else []):
            rows = [
                [
                    str(case["tokens"]),
                    *(output.duration(case["seconds"][name]["median"]) for name in names),
                ]
                for case in of_layer["results"]
            ]
            if names:
                found.append(Section(f"{layer}, tokens", names, rows))
    return found
