# SPDX-License-Identifier: Apache-2.0
"""What the report says of a suite of shapes (bench.studies.gpu): its tables, comparisons of numbers
of GPUs, and which bars they reach. Bars are defined in bench.report.bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import bars, plots, run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

_COLUMNS = (
    "moeos", "quartiles", "NCCL + grouped", "times as fast", "G", "F", "W", "N", "T / G",
    "floor / T", "bar", "T / bar",
)  # fmt: skip


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
    runs = results["runs"]
    first = runs[0]
    versions = first["versions"]
    ranks, full = results["ranks"], results["full_ranks"]
    smaller = (
        f"; each rank has the experts of one of {full}, so E is {ranks}/{full} of the model's"
        if ranks < full
        else ""
    )
    coded = any(map(bars.has_formats, results["results"]))
    formats = " but for the formats that each table names" if coded else ""
    starts = f", measured in {len(runs)} starts of the ranks" if len(runs) > 1 else ""
    return (
        f"{ranks} × {first['gpu']['name']} of one host{smaller}; bfloat16{formats}; driver "
        f"{first['driver']}, CUDA {versions['cuda']}, NCCL {versions['nccl']}, PyTorch "
        f"{versions['torch']}, moeos {versions['moeos']}, {run.source(results)}"
        f"{starts}. Times are of the slowest rank, medians of {results['rounds']} interleaved "
        f"rounds after {results['warm_up_rounds']} to warm up; T is moeos's. "
        f"Measured in the same run: {_rates(runs)}."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """A table for each shape that has been measured."""
    made = []
    for name, layer in results["shapes"].items():
        cases = cases_of(results, name)
        if cases:
            full = results["ranks"] >= max(2, results["full_ranks"])  # alone, it sends nothing
            rows = [_row(found, full) for found in cases]
            made.append(Section("tokens", _COLUMNS, rows, _heading(results, name, layer)))
    return made


def cases_of(results: Mapping[str, Any], shape: str) -> list[Mapping[str, Any]]:
    """The measured cases of a shape: by tokens, those routed by the gate first."""
    cases = [found for found in results["results"] if found["shape"] == shape]
    return sorted(
        cases, key=lambda found: (found["routing"] != "gate", found["tokens"], not found["lone"])
    )


def scaling(every: Sequence[Mapping[str, Any]]) -> Section | None:
    """Times with different numbers of GPUs, as many rows and experts on each; None for one."""
    by_ranks = {results["ranks"]: results for results in every}
    if len(by_ranks) < 2:
        return None
    counts = sorted(by_ranks)
    rows = []
    for name in by_ranks[counts[0]]["shapes"]:
        for found in cases_of(by_ranks[counts[0]], name):
            if not bars.gate_on_all_ranks(found) or found["tokens"] == 0:
                continue
            same = [same_case(by_ranks[count], found) for count in counts]
            times = [None if case is None else bars.time_of(case) for case in same]
            first, last = times[0], times[-1]
            ratio = "" if first is None or last is None else f"{last / first:.2f}"
            if ratio and found["tokens"] == bars.WEAK_SCALING_TOKENS:
                ratio += f" (at most {bars.WEAK_SCALING:g})"
            shown = ["" if time is None else output.duration(time) for time in times]
            rows.append([name, str(found["tokens"]), *shown, ratio])
    columns = ["tokens per rank", *(f"T, {count} GPUs" for count in counts)]
    return Section("shape", [*columns, f"T({counts[-1]}) / T({counts[0]})"], rows)


def bars_reached(every: Sequence[Mapping[str, Any]]) -> Section | None:
    """The table of all bars, met or missed; None without results."""
    by_ranks = {results["ranks"]: results for results in every}
    if not by_ranks:
        return None
    counts = sorted(by_ranks)
    ratios = {count: _ratios(by_ranks[count], by_ranks.get(1)) for count in counts}
    # Rows are ordered by bar, and within a bar as in the results.
    rows = dict.fromkeys(row for count in counts for row in ratios[count])
    words = list(dict.fromkeys(bar for bar, _, _ in rows))
    return Section(
        "T at most",
        ["layer", "tokens", *(output.plural(count, "GPU") for count in counts)],
        [
            [*row, *(_share_of_bar(ratios[count].get(row)) for count in counts)]
            for row in sorted(rows, key=lambda row: words.index(row[0]))
        ],
        _bars_heading(by_ranks, ratios),
    )


_BarRow = tuple[str, str, str]  # a bar, a layer and its tokens


def _ratios(results: Mapping[str, Any], of_one: Mapping[str, Any] | None) -> dict[_BarRow, float]:
    """T / bar of all bars for one number of GPUs. `of_one`: the time of one GPU, if known."""
    full = results["ranks"] >= results["full_ranks"]
    one = of_one if results["ranks"] > 1 else None
    found = {}
    for shape in results["shapes"]:
        for case in cases_of(results, shape):
            alone = None if one is None else same_case(one, case)
            for bar in bars.bars_of(case, alone, full):
                row = (bar.words, shape, label(case))
                found[row] = bars.time_of(case) / bar.seconds
    return found


def _bars_heading(
    by_ranks: Mapping[int, Mapping[str, Any]], ratios: Mapping[int, Mapping[_BarRow, float]]
) -> str:
    met = [
        f"{sum(ratio <= 1 for ratio in found.values())} of {len(found)} on "
        f"{output.plural(count, 'GPU')} ({run.source(by_ranks[count])})"
        for count, found in ratios.items()
    ]
    return f"T / bar; **bold** where the bar is missed. Met: {', '.join(met)}."


def _share_of_bar(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio <= 1 else f"**{ratio:.2f}**"


def same_case(results: Mapping[str, Any], like: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The case with another number of GPUs; None where it has not been measured."""
    keys = ("shape", "tokens", "lone", "routing")
    for found in results["results"]:
        if all(found[key] == like[key] for key in keys):
            case: Mapping[str, Any] = found
            return case
    return None


