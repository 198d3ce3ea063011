# SPDX-License-Identifier: Apache-2.0
"""The demo, once under mpirun: some processes, one table, one verdict, and one voice."""

import json
import re
from pathlib import Path

import pytest

from tests.nightly import all_but
from tests.processes import MOEOS, ROOT, forked, mpirun

DEMO = str(ROOT / "configs" / "demo.toml")

ONE_WRONG_RANK = """
import moeos
right = moeos.MoELayer.forward

def forward(layer, *arguments):
    y = right(layer, *arguments)
    return y * 1.05 if layer.world.rank == 1 else y

moeos.MoELayer.forward = forward
"""


@pytest.mark.parametrize("size", all_but([2], [2, 4]))
def test_ranks_run_a_layer_on_documents_and_match_the_reference(size: int, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    ended = mpirun(size, MOEOS, "run", DEMO, "--iterations", "5", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.rstrip().splitlines()
    assert re.fullmatch(r"max relative error \d\.\de-\d\d \(tolerance 8\.0e-03\)", lines[-1])
    assert sum("max relative error" in line for line in lines) == 1
    assert all(f"rank {rank}" in ended.stdout for rank in range(size))

    document = json.loads(path.read_text())
    ranks = document["by_rank"]
    assert document["ranks"] == size
    assert 0 < document["max_relative_error"] <= 8e-3
    sent = [rank["pairs_sent"] for rank in ranks]
    received = [rank["pairs_received"] for rank in ranks]
    assert sent == [list(column) for column in zip(*received, strict=True)]
    assert [2 * sum(rank["tokens"]) for rank in ranks] == [sum(pairs) for pairs in sent]
    assert len({tuple(rank["tokens"]) for rank in ranks}) == size  # each rank draws its own
    for rank in ranks:
        assert rank["check"]["checked"] + rank["check"]["near_ties"] == sum(rank["tokens"])


def test_one_ranks_wrong_output_fails_the_run() -> None:
    ended = forked(2, ONE_WRONG_RANK + MOEOS, "run", DEMO, "--iterations", "2")
    assert ended.returncode == 1
    assert "max relative error 5." in ended.stdout


def test_what_all_ranks_refuse_is_one_line() -> None:
    ended = forked(2, MOEOS, "run", DEMO, "--tokens", "600")
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("moeos")]
    assert said == ["moeos: tokens is 600; allowed: 0 to max_tokens, 512, of this rank"]
    assert "Traceback" not in ended.stderr
