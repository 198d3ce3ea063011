# SPDX-License-Identifier: Apache-2.0
"""The frame of studies: turns, and a document that is whole at any time and is continued."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import clocks, study
from bench.study import Rounds, Study
from moeos import World
from moeos.cli.shared.failures import Refused
from moeos.world import virtual

COMMIT = {"id": "a" * 40, "changed_files": ["README.md"]}


@pytest.fixture(autouse=True)
def _commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all runs one commit, so that a change of the tree does not part them."""
    monkeypatch.setattr(study, "commit", lambda: COMMIT)


def on_rank(work: Callable[[Study], Any], out: Path, **changed: Any) -> Any:
    """What `work` makes of a study on one rank."""
    given = {"hidden": 32, "cases": [], **changed}
    rounds = given.pop("rounds", Rounds(3, 1))
    module = "bench.studies.some"

    def rank_main(world: World) -> Any:
        return work(Study(world, out, "some-twin-1", module, rounds, lambda: dict(given)))

    return virtual.run(rank_main, 1)[0]


def measure(one: Study, tokens: list[int]) -> list[int]:
    """Adds the cases that are not there; which these were."""
    into, done = one.document["cases"], []
    for case in one.cases(into, [{"tokens": count} for count in tokens]):
        one.add(into, case, {"seconds": 1.5})
        done.append(case["tokens"])
    return done


def test_what_is_measured_is_not_measured_again_and_more_is_added(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert on_rank(lambda one: measure(one, [1, 2]), out) == [1, 2]
    assert on_rank(lambda one: measure(one, [1, 2]), out) == []
    assert on_rank(lambda one: measure(one, [2, 3, 1]), out) == [3]
    found = json.loads(out.read_text())
    assert [(case["tokens"], case["run"]) for case in found["cases"]] == [(1, 0), (2, 0), (3, 1)]
    assert [run["command"].split()[2] for run in found["runs"]] == ["bench.studies.some"] * 2
    assert {"began", "machine", "processors", "versions"} <= found["runs"][0].keys()
    assert (found["benchmark"], found["ranks"], found["hidden"]) == ("some-twin-1", 1, 32)
    assert (found["rounds"], found["warm_up_rounds"], found["commit"]) == (3, 1, COMMIT)
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_a_case_is_a_line(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    on_rank(lambda one: measure(one, [1, 2, 3]), out)
    lines = out.read_text().splitlines()
    assert sum('"tokens":' in line for line in lines) == 3
    layers = {"a": {"results": []}, "b": {"results": []}}
    assert study.text({"layers": layers, "rate": 1.5}).splitlines() == [
        *("{", '"layers":{', '"a":{"results":[]},', '"b":{"results":[]}', "},", '"rate":1.5', "}"),
    ]


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("commit", {"id": "f" * 40, "changed_files": []}),
        ("commit", {"id": "a" * 40, "changed_files": []}),
        *(("ranks", 4), ("backend", "cuda"), ("hidden", 64), ("rounds", 4), ("benchmark", "b")),
    ],
)
def test_results_of_something_else_are_refused_by_both_values(
    tmp_path: Path, key: str, other: object
) -> None:
    out = tmp_path / "out.json"
    on_rank(lambda one: measure(one, [1]), out)
    document = json.loads(out.read_text())
    mine = document[key]
    out.write_text(json.dumps({**document, key: other}))
    words = f"{out} has {key} {other!r}, and this run {mine!r}: continue what was begun"
    with pytest.raises(Refused, match=re.escape(words)):
        on_rank(lambda one: measure(one, [1]), out)


def test_another_layer_of_the_same_name_is_refused(tmp_path: Path) -> None:
    def described(width: int) -> Callable[[Study], None]:
        def work(one: Study) -> None:
            one.describe_layer("layers", "a", {"hidden": width})
            measure(one, [1])

        return work

    on_rank(described(8), tmp_path / "out.json")
    on_rank(described(8), tmp_path / "out.json")
    with pytest.raises(ValueError, match="has another layer a: name another file"):
        on_rank(described(16), tmp_path / "out.json")


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(Refused, match=r"out\.json: not the results of a benchmark"):
        on_rank(lambda one: None, tmp_path / "out.json")


def test_a_number_that_json_has_no_word_for_never_reaches_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    on_rank(lambda one: measure(one, [1]), out)
    before = out.read_text()
    with pytest.raises(ValueError, match="JSON compliant"):
        on_rank(lambda one: one.add(one.document["cases"], {}, {"seconds": float("nan")}), out)
    assert out.read_text() == before


def test_contestants_take_turns_and_the_slowest_rank_counts() -> None:
    order: list[str] = []

    class Table:
        """A clock by which a call takes as many seconds as its rank and its name say."""

        def __init__(self, rank: int) -> None:
            self._rank = rank

        def begin(self, work: Callable[[], object], delay: float = 0.0) -> Callable[[], float]:
            name = work()
            if self._rank == 0:
                order.append(str(name))
            return lambda: 10.0 * (name == "b") + self._rank + delay

        def settle(self) -> None: ...

        def flush(self) -> None: ...

        def stretch(self, work: Callable[[], object], factor: float) -> object: ...

    def rank_main(world: World) -> dict[str, Any]:
        ways = {"a": lambda: "a", "b": lambda: "b"}
        return clocks.in_turn(world, Table(world.rank), ways, rounds=3, warm_up=1)

    found = virtual.run(rank_main, 2)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [found[0][name]["seconds"] for name in "ab"] == [[1.0] * 3, [11.0] * 3]
    assert found[0] == found[1]


def test_quartiles_lie_around_the_median() -> None:
    found = clocks.timing([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found["median"], found["quartiles"]) == (3.0, [1.5, 4.5])
    assert found["median"] == statistics.median(found["seconds"])


def test_a_distance_that_is_no_number_is_the_worst() -> None:
    def rank_main(world: World) -> float:
        one = Study.__new__(Study)
        one.world = world
        return one.worst(float("nan") if world.rank == 1 else 0.5)

    assert all(found != found for found in virtual.run(rank_main, 2))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: study.numbers("--tokens", "1,x"), "--tokens is '1,x'; it must be numbers from 1"),
        (lambda: study.numbers("--tokens", "0"), "it must be numbers from 1 on"),
        (lambda: study.check_counts(warm_up=(0, 1)), "--warm-up is 0; allowed: 1 to 100000"),
    ],
)
def test_options_that_cannot_be_are_refused(work: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        work()
