# SPDX-License-Identifier: Apache-2.0
"""What the report says of the training study (bench.studies.training), beside the papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report import papers, run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

PREFIX = "training-"
"""What the name of the study's results begins with."""

LEFT_OUT = "left out"

_GROUPED = "grouped_mm"
_MOEOS = ("nothing", "preactivation")
_SHOWN = {"nothing": "moeos, saves nothing", "preactivation": "moeos, saves h", _GROUPED: _GROUPED}
_OTHERS = "The papers' columns are of one H100: other machines than ours."


def conditions(results: Mapping[str, Any]) -> str:
    """What was measured, on what and when, in one paragraph."""
    first = run.first_run(results)
    return (
        f"{results['device']}, {first['processors']} processors, {first['machine']['cores']} "
        f"cores; PyTorch {first['versions']['torch']}, {run.source(results)}. "
        f"Medians of {results['rounds']} rounds after {results['warm_up_rounds']} to warm up, in "
        "which all contestants take turns. grouped_mm is autograd of torch._grouped_mm. Routing is "
        "given to all. Rates count 2 FLOPs for each multiplication of the experts' products, and "
        "twice as many backward as forward, whatever is computed again. Behind a layer's tokens "
        "stands in how many pieces a call of moeos takes them, if in several."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    paper = results["benchmark"].removeprefix(PREFIX).partition("-")[0]
    found = []
    if results["layers"]:
        found += [_rates(results, paper), _steps(results, paper), _memory(results, paper)]
    if results["lists"]:
        found.append(_lists(results, paper))
    reasons = _reasons(results)
    return [*found, reasons] if reasons.rows else found


def _rates(results: Mapping[str, Any], paper: str) -> Section:
    columns = [f"{_SHOWN[who]}: {step}" for who in _SHOWN for step in ("forward", "backward")]
    sonic = paper == papers.SONICMOE
    if sonic:
        columns += [f"SonicMoE, one H100: {step}" for step in ("forward", "backward")]
    rows = []
    for case in results["layers"]:
        row = [_label(case)]
        for who in _SHOWN:
            for step, share in (("forward", 1), ("backward", 2)):
                row.append(_rate(case, who, step, share))
        if sonic:
            row += papers.SONICMOE_TFLOPS.get(case["layer"], ("", ""))
        rows.append(row)
    whose = (
        f"{_OTHERS} They are what the text of SonicMoE's section 6.2 says; the rest is in plots."
        if sonic
        else "MoEBlaze's paper has no rates."
    )
    return Section(_TITLE, columns, rows, f"**Rates**, TFLOP/s. {whose}")


def _steps(results: Mapping[str, Any], paper: str) -> Section:
    columns = [_SHOWN[who] for who in _SHOWN] + [f"{_GROUPED} / {_SHOWN[who]}" for who in _MOEOS]
    blaze = paper == papers.MOEBLAZE
    if blaze:
        columns += ["MoEBlaze, one H100", "MegaBlocks, one H100"]
    rows = []
    for case in results["layers"]:
        times = {who: _step_seconds(case, who) for who in _SHOWN}
        row = [_label(case)]
        row += [LEFT_OUT if t is None else output.duration(t) for t in times.values()]
        row += [_ratio(times[_GROUPED], times[who]) for who in _MOEOS]
        if blaze:
            theirs = _scaling_of(case)
            row += ["", ""] if theirs is None else [_ms(theirs.blaze_ms), _ms(theirs.blocks_ms)]
        rows.append(row)
    whose = (
        f"{_OTHERS} They are MoEBlaze's Table 2. Of conf1 to conf6 it has plots alone, whose text "
        "says 2 to 6.2 times as fast as MegaBlocks with SwiGLU, and 1.4 to 3.7 with SiLU."
        if blaze
        else ""
    )
    heading = f"**Forward and backward**, the sum of both medians. {whose}"
    return Section(_TITLE, columns, rows, heading.strip())


def _memory(results: Mapping[str, Any], paper: str) -> Section:
    columns = [f"{_SHOWN[who]}: {what}" for who in _SHOWN for what in ("saved", "peak")]
    columns.append("x and h alone")
    blaze = paper == papers.MOEBLAZE
    if blaze:
        columns += ["MoEBlaze, one H100: saved", "MegaBlocks, one H100: saved"]
    rows = []
    for case in results["layers"]:
        row = [_label(case)]
        for who in _SHOWN:
            found = case["contestants"][who]
            for what in ("saved_bytes", "peak_bytes"):
                size = found.get(what)
                no_gpu = "no GPU" if what == "peak_bytes" else LEFT_OUT
                row.append(
                    LEFT_OUT
                    if "left_out" in found
                    else no_gpu
                    if size is None
                    else output.size(size)
                )
        row.append(output.size(least_bytes(case)))
        if blaze:
            theirs = _scaling_of(case)
            row += ["", ""] if theirs is None else [_mb(theirs.blaze_mb), _mb(theirs.blocks_mb)]
        rows.append(row)
    whose = (
        f"{_OTHERS} They are MoEBlaze's Table 2. Of the others its text has two: 6100 MB where "
        "MegaBlocks takes 22 000 (conf4, SiLU), and about 10 000 where it takes over 40 000 "
        "(conf3, SwiGLU)."
        if blaze
        else "What SonicMoE's paper measured of it is in plots alone, Figure 13."
    )
    return Section(
        _TITLE,
        columns,
        rows,
        "**Memory of activations.** *saved* is what autograd keeps beside what the call was given, "
        "by hooks of saved tensors. *peak* is what a forward call and its gradients take of "
        "PyTorch's memory at most, with the gradients that they return; moeos' workspace, which "
        "all layers of a model share, is not in it. *x and h alone* is computed: the tokens, and "
        f"what the first product makes of each pair, which is what SonicMoE keeps. {whose}",
    )


def least_bytes(case: Mapping[str, Any]) -> int:
    """Of the tokens and the pre-activations of their pairs."""
    size = 4 if case["dtype"] == "float32" else 2
    halves = 2 if case["gated"] else 1
    of_token = case["hidden"] + case["top_k"] * halves * case["intermediate"]
    bytes_: int = size * case["tokens"] * of_token
    return bytes_


def _lists(results: Mapping[str, Any], paper: str) -> Section:
    columns = [
        "calls of moeos",
        "moeos: routing map",
        "moeos: first rows to load",
        "three steps",
        "lists by a sort",
        "torch.sort alone",
        "torch.sort / routing map",
        "torch.sort / first rows",
    ]
    blaze = paper == papers.MOEBLAZE
    if blaze:
        columns += ["MoEBlaze, one H100: three steps", "MoEBlaze, one H100: by a sort"]
    rows = []
    for case in results["lists"]:
        own = [None if "left_out" in case else case[name]["median"] for name in ("map", "rows")]
        others = [case[name]["median"] for name in ("steps", "sorted_lists", "sort")]
        row = [f"{case['name']}, {case['experts']}, {case['top_k']}, {case['tokens']}"]
        row.append(str(case["calls"]))
        row += [LEFT_OUT if t is None else output.duration(t) for t in (*own, *others)]
        row += [_ratio(others[-1], t) for t in own]
        if blaze:
            near = abs(case["tokens"] / papers.DISPATCH_TOKENS - 1) < 0.05
            theirs = papers.DISPATCH_MS.get(case["name"]) if near else None
            row += ["", ""] if theirs is None else [_ms(theirs[1]), _ms(theirs[0])]
        rows.append(row)
    return Section(
        "routing of, experts, top-k, tokens",
        columns,
        rows,
        "**Index lists of a routing.** moeos' times are by a trace, from the call's first event: "
        "until the last part of Route is done, and until the first product has rows to load. Those "
        "of all calls that the tokens take are added up, and medians are of "
        f"{results['trace_rounds']} rounds. The "
        "three steps are those of MoEBlaze's section 4.2: a map of tokens by experts, each "
        "expert's length, and the places, without atomics. *torch.sort* sorts the int64 ids, "
        "stably; the lists by a sort are made by keys of as few bits as do. MoEBlaze's columns are "
        "its Table 3, of 1M tokens and one H100: another machine than ours.",
    )


def _reasons(results: Mapping[str, Any]) -> Section:
    rows = []
    for case in results["layers"]:
        for who, found in case["contestants"].items():
            if "left_out" in found:
                rows.append([f"{_SHOWN[who]}: {_label(case)}", found["left_out"]])
    for case in results["lists"]:
        if "left_out" in case:
            rows.append([f"moeos: lists of {case['name']}, {case['tokens']}", case["left_out"]])
    return Section("contestant, layer", ["why"], rows, "**Left out.**")


_TITLE = "layer, H, I, experts, top-k, activation, tokens"


def _label(case: Mapping[str, Any]) -> str:
    keys = ("layer", "hidden", "intermediate", "experts", "top_k", "activation", "tokens")
    pieces = f" in {case['pieces']} pieces" if case["pieces"] > 1 else ""
    return ", ".join(str(case[key]) for key in keys) + pieces


def _rate(case: Mapping[str, Any], who: str, step: str, share: int) -> str:
    found = case["contestants"][who]
    if "left_out" in found:
        return LEFT_OUT
    return f"{share * case['forward_flops'] / found[step]['median'] / 1e12:.4g}"


def _step_seconds(case: Mapping[str, Any], who: str) -> float | None:
    found = case["contestants"][who]
    if "left_out" in found:
        return None
    seconds: float = found["forward"]["median"] + found["backward"]["median"]
    return seconds


def _scaling_of(case: Mapping[str, Any]) -> papers.Scaling | None:
    if case["layer"] != papers.SCALING_LAYER:
        return None
    return papers.SCALING.get((case["activation"], case["tokens"]))


def _ratio(slower: float | None, faster: float | None) -> str:
    return "" if slower is None or faster is None else f"{slower / faster:.2f}"


def _ms(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.1f} ms"


def _mb(value: int | None) -> str:
    return "out of memory" if value is None else f"{output.count(value)} MB"
