"""Turns a benchmark's JSON into tables, on stdout and between two markers of docs/performance.md.

`python -m moeos.bench.report docs/benchmarks/twin.json` writes the tables into docs/performance.md,
where lines with the markers `<!-- benchmark twin -->` and `<!-- end of benchmark twin -->` stand.
So no number there is typed by hand. It knows the fields that moeos.bench.twin and moeos.bench.gpu
write, and measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moeos.cli import failures, output

_NAMES = {
    "pytorch": "PyTorch, one process",
    "mpirun": "{ranks} ranks under mpirun",
    "virtual": "{ranks} virtual ranks, one process",
}

_WIDEST = 200  # characters of a table on stdout


@dataclasses.dataclass(frozen=True)
class Section:
    """A table: its title, its columns but the first, and rows that begin with a label."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def main(
    json_file: Annotated[Path, typer.Argument(help="What a benchmark wrote.")],
    document: Annotated[
        Path, typer.Option(help="The page with the markers between which the tables go.")
    ] = Path("docs/performance.md"),
) -> None:
    """Writes a benchmark's tables into a document."""
    failures.finish(lambda: execute(json_file, document))


def execute(json_file: Path, document: Path) -> int:
    """Runs the command; the exit code.

    Raises `OSError` for a file that cannot be read or written, and `ValueError` for one that is not
    a benchmark's or a document without the markers.
    """
    try:
        results = json.loads(json_file.read_text(encoding="utf-8"))
        name, tables = results["benchmark"], markdown(results)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{json_file}: not the results of a benchmark: {error!r}") from error
    written = between_markers(document.read_text(encoding="utf-8"), name, tables)
    document.write_text(written, encoding="utf-8")
    return failures.DONE


def between_markers(text: str, name: str, content: str) -> str:
    """The text with `content` between the markers of the benchmark `name`.

    Raises `ValueError` unless the text has both, once each and in this order.
    """
    begin, end = f"<!-- benchmark {name} -->\n", f"<!-- end of benchmark {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document must have the lines {begin.strip()} and {end.strip()}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{content}{end}{after}"


def markdown(results: Mapping[str, Any]) -> str:
    """The tables and where they come from, as Markdown."""
    lines = [f"{conditions(results)}\n"]
    for section in sections(results):
        lines.append(f"\n| {section.title} | {' | '.join(section.columns)} |\n")
        lines.append(f"| --- |{' ---: |' * len(section.columns)}\n")
        lines.extend(f"| {' | '.join(row)} |\n" for row in section.rows)
    return "".join(lines)


def print_tables(results: Mapping[str, Any]) -> None:
    """The same on stdout."""
    print(conditions(results), flush=True)
    console = output.tables(0)
    console.width = _WIDEST  # a table takes no more than it needs
    for section in sections(results):
        made = output.table(*section.columns)
        made.columns[0].header = section.title
        for row in section.rows:
            made.add_row(*row)
        console.print(made)


def conditions(results: Mapping[str, Any]) -> str:
    """What was measured, on what and when, in one paragraph."""
    if results["benchmark"] == "gpu":
        return (
            f"One {results['gpu']['name']}; one rank with the experts of one of four; bfloat16; "
            f"PyTorch {results['versions']['torch']}, moeos {results['versions']['moeos']}, commit "
            f"{results['commit'][:12]}; medians of {results['rounds']} interleaved rounds."
        )
    config, machine, load = results["config"], results["machine"], results["load"]
    versions, commit = results["versions"], results["commit"]
    source = "an unknown commit"
    if commit is not None:
        changes = " with changes" if commit["changed_files"] else ""
        source = f"commit {commit['id'][:12]}{changes}"
    return (
        f"{results['ranks']} ranks with S {config['max_tokens']} each, H {config['hidden']}, "
        f"I {config['intermediate']}, E {config['experts']}, k {config['top_k']}, "
        f"{config['dtype']}; {machine['processor']}, {machine['cores']} cores, of which others "
        f"used {statistics.fmean(load['cores_used_by_others']):.2f} meanwhile, "
        f"{max(load['cores_used_by_others']):.2f} in the busiest round (load average "
        f"{load['average_before'][0]:.1f} before, {load['average_after'][0]:.1f} after); "
        f"PyTorch {versions['torch']}, moeos {versions['moeos']}, {source}; medians of "
        f"{results['rounds']} interleaved rounds after {results['warm_up_rounds']} to warm up."
    )


