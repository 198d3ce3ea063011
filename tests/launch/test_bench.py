"""`launch/bench` says what it can measure before it installs anything."""

import subprocess

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "moeos: which benchmark? allowed: twin; usage: launch/bench twin [--json OUT]"),
        (["twins"], "moeos: the benchmark 'twins' is unknown; allowed: twin"),
    ],
)
def test_a_benchmark_that_does_not_exist_is_refused_in_a_line(
    arguments: list[str], said: str
) -> None:
    ended = subprocess.run(
        [ROOT / "launch" / "bench", *arguments], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == [said]
