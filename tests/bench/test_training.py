# SPDX-License-Identifier: Apache-2.0
"""`launch/evaluate training` on the twin: a tiny suite has all numbers, and its tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moeos
from bench import suites
from bench.report import report, training_tables
from bench.studies import trained, training
from bench.studies.index_lists import IndexLists, by_sort, by_steps

TINY = """
rounds = 3
warm_up_rounds = 1
trace_rounds = 4
[[layers]]
name = "tiny"
tokens = [16, 40]
activations = ["swiglu", "silu", "relu"]
layer = { hidden = 32, intermediate = 48, experts = 8, top_k = 2, max_tokens = 24 }
[[lists]]
name = "Qwen3"
tokens = [50]
experts = 8
top_k = 2
call_tokens = 32
"""


def measure(file: Path, out: Path) -> None:
    with moeos.init("twin") as world:
        training.Trainings(world, suites.training(file), out, 0).measure_all()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.toml").write_text(TINY)
    out = folder / "out.json"
    measure(folder / "tiny.toml", out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_case_has_all_numbers(results: dict[str, Any]) -> None:
    assert results["benchmark"] == "training-tiny-twin-1"
    cases = [(case["activation"], case["tokens"], case["pieces"]) for case in results["layers"]]
    kinds = ("swiglu", "silu", "relu")
    assert cases == [(kind, *sizes) for kind in kinds for sizes in ((16, 1), (40, 2))]
    for case in results["layers"]:
        matrices = 3 if case["activation"] == "swiglu" else 2
        assert case["forward_flops"] == 2 * matrices * case["tokens"] * 2 * 32 * 48
        assert list(case["contestants"]) == ["grouped_mm", "nothing", "preactivation"]
        for name, found in case["contestants"].items():
            for step in ("forward", "backward"):
                assert len(found[step]["seconds"]) == 3
                assert min(found[step]["seconds"]) > 0
            assert found["peak_bytes"] is None  # no GPU
            assert (found["distance"] is None) == (name == "grouped_mm")
            assert found["distance"] is None or found["distance"] < 1e-4


def test_saved_bytes_are_what_each_way_keeps(results: dict[str, Any]) -> None:
    for case in results["layers"]:
        kept = {name: found["saved_bytes"] for name, found in case["contestants"].items()}
        pairs, halves = case["tokens"] * 2, 2 if case["activation"] == "swiglu" else 1
        routing = pairs * 4  # ids; the weights are the caller's
        assert kept["nothing"] == routing
        # Rows of a piece are saved up to 1.25 times the even share, and at most all of them.
        assert routing < kept["preactivation"] <= routing + pairs * halves * 48 * 4
        rows = pairs * 32 * 4  # gathered, and made
        assert kept["grouped_mm"] > 2 * rows + pairs * halves * 48 * 4


def test_index_lists_have_their_times(results: dict[str, Any]) -> None:
    [found] = results["lists"]
    assert (found["name"], found["tokens"], found["calls"]) == ("Qwen3", 50, 2)
    for name in ("steps", "sorted_lists", "sort", "map", "rows"):
        assert len(found[name]["seconds"]) == (4 if name in ("map", "rows") else 3)
        assert min(found[name]["seconds"]) > 0
    # What a product loads is there after the map; both are of the same calls.
    for of_map, of_rows in zip(found["map"]["seconds"], found["rows"]["seconds"], strict=True):
        assert of_map <= of_rows


def test_the_report_knows_the_results(results: dict[str, Any]) -> None:
    sections = report.sections(results)
    assert [len(section.rows) for section in sections] == [6, 6, 6, 1]
    assert training_tables.LEFT_OUT not in report.markdown(results)


def test_what_a_machine_refuses_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> trained.Forward:
        raise ValueError("experts is 8; at most 4 are allowed: use fewer. And more words.")

    monkeypatch.setattr(trained, "moeos_forward", refuse)
    monkeypatch.setattr(moeos, "Experts", refuse)
    (tmp_path / "tiny.toml").write_text(TINY.replace('"swiglu", "silu", ', ""))
    out = tmp_path / "out.json"
    measure(tmp_path / "tiny.toml", out)
    results = json.loads(out.read_text())
    why = "experts is 8; at most 4 are allowed: use fewer"
    for case in results["layers"]:
        assert case["contestants"]["grouped_mm"]["backward"]["median"] > 0
        assert case["contestants"]["nothing"] == {"left_out": why}
    assert results["lists"][0]["left_out"] == why
    *_, reasons = report.sections(results)
    assert {row[-1] for row in reasons.rows} == {why}
    assert len(reasons.rows) == 2 * 2 + 1


def test_gradients_that_differ_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = trained.grouped_experts
    monkeypatch.setattr(trained, "grouped_experts", lambda *given: 2 * right(*given))
    (tmp_path / "tiny.toml").write_text(TINY.partition("[[lists]]")[0])
    measure(tmp_path / "tiny.toml", tmp_path / "out.json")
    for case in json.loads((tmp_path / "out.json").read_text())["layers"]:
        assert case["contestants"]["nothing"]["left_out"].startswith("its gradients differ by 5")


@pytest.mark.parametrize("activation", sorted(trained.ACTIVATIONS))
def test_pytorchs_experts_are_the_reference(activation: str) -> None:
    cfg = moeos.MoEConfig(
        hidden=32,
        intermediate=48,
        experts=8,
        top_k=2,
        activation=activation,  # type: ignore[arg-type]
        dtype=torch.float32,
    )
    inputs = trained.draw(cfg, 24, "cpu", seed=1)
    i = inputs
    expected = moeos.reference.moe(
        *(i.x.detach(), torch.zeros(8, 32), i.w1.detach(), i.w2.detach(), cfg),
        topk_ids=i.ids,
        topk_weights=i.weights.detach(),
    )
    made = trained.grouped_forward(cfg, inputs)()
    torch.testing.assert_close(made.double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_distances_are_relative_and_of_the_worst_tensor() -> None:
    one, other = torch.full((4, 3), 2.0), torch.full((4, 3), 1.0)
    assert trained.distance([one], [one]) == 0
    assert trained.distance([one, one], [one, other]) == pytest.approx(1)
    broken = torch.full((4, 3), torch.nan)
    assert math.isnan(trained.distance([one, broken], [one, one]))


WAYS = (by_sort, by_steps)


def defined(ids: Tensor, experts: int) -> IndexLists:
    """By the meaning of the lists, pair by pair."""
    tokens: list[int] = []
    offsets = [0]
    places = torch.empty(ids.shape, dtype=torch.int32)
    for expert in range(experts):
        for token, of_token in enumerate(ids.tolist()):
            if expert in of_token:
                places[token, of_token.index(expert)] = len(tokens)
                tokens.append(token)
        offsets.append(len(tokens))
    made = (torch.tensor(one, dtype=torch.int32) for one in (tokens, offsets))
    return IndexLists(*made, places)


@pytest.mark.parametrize("way", WAYS)
def test_the_papers_example(way: type) -> None:
    ids = torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]])
    tokens, offsets, places = way(ids, 4)
    assert tokens.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert offsets.tolist() == [0, 3, 5, 7, 10]
    assert places[0].tolist() == [5, 7]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 300), st.data())
def test_both_ways_are_the_definition(
    seed: int, count: int, experts: int, data: st.DataObject
) -> None:
    slots = data.draw(st.integers(1, min(experts, 9)))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, experts, generator=generator).topk(slots, dim=1).indices
    expected = defined(ids, experts)
    for way in WAYS:
        for name, one, other in zip(expected._fields, way(ids, experts), expected, strict=True):
            assert one.dtype == torch.int32, name
            torch.testing.assert_close(one, other, msg=f"{way.__name__}, {name}")