def sections(results: Mapping[str, Any]) -> list[Section]:
    """All tables of a benchmark."""
    if results["benchmark"] == "gpu":
        return [_gpu(results)]
    return [_layer(results), _scheduling(results), _floors(results)]


def _gpu(results: Mapping[str, Any]) -> Section:
    rows = [
        [
            row["shape"],
            str(row["tokens"]),
            output.duration(row["layer_us"]["median"] / 1e6),
            output.duration(row["grouped_us"]["median"] / 1e6),
            f"{row['ratio']:.2f}",
        ]
        for row in results["results"]
    ]
    return Section("shape", ["tokens", "the layer", "its two grouped GEMMs alone", "ratio"], rows)


def _layer(results: Mapping[str, Any]) -> Section:
    bars = {"mpirun": "mpirun_ratio", "virtual": "virtual_ratio"}
    rows = []
    for name, found in results["layer"].items():
        bar = results["bars"].get(bars.get(name, ""))
        rows.append(
            [
                _NAMES[name].format(ranks=results["ranks"]),
                output.duration(found["median_seconds"]),
                _quartiles(found["seconds"]),
                f"{found['median_cpu_seconds'] / found['median_seconds']:.2f}",
                f"{found['flops_per_second'] / 1e9:.0f} GFLOP/s",
                f"{found['ratio_to_pytorch']:.2f}",
                "" if bar is None else _verdict(bar, f"{bar['limit']:g}"),
            ]
        )
    columns = ["time, slowest rank", "quartiles", "cores used", "rate", "PyTorch's times", "bar"]
    return Section("a call of the layer", columns, rows)


def _scheduling(results: Mapping[str, Any]) -> Section:
    found, bar = results["scheduling"], results["bars"]["task_seconds"]
    tasks = [round(statistics.median(found[call]["tasks"])) for call in ("few", "many")]
    return Section(
        "outside of tasks, one rank, one processor",
        ["time", "quartiles", "bar"],
        [
            [
                f"a task, from calls with {tasks[0]} and {tasks[1]} of them",
                output.duration(found["median_task_seconds"]),
                _quartiles(found["task_seconds"]),
                _verdict(bar, output.duration(bar["limit"])),
            ],
            [
                "a call, whatever its tasks",
                output.duration(found["median_call_seconds"]),
                _quartiles(found["call_seconds"]),
                "",
            ],
            [
                "a call after a rest",
                output.duration(found["median_rested_call_seconds"]),
                _quartiles(found["rested_call_seconds"]),
                "",
            ],
        ],
    )


def _floors(results: Mapping[str, Any]) -> Section:
    floors = results["floors"]
    return Section(
        "what the machine allows",
        ["of a call", "measured rate", "time"],
        [
            [
                "arithmetic",
                f"{floors['flops'] / 1e9:.2f} GFLOP",
                f"{floors['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s, one matrix product",
                output.duration(floors["flops_seconds"]),
            ],
            [
                "memory: weights and x read, y written, once",
                output.size(floors["bytes"]),
                f"{floors['memory_bytes_per_second'] / 1e9:.1f} GB/s, a copy",
                output.duration(floors["bytes_seconds"]),
            ],
        ],
    )


def _quartiles(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{output.duration(low)} to {output.duration(high)}"


def _verdict(bar: Mapping[str, Any], limit: str) -> str:
    return f"at most {limit}: {'met' if bar['met'] else 'missed'}"


if __name__ == "__main__":
    typer.run(main)
