# SPDX-License-Identifier: Apache-2.0
"""The frame of every study: its command, its ranks, its document and its cases.

A study is a module that lists its cases, its contestants and what it judges by. The rest is here:
each process is a rank, which a launcher started; rank 0 writes each case as soon as it is measured,
one a line; what a document has is not measured again. The document's fields:
    benchmark, commit, backend, device, ranks, and what else the study says: alike in every run.
    runs: of each start of the ranks its command, machine and versions.
    lists of cases, each with the number of its run.
Must not depend on any study, nor on how a call is timed.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist
import typer

import moeos
from bench.clocks import FLUSHED_TOKENS, Clock, Name, clock_of, in_turn
from bench.gpu import compile_ahead
from bench.report import report
from moeos.cli.shared import failures, machine, output, process_group, provenance
from moeos.cli.shared import help as helps
from moeos.system.files import replace

ROOT = Path(__file__).parents[1]
PATIENCE = 900.0
"""Seconds in which the ranks meet, where the compiler's time counts."""

Out = Annotated[Path, typer.Option(help="Where the results go, as JSON; continued if it is there.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, tokens and routing.")]
SuiteFile = Annotated[Path, typer.Argument(help="The suite's TOML file.")]

Case = dict[str, Any]
Options = TypeVar("Options")


def start(command: Callable[..., None]) -> None:
    """Runs a study's command by its options, on each rank; help is shown by rank 0 alone."""
    with helps.shown_once():
        typer.run(command)


def command_of(options: type[Options], about: str, body: Callable[[Options], None]) -> Any:
    """A command whose options are the fields of a dataclass; `about`: what its help says."""

    def command(**values: Any) -> None:
        body(options(**values))

    command.__doc__ = about
    command.__annotations__ = hints = get_type_hints(options, include_extras=True)
    given = inspect.signature(options).parameters
    fields = [one.replace(annotation=hints[name]) for name, one in given.items()]
    command.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
    return command


