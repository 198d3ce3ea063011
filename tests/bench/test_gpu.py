# SPDX-License-Identifier: Apache-2.0
"""What a rank of the GPU benchmark computes on the host: the limits of a case, and its layers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench import suites
from bench.clocks import HostClock
from bench.gpu.all_to_all import LARGEST_ERROR
from bench.studies import gpu
from bench.studies.gpu import LARGEST_ROUNDED_ERROR, coded_and_plain, limits
from bench.study import Case
from moeos import MoEConfig, MoELayer, World
from moeos.config import reference
from moeos.world import virtual
from tests.bench.measured import SUITE
from tests.layers import config, draw_given_call

CFG = MoEConfig(hidden=64, intermediate=32, experts=8, top_k=2, max_tokens=16)
RATES = {"F": 1e9, "W": 1e8, "N": 1e7}


def load(rows: int, experts: int, from_peers: int, to_peers: int) -> dict[str, int]:
    return {"rows": rows, "experts": experts, "from_peers": from_peers, "to_peers": to_peers}


def test_limits_are_those_of_the_rank_with_most() -> None:
    found = limits(CFG, 16, [load(20, 3, 5, 11), load(12, 4, 11, 5)], RATES)
    router = 2 * 16 * 8 * 64
    weights = (64 + 32) * 64
    assert found["F"] == pytest.approx((router + 2 * 20 * weights) / 1e9)
    assert found["W"] == pytest.approx(4 * weights * 2 / 1e8)
    assert found["N"] == pytest.approx(16 * 64 * 2 / 1e7)


def test_one_gpu_has_no_links() -> None:
    assert limits(CFG, 16, [load(32, 8, 0, 0)], RATES | {"N": None})["N"] is None


def test_codes_are_read_as_they_are_stored_and_multiplied_at_twice_the_rate() -> None:
    cfg = MoEConfig(hidden=128, intermediate=64, experts=8, top_k=2, max_tokens=16)
    coded = dataclasses.replace(cfg, weight_format="fp8_channel", activation_format="fp8_group128")
    of_ranks = [load(20, 3, 5, 11), load(12, 4, 11, 5)]
    found, plain = limits(coded, 16, of_ranks, RATES), limits(cfg, 16, of_ranks, RATES)
    assert found["F"] == pytest.approx(plain["F"] / 2)  # type: ignore[operator]
    scales = 4 * (2 * 64 + 128)
    assert found["W"] == pytest.approx(4 * (3 * 128 * 64 + scales) / 1e8)
    # Rank 1's rows have 128 codes and a scale, padded; its results have 128 numbers of 2 bytes.
    assert found["N"] == pytest.approx((5 * 144 + 11 * 256) / 1e7)
    wide = dataclasses.replace(coded, hidden=256)
    returned = dataclasses.replace(wide, result_format="fp8_group128")
    links = [limits(each, 16, of_ranks, RATES)["N"] for each in (wide, returned)]
    assert links == pytest.approx([(5 * 272 + 11 * size) / 1e7 for size in (512, 384)])


@pytest.mark.parametrize(
    ("formats", "most"),
    [
        ({}, 0.0),
        ({"weight_format": "mxfp4"}, LARGEST_ERROR[torch.bfloat16]),
        (
            {"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
            LARGEST_ROUNDED_ERROR,
        ),
    ],
)
def test_a_layer_with_formats_stands_beside_one_with_the_numbers_of_its_codes(
    formats: dict[str, str], most: float
) -> None:
    cfg = config(hidden=128, intermediate=192, dtype=torch.bfloat16, **formats)
    call = draw_given_call(cfg, 100, 1)

    def rank_main(world: World) -> float:
        layers = coded_and_plain(MoELayer(cfg.in_numbers(), world), cfg)
        assert [*layers] == ["moeos", "in_numbers"][: 1 + (cfg.weight_format is not None)]
        assert layers["moeos"].cfg == cfg
        y, plain = (call(one) for one in (layers["moeos"], [*layers.values()][-1]))
        return reference.relative_error(y, plain)

    errors = virtual.run(rank_main, ranks=2)
    assert max(errors) <= most
    if cfg.activation_format is not None:
        assert min(errors) > most / 4  # the bound is no wider than it has to be


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--tokens", "1,x"], 2, "--tokens is '1,x'; it must be numbers from 0 on"),
        (["--tokens", "7"], 2, "--tokens has 7; the suite has"),
        (["--shapes", "gpt"], 2, "--shapes has 'gpt'; the suite has"),
        (["--ranks", "0"], 2, "--ranks is 0; allowed: 1 to 2, with a GPU each"),
        (["--suite", "/nowhere.toml"], 2, "/nowhere.toml: No such file or directory"),
        ([], 3, "finds no GPU on this host: `moeos doctor`"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2 if options else 0)
    application = typer.Typer()
    application.command()(gpu.main)
    out = tmp_path / "out.json"
    ended = CliRunner().invoke(application, ["--out", str(out), "--suite", str(SUITE), *options])
    assert ended.exit_code == code
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not out.exists()


def test_started_by_hand_it_becomes_torchrun_with_its_own_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("os.execv", lambda path, words: become.extend(words))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", "o.json"])
    gpu._become_ranks(suites.shapes(SUITE), None)
    assert become[1:3] == ["-m", "torch.distributed.run"]
    assert become[-5:] == ["4", "-m", "bench.studies.gpu", "--out", "o.json"]


class Fake(gpu.Benchmark):
    """A benchmark whose cases need no GPU: what is measured of each is its outputs' error."""

    def __init__(self, errors: dict[str, float], world: World, out: Path, ends: float) -> None:
        self._errors = errors
        super().__init__(world, out, suites.shapes(SUITE).only(["mixtral-8x7b"], [1, 8]), ends)

    def _measure(self, case: Case, layers: Any, baseline: Any) -> bool:
        if case["tokens"] in self._errors:
            self._fail(case["shape"], "they differ")
            return False
        self.add(self.document["results"], case, {"times": {}})
        return True


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no layer and no rate is there."""
    rates = {"F": 1.0, "W": 1.0, "N": None}
    monkeypatch.setattr(gpu, "DeviceClock", object)
    monkeypatch.setattr(HostClock, "reader", None, raising=False)
    monkeypatch.setattr(gpu.device_rates, "measure", lambda world, reader: rates)
    monkeypatch.setattr(gpu, "coded_and_plain", lambda plain, cfg: {"moeos": plain})
    monkeypatch.setattr(gpu, "beside", lambda plain, group: None)
    stand_in = SimpleNamespace(gate=SimpleNamespace(selection_bias=None))
    stand_in.requires_grad_ = lambda required: stand_in
    monkeypatch.setattr(gpu.moeos, "MoELayer", lambda cfg, world: stand_in)
    monkeypatch.setattr(gpu.moeos, "init", lambda *_, **__: contextlib.nullcontext())


def test_a_shape_that_failed_is_left_until_a_new_attempt(faked: None, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    def run(errors: dict[Any, float], seconds: float = 60.0) -> dict[str, Any]:
        ends = time.monotonic() + seconds
        virtual.run(lambda world: Fake(errors, world, out, ends).measure_all(), 1)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return found

    assert run({}, seconds=-1) == {}  # nothing outlasts the limit
    first = run({8: 1.0})
    assert [(case["tokens"], case["lone"]) for case in first["results"]] == [(1, True), (1, False)]
    assert first["failures"] == [{"shape": "mixtral-8x7b", "what": "they differ"}]
    second = run({})
    assert [case["tokens"] for case in second["results"]] == [1, 1, 8]
    assert second["failures"] == []
    assert second["results"][:2] == first["results"]
    assert [run_["rates"]["F"] for run_ in second["runs"]] == [1.0, 1.0]
    assert second["shapes"].keys() == {"mixtral-8x7b"}
