# SPDX-License-Identifier: Apache-2.0
"""`launch/bench twin`, with a tiny layer: every field is there and follows from the times."""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import twin
from bench.twin import Outcome, PlainLayer, Workload
from moeos import MoEConfig
from moeos.config import reference
from tests.nightly import at_night
from tests.processes import ROOT

TINY = """
hidden = 32
intermediate = 48
experts = 8
top_k = 2
dtype = "float32"
max_tokens = 64

[run]
iterations = {rounds}
"""


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The benchmark as its launcher starts it."""
    return subprocess.run(
        [
            *("bash", "-c", 'source "$0" && exec "$@"', str(ROOT / "launch" / "environment.sh")),
            *(sys.executable, "-m", "bench.twin", *map(str, arguments)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of a tiny run, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "tiny.toml").write_text(TINY.format(rounds=9))
    ended = bench(folder / "tiny.toml", "--ranks", 2, "--json", folder / "tiny.json")
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "tiny.json").read_text()), ended.stdout


Run = tuple[dict[str, Any], str]


@pytest.mark.nightly
def test_the_conditions_of_the_run_are_recorded(run: Run) -> None:
    results, printed = run
    assert results["benchmark"] == "twin"
    [about] = results["runs"]
    assert about["command"].startswith("python -m bench.twin ")
    assert about["machine"]["processor"]
    assert about["machine"]["cores"] >= 1
    assert {"python", "torch", "moeos", "openmpi"} <= set(about["versions"])
    assert len(results["load"]["average_before"]) == len(results["load"]["average_after"]) == 3
    assert len(results["load"]["cores_used_by_others"]) == 9
    assert (results["config"]["hidden"], results["ranks"]) == (32, 2)
    assert (results["rounds"], results["warm_up_rounds"]) == (9, 3)
    assert printed.startswith("2 ranks with S 64 each, H 32, I 48, E 8, k 2, float32; ")


@pytest.mark.nightly
def test_medians_and_ratios_are_those_of_the_rounds(run: Run) -> None:
    results, _ = run
    layer = results["layer"]
    assert set(layer) == {"pytorch", "mpirun", "virtual"}
    for found in layer.values():
        assert len(found["seconds"]) == 9
        assert all(seconds > 0 for seconds in found["seconds"])
        assert found["median_seconds"] == statistics.median(found["seconds"])
        ratio = found["median_seconds"] / layer["pytorch"]["median_seconds"]
        assert found["ratio_to_pytorch"] == pytest.approx(ratio)
    for name in ("mpirun", "virtual"):
        assert 0 < layer[name]["relative_error"] <= 1e-5
        assert min(layer[name]["tasks"]) >= 2 * (2 + 2 + 1 + 1 + 2)  # Route to Combine, two ranks


@pytest.mark.nightly
def test_bars_say_whether_they_are_met(run: Run) -> None:
    results, printed = run
    bars = results["bars"]
    assert bars["mpirun_ratio"]["value"] == results["layer"]["mpirun"]["ratio_to_pytorch"]
    assert bars["virtual_ratio"]["value"] == results["layer"]["virtual"]["ratio_to_pytorch"]
    assert bars["task_seconds"]["value"] == results["scheduling"]["median_task_seconds"]
    assert [bars[name]["limit"] for name in bars] == [3.0, 3.0, 5e-6]
    for bar in bars.values():
        assert bar["met"] == (bar["value"] <= bar["limit"])
    assert printed.count(": met") + printed.count(": missed") == 3


@pytest.mark.nightly
def test_floors_follow_from_the_work_and_the_measured_rates(run: Run) -> None:
    floors = run[0]["floors"]
    assert floors["flops"] == 2 * 64 * (2 * 8 * 32 + 2 * 2 * (96 + 48) * 32)
    assert floors["flops_seconds"] == floors["flops"] / floors["gemm_flops_per_second"]
    assert floors["bytes_seconds"] == floors["bytes"] / floors["memory_bytes_per_second"]


def test_the_cost_of_a_task_is_the_slope_over_tasks_and_the_rest_is_the_calls() -> None:
    def call(tasks: int, busy: float) -> Outcome:
        return Outcome(seconds=1e-4 + 2e-6 * tasks + busy, cpu_seconds=0, tasks=tasks,
                       busy_seconds=busy)  # fmt: skip

    few = [call(100, 3e-4), call(110, 9e-4), call(100, 3e-4)]
    many = [call(1000, 4e-3), call(1010, 8e-3), call(1100, 2e-3)]
    rested = [Outcome(seconds=8e-3, cpu_seconds=0, tasks=100, busy_seconds=1e-3)] * 3
    found = twin.scheduling(few, many, rested)
    assert found["task_seconds"] == pytest.approx([2e-6] * 3)
    assert found["call_seconds"] == pytest.approx([1e-4] * 3)
    assert found["median_task_seconds"] == pytest.approx(2e-6)
    assert found["rested_call_seconds"] == pytest.approx([8e-3 - 1e-3 - 100 * 2e-6] * 3)
    assert found["few"]["tasks"] == [100, 110, 100]


@pytest.mark.parametrize(
    ("rounds", "option", "said"),
    [
        (8, [], "iterations is 8; allowed: at least 9"),
        at_night((9, ["--ranks", "0"], "world_size is 0; it must be at least 1")),
        at_night((9, ["--json", "/nowhere/out.json"], "--json is /nowhere/out.json")),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(
    tmp_path: Path, rounds: int, option: list[str], said: str
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.format(rounds=rounds))
    ended = bench(tmp_path / "tiny.toml", *option)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


CFG = MoEConfig(hidden=32, intermediate=48, experts=8, top_k=2, dtype=torch.float32, max_tokens=40)
WORKLOAD = Workload(cfg=CFG, ranks=2, seed=7)


def test_plain_pytorch_computes_what_the_reference_does() -> None:
    gate, (w1, w2) = WORKLOAD.gate(), WORKLOAD.experts(range(CFG.experts))
    x = WORKLOAD.all_tokens().flatten(0, 1)
    y = PlainLayer(gate, w1, w2, CFG.top_k, 80)(x)
    expected = reference.moe(x, gate, w1, w2, CFG)
    assert 0 < reference.relative_error(y, expected) < 1e-5


def test_every_contestant_draws_the_same_work() -> None:
    assert torch.equal(WORKLOAD.all_tokens()[1], WORKLOAD.tokens(1))
    w1, w2 = WORKLOAD.experts(range(8))
    last_w1, last_w2 = WORKLOAD.experts(range(4, 8))  # what the second of two ranks draws
    assert torch.equal(last_w1, w1[4:])
    assert torch.equal(last_w2, w2[4:])
    assert not torch.equal(WORKLOAD.tokens(0), WORKLOAD.tokens(1))
    assert not torch.equal(w1[0], w1[1])


def test_work_is_counted_for_all_ranks() -> None:
    pairs, router = 2 * 40 * 2, 2 * 80 * 8 * 32
    assert WORKLOAD.flops == router + pairs * 2 * (96 + 48) * 32
    weights = 8 * 32 + 8 * (96 * 32 + 32 * 48)
    assert WORKLOAD.least_bytes == 4 * (weights + 2 * 80 * 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", torch.bfloat16), ("activation", "gelu"), ("scoring", "sigmoid"), ("bias", True)],
)
def test_a_layer_that_the_pytorch_side_does_not_compute_is_refused(
    field: str, value: object
) -> None:
    other = dataclasses.replace(CFG, **{field: value})
    with pytest.raises(ValueError, match=f"^{field} is .* what is measured against PyTorch has"):
        Workload(cfg=other, ranks=2, seed=7)
