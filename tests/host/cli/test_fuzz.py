# SPDX-License-Identifier: Apache-2.0
"""`moeos fuzz`: figures, findings, and how to repeat one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from moeos.engines import explore
from moeos.engines.explore import SCENARIOS, Found, Tally, Wrong
from tests.host.cli import commands

invoke = functools.partial(commands.invoke, "fuzz")


def test_a_moment_of_it_finds_nothing_and_says_what_was_tried(tmp_path: Path) -> None:
    code, out, err = invoke("--seconds", 0.5, "--seed", 7, "--json", tmp_path / "fuzz.json")
    assert (code, err) == (0, "")
    assert "latest error" in out
    document = json.loads((tmp_path / "fuzz.json").read_text())
    assert document["seed"] == 7
    assert document["wrong"] == []
    assert list(document["scenarios"]) == list(SCENARIOS)
    assert all(tally["runs"] > 0 for tally in document["scenarios"].values())
    assert all(name in out for name in SCENARIOS)


def test_a_finding_is_an_exit_code_and_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tallies = {scenario: Tally(runs=1) for scenario in SCENARIOS}
    wrong = [Wrong(321, "nic", "priority", "rank 2 gives a wrong result")]
    monkeypatch.setattr(explore, "explore_side_by_side", lambda *_: Found(tallies, wrong))
    code, out, _ = invoke()
    assert code == 1
    assert "WRONG: rank 2 gives a wrong result" in out
    assert "again: moeos fuzz --seed 321 --replay nic/priority" in out


def test_a_run_is_repeated_by_its_seed() -> None:
    code, out, err = invoke("--seed", 5, "--replay", "die/random")
    assert (code, err) == (0, "")
    assert out == invoke("--seed", 5, "--replay", "die/random")[1]
    assert "seed 5, die, random:" in out
    assert "as it must be" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", 0), "--seconds is 0; allowed: above 0"),
        (("--seconds", "nan"), "--seconds is nan"),
        (("--seed", -1), "--seed is -1"),
        (("--replay", "die"), "--replay is 'die'; it must be SCENARIO/STRATEGY"),
        (("--replay", "die/hard"), "strategy is 'hard'"),
        (("--json", "/nowhere/x.json"), "--json is /nowhere/x.json"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[object, ...], message: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
