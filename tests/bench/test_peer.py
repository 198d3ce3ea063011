# SPDX-License-Identifier: Apache-2.0
"""`launch/evaluate megamoe` on the twin: every call of the peer's stands beside moeos' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moeos
from bench.report import option_tables, report
from bench.studies import peer
from bench.study import Rounds
from moeos.cli.shared.failures import Refused

CALLS = (("tiny", 3, 0.0), ("tiny", 40, 0.0), ("tiny", 40, 1.2))


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SHAPES", {"tiny": peer.Shape(128, 64, 4, 2)})
    monkeypatch.setattr(peer, "FEW_TOKENS", 8)
    monkeypatch.setattr(peer, "ROUNDS", Rounds(3, 1))


def written(folder: Path, **changes: Any) -> Path:
    """What the peer's program writes: a call that failed has no time."""
    rows = [
        {"who": peer.PEER, "shape": shape, "tokens": tokens, "zipf": zipf, "us": 5.0, "err": 0.06}
        for shape, tokens, zipf in CALLS
    ]
    rows.append({"who": peer.PEER, "shape": "tiny", "tokens": 80, "error": "too little memory"})
    file = folder / "peer.json"
    file.write_text(json.dumps({"ranks": 1, "rows": rows} | changes))
    return file


def measure(made: Path, out: Path) -> None:
    with moeos.init("twin") as world, torch.no_grad():
        peer.Peer(world, made, out).measure_all()


def test_each_call_of_the_peer_is_measured_in_every_format(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    measure(written(tmp_path), out)
    results = json.loads(out.read_text())
    assert results["benchmark"] == "fp8-peer-1"
    assert len(results["rows"]) == 4 * len(CALLS)
    (section,) = report.sections(results)
    assert [row[0] for row in section.rows] == ["3", "40", "40, Zipf 1.2"]
    errors = {(row["who"], row["tokens"], row["zipf"]): row["err"] for row in results["rows"]}
    for _, *call in CALLS:
        plain, weights, both = (
            errors[(who, *call)] for who in ("moeos bf16", "moeos fp8", option_tables.OURS)
        )
        assert plain < 0.01 < weights < both < 0.1


def test_a_file_that_is_of_other_ranks_or_another_program_is_named(tmp_path: Path) -> None:
    row = {"who": peer.PEER, "shape": "large", "tokens": 3, "zipf": 0.0, "us": 5.0}
    for changes, message in (
        ({"ranks": 2}, r"the peer ran on 2 ranks, and here are 1: set RANKS=2"),
        ({"rows": [row]}, r"shape 'large' is unknown; it must be one of tiny"),
        ({"rows": []}, r"no call of deepgemm-fp8; run the peer's program"),
        ({"rows": [{}]}, r"not what the peer's program writes: KeyError\('who'\)"),
    ):
        with pytest.raises(Refused, match=message):
            measure(written(tmp_path, **changes), tmp_path / "out.json")
