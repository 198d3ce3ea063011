# SPDX-License-Identifier: Apache-2.0
"""Turns a benchmark's JSON into tables, on stdout and between two markers of docs/performance.md.

`python -m bench.report results/twin.json` writes the tables into docs/performance.md, or into
the one page of docs/performance/ where lines with the markers `<!-- benchmark twin -->` and
`<!-- end of benchmark twin -->` stand. So no number there is typed by hand. `--document` names
another page, such as docs/reliability.md. It draws the plots of a suite of shapes into plots/ next
to the file, and that of an evaluation, or of a straggler study whose page shows it, next to the
file. It compares results of the suite gpu.toml with those on other numbers of GPUs next to the
file, and with the bars that they have to reach. It measures nothing; what a kind of results looks
like, the files *tables.py know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import (
    evaluation_tables,
    gpu_tables,
    option_tables,
    plots,
    straggler_tables,
    tensor_tables,
    training_tables,
    twin_tables,
)
from moeos.cli import reliability_tables
from moeos.cli.shared import failures, section
from moeos.cli.shared.section import Section

SCALING = "weak-scaling"
"""The name of the markers around the comparison of numbers of GPUs."""
BARS = "bars"
"""The name of the markers around the bars."""
COMPARED = "gpu"
"""The suite of both comparisons."""


def main(
    json_file: Annotated[Path, typer.Argument(help="What a benchmark wrote.")],
    document: Annotated[
        Path, typer.Option(help="The page, or beside it the folder, with the tables' markers.")
    ] = Path("docs/performance.md"),
) -> None:
    """Writes a benchmark's tables into a document, and draws its plots beside its results."""
    failures.finish(lambda: execute(json_file, document))


def execute(json_file: Path, document: Path) -> int:
    """Runs the command; the exit code.

    Raises `OSError` for a file that cannot be read or written, `ValueError` for one that is not
    a benchmark's or a document without the markers, and `RuntimeError` if plots cannot be drawn.
    """
    results = load(json_file)
    try:
        name, tables = results["benchmark"], markdown(results)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{json_file}: not the results of a benchmark: {error!r}") from error
    folder = json_file.parent
    written = put(pages(document), name, tables, folder)
    if is_compared(results):
        written = put(written, SCALING, scaling(folder), folder)
        written = put(written, BARS, bars(folder), folder)
    if of_gpus(results):
        plots.draw_shapes(results, folder / plots.FOLDER)
    picture = plots.straggler_file(results)
    if name.startswith(straggler_tables.PREFIX) and picture in "".join(written.values()):
        plots.draw_stragglers(results, folder)
    if of_evaluation(results):
        compared = table(evaluation_scaling(results, folder))
        written = put(written, evaluation_tables.SCALING, compared, folder)
        memory = table(evaluation_tables.memory())
        written = put(written, evaluation_tables.MEMORY, memory, folder)
        plots.draw_evaluation(results, folder)
    for page, text in written.items():
        page.write_text(text, encoding="utf-8")
    return failures.DONE


def load(json_file: Path) -> dict[str, Any]:
    """A benchmark's results. Raises `ValueError` if the file holds none."""
    try:
        results = json.loads(json_file.read_text(encoding="utf-8"))
        results["benchmark"].islower()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{json_file}: not the results of a benchmark: {error!r}") from error
    found: dict[str, Any] = results
    return found


def of_gpus(results: Mapping[str, Any]) -> bool:
    """Whether the results are those of bench.gpu, whatever the suite."""
    return "full_ranks" in results


def is_compared(results: Mapping[str, Any]) -> bool:
    """Whether the results are of the suite that compares numbers of GPUs."""
    name: str = results["benchmark"]
    return of_gpus(results) and name == f"{COMPARED}-{results['ranks']}"


def of_evaluation(results: Mapping[str, Any]) -> bool:
    """Whether the results are those of bench.studies.evaluate."""
    name: str = results["benchmark"]
    return name.startswith(evaluation_tables.PREFIX)


def evaluation_scaling(results: Mapping[str, Any], folder: Path) -> Section:
    """The comparison of evaluations in a folder that are like this one, on other ranks."""
    found = [load(file) for file in sorted(folder.glob(f"{evaluation_tables.PREFIX}*.json"))]
    return evaluation_tables.scaling(filter(of_evaluation, found), results)


def scaling(folder: Path) -> str:
    """The comparison of numbers of GPUs in a folder, as Markdown; "" for fewer than two."""
    section = gpu_tables.scaling(_compared_in(folder))
    return "" if section is None else table(section)


