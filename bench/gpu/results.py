# SPDX-License-Identifier: Apache-2.0
"""The JSON document of a GPU benchmark: begun, added to after each case, continued by a later run.

It is whole at any time, whatever becomes of the process that writes it. Its fields:
    benchmark, ranks, rounds, warm_up_rounds, full_ranks, commit, shapes (name -> the layer's
        config): what was asked for, the same in every run that adds to the document. `benchmark`
        is the name of the suite and the number of ranks.
    method: how each number is measured, in words.
    runs: for each start of the ranks its command, machine, GPUs, versions and measured rates.
    results: the measured cases; `run` says in which one, and everything in it is of that run.
    failures: what went wrong, by shape; a later run tries it again.
    not_measured: the cases that this suite has and the document has not.
    measuring: the case that the ranks are at, while they are; `moved` is counted up as they go on.
It knows nothing of GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.suite import Case, Shape, Suite
from moeos.system.files import replace

_SAME = (
    "benchmark", "ranks", "rounds", "warm_up_rounds", "full_ranks", "commit", "shapes",
)  # fmt: skip


class Results:
    """A document and the file that it is in; one process at a time may hold it.

    Args:
        path: of the file; begun if it does not exist.
        suite: what should be measured.
        ranks: P.
        commit: see `moeos.cli.shared.provenance`.
        method: how each number is measured.

    Raises:
        ValueError: the file is not such a document, or one of another suite, number of ranks or
            commit.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        suite: Suite,
        ranks: int,
        commit: Mapping[str, Any] | None,
        method: Mapping[str, str],
    ) -> None:
        self._path = path
        self._suite = suite
        shapes = {
            shape.name: json.loads(shape.config_on(ranks, suite.full_ranks).digest())
            for shape in suite.shapes
        }
        self.document: dict[str, Any] = {
            "benchmark": f"{suite.name}-{ranks}",
            "ranks": ranks,
            "rounds": suite.rounds,
            "warm_up_rounds": suite.warm_up_rounds,
            "full_ranks": suite.full_ranks,
            "few_tokens": suite.few_tokens,
            "commit": None if commit is None else dict(commit),
            "shapes": shapes,
            "method": dict(method),
            "runs": [],
            "results": [],
            "failures": [],
        }
        if path.exists():
            self._continue(_read(path))

    def _continue(self, found: dict[str, Any]) -> None:
        """Takes over what an earlier run has found. Shapes may be others of the same suite."""
        for key in _SAME:
            mine, other = self.document[key], found.get(key)
            if key == "shapes" and isinstance(other, dict):
                mine = {name: mine.get(name, layer) for name, layer in other.items()}
            if mine != other:
                raise ValueError(
                    f"{self._path} has {key} {other!r}, and this run {mine!r}: continue what was "
                    "begun, or name another file"
                )
        shapes = found["shapes"] | self.document["shapes"]
        self.document = found | {"shapes": shapes, "method": self.document["method"]}

    def write(self) -> None:
        """Puts the document into its file in one step."""
        self.document["not_measured"] = [
            {"shape": shape.name, **dataclasses.asdict(case)}
            for shape in self._suite.shapes
            for case in shape.cases
            if not self.has(shape, case)
        ]
        text = json.dumps(self.document, indent=1, allow_nan=False) + "\n"
        replace(self._path, text)

    def forget_failures(self) -> None:
        """For a new attempt."""
        self.document["failures"] = []
        self.document.pop("measuring", None)

    def has(self, shape: Shape, case: Case) -> bool:
        """Whether a case has been measured."""
        key = {"shape": shape.name, **dataclasses.asdict(case)}
        return any(key.items() <= found.items() for found in self.document["results"])

    def failed(self, shape: Shape) -> bool:
        """Whether something of a shape went wrong."""
        return any(shape.name == failure["shape"] for failure in self.document["failures"])

    def open_cases(self, shape: Shape) -> list[Case]:
        """The cases of a shape that should be measured; none of one that failed."""
        if self.failed(shape):
            return []
        return [case for case in shape.cases if not self.has(shape, case)]

    def begin_run(self, about: Mapping[str, Any]) -> None:
        """Notes that the ranks have started, and what they run on."""
        self.document["runs"].append(dict(about))
        self.write()

    def measuring(self, what: str, case: Case | None = None) -> None:
        """Notes what the ranks do now: of which shape, or how they start."""
        moved = self.document.get("measuring", {}).get("moved", 0) + 1
        self.document["measuring"] = {"shape": what, "moved": moved}
        if case is not None:
            self.document["measuring"] |= dataclasses.asdict(case)
        self.write()

    def add(self, shape: Shape, case: Case, found: Mapping[str, Any]) -> None:
        """Adds a measured case."""
        key = {"shape": shape.name, **dataclasses.asdict(case)}
        run = len(self.document["runs"]) - 1
        self.document["results"].append({"run": run, **key, **found})
        self.write()

    def fail(self, shape: str, what: str, case: Case | None = None) -> None:
        """Adds a failure."""
        entry: dict[str, Any] = {"shape": shape, "what": what}
        if case is not None:
            entry |= dataclasses.asdict(case)
        self.document["failures"].append(entry)
        self.write()

    def end(self) -> None:
        """Notes that the ranks have ended."""
        self.document.pop("measuring", None)
        self.write()


def timing(seconds: Sequence[float]) -> dict[str, Any]:
    """Times of one contestant, a round each, with their median and quartiles."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"seconds": list(seconds), "median": median, "quartiles": [low, high]}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not the results of a benchmark: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not the results of a benchmark")
    return found