def run(body: Callable[[moeos.World], Study], backend: str, deadline: float = PATIENCE) -> None:
    """Runs one rank of a study, prints the tables of its document, and ends the process.

    `body` measures everything. Where a document has `failures`, the exit code says so.
    """

    def command() -> int:
        # Baselines have small functions to compile: these need no pool.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        with moeos.init(backend, deadline=deadline) as world:

            def of_rank() -> int:
                try:
                    study = body(world)
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
                if world.rank == 0 and report.is_known(study.document):
                    report.print_tables(study.document)
                return failures.FAILURE if study.document.get("failures") else failures.DONE

            return failures.together(world, of_rank)

    failures.finish(command)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often each contestant runs: in rounds that count, and in those before them."""

    count: int = 30
    warm_up: int = 5

    def fields(self) -> Case:
        """The fields as documents name them."""
        return {"rounds": self.count, "warm_up_rounds": self.warm_up}


class Study:
    """One rank of a study. Collective.

    Args:
        world: of all ranks.
        out: the document's file, if it has one; continued if it exists.
        name: of the results, by which the report knows them.
        module: that is run, for the command that the document names.
        rounds: of contestants in turn.
        prepare: raises what the study refuses; else what its document says, alike in every run,
            and the empty lists of its cases.

    Attributes:
        document: what rank 0 writes; other ranks have their own.
        about: what else the record of this run says.
        clock, group: of all ranks.
        device: where tensors lie.

    Raises:
        Refused: `prepare` or the file is not as it must be, alike on all ranks.
    """

    def __init__(
        self,
        world: moeos.World,
        out: Path | None,
        name: str,
        module: str,
        rounds: Rounds = Rounds(),
        prepare: Callable[[], Case] = dict,
    ) -> None:
        self.world, self.rounds, self._out, self._module = world, rounds, out, module
        self.on_gpu = world.backend == "cuda"
        self.device = "cuda" if self.on_gpu else "cpu"
        self.about: Case = {}
        self._begun = False

        def document() -> Case:
            output.check_writable(out, "--out")
            made = {
                "benchmark": name,
                "commit": commit(),
                "backend": world.backend,
                "device": machine.gpus()[0] if self.on_gpu else f"the twin, {machine.processor()}",
                "ranks": world.size,
                **rounds.fields(),
                **prepare(),
                "runs": [],
            }
            return continued(made, out) if world.rank == 0 and out and out.exists() else made

        self.document: Case = failures.agree(world, document, "the input of the study")
        self.group = process_group.start(world)
        self.clock: Clock = clock_of(world, self.group)

    def cases(self, into: list[Case], asked: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
        """Yields, one by one, the requested cases that `into` lacks; the caller adds each. Gives
        memory back between cases. Collective.
        """
        here = [
            dict(case) for case in asked if not any(case.items() <= found.items() for found in into)
        ]
        for case in self.world.control.allgather(here, "the cases")[0]:
            if self.world.rank == 0:
                output.say(", ".join(f"{name} {value}" for name, value in case.items()))
            yield case
            self.forget()

    def add(self, into: list[Case], case: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Puts what was found of a case into a list of the document, and this into its file."""
        self.begin_run()
        into.append({**case, "run": len(self.document["runs"]) - 1, **found})
        self.write()

    def begin_run(self) -> None:
        """Notes what this run's numbers depend on, before the first of them."""
        if not self._begun:
            self.document["runs"].append(environment(self.world, self._module) | self.about)
            self._begun = True

    def describe_layer(self, field: str, name: str, about: Case) -> Case:
        """A layer in a table of the document, alike in every run. Raises `ValueError` if another
        run measured a different layer of this name.
        """
        found: Case = self.document.setdefault(field, {}).setdefault(name, about)
        if not about.items() <= found.items():
            raise ValueError(f"{self._out} has another layer {name}: name another file")
        return found

    def write(self) -> None:
        """Puts the document into its file in one step."""
        if self.world.rank == 0 and self._out is not None:
            replace(self._out, text(self.document))

    def timed(
        self,
        contestants: Mapping[Name, Callable[[], object]],
        tokens: int | None = None,
        **options: Any,
    ) -> dict[Name, dict[str, Any]]:
        """See `clocks.in_turn`; up to `FLUSHED_TOKENS` tokens each call begins cold. Collective."""
        return in_turn(
            self.world,
            self.clock,
            contestants,
            rounds=self.rounds.count,
            warm_up=self.rounds.warm_up,
            flushed=tokens is not None and tokens <= FLUSHED_TOKENS,
            **options,
        )

    def worst(self, value: float) -> float:
        """The largest of all ranks, or NaN if there is one. Collective."""
        every = torch.tensor(self.world.control.allgather(value, "the comparison of outputs"))
        return float(every.double().max())

    def compile(self, kernels: Sequence[tuple[str, Case]], *, required: bool = True) -> Case:
        """Compiles kernels side by side, see `compile_ahead`; nothing on the twin. Collective.

        Returns the compiler's errors for refused kernels, by name; raises `RuntimeError` where they
        are required.
        """
        refused = compile_ahead.together(self.world, kernels) if self.on_gpu else {}
        if refused and required:
            raise RuntimeError(f"the compiler refuses: {refused}")
        return refused

    def forget(self) -> None:
        """Frees memory, which the next layer may need."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def continued(made: Case, out: Path) -> Case:
    """The document in a file, if it is of the same study on the same machine and commit.

    Raises `ValueError` if it is not, and `OSError` if it cannot be read.
    """
    found = report.load(out)
    for key, mine in made.items():
        other = found.get(key)
        # Lists are of cases: what the file has of them is kept.
        if mine != other and not (isinstance(mine, list) and isinstance(other, list)):
            raise ValueError(
                f"{out} has {key} {other!r}, and this run {mine!r}: continue what was begun, or "
                "name another file"
            )
    return found


def text(document: Case) -> str:
    """The document in JSON, one case a line. Raises `ValueError` for NaN."""

    def one(value: Any) -> str:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))

    fields = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            shown = "[\n" + ",\n".join(map(one, value)) + "\n]"
        elif isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            entries = (f"{one(name)}:{one(entry)}" for name, entry in value.items())
            shown = "{\n" + ",\n".join(entries) + "\n}"
        else:
            shown = one(value)
        fields.append(f"{one(key)}:{shown}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def commit() -> dict[str, Any] | None:
    """The commit of the package that is measured; of this checkout, where it lies outside of
    one.
    """
    return provenance.commit() or provenance.commit(ROOT)


def environment(world: moeos.World, module: str) -> Case:
    """What a run's numbers depend on: when, what was typed, machine, GPUs, driver and versions."""
    found: Case = {
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": provenance.command(module),
        "machine": machine.describe(),
        "processors": machine.processors_of(world),
        "versions": machine.versions(),
    }
    if world.backend != "cuda":
        return found
    gpu = torch.cuda.get_device_properties()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found["versions"] |= {"cuda": torch.version.cuda, "nccl": nccl}
    return found | {
        "gpu": {
            "name": gpu.name,
            "multiprocessors": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "l2_bytes": gpu.L2_cache_size,
        },
        "driver": next(iter(answer.stdout.split()), None),
    }


def numbers(option: str, given: str, least: int = 1) -> tuple[int, ...]:
    """An option's numbers with commas between. Raises `ValueError` for anything else."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise ValueError(
            f"{option} is {given!r}; it must be numbers from {least} on, with commas between"
        )
    return tuple(map(int, parts))


def names(given: str) -> tuple[str, ...]:
    """An option's names with commas between."""
    return tuple(name for name in given.split(",") if name)


def check_counts(**counts: tuple[int, int]) -> None:
    """Raises `ValueError` for an option that is smaller than the number paired with it."""
    for name, (given, least) in counts.items():
        if not least <= given <= 100_000:
            raise ValueError(f"--{name.replace('_', '-')} is {given}; allowed: {least} to 100000")


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative distance of a tensor from another one."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))
