# SPDX-License-Identifier: Apache-2.0
"""`launch/straggler` on the twin: a small study has all numbers, and tables follow from them."""

from __future__ import annotations

import copy
import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.report import plots, report, straggler_tables
from bench.studies import straggler
from bench.studies.straggler import Options
from moeos import World
from moeos.cli.shared import output
from moeos.world import virtual
from tests.processes import ROOT, forked

TINY = """
hidden = 32
intermediate = 48
experts = 8
top_k = 2
dtype = "float32"
max_tokens = 64
"""
DELAY = 0.3
STUDY = """
from bench import study
from bench.studies import straggler
study.start(straggler.main)
"""

Found = tuple[dict[str, Any], str]


def run_study(*arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return forked(ranks, STUDY, *map(str, arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    folder = tmp_path_factory.mktemp("straggler")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "plots").mkdir()
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Two ranks, the second late or slow; what was written and printed."""
    out = folder / "out.json"
    names = [f"late:1:{DELAY}", "slow:1:1500", "jitter:thesis-vm"]
    wanted = [word for name in names for word in ("--scenario", name)]
    ended = run_study(
        folder / "tiny.toml", "--out", out, "--steps", 6, *wanted, "--plot", folder / "plots"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("name none\n") == 1  # which scenario it is at
    return json.loads(out.read_text()), ended.stdout


def scenario_of(results: dict[str, Any], name: str) -> dict[str, Any]:
    [scenario] = [one for one in results["scenarios"] if one["name"].startswith(name)]
    found: dict[str, Any] = scenario
    return found


@pytest.mark.nightly
def test_both_layers_have_the_same_delays_in_every_scenario(found: Found) -> None:
    results, _ = found
    assert [one["name"].split(":")[0] for one in results["scenarios"]] == [
        *("none", "late", "slow", "jitter")
    ]
    for scenario in results["scenarios"]:
        for name in ("moeos", "baseline"):
            seconds = scenario[name]["seconds"]
            assert (len(seconds), {len(step) for step in seconds}) == (6, {2})
            for step, delays in zip(seconds, scenario["delays"], strict=True):
                assert all(took > delay > -1 for took, delay in zip(step, delays, strict=True))
                assert min(step) > 0
    assert scenario_of(results, "late")["delays"] == [[0.0, DELAY]] * 6
    assert len({d for step in scenario_of(results, "jitter")["delays"] for d in step}) == 12


@pytest.mark.nightly
def test_a_late_rank_keeps_nobody_from_working(found: Found) -> None:
    late = scenario_of(found[0], "late")
    assert late["moeos"]["done_before"] == [1.0] * 6
    for name in ("moeos", "baseline"):
        # All need its rows. Where the cores are busy, a rank may leave the barrier after another.
        least = statistics.median(min(step) for step in late[name]["seconds"])
        assert least > 0.5 * DELAY


@pytest.mark.nightly
def test_a_slow_rank_is_slow_in_both_layers(found: Found) -> None:
    results, _ = found
    for name in ("moeos", "baseline"):
        # The shortest steps: others may take the cores in some of them.
        slow, undelayed = (
            min(straggler_tables.step_seconds(scenario_of(results, scenario), name))
            for scenario in ("slow", "none")
        )
        assert slow > 2 * undelayed


@pytest.mark.nightly
def test_tables_follow_from_the_numbers(found: Found) -> None:
    results, printed = found
    assert results["benchmark"] == "straggler-twin-2"
    [about] = results["runs"]
    assert about["command"].startswith("python -m bench.studies.straggler ")
    text = report.markdown(results)
    assert "2 ranks, 1 processor each, 64 tokens a rank, 6 steps of each scenario" in text
    late = straggler_tables.step_seconds(scenario_of(results, "late"), "moeos")
    median = statistics.median(late)
    assert f"| `late:1:{DELAY}` | 300 ms | {output.duration(median)} |" in text
    assert f"| `late:1:{DELAY}` | 300 ms | 100.0 %: met |" in text
    assert "idle share of a step" in printed
    none = straggler_tables.idle_shares(results, "baseline", 0)
    assert all(0 <= share < 1 for share in none)
    idle = straggler_tables.idle_shares(results, "moeos", 1)
    assert all(0.5 < share <= 1 for share in idle)


@pytest.mark.nightly
def test_nobody_is_asked_for_work_for_which_there_was_no_time(found: Found) -> None:
    results = copy.deepcopy(found[0])
    late = scenario_of(results, "late")
    late["moeos"]["done_before"] = [0.1] * 6
    assert "10.0 %: missed" in report.markdown(results)
    # Half of a step does not depend on one of two ranks.
    results["undelayed_seconds"]["moeos"] = 2 * DELAY
    assert "10.0 %: missed" in report.markdown(results)
    results["undelayed_seconds"]["moeos"] = 3 * DELAY
    assert "10.0 %: no time for it" in report.markdown(results)


@pytest.mark.nightly
def test_plots_are_of_the_results_and_the_timeline_is_there(found: Found, folder: Path) -> None:
    results, _ = found
    picture = (folder / "plots" / plots.straggler_file(results)).read_text()
    assert plots.straggler_digest(results) in picture
    assert "late:1:" in picture
    timeline = folder / "plots" / results["timeline"]
    assert timeline.read_bytes().startswith(b"\x89PNG")


def test_ranks_of_two_nodes_have_slow_links_and_windows(folder: Path) -> None:
    out = folder / "nodes.json"
    options = ["--nodes", 2, "--link-latency", 0.02, "--link-rate", 1e8, "--scenario", "none"]
    ended = run_study(folder / "tiny.toml", "--out", out, "--steps", 3, *options)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(out.read_text())
    assert results["benchmark"] == "straggler-twin-2-nodes-2"
    [none] = results["scenarios"]
    for name in ("moeos", "baseline"):  # a latency there and one back
        assert all(took > 0.04 for step in none[name]["seconds"] for took in step)
    incast = results["incast"]
    # 64 tokens over 8 experts, 4 local, 32 numbers of 4 bytes, both rounds, one far rank.
    assert incast["miv_bytes"] == 64 * 4 * 128 * 2 // 8
    assert 0 < incast["received_bytes"] <= 2 * 64 * 2 * 128
    assert incast["window_bytes"] > 0
    assert "2 ranks of 2 nodes with links of 0.1 GB/s and 20 ms between them" in ended.stdout


def options_in(folder: Path, **changed: Any) -> Options:
    given: dict[str, Any] = {"config": folder / "tiny.toml", "out": folder / "bad.json"}
    return Options(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "words", "ranks"),
    [
        ({}, "a study needs two ranks or more", 1),
        ({"scenario": ["late:2:1x"]}, "names '2'; ranks are 0 to 1", 2),
        ({"nodes": 3}, "--nodes is 3; it must divide 2 ranks equally", 2),
        ({"steps": 1}, "--steps is 1; allowed: 2 to", 2),
        ({"warm_up": 0}, "--warm-up is 0; allowed: 1 to", 2),
        ({"tokens": 65}, "tokens is 65; allowed: 0 to", 2),
        ({"plot": Path("/nowhere")}, "--plot is /nowhere; it must be a folder that exists", 2),
        (
            {"config": ROOT / "configs" / "thesis.toml"},
            "has biases, a capacity or a SwiGLU limit",
            2,
        ),
    ],
)
def test_what_cannot_be_studied_is_refused_before_the_first_step(
    folder: Path, changed: dict[str, Any], words: str, ranks: int
) -> None:
    options = options_in(folder, **changed)

    def rank_main(world: World) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            straggler.prepare(world, options)

    virtual.run(rank_main, ranks)


def test_what_all_ranks_refuse_is_said_once(folder: Path) -> None:
    ended = run_study(folder / "tiny.toml", "--out", folder / "x.json", "--scenario", "plan:none")
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("moeos: ")]
    assert said == ["moeos: none: No such file or directory"]


@pytest.mark.nightly
def test_experts_that_no_rank_can_hold_equally_are_refused_once(folder: Path) -> None:
    ended = run_study(folder / "tiny.toml", "--out", folder / "x.json", ranks=3)
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("moeos: ")]
    sentence = "experts is 8 and cannot be divided equally among 3 ranks, as the all-to-all layer"
    assert said == [f"moeos: {sentence} needs; start a number of ranks that divides 8"]
    assert "Traceback" not in ended.stderr


def test_plots_without_matplotlib_are_refused_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("matplotlib, which draws plots, is missing")

    monkeypatch.setattr(straggler.drawing, "matplotlib", missing)
    options = Options(config=folder / "tiny.toml", out=folder / "no.json", plot=folder / "plots")
    with pytest.raises(ValueError, match="--plot is given: matplotlib, which draws plots, is mis"):
        virtual.run(lambda world: straggler.prepare(world, options), 2)


@pytest.mark.nightly
def test_help_is_shown_once_by_all_ranks() -> None:
    ended = run_study("--help")
    assert ended.returncode == 0
    assert ended.stdout.count("Usage:") == 1
