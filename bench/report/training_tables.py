# SPDX-License-Identifier: Apache-2.0
"""What the report says of the training study (bench.studies.training), next to papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.report import papers, run
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

PREFIX = "training-"
"""The prefix of the name of the study's results."""

LEFT_OUT = "left out"

_GROUPED = "grouped_mm"
_MOEOS = ("nothing", "preactivation")
_SHOWN = {"nothing": "moeos, saves nothing", "preactivation": "moeos, saves h", _GROUPED: _GROUPED}
_LISTS = {
    "map": "moeos: routing map",
    "rows": "moeos: first rows to load",
    "steps": "three steps",
    "sorted_lists": "lists by a sort",
    "sort": "torch.sort alone",
}
_OTHERS = "The papers' columns are of one H100: other machines than ours."


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
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


Columns = dict[str, Callable[[run.Case], str]]


def _rates(results: Mapping[str, Any], paper: str) -> Section:
    columns: Columns = {
        f"{_SHOWN[who]}: {step}": partial(_rate, who=who, step=step, share=share)
        for who in _SHOWN
        for step, share in (("forward", 1), ("backward", 2))
    }
    whose = "MoEBlaze's paper has no rates."
    if paper == papers.SONICMOE:
        for at, step in enumerate(("forward", "backward")):
            columns[f"SonicMoE, one H100: {step}"] = partial(_sonic, at=at)
        whose = f"{_OTHERS} They are what the text of SonicMoE's section 6.2 says; the rest is in "
        whose += "plots."
    return run.table(_TITLE, results["layers"], _label, columns, f"**Rates**, TFLOP/s. {whose}")


def _steps(results: Mapping[str, Any], paper: str) -> Section:
    columns: Columns = {shown: partial(_step, who=who) for who, shown in _SHOWN.items()}
    for who in _MOEOS:
        columns[f"{_GROUPED} / {_SHOWN[who]}"] = partial(_speed, who=who)
    whose = ""
    if paper == papers.MOEBLAZE:
        columns["MoEBlaze, one H100"] = lambda case: _theirs(case, "blaze_ms", _ms)
        columns["MegaBlocks, one H100"] = lambda case: _theirs(case, "blocks_ms", _ms)
        whose = (
            f"{_OTHERS} They are MoEBlaze's Table 2. Of conf1 to conf6 it has plots alone, whose "
            "text says 2 to 6.2 times as fast as MegaBlocks with SwiGLU, and 1.4 to 3.7 with SiLU."
        )
    heading = f"**Forward and backward**, the sum of both medians. {whose}"
    return run.table(_TITLE, results["layers"], _label, columns, heading.strip())


def _memory(results: Mapping[str, Any], paper: str) -> Section:
    columns: Columns = {
        f"{_SHOWN[who]}: {what}": partial(_bytes, who=who, what=what)
        for who in _SHOWN
        for what in ("saved", "peak")
    }
    columns["x and h alone"] = lambda case: output.size(least_bytes(case))
    whose = "What SonicMoE's paper measured of it is in plots alone, Figure 13."
    if paper == papers.MOEBLAZE:
        columns["MoEBlaze, one H100: saved"] = lambda case: _theirs(case, "blaze_mb", _mb)
        columns["MegaBlocks, one H100: saved"] = lambda case: _theirs(case, "blocks_mb", _mb)
        whose = (
            f"{_OTHERS} They are MoEBlaze's Table 2. Of the others its text has two: 6100 MB where "
            "MegaBlocks takes 22 000 (conf4, SiLU), and about 10 000 where it takes over 40 000 "
            "(conf3, SwiGLU)."
        )
    return run.table(
        _TITLE,
        results["layers"],
        _label,
        columns,
        "**Memory of activations.** *saved* is what autograd keeps beside what the call was given, "
        "by hooks of saved tensors. *peak* is what a forward call and its gradients take of "
        "PyTorch's memory at most, with the gradients that they return; moeos' workspace, which "
        "all layers of a model share, is not in it. *x and h alone* is computed: the tokens, and "
        f"what the first product makes of each pair, which is what SonicMoE keeps. {whose}",
    )


