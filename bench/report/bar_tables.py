# SPDX-License-Identifier: Apache-2.0
"""What the report says of the bars: T / bar of every case that has one, all numbers of GPUs side by
side. What a bar is, bench.report.bars knows; where the times come from,
bench.report.gpu_tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import bars, gpu_tables
from moeos.cli.shared import output, provenance
from moeos.cli.shared.section import Section


def section(every: Sequence[Mapping[str, Any]]) -> Section | None:
    """The table of all bars, met or missed, from results of bench.gpu; None of no results."""
    by_ranks = {results["ranks"]: results for results in every}
    if not by_ranks:
        return None
    counts = sorted(by_ranks)
    ratios = {count: _ratios(by_ranks[count], by_ranks.get(1)) for count in counts}
    # By bars, and within one of them in the order of the results.
    rows = dict.fromkeys(row for count in counts for row in ratios[count])
    words = list(dict.fromkeys(bar for bar, _, _ in rows))
    return Section(
        "T at most",
        ["layer", "tokens", *(output.plural(count, "GPU") for count in counts)],
        [
            [*row, *(_cell(ratios[count].get(row)) for count in counts)]
            for row in sorted(rows, key=lambda row: words.index(row[0]))
        ],
        _heading(by_ranks, ratios),
    )


_Row = tuple[str, str, str]  # a bar, a layer and its tokens


def _ratios(results: Mapping[str, Any], of_one: Mapping[str, Any] | None) -> dict[_Row, float]:
    """T / bar of all bars for one number of GPUs. `of_one`: what one GPU took, if that is known."""
    full = results["ranks"] >= results["full_ranks"]
    one = of_one if results["ranks"] > 1 else None
    found = {}
    for shape in results["shapes"]:
        for case in gpu_tables.cases_of(results, shape):
            alone = None if one is None else gpu_tables.same_case(one, case)
            for bar in bars.bars_of(case, alone, full):
                row = (bar.words, shape, gpu_tables.label(case))
                found[row] = bars.time_of(case) / bar.seconds
    return found


def _heading(
    by_ranks: Mapping[int, Mapping[str, Any]], ratios: Mapping[int, Mapping[_Row, float]]
) -> str:
    met = [
        f"{sum(ratio <= 1 for ratio in found.values())} of {len(found)} on "
        f"{output.plural(count, 'GPU')} ({provenance.source(by_ranks[count]['commit'])})"
        for count, found in ratios.items()
    ]
    return f"T / bar; **bold** where the bar is missed. Met: {', '.join(met)}."


def _cell(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio <= 1 else f"**{ratio:.2f}**"
