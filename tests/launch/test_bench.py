# SPDX-License-Identifier: Apache-2.0
"""`launch/bench` says what it can measure before it installs anything."""

import subprocess

import pytest

from tests.processes import ROOT

USAGE = (
    "usage: launch/bench twin [--json OUT] | launch/bench gpu --out OUT | "
    "launch/bench guard --base COMMIT; each knows --help"
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], f"moeos: which benchmark? {USAGE}"),
        (["twins"], f"moeos: the benchmark 'twins' is unknown; {USAGE}"),
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
