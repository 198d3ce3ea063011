# SPDX-License-Identifier: Apache-2.0
"""`launch/evaluate tensor` on the twin: a tiny suite has all numbers, and its tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import study, suites
from bench.report import report, tensor_paper, tensor_tables
from bench.studies import expert_major
from moeos import MoEConfig
from tests.processes import ROOT, forked

TINY = """
rounds = 3
warm_up_rounds = 1
trace_rounds = 3
hidden = 64
experts = 8
top_k = 2
tokens = [4, 40]
slices = [16, 32]
staged = 16
reduced = 32
"""
STUDY = """
from bench import study
from bench.studies import tensor
study.start(tensor.main)
"""
COUNTS = (4, 40)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found."""
    folder = tmp_path_factory.mktemp("tensor")
    (folder / "tiny.toml").write_text(TINY)
    out = folder / "out.json"
    ended = forked(2, STUDY, str(folder / "tiny.toml"), "--out", str(out), "--backend", "twin")
    assert ended.returncode == 0, ended.stderr
    assert "best forced" in ended.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_case_has_all_contestants(results: dict[str, Any]) -> None:
    assert results["benchmark"] == "tensor-twin-2"
    cases = [(case["intermediate"], case["tokens"]) for case in results["alone"]]
    assert cases == [(width, tokens) for width in (16, 32) for tokens in COUNTS]
    layouts = ["EE", "auto", "expert_major_persistent", "gathered", "token_major"]
    for case in results["alone"]:
        assert list(case["times"]) == layouts
        assert list(case["stages"]) == (layouts if case["intermediate"] == 16 else [])
    policies = ["EE", "auto", "fused", "after", "expert_major_persistent"]
    for case in results["together"]:
        assert list(case["times"]) == [*policies, "gathered", "token_major", "products", "chain"]
        assert 1 <= case["touched"] <= min(8, 2 * case["tokens"])
    for case in results["alone"] + results["together"]:
        assert max(case["distance"].values()) < 1e-4
        for times in case["times"].values():
            assert len(times["seconds"]) == 3
            assert min(times["seconds"]) > 0


def test_a_layout_that_gathers_permutes_nothing(results: dict[str, Any]) -> None:
    of_few = results["alone"][0]["stages"]
    assert of_few["auto"]["permute"] == of_few["gathered"]["permute"] == 0
    of_many = results["alone"][1]["stages"]["auto"]
    for stages in (of_few["expert_major_persistent"], of_few["token_major"], of_many):
        assert min(stages.values()) > 0


def test_tables_have_ours_beside_the_paper_s(results: dict[str, Any]) -> None:
    tables = {section.title: section for section in report.sections(results)}
    stages = tables["tokens, variant"]
    assert [row[0] for row in stages.rows[:2]] == ["4, EE", "4, moeos, auto"]
    assert all(len(row) == 1 + len(stages.columns) for row in stages.rows)
    assert "other machines" in stages.heading
    theirs = {**results, "staged": 16, "alone": [{**results["alone"][0], "tokens": 8}]}
    rows = {row[0]: row for row in report.sections(theirs)[0].rows}
    assert rows["8, the paper's TT"][-1] == "0.249 ms"
    assert rows["8, the paper's EE"][2] == "0.117 ms"
    assert "the rank's" not in report.markdown(results)


def test_bars_are_of_the_largest_of_three_floors(results: dict[str, Any]) -> None:
    rates = {"F": 1.0, "W": 1e9, "N": 1e9}
    [few, many] = (dict(case) for case in results["together"])
    few |= {"tokens": 8, "times": {name: {"median": 1e-6} for name in few["times"]}}
    many["times"] = {name: {"median": 1e-3} for name in many["times"]}
    few["times"]["EE"] = {"median": 3e-6}
    bars = report.sections({**results, "rates": rates, "together": [few, many]})[-1]
    weights = 3 * few["touched"] * 32 * 64 * 2 / 1e9  # above sums, 8 * 64 * 2 / 1e9
    most = 1.15 * weights + 45e-6
    assert bars.rows[0][:4] == ["8", "3.00", "2", "1 µs"]
    assert float(bars.rows[0][5].split()[0]) == pytest.approx(1e-6 / most, abs=0.01)
    assert bars.rows[1][5] == f"{1e-3 / (1.15e-3 + 45e-6):.2f}"
    assert bars.rows[1][7] == "1.00"


def test_the_baseline_is_the_reference_s() -> None:
    cfg = MoEConfig(
        hidden=32, intermediate=16, experts=6, top_k=3, max_tokens=20, dtype=torch.float32
    )
    inputs = expert_major.draw(cfg, 20, "cpu", 1, 0)
    baseline = expert_major.ExpertMajor(inputs, None)
    gates, ups = (
        torch.einsum(
            "sh,skih->ski", inputs.x.double(), inputs.w1.double()[inputs.ids.long()][:, :, half]
        )
        for half in (slice(0, 16), slice(16, 32))
    )
    inner = gates * gates.sigmoid() * ups
    made = torch.einsum("ski,skhi->skh", inner, inputs.w2.double()[inputs.ids.long()])
    y = (made * inputs.weights.double()[..., None]).sum(1)
    assert study.distance(baseline.partial(), y) < 1e-5
    assert study.distance(baseline.whole(), y) < 1e-5
    assert torch.equal(baseline.chain(), baseline.stages["combine"]())  # type: ignore[arg-type]


def test_the_paper_s_suite_has_the_paper_s_sizes() -> None:
    found = suites.slices(ROOT / "configs" / "suites" / "tensor.toml")
    assert found.tokens == tensor_paper.TOKENS == tuple(tensor_tables.BARS)
    assert set(found.slices) == {intermediate for intermediate, _ in tensor_paper.TOTALS}
    config = found.config(found.reduced, torch.bfloat16)
    assert (config.hidden, config.experts, config.top_k) == (4096, 128, 8)