def least_bytes(case: Mapping[str, Any]) -> int:
    """Bytes of the tokens and of the pre-activations of their pairs."""
    size = 4 if case["dtype"] == "float32" else 2
    halves = 2 if case["gated"] else 1
    of_token = case["hidden"] + case["top_k"] * halves * case["intermediate"]
    bytes_: int = size * case["tokens"] * of_token
    return bytes_


def _lists(results: Mapping[str, Any], paper: str) -> Section:
    columns: Columns = {"calls of moeos": lambda case: str(case["calls"])}
    columns |= {shown: partial(_list_time, name=name) for name, shown in _LISTS.items()}
    for name, shown in (("map", "routing map"), ("rows", "first rows")):
        columns[f"torch.sort / {shown}"] = partial(_list_speed, name=name)
    if paper == papers.MOEBLAZE:
        for at, shown in ((1, "three steps"), (0, "by a sort")):
            columns[f"MoEBlaze, one H100: {shown}"] = partial(_dispatch, at=at)
    return run.table(
        "routing of, experts, top-k, tokens",
        results["lists"],
        lambda case: ", ".join(str(case[key]) for key in ("name", "experts", "top_k", "tokens")),
        columns,
        "**Index lists of a routing.** moeos' times are by a trace, from the call's first event: "
        "until the last part of Route is done, and until the first product has rows to load. Those "
        "of all calls that the tokens take are added up, and medians are of "
        f"{results['trace_rounds']} rounds. The "
        "three steps are those of MoEBlaze's section 4.2: a map of tokens by experts, each "
        "expert's length, and the places, without atomics. *torch.sort* sorts the int64 ids, "
        "stably; the lists by a sort are made by keys of as few bits as do. MoEBlaze's columns are "
        "its Table 3, of 1M tokens and one H100: another machine than ours.",
    )


def _list_time(case: run.Case, name: str) -> str:
    return output.duration(case[name]["median"]) if name in case else LEFT_OUT


def _list_speed(case: run.Case, name: str) -> str:
    return f"{case['sort']['median'] / case[name]['median']:.2f}" if name in case else ""


def _dispatch(case: run.Case, at: int) -> str:
    near = abs(case["tokens"] / papers.DISPATCH_TOKENS - 1) < 0.05
    return _ms(papers.DISPATCH_MS[case["name"]][at]) if near else ""


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


def _rate(case: run.Case, who: str, step: str, share: int) -> str:
    found = case["contestants"][who]
    if "left_out" in found:
        return LEFT_OUT
    return f"{share * case['forward_flops'] / found[step]['median'] / 1e12:.4g}"


def _bytes(case: run.Case, who: str, what: str) -> str:
    found = case["contestants"][who]
    if "left_out" in found:
        return LEFT_OUT
    size = found[f"{what}_bytes"]
    return "no GPU" if size is None else output.size(size)


def _step_seconds(case: run.Case, who: str) -> float | None:
    found = case["contestants"][who]
    if "left_out" in found:
        return None
    seconds: float = found["forward"]["median"] + found["backward"]["median"]
    return seconds


def _step(case: run.Case, who: str) -> str:
    seconds = _step_seconds(case, who)
    return LEFT_OUT if seconds is None else output.duration(seconds)


def _speed(case: run.Case, who: str) -> str:
    """The speed as a multiple of PyTorch's."""
    slower, faster = _step_seconds(case, _GROUPED), _step_seconds(case, who)
    return "" if slower is None or faster is None else f"{slower / faster:.2f}"


def _sonic(case: run.Case, at: int) -> str:
    return papers.SONICMOE_TFLOPS.get(case["layer"], ("", ""))[at]


def _theirs(case: run.Case, what: str, shown: Callable[[Any], str]) -> str:
    """The row of a case in MoEBlaze's Table 2."""
    key = (case["activation"], case["tokens"])
    if case["layer"] != papers.SCALING_LAYER or key not in papers.SCALING:
        return ""
    return shown(getattr(papers.SCALING[key], what))


def _ms(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.1f} ms"


def _mb(value: int | None) -> str:
    return "out of memory" if value is None else f"{output.count(value)} MB"
