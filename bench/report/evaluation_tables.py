# SPDX-License-Identifier: Apache-2.0
"""What the report says of an evaluation: ours, and what the thesis measured on other machines."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import moeos
from bench.report import plots, run, thesis
from moeos.cli.shared import output
from moeos.cli.shared.section import Section
from moeos.engines.twin.engine import sizes_of

PREFIX = "evaluation-"
"""The prefix of the name of an evaluation's results."""

SCALING = "evaluation-scaling"
"""The name of the markers around the comparison of numbers of ranks."""
MEMORY = "evaluation-memory"
"""The name of the markers around the memory of a rank, which is computed."""

NOT_MEASURED = "not measured"

_MIB = 1 << 20


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
    first = run.first_run(results)
    starts = len(results["runs"])
    again = f", in {starts} starts of the ranks" if starts > 1 else ""
    return (
        f"{results['device']}: {output.plural(results['ranks'], 'rank')} with "
        f"{output.plural(first['processors'], 'processor')} each, {first['machine']['cores']} "
        f"cores; hidden {results['hidden']}, intermediate {results['intermediate']}, "
        f"top-{results['top_k']}, {results['activation']}, no gate, dropless, without biases, "
        f"{results['dtype']}; PyTorch {first['versions']['torch']}, "
        f"{run.source(results)}{again}. Times are of the slowest rank, medians of "
        f"{run.rounds(results)}, in which moeos and the all-to-all alternate."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables."""
    return [_tokens(results), _experts(results), _payload(results), _operations(results)]


def of_thesis_sizes(results: Mapping[str, Any]) -> bool:
    """Whether a layer has the sizes of the thesis' layers, so that the thesis' times belong next to
    ours.
    """
    own = (results["hidden"], results["intermediate"], results["top_k"])
    return own == (thesis.HIDDEN, thesis.INTERMEDIATE, thesis.TOP_K)


def case_of(results: Mapping[str, Any], tokens: int, experts: int) -> Mapping[str, Any] | None:
    """A case's results; None if it was not measured."""
    for found in results["cases"]:
        if (found["tokens"], found["experts"]) == (tokens, experts):
            case: Mapping[str, Any] = found
            return case
    return None


def median(case: Mapping[str, Any], contestant: str) -> float:
    """Seconds of a call, of the slowest rank."""
    seconds: float = case["times"][contestant]["median"]
    return seconds


def scaling(every: Iterable[Mapping[str, Any]], like: Mapping[str, Any]) -> Section:
    """Times with different numbers of ranks, of the results whose backend and sizes are those of
    `like`; with equal tokens on each rank and equal experts in all (Table 6.5).
    """
    keys = ("backend", "hidden", "intermediate", "top_k", "scaling_experts", "scaling_tokens")
    by_ranks = {
        results["ranks"]: results
        for results in every
        if all(results[key] == like[key] for key in keys)
    }
    tokens, experts = like["scaling_tokens"], like["scaling_experts"]
    same = of_thesis_sizes(like) and (tokens, experts) == (
        thesis.EXPERT_SCALING_TOKENS,
        thesis.TOKEN_SCALING_EXPERTS,
    )
    theirs = thesis.MILLISECONDS_BY_GPUS if same else {}
    rows = []
    for ranks in sorted({*by_ranks, *theirs}):
        results = by_ranks.get(ranks)
        case = None if results is None else case_of(results, tokens, experts)
        where = "" if results is None else results["device"]
        commit = "" if results is None else run.source(results)
        rows.append([str(ranks), *_times(case), where, commit, *_latencies(theirs, ranks, same)])
    return Section(
        "ranks",
        [*_TIMES, "on", "of", *_systems("H100", same)],
        rows,
        f"**Scaling over ranks**, {tokens} tokens a rank, {experts} experts in all, "
        f"{like['backend']}. {_whose('6.5', 'of as many H100 as there are ranks', same)}",
    )


def memory() -> Section:
    """The thesis' memory overhead and ours; computed, nothing is allocated (Table 6.2)."""
    columns = [
        "thesis: EC",
        "thesis: Size(L)",
        "thesis: bookkeeping",
        "thesis: total",
        "formula: Size(L)",
        "ours: C",
        "ours: heap",
        "ours: queues, counters, maps",
        "ours: total",
        "ours: between the GEMMs",
        "ours: heap, C = EC",
    ]
    return Section(
        "tokens, experts",
        columns,
        [_memory_row(theirs) for theirs in thesis.MEMORY],
        "**Memory overhead of a rank**, in MiB. *thesis* is what its Table 6.2 says was measured; "
        "its MB are MiB. *formula* is the thesis' section 5.4, computed: 4 · Size(T), times "
        f"bM · E / S where S / E is less than bM = {thesis.TILE_ROWS}; Size(T) = S · H · 4 bytes. "
        "*ours* is computed, too, by the runtime's own arithmetic for the twin, and was not "
        f"measured on a GPU: float32, hidden {thesis.HIDDEN}, intermediate {thesis.INTERMEDIATE}, "
        f'top-{thesis.TOP_K}, capacity factor {thesis.CAPACITY_FACTOR:g}, row map "capacity", '
        f"{thesis.GPUS} ranks, one processor each; the total is the two columns before it.",
    )


def formula_bytes(tokens: int, experts: int) -> int:
    """Size(L) by the thesis' section 5.4, in float32."""
    size = 4 * tokens * thesis.HIDDEN * 4
    if tokens >= experts * thesis.TILE_ROWS:
        return size
    return size * thesis.TILE_ROWS * experts // tokens


def own_bytes(tokens: int, experts: int, capacity_factor: float) -> dict[str, int]:
    """The sizes of our layer with the thesis' sizes: "capacity" in rows, and in bytes "heap",
    "memory" (queues, counters and maps) and "intermediate" (between the GEMMs).
    """
    cfg = moeos.MoEConfig(
        hidden=thesis.HIDDEN,
        intermediate=thesis.INTERMEDIATE,
        experts=experts,
        top_k=thesis.TOP_K,
        activation="gelu",
        dtype=torch.float32,
        max_tokens=tokens,
        capacity_factor=capacity_factor,
        row_map="capacity",
    )
    sizes = sizes_of(cfg, thesis.GPUS, processors=1)
    capacity = cfg.capacity(tokens)
    assert capacity is not None
    return {
        "capacity": capacity,
        "heap": sizes.heap_bytes,
        "memory": sizes.memory_bytes,
        "intermediate": sizes.intermediate_bytes,
    }


def _memory_row(theirs: thesis.Memory) -> list[str]:
    own = own_bytes(theirs.tokens, theirs.experts, thesis.CAPACITY_FACTOR)
    fewer = own_bytes(theirs.tokens, theirs.experts, thesis.CAPACITY_FACTOR / thesis.TOP_K)
    assert fewer["capacity"] == theirs.capacity
    in_mib = [
        formula_bytes(theirs.tokens, theirs.experts),
        own["heap"],
        own["memory"],
        own["heap"] + own["memory"],
        own["intermediate"],
        fewer["heap"],
    ]
    formula, *ours = [f"{size / _MIB:.2f}" for size in in_mib]
    return [
        f"{theirs.tokens}, {theirs.experts}",
        str(theirs.capacity),
        *(f"{size:.2f}" for size in (theirs.symmetric, theirs.bookkeeping, theirs.total)),
        formula,
        str(own["capacity"]),
        *ours,
    ]


_TIMES = ("moeos", "quartiles", "all-to-all", "all-to-all / moeos")


def _tokens(results: Mapping[str, Any]) -> Section:
    experts = results["scaling_experts"]
    same = of_thesis_sizes(results) and experts == thesis.TOKEN_SCALING_EXPERTS
    theirs = thesis.MILLISECONDS_BY_TOKENS if same else None
    shown = {*results["tokens"], *(theirs or {})}
    cases = {tokens: case_of(results, tokens, experts) for tokens in shown}
    heading = (
        f"![time against tokens and against experts]({plots.evaluation_file(results)})\n\n"
        f"**Scaling over tokens**, {experts} experts in all."
    )
    return _scaling_over("tokens a rank", cases, theirs, heading, "6.3")


def _experts(results: Mapping[str, Any]) -> Section:
    tokens = results["scaling_tokens"]
    same = of_thesis_sizes(results) and tokens == thesis.EXPERT_SCALING_TOKENS
    theirs = thesis.MILLISECONDS_BY_EXPERTS if same else None
    shown = {*results["experts"], *(theirs or {})}
    cases = {experts: case_of(results, tokens, experts) for experts in shown}
    heading = f"**Scaling over experts**, {tokens} tokens a rank."
    return _scaling_over("experts in all", cases, theirs, heading, "6.4")


def _scaling_over(
    title: str,
    cases: Mapping[int, Mapping[str, Any] | None],
    theirs: Mapping[int, Sequence[float]] | None,
    heading: str,
    table: str,
) -> Section:
    """Times of the cases, by what `title` names, next to the thesis' where its sizes are the same;
    `table` is its number there.
    """
    same = theirs is not None
    rows = [
        [str(key), *_times(case), *_latencies(theirs or {}, key, same)]
        for key, case in sorted(cases.items())
    ]
    columns = [*_TIMES, *_systems(f"{thesis.GPUS} H100", same)]
    whose = _whose(table, f"of {thesis.GPUS} H100", same)
    return Section(title, columns, rows, f"{heading} {whose}")


def _payload(results: Mapping[str, Any]) -> Section:
    rows = []
    for case in _measured(results):
        efficiency = case["payload_efficiency"]
        rows.append(
            [
                _label(case),
                f"{100 * statistics.median(case['busy_shares']):.1f} %",
                output.count(case["pairs_to_peers"]),
                output.size(case["row_bytes_to_peers"]),
                output.size(case["bytes_to_peers"]),
                output.size(case["padded_bytes_to_peers"]),
                "" if efficiency is None else f"{100 * efficiency:.1f} %",
            ]
        )
    rows += [[_label(case), NOT_MEASURED, *[""] * 5] for case in results["not_measured"]]
    return Section(
        "tokens a rank, experts",
        [
            "busy share",
            "pairs to peers",
            "rows to peers",
            "all bytes to peers",
            "rows, padded",
            "payload efficiency",
        ],
        rows,
        "**Utilization and payload** of one call of moeos, all ranks together. The busy share is "
        "the part of the processors' time that is inside tasks: the mean over ranks, the median "
        f"over rounds. The thesis' SM utilization, {thesis.SM_UTILIZATION} %, is another measure "
        "(cycles in which an SM has a warp in flight, section 6.4), which a persistent kernel "
        "meets whether it works or waits. Each pair's result crosses a link, and its row, unless "
        "there are many for a rank: then a token's row goes there once. Payload efficiency is the "
        "bytes of the rows over those of an all-to-all padded to the fullest pair of a source and "
        "an expert, both rounds; the thesis shows its own in Figure 6.3b alone.",
    )


def _operations(results: Mapping[str, Any]) -> Section:
    rows = []
    for case in _measured(results):
        found = case["operations"]
        for contestant, name in (("moeos", "moeos"), ("baseline", "all-to-all")):
            shown = ["no GPU", ""] if found is None else list(map(str, found[contestant].values()))
            rows.append([f"{name}, {_label(case)}", *shown])
    rows += [[_label(case), NOT_MEASURED, ""] for case in results["not_measured"]]
    rows += [
        [f"thesis, {system}", str(operations), ""]
        for system, operations in thesis.GPU_OPERATIONS.items()
    ]
    return Section(
        "contestant, tokens a rank, experts",
        ["kernels", "copies and fills"],
        rows,
        "**What a GPU is given in one call**, on rank 0. Rows of the thesis are its Table 1.1, "
        "launched GPU operations of one forward pass.",
    )


def _measured(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(results["cases"], key=lambda case: (case["experts"], case["tokens"]))


def _label(case: Mapping[str, Any]) -> str:
    return f"{case['tokens']}, {case['experts']}"


def _times(case: Mapping[str, Any] | None) -> list[str]:
    if case is None:
        return [NOT_MEASURED, "", NOT_MEASURED, ""]
    mine, theirs = median(case, "moeos"), median(case, "baseline")
    return [
        output.duration(mine),
        run.quartiles(case["times"]["moeos"]),
        output.duration(theirs),
        f"{theirs / mine:.2f}",
    ]


def _systems(machines: str, shown: bool) -> list[str]:
    """The columns of the thesis."""
    if not shown:
        return []
    precisions = ["FP32", *["FP16"] * (len(thesis.SYSTEMS) - 1)]
    return [
        f"thesis, {machines}, {precision}: {system}"
        for system, precision in zip(thesis.SYSTEMS, precisions, strict=True)
    ]


def _latencies(table: Mapping[int, Sequence[float]], key: int, shown: bool) -> list[str]:
    if not shown:
        return []
    return (
        [f"{value:.2f} ms" for value in table[key]] if key in table else [""] * len(thesis.SYSTEMS)
    )


def _whose(table: str, machines: str, shown: bool) -> str:
    if not shown:
        return "The thesis has no numbers for these sizes."
    return (
        f"The thesis' columns are its Table {table}, {machines}: other machines than ours, and "
        "another precision for FlashDMoE."
    )
