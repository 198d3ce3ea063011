# SPDX-License-Identifier: Apache-2.0
"""The JSON document of an evaluation: begun, added to after each case, continued by a later run.

It is whole at any time, whatever becomes of the process that writes it. Its fields:
    benchmark, commit, backend, device, ranks, hidden, intermediate, top_k, activation, dtype,
        scaling_experts, scaling_tokens, rounds, warm_up_rounds, seed: the same in every run.
    tokens, experts: what all runs together were asked for.
    runs: of each start of the ranks its command, machine, versions and processors of a rank.
    cases: what was measured; `run` says in which of them.
    not_measured: the cases that were asked for and are not there.
It knows nothing of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import report
from moeos.cli.shared import output
from moeos.system.files import replace

_SAME = (
    "benchmark", "commit", "backend", "device", "ranks", "hidden", "intermediate", "top_k",
    "activation", "dtype", "scaling_experts", "scaling_tokens", "rounds", "warm_up_rounds", "seed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured at a time.

    Attributes:
        tokens: of each rank.
        experts: of all ranks.
    """

    tokens: int
    experts: int


class Document:
    """A document and the file that it is in; one process at a time may hold it.

    Args:
        path: of the file; begun if it does not exist.
        same: the fields that are the same in every run.
        tokens: of the cases with `scaling_experts` experts.
        experts: of the cases with `scaling_tokens` tokens.

    Raises:
        ValueError: the file is no such document, or one of another commit, of other ranks, another
            backend or other sizes.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        same: Mapping[str, Any],
        tokens: Sequence[int],
        experts: Sequence[int],
    ) -> None:
        self._path = path
        self._same = {key: same[key] for key in _SAME}
        found: dict[str, Any] = {"tokens": [], "experts": [], "runs": [], "cases": []}
        if path.exists():
            found = report.load(path)
            self._check(found)
        self.content: dict[str, Any] = {
            **self._same,
            "tokens": sorted({*tokens, *found["tokens"]}),
            "experts": sorted({*experts, *found["experts"]}),
            "runs": found["runs"],
            "cases": found["cases"],
        }
        self._note_open_cases()

    def _check(self, found: Mapping[str, Any]) -> None:
        for key, mine in self._same.items():
            other = found.get(key)
            if mine != other:
                raise ValueError(
                    f"{self._path} has {key} {other!r}, and this run {mine!r}: continue what was "
                    "begun, or name another file"
                )

    def open_cases(self) -> list[Case]:
        """The cases that were asked for and have not been measured."""
        content = self.content
        asked = [Case(tokens, content["scaling_experts"]) for tokens in content["tokens"]]
        asked += [Case(content["scaling_tokens"], experts) for experts in content["experts"]]
        measured = {Case(found["tokens"], found["experts"]) for found in content["cases"]}
        return [case for case in dict.fromkeys(asked) if case not in measured]

    def begin_run(self, about: Mapping[str, Any]) -> None:
        """Notes that the ranks have started, and what they run on."""
        self.content["runs"].append(dict(about))
        self.write()

    def add(self, case: Case, found: Mapping[str, Any]) -> None:
        """Adds a measured case."""
        run = len(self.content["runs"]) - 1
        self.content["cases"].append({**dataclasses.asdict(case), "run": run, **found})
        self.write()

    def write(self) -> None:
        """Puts the document into its file in one step. Raises `OSError`."""
        self._note_open_cases()
        replace(self._path, output.json_text(self.content))

    def _note_open_cases(self) -> None:
        self.content["not_measured"] = [dataclasses.asdict(case) for case in self.open_cases()]
