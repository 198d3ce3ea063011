# SPDX-License-Identifier: Apache-2.0
"""`moeos doctor`: what this machine has, what is missing, and the command that fixes it.

Started alone it tries the links between all GPUs that it sees; started on several ranks, by mpirun,
torchrun or srun, those between the ranks' GPUs, and rank 0 speaks.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moeos.cli import extras, links, probes
from moeos.cli.links import Link
from moeos.cli.probes import Finding
from moeos.cli.shared import device_rates, failures, machine, output
from moeos.partition import rates
from moeos.system import launchers
from moeos.world import bootstrap

_WIDTH = 110
_LINKS = "links between GPUs"


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("all findings"))
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measures the GPUs here, and keeps the rates by which layers choose layouts.",
        ),
    ] = False,
) -> None:
    """Says what this machine can run. Exit code 0 if the twin works."""
    failures.finish(lambda: execute(json_file, measure), json_file)


def execute(json_file: Path | None, measure: bool = False) -> int:
    """Runs the command; the exit code.

    Raises `ValueError` for a file that cannot be written, and for several ranks that are to
    measure; `RuntimeError` where there is no GPU to measure; and what `moeos.init` raises where a
    launcher has started several ranks.
    """
    output.check_writable(json_file)
    if measure:
        _require_measurable()
    if launchers.detect(os.environ).size == 1:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH)
        return _examine(
            console, json_file, links.try_local_links, torch.cuda.is_available(), measure
        )
    with bootstrap.init() as world:
        gpus = world.backend == "cuda"
        if world.rank == 0:
            # A launcher may give its ranks a terminal of its own and send their text to a file.
            console = Console(highlight=False, color_system=None, width=_WIDTH)
            return _examine(console, json_file, lambda: links.try_world_links(world), gpus)
        if gpus:
            _try_links(lambda: links.try_world_links(world))
        return failures.DONE


def _examine(
    console: Console,
    json_file: Path | None,
    try_links: Callable[[], list[Link]],
    gpus: bool,
    measure: bool = False,
) -> int:
    gpu = [probe() for probe in probes.GPU]
    tried: list[Link] = []
    if gpus:
        finding, tried = _try_links(try_links)
        gpu.append(finding)
    twin = [probe() for probe in probes.TWIN]
    console.print("The twin: ranks on this machine's cores", _table(twin))
    console.print("The GPU, which the twin does not need", _table(gpu))
    optional = extras.findings()
    console.print("Extras, each of which only what it names needs", _table(optional))
    if tried:
        console.print("Links, in GB/s: stores of the row's GPU to the column's", _link_table(tried))
        for link in tried:
            if link.problem:
                console.print(f"{link.source} -> {link.destination}: {escape(link.problem)}")
    measured = _measure(console, tried) if measure else {}
    console.print(_verdict(twin, gpu))
    if json_file is not None:
        document = {
            "twin": [dataclasses.asdict(finding) for finding in twin],
            "gpu": [dataclasses.asdict(finding) for finding in gpu],
            "extras": [dataclasses.asdict(finding) for finding in optional],
            "links": [dataclasses.asdict(link) for link in tried],
            "rates": measured,
        }
        output.write_json(json_file, document)
    return failures.DONE if twin[-1].works else failures.FAILURE


def _require_measurable() -> None:
    ranks = launchers.detect(os.environ).size
    if ranks != 1:
        raise ValueError(
            f"--measure is given to {ranks} ranks, and one process measures all GPUs of its host: "
            "run `moeos doctor --measure` without a launcher, on each host"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("--measure is given, and PyTorch sees no GPU: leave it out")
    rates.measured_rates()  # raises before the long part if the file cannot be added to


def _measure(console: Console, tried: Sequence[Link]) -> dict[str, dict[str, float]]:
    """Measures one GPU of each name, and keeps what it finds by that name."""
    names = machine.gpus()
    found: dict[str, dict[str, float]] = {}
    for index, name in enumerate(names):
        if name in found:
            continue
        with torch.cuda.device(index):
            entry = device_rates.measure()
        speeds = [
            link.gigabytes_per_second
            for link in tried
            if link.source != link.destination
            and names[link.source] == name
            and link.gigabytes_per_second is not None
            and not link.problem
        ]
        if speeds:
            entry["link_bytes"] = statistics.median(speeds) * 1e9
        path = rates.keep(name, entry)
        found[name] = entry
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in entry.items())
        console.print(f"{escape(name)}: {numbers}; kept in {escape(str(path))}", soft_wrap=True)
    return found


def _try_links(try_links: Callable[[], list[Link]]) -> tuple[Finding, list[Link]]:
    """The finding on all links together, and each link."""
    try:
        tried = try_links()
    except RuntimeError as error:
        return Finding(_LINKS, False, f"they could not be tried: {error}"), []
    broken = sum(bool(link.problem) for link in tried)
    if broken:
        return Finding(_LINKS, False, f"{broken} of {len(tried)} fail", "see below"), tried
    rounds = sum(link.rounds for link in tried)
    speeds = [link.gigabytes_per_second for link in tried if link.gigabytes_per_second is not None]
    return Finding(
        _LINKS,
        True,
        f"{output.count(rounds)} rounds of {output.size(links.PAYLOAD_BYTES)}, flag and credit "
        f"checked on {len(tried)} in {links.SECONDS:g} s; {min(speeds):.0f} to "
        f"{max(speeds):.0f} GB/s",
    ), tried


def _table(findings: list[Finding]) -> Table:
    made = Table()
    made.add_column("")
    made.add_column("")
    made.add_column("found", overflow="fold")
    made.add_column("to fix", overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.works else "[red]missing[/]"
        made.add_row(mark, *map(escape, (finding.what, finding.found, finding.fix)))
    return made


def _link_table(tried: list[Link]) -> Table:
    ends = sorted({end for link in tried for end in (link.source, link.destination)})
    by_ends = {(link.source, link.destination): link for link in tried}
    made = output.table(*map(str, ends))
    for source in ends:
        made.add_row(str(source), *(_cell(by_ends.get((source, end))) for end in ends))
    return made


def _cell(link: Link | None) -> str:
    if link is None:
        return ""
    if link.problem or link.gigabytes_per_second is None:
        return "[red]fails[/]"
    return f"{link.gigabytes_per_second:.0f}"


def _verdict(twin: list[Finding], gpu: list[Finding]) -> str:
    if not twin[-1].works:
        return "the twin does not work here, so no layer can run"
    missing = [finding.what for finding in twin if not finding.works]
    ranks = f"; without {', '.join(missing)}: virtual ranks only" if missing else ""
    if all(finding.works for finding in gpu):
        return f"layers run here on the twin and on the GPU{ranks}"
    return f'layers run here with backend="twin"{ranks}; the GPU cannot be used'
