# SPDX-License-Identifier: Apache-2.0
"""`launch/evaluate` on the twin: a tiny evaluation has all numbers, and goes on where it ended."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import study
from bench.studies import evaluate
from bench.studies.evaluate import Options
from bench.study import Case
from moeos import MoELayer, World
from moeos.cli.shared.failures import Refused
from moeos.config import reference
from moeos.engines.twin.engine import sizes_of
from moeos.world import virtual
from tests.layers import deduplicated_rows
from tests.processes import forked

STUDY = """
from bench import study
from bench.studies import evaluate
study.start(evaluate.main)
"""
RANKS = 2
TINY = [
    *("--tokens", "16,48", "--scaling-experts", "8", "--experts", "4,8", "--scaling-tokens", "16"),
    *("--hidden", "32", "--intermediate", "48", "--rounds", "3", "--warm-up", "1"),
    *("--backend", "twin"),
]
CASES = [{"tokens": tokens, "experts": experts} for tokens, experts in ((16, 8), (48, 8), (16, 4))]
ROW_BYTES = 32 * 4


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked(RANKS, STUDY, "--out", str(out), *TINY, *arguments)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote."""
    file = tmp_path_factory.mktemp("evaluation") / "evaluation-twin-2.json"
    ended = run(file)
    assert ended.returncode == 0, ended.stderr
    assert "tokens a rank" in ended.stdout
    assert ended.stderr.count("tokens 48, experts 8\n") == 1
    return file


@pytest.fixture
def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def options_of(file: Path, **changed: Any) -> Options:
    """Those of TINY."""
    given: dict[str, Any] = {
        "out": file,
        "tokens": "16,48",
        "scaling_experts": 8,
        "experts": "4,8",
        "scaling_tokens": 16,
        "hidden": 32,
        "intermediate": 48,
        "rounds": 3,
        "warm_up": 1,
    }
    return Options(**(given | changed))


def by_routing(case: Case) -> list[tuple[list[int], int, int]]:
    """Of each rank, by the reference's routing of the same tokens: pairs of each expert, pairs for
    the other rank, and rows for it if each token goes once.
    """
    options = options_of(Path())
    cfg = evaluate.config_of(options, "twin", case)

    def rank_main(world: World) -> tuple[list[int], int, int]:
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(case["tokens"], cfg.hidden, generator=generator)
        ids = reference.route(x, gate, cfg).ids
        local = cfg.experts // RANKS
        away = ids // local != world.rank
        sizes = sizes_of(cfg, RANKS, 1)
        others = range((1 - world.rank) * local, (2 - world.rank) * local)
        once = deduplicated_rows(ids, others, sizes.dedup_after * sizes.chunk_rows)
        counts = torch.bincount(ids.flatten(), minlength=cfg.experts).tolist()
        return counts, int(away.sum()), once

    torch.manual_seed(options.seed)
    gate = virtual.run(lambda world: MoELayer(cfg, world), 1)[0].gate.weight
    found: list[tuple[list[int], int, int]] = virtual.run(rank_main, RANKS)
    return found


def test_every_case_has_all_numbers(results: dict[str, Any]) -> None:
    assert results["benchmark"] == "evaluation-twin-2"
    assert (results["dtype"], results["activation"], results["top_k"]) == ("float32", "gelu", 2)
    assert results["not_measured"] == []
    [about] = results["runs"]
    assert about["command"].startswith("python -m bench.studies.evaluate ")
    assert [{key: case[key] for key in CASES[0]} for case in results["cases"]] == CASES
    for case in results["cases"]:
        assert case["run"] == 0
        assert 0 <= case["relative_error"] < 1e-5
        for name in ("moeos", "baseline"):
            times = case["times"][name]
            assert len(times["seconds"]) == 3
            assert min(times["seconds"]) > 0
            assert times["median"] == sorted(times["seconds"])[1]
        assert len(case["busy_shares"]) == 3
        assert all(0 < share < 1 for share in case["busy_shares"])
        assert case["bytes_to_peers"] > case["row_bytes_to_peers"]
        assert case["operations"] is None  # no GPU


