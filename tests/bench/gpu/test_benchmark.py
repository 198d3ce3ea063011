# SPDX-License-Identifier: Apache-2.0
"""`launch/bench gpu` on a machine without one: it watches its ranks, and goes on after a failure.

The ranks are programs that do what they are told for each shape; what real ones do needs a GPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.gpu import benchmark
from bench.gpu.one_rank import Order
from bench.gpu.results import timing
from moeos.cli.shared import failures
from tests.bench.measured import COMMIT, run_of, small_suite

RANK = """
import json, os, pathlib, sys, time
plan, run, times, order = map(json.loads, sys.argv[1:])
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
out = pathlib.Path(order["out"])
document = json.loads(out.read_text())
if rank == 0:
    document["runs"].append(run)
over = {found["shape"] for found in document["failures"] + document["results"]}
for shape, does in plan.items():
    if shape in over:
        continue
    document["measuring"] = {"shape": shape, "moved": 0}
    if rank == 0:
        out.with_suffix(".new").write_text(json.dumps(document))
        out.with_suffix(".new").replace(out)
    while does in ("fail", "exit") and rank == last:  # when rank 0 has written what is measured
        if json.loads(out.read_text()).get("measuring", {}).get("shape") == shape:
            break
        time.sleep(0.001)
    if does == "fail" and rank == last:
        pathlib.Path(order["failure"]).write_text("RuntimeError: broke")
        sys.exit(1)
    if does == "exit" and rank == last:
        sys.exit(9)
    if does != "measure":
        time.sleep(60)
    case = {"tokens": 2048, "lone": False, "routing": "gate"}
    document["results"].append({"run": 0, "shape": shape, **case, "times": times})
document.pop("measuring", None)
if rank == 0:
    out.with_suffix(".new").write_text(json.dumps(document))
    out.with_suffix(".new").replace(out)
"""


def run(
    folder: Path, plan: dict[str, str], seconds: float = 60.0, ranks: int = 2
) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a run with ranks that follow a plan: shape -> what."""
    order = Order(
        suite=str(small_suite(folder)),
        shapes=(),
        tokens=(2048,),
        out=str(folder / "out.json"),
        ends=time.monotonic() + seconds,
        commit=COMMIT,
        command="python -m bench.gpu",
    )
    times = {name: timing([1e-4] * 3) for name in ("moeos", "baseline", "grouped")}
    arguments = [json.dumps(value) for value in (plan, run_of(ranks), times)]
    code = benchmark.execute(order, ranks, [sys.executable, "-c", RANK, *arguments])
    return code, json.loads((folder / "out.json").read_text())


def test_all_that_is_measured_is_told_and_so_is_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run(tmp_path, {"qwen3-30b-a3b": "measure", "other": "measure"})
    assert code == failures.DONE
    assert "measuring" not in document
    assert [found["shape"] for found in document["results"]] == ["qwen3-30b-a3b", "other"]
    zipf = {"shape": "qwen3-30b-a3b", "tokens": 2048, "lone": False, "routing": "zipf:1.2"}
    assert document["not_measured"] == [zipf]
    printed = capsys.readouterr().out
    assert "moeos 100 µs, baseline 100 µs, grouped 100 µs" in printed
    assert "not measured: qwen3-30b-a3b with 2048 tokens" in printed


@pytest.mark.parametrize(
    ("does", "said"),
    [("fail", "rank 1: RuntimeError: broke"), ("exit", "the ranks ended with codes [-15, 9]")],
)
def test_ranks_that_fail_are_started_again_for_the_shapes_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    monkeypatch.setattr(benchmark, "_FAREWELL", 0.3)
    code, document = run(tmp_path, {"qwen3-30b-a3b": does, "other": "measure"})
    assert code == failures.FAILURE
    assert [found["shape"] for found in document["results"]] == ["other"]
    [failure] = document["failures"]
    assert failure["shape"] == "qwen3-30b-a3b"
    assert said.split("[")[0] in failure["what"]
    assert len(document["runs"]) == 2


def test_ranks_that_stand_still_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "STANDSTILL", 1.5)
    code, document = run(tmp_path, {"qwen3-30b-a3b": "hang", "other": "measure"})
    assert code == failures.FAILURE
    assert document["failures"][0]["what"] == "the ranks stood still for 1.5 s"
    assert [found["shape"] for found in document["results"]] == ["other"]


def test_nothing_outlasts_the_time_limit(tmp_path: Path) -> None:
    code, document = run(tmp_path, {"other": "measure", "qwen3-30b-a3b": "hang"}, seconds=2)
    assert code == failures.DONE
    assert document["failures"] == []
    assert [found["shape"] for found in document["not_measured"]] == ["qwen3-30b-a3b"] * 2


def test_ranks_that_cannot_start_are_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_FAREWELL", 0.3)
    with pytest.raises(RuntimeError, match="rank 1: RuntimeError: broke"):
        run(tmp_path, {"starting": "fail"})


def test_an_order_reaches_a_rank_as_it_was_given(tmp_path: Path) -> None:
    order = Order(
        suite="s", shapes=("a",), tokens=(1, 8), out="o", ends=1.5, commit=None, command="c"
    )
    assert Order.from_json(order.to_json()) == order


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "/nowhere/out.json"], "--out is /nowhere/out.json"),
        (["--tokens", "1,x"], "--tokens is '1,x'; it must be numbers, comma between"),
        (["--tokens", "7"], "--tokens has 7; the suite has"),
        (["--shapes", "gpt"], "--shapes has 'gpt'; the suite has"),
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--suite", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    suite_file = small_suite(tmp_path)
    defaults = ["--out", str(tmp_path / "out.json"), "--suite", str(suite_file), "--ranks", "2"]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    application = typer.Typer()
    application.command()(benchmark.main)
    ended = CliRunner().invoke(application, [*defaults, *options])
    assert ended.exit_code == failures.BAD_INPUT
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "out.json").exists()


def test_a_host_without_a_gpu_is_told_so_and_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    application = typer.Typer()
    application.command()(benchmark.main)
    options = ["--out", str(tmp_path / "out.json"), "--suite", str(small_suite(tmp_path))]
    ended = CliRunner().invoke(application, options)
    assert ended.exit_code == failures.FAILURE
    assert "finds no GPU on this host: `moeos doctor`" in ended.stderr
    assert not (tmp_path / "out.json").exists()
