# SPDX-License-Identifier: Apache-2.0
"""What the report says of the study of tensor parallelism (bench.studies.tensor), next to the
paper's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.report import run, tensor_paper
from moeos.cli.shared import output
from moeos.cli.shared.section import Section

PREFIX = "tensor-"
"""The prefix of the name of the study's results."""

BARS: Mapping[int, float] = {8: 2.0, 128: 1.2, 4096: 1.8, 16384: 1.8}
"""The layer's required speed as a multiple of EE's, by tokens."""
FLOOR_FACTOR, FLOOR_SECONDS = 1.15, 45e-6
"""A call takes at most this many times its floor, plus this many seconds."""
AUTO_FACTOR = 1.03
"""`auto` takes at most this many times as long as the best forced policy."""

_EE = "EE"
_FORCED = ("fused", "after", "expert_major_persistent", "gathered", "token_major")
_STAGES = ("align", "permute", "up/gate", "act", "down", "combine")
_OTHERS = "Rows of the paper are of eight H200 and Triton: other machines and kernels than ours."


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
    first = run.first_run(results)
    return (
        f"{results['ranks']} x {results['device']}, {first['processors']} processors each, "
        f"{first['machine']['cores']} cores; hidden {results['hidden']}, {results['experts']} "
        f"experts, top-{results['top_k']}; PyTorch {first['versions']['torch']}, "
        f"{run.source(results)}. Times are of the slowest rank, medians of "
        f"{results['rounds']} rounds after {results['warm_up_rounds']} to warm up, in which all "
        "contestants take turns. EE is stock PyTorch; on GPUs all are CUDA graphs."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    found = [_stages(results), _totals(results)]
    if results["together"]:
        found += [_reductions(results), _bars(results)]
    return found


def _stages(results: Mapping[str, Any]) -> Section:
    rows = []
    for case in results["alone"]:
        if case["intermediate"] != results["staged"]:
            continue
        for name, stages in case["stages"].items():
            times = [output.duration(stages[it]) if it in stages else "" for it in _STAGES]
            whole = output.duration(case["times"][name]["median"])
            rows.append([f"{case['tokens']}, {_shown(name)}", *times, whole])
        for name, stage_ms in tensor_paper.STAGES.get(case["tokens"], {}).items():
            rows.append([f"{case['tokens']}, the paper's {name}", *map(_ms, stage_ms)])
    heading = (
        f"**Stages**, I {results['staged']} a rank, without the reduction (the paper's Table 1). "
        "EE's are calls of their own. Those of moeos are how long its processors are at a stage, "
        "on average: stages overlap, couriers permute beside products, and the activation is part "
        f"of up/gate. So they do not add up to the total. {_OTHERS}"
    )
    return Section("tokens, variant", [*_STAGES, "total"], rows, heading)


def _totals(results: Mapping[str, Any]) -> Section:
    counts = sorted({case["tokens"] for case in results["alone"]})
    rows = []
    for intermediate in dict.fromkeys(case["intermediate"] for case in results["alone"]):
        its = {c["tokens"]: c for c in results["alone"] if c["intermediate"] == intermediate}
        for name in dict.fromkeys(name for case in its.values() for name in case["times"]):
            rows.append(
                [f"{intermediate}, {_shown(name)}", *(run.median(its.get(n), name) for n in counts)]
            )
        for (of_rank, name), times in tensor_paper.TOTALS.items():
            if of_rank == intermediate:
                rows.append([f"{intermediate}, the paper's {name}", *_theirs(times, counts)])
    heading = f"**Totals**, without the reduction, by tokens (its Table 2a). {_OTHERS}"
    return Section("I of a rank, variant", [str(n) for n in counts], rows, heading)


def _reductions(results: Mapping[str, Any]) -> Section:
    cases = {case["tokens"]: case for case in results["together"]}
    alone = {
        case["tokens"]: case["times"]["auto"]["median"]
        for case in results["alone"]
        if case["intermediate"] == results["reduced"]
    }
    rows = [["EE: combine, all-reduce", *(run.median(case, "chain") for case in cases.values())]]
    for name in ("fused", "after"):
        beyond = [
            output.duration(max(0.0, case["times"][name]["median"] - alone[tokens]))
            if tokens in alone
            else ""
            for tokens, case in cases.items()
        ]
        rows.append([f"moeos, {name}: beyond a slice alone", *beyond])
    measured = {name for case in cases.values() for name in case["times"]}
    for name in (it for it in (_EE, "auto", *_FORCED) if it in measured):
        rows.append(
            [f"{_shown(name)}: whole", *(run.median(case, name) for case in cases.values())]
        )
    for (ranks, method), theirs in tensor_paper.CHAINS.items():
        name = f"the paper's {method}, {ranks} ranks: combine, all-reduce"
        rows.append([name, *_theirs(theirs, cases)])
    heading = (
        f"**The reduction**, I {results['reduced']} a rank, {results['ranks']} ranks, by tokens "
        "(its Table 2b). moeos combines within its call, so a slice alone has combined, too. "
        f"{_OTHERS}"
    )
    return Section("what", [str(n) for n in cases], rows, heading)


def _bars(results: Mapping[str, Any]) -> Section:
    rows = []
    for case in results["together"]:
        times = {name: found["median"] for name, found in case["times"].items()}
        best = min((name for name in _FORCED if name in times), key=lambda name: times[name])
        floor, bar = _floor(results, case), BARS.get(case["tokens"])
        most = None if floor is None else FLOOR_FACTOR * floor + FLOOR_SECONDS
        rows.append(
            [
                str(case["tokens"]),
                f"{times[_EE] / times['auto']:.2f}",
                "" if bar is None else f"{bar:g}",
                output.duration(times["auto"]),
                "" if most is None else output.duration(most),
                "" if most is None else f"{times['auto'] / most:.2f}",
                best,
                f"{times['auto'] / times[best]:.2f}",
            ]
        )
    columns = ["EE / auto", "at least", "auto", "at most", "auto / at most", "best forced"]
    heading = (
        f"**Bars.** At most: {FLOOR_FACTOR:g} times the largest of both grouped products alone, "
        "bytes of touched weights at the memory's rate, and bytes of sums at the links' rate; and "
        f"{output.duration(FLOOR_SECONDS)} more. auto is to be within {AUTO_FACTOR:g} of the best "
        "policy that is forced."
    )
    return Section("tokens", [*columns, "auto / best"], rows, heading)


def _floor(results: Mapping[str, Any], case: Mapping[str, Any]) -> float | None:
    """The least seconds of any call; None where rates are not known."""
    rates = results["rates"]
    if rates is None:
        return None
    itemsize, ranks = 2, results["ranks"]
    weights = 3 * case["touched"] * case["intermediate"] * results["hidden"] * itemsize
    sums = 2 * case["tokens"] * (ranks - 1) / ranks * results["hidden"] * itemsize
    products: float = case["times"]["products"]["median"]
    largest: float = max(products, weights / rates["W"], sums / rates["N"])
    return largest


def _theirs(times: Iterable[float], counts: Iterable[int]) -> list[str]:
    """What the paper has of these token counts; `times`: of those of its own."""
    by_count = dict(zip(tensor_paper.TOKENS, times, strict=True))
    return [_ms(by_count[count]) if count in by_count else "" for count in counts]


def _shown(name: str) -> str:
    return name if name == _EE else f"moeos, {name}"


def _ms(value: float) -> str:
    return f"{value:.3f} ms"