def _heading(results: Mapping[str, Any], name: str, layer: Mapping[str, Any]) -> str:
    about = (
        f"**{name}**: H {layer['hidden']}, I {layer['intermediate']}, E {layer['experts']}, "
        f"k {layer['top_k']}, {layer['activation']}"
    )
    if layer.get("weight_format") is not None:
        tokens = layer["activation_format"] or layer["dtype"]
        about += f"; weights in {layer['weight_format']}, tokens in {tokens}"
    if not plots.is_drawn(results, name):
        return about
    picture = f"{plots.FOLDER}/{plots.shape_file(results, name)}"
    return f"{about}\n\n![{name}: time against tokens, and share of the floor]({picture})"


def _row(found: Mapping[str, Any], full: bool) -> list[str]:
    times, limits = found["times"], bars.limits_of(found)
    time, grouped = bars.time_of(found), limits["G"]
    speed = f"{times['baseline']['median'] / time:.2f}"
    wanted = bars.speed_bar(found) if full else None
    bar = bars.time_bar(found)
    some = found["tokens"] > 0
    return [
        label(found),
        output.duration(time),
        run.quartiles(times["moeos"]),
        run.median(found, "baseline"),
        speed if wanted is None else f"{speed} (at least {wanted:g})",
        *(_limit(limits[name], some) for name in ("G", "F", "W", "N")),
        f"{time / grouped:.2f}" if some and grouped else "",
        f"{100 * bars.floor_of(found) / time:.0f} %" if some else "",
        "" if bar is None else f"{bar.words} = {output.duration(bar.seconds)}",
        "" if bar is None else f"{time / bar.seconds:.2f}",
    ]


def label(found: Mapping[str, Any]) -> str:
    """The name of a case among others of its shape."""
    tokens = f"{found['tokens']} on one rank" if found["lone"] else str(found["tokens"])
    kind, _, value = found["routing"].partition(":")
    return f"{tokens}, Zipf {value}" if kind == "zipf" else tokens


def _limit(seconds: float | None, some: bool) -> str:
    return output.duration(seconds) if some and seconds is not None else ""


def _rates(runs: Sequence[Mapping[str, Any]]) -> str:
    def spread(name: str, unit: float) -> str:
        values = sorted({f"{run['rates'][name] / unit:.0f}" for run in runs})
        return " and ".join(values)

    parts = [
        f"F {spread('F', 1e12)} TFLOP/s in one dense product",
        f"W {spread('W', 1e9)} GB/s of memory read",
    ]
    if runs[0]["rates"]["N"] is not None:
        parts.append(f"N {spread('N', 1e9)} GB/s stored over NVLink")
    return ", ".join(parts)