def bars(folder: Path) -> str:
    """Which bars results in a folder reach, as Markdown; "" without results."""
    section = gpu_tables.bars_reached(_compared_in(folder))
    return "" if section is None else table(section)


def _compared_in(folder: Path) -> list[dict[str, Any]]:
    found = [load(file) for file in sorted(folder.glob("*.json"))]
    return [results for results in found if is_compared(results)]


def pages(document: Path) -> dict[Path, str]:
    """The texts of a document, which comes first, and of the pages in the folder of its name."""
    found = [document, *sorted(document.with_suffix("").glob("*.md"))]
    return {page: page.read_text(encoding="utf-8") for page in found}


def put(texts: Mapping[Path, str], name: str, content: str, folder: Path) -> dict[Path, str]:
    """The pages with `content` between the markers of the benchmark `name`.

    Its pictures' paths begin in `folder`, and in the page where the page lies. Raises `ValueError`
    unless one page has both markers, once each and in this order.
    """
    document = next(iter(texts))
    having = [page for page, text in texts.items() if _begin(name) in text] or [document]
    if len(having) > 1:
        raise ValueError(f"{_begin(name).strip()}: only one of {', '.join(map(str, having))}")
    page = having[0]
    linked = re.sub(
        r"(!\[[^]]*\]\()([^)]+)",
        lambda found: found[1] + os.path.relpath(folder / found[2], page.parent),
        content,
    )
    return {**texts, page: between_markers(texts[page], name, linked)}


def _begin(name: str) -> str:
    return f"<!-- benchmark {name} -->\n"


def between_markers(text: str, name: str, content: str) -> str:
    """The text with `content` between the markers of the benchmark `name`.

    Raises `ValueError` unless the text has both, once each and in this order.
    """
    begin, end = _begin(name), f"<!-- end of benchmark {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document must have the lines {begin.strip()} and {end.strip()}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{content}{end}{after}"


def markdown(results: Mapping[str, Any]) -> str:
    """The tables and where they come from, as Markdown."""
    tables = (f"\n{table(section)}" for section in sections(results))
    return f"{conditions(results)}\n" + "".join(tables)


def print_tables(results: Mapping[str, Any]) -> None:
    """The tables and where they come from, on stdout."""
    section.print_tables(conditions(results), sections(results))


def conditions(results: Mapping[str, Any]) -> str:
    """One paragraph on what was measured, on what machine and when."""
    return _tables_of(results)[0](results)


def sections(results: Mapping[str, Any]) -> Sequence[Section]:
    """All tables of a benchmark."""
    return _tables_of(results)[1](results)


_Results = Mapping[str, Any]
_Tables = tuple[Callable[[_Results], str], Callable[[_Results], Sequence[Section]]]
_TABLES: Mapping[str, _Tables] = {
    **{
        prefix: (tables.conditions, tables.sections)
        for prefix, tables in (
            (straggler_tables.PREFIX, straggler_tables),
            (evaluation_tables.PREFIX, evaluation_tables),
            (training_tables.PREFIX, training_tables),
            (tensor_tables.PREFIX, tensor_tables),
            ("twin", twin_tables),
            *((name, option_tables) for name in option_tables.STUDIES),
            *((name, reliability_tables) for name in reliability_tables.NAMES),
        )
    },
    option_tables.PEER_PREFIX: (option_tables.peer_conditions, option_tables.peer_sections),
    option_tables.COSTS: (option_tables.cost_conditions, option_tables.cost_sections),
}
"""The conditions and sections of results, by what their names begin with."""


def is_known(results: _Results) -> bool:
    """Whether there are tables of such results."""
    return of_gpus(results) or results["benchmark"].startswith(tuple(_TABLES))


def _tables_of(results: _Results) -> _Tables:
    if of_gpus(results):
        return gpu_tables.conditions, gpu_tables.sections
    for prefix, tables in _TABLES.items():
        if results["benchmark"].startswith(prefix):
            return tables
    raise KeyError(f"no tables of {results['benchmark']}")


def table(section: Section) -> str:
    """A table and its heading, as Markdown."""
    lines = [f"{section.heading}\n\n"] if section.heading else []
    lines.append(f"| {section.title} | {' | '.join(section.columns)} |\n")
    lines.append(f"| --- |{' ---: |' * len(section.columns)}\n")
    lines.extend(f"| {' | '.join(row)} |\n" for row in section.rows)
    return "".join(lines)