def test_the_payload_is_that_of_the_routing(results: dict[str, Any]) -> None:
    for case, found in zip(CASES, results["cases"], strict=True):
        ranks = by_routing(case)
        sizes = sizes_of(evaluate.config_of(options_of(Path()), "twin", case), RANKS, 1)
        local = case["experts"] // RANKS
        pairs = sum(away for _, away, _ in ranks)
        rows = sum(once if sizes.deduplicates(away) else away for _, away, once in ranks)
        fullest = max(max(of_source) for of_source, _, _ in ranks)
        assert found["pairs_to_peers"] == pairs
        assert found["row_bytes_to_peers"] == (rows + pairs) * ROW_BYTES
        assert found["fullest_pair_rows"] == fullest
        # Two ranks send to `local` experts of the other, and have the results back.
        padded = 2 * 2 * local * fullest
        assert found["padded_bytes_to_peers"] == padded * ROW_BYTES
        assert found["payload_efficiency"] == pytest.approx((rows + pairs) / padded)


def test_an_evaluation_goes_on_where_it_ended_and_says_what_is_missing(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(out.read_text())
    monkeypatch.setattr(study, "commit", lambda: before["commit"])
    whole = out.with_name("whole.json")
    # An evaluation that was cut off before its last case, and is asked for another one.
    whole.write_text(json.dumps(before | {"cases": before["cases"][:-1]}))
    options = options_of(whole, tokens="16,48,32")

    def rank_main(world: World) -> list[Case]:
        one = evaluate.Evaluation(world, options)
        one.write()
        asked = options.cases(one.document["tokens"], one.document["experts"])
        return list(one.cases(one.document["cases"], asked))

    monkeypatch.setattr("moeos.cli.shared.process_group.start", lambda world: None)
    missing = [{"tokens": 32, "experts": 8}, {"tokens": 16, "experts": 4}]
    assert virtual.run(rank_main, RANKS)[1] == missing
    after = json.loads(whole.read_text())
    assert after["not_measured"] == missing
    assert (after["tokens"], after["cases"]) == ([16, 32, 48], before["cases"][:-1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rounds": 1}, "--rounds is 1; allowed: 2 to"),
        ({"warm_up": 0}, "--warm-up is 0; allowed: 1 to"),
        ({"hidden": 33}, "hidden"),
        ({"experts": "4,5"}, "experts"),
        ({"experts": "4,x"}, "--experts is '4,x'; it must be numbers from 1 on"),
        ({"out": Path("/nowhere/out.json")}, "--out is /nowhere/out.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_case(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    options = options_of(tmp_path / "out.json", **changed)
    with pytest.raises(Refused, match=re.escape(words)):
        virtual.run(lambda world: evaluate.Evaluation(world, options), RANKS)


@pytest.mark.nightly
def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    ended = run(tmp_path / "out.json", "--rounds", "1")
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("moeos: ")]
    assert said == ["moeos: --rounds is 1; allowed: 2 to 100000"]


def test_padding_is_to_the_fullest_pair_of_all() -> None:
    # Two ranks with two experts each: rank 0 has 1 and 2 rows of source 0, 3 and 4 of source 1.
    counts = [[[1, 2], [3, 4]], [[0, 5], [6, 0]]]
    assert evaluate.fullest(counts) == 6
    assert evaluate.padded_bytes(counts, 10) == 2 * (2 * 2) * 6 * 10
    assert evaluate.padded_bytes([[[7, 9]]], 10) == 0  # one rank has no peers


def test_kernels_and_copies_are_told_apart() -> None:
    names = ["moe", "ncclDevKernel_SendRecv()", "nccl:all_to_all", "Memcpy DtoH", "Memset (Device)"]
    assert evaluate.count_operations(names) == {"kernels": 2, "copies": 2}
