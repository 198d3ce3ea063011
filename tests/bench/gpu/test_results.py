# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's document: whole at any time, continued by later runs of the same thing."""

import json
import statistics
from pathlib import Path

import pytest

from bench.gpu import suite
from bench.gpu.one_rank import METHOD
from bench.gpu.results import Results, timing
from bench.gpu.suite import Case
from tests.bench.measured import COMMIT, fill, measured, run_of, small_suite

FIELDS = {
    *("benchmark", "ranks", "rounds", "warm_up_rounds", "full_ranks", "few_tokens", "commit"),
    *("shapes", "method", "runs", "results", "failures", "not_measured"),
}


def test_a_complete_document_has_every_field_of_every_case(tmp_path: Path) -> None:
    file = small_suite(tmp_path)
    measured(tmp_path / "out.json", file)
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found) == FIELDS
    assert (found["benchmark"], found["ranks"], found["commit"]) == ("gpu-4", 4, COMMIT)
    assert found["not_measured"] == found["failures"] == []
    assert set(found["shapes"]) == {"qwen3-30b-a3b", "other"}
    assert {"moeos", "baseline", "G", "F", "W", "N", "L2", "time"} <= set(found["method"])
    assert len(found["results"]) == 6
    for case in found["results"]:
        assert set(case) == {
            *("run", "shape", "tokens", "lone", "routing", "max_tokens", "relative_error"),
            *("near_ties", "l2_flushed", "load", "times", "limits"),
        }
        assert set(case["times"]) == {"moeos", "baseline", "grouped"}
        assert set(case["limits"]) == {"F", "W", "N"}
        for of_one in case["times"].values():
            assert of_one["median"] == statistics.median(of_one["seconds"])
            assert of_one["quartiles"][0] <= of_one["median"] <= of_one["quartiles"][1]


def test_a_document_has_the_name_of_its_suite(tmp_path: Path) -> None:
    """So that results of two suites, on as many ranks, are not taken for each other."""
    asked = suite.read(small_suite(tmp_path, name="fp8"))
    results = Results(tmp_path / "out.json", asked, 2, COMMIT, METHOD)
    results.write()
    assert results.document["benchmark"] == "fp8-2"
    other = suite.read(small_suite(tmp_path, name="gpu"))
    with pytest.raises(ValueError, match=r"has benchmark 'fp8-2', and this run 'gpu-2'"):
        Results(tmp_path / "out.json", other, 2, COMMIT, METHOD)


def test_quartiles_are_of_the_slowest_ranks_rounds() -> None:
    assert timing([5.0, 1.0, 2.0, 4.0, 3.0]) == {
        "seconds": [5.0, 1.0, 2.0, 4.0, 3.0],
        "median": 3.0,
        "quartiles": [1.5, 4.5],
    }


def test_what_is_missing_stands_in_the_file_at_any_time(tmp_path: Path) -> None:
    asked = suite.read(small_suite(tmp_path)).only(["other"], [])
    results = Results(tmp_path / "out.json", asked, 2, COMMIT, METHOD)
    results.measuring("other", Case(2048))
    found = json.loads((tmp_path / "out.json").read_text())
    missing = {"shape": "other", "tokens": 2048, "lone": False, "routing": "gate"}
    assert found["not_measured"] == [missing]
    assert found["measuring"] == missing | {"moved": 1}
    fill(results, asked, 2)
    results.end()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["not_measured"] == []
    assert "measuring" not in found


def test_a_later_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    whole = suite.read(small_suite(tmp_path))
    part = whole.only(["other"], [])
    fill(Results(tmp_path / "out.json", part, 4, COMMIT, METHOD), part, 4)
    later = Results(tmp_path / "out.json", whole, 4, COMMIT, METHOD)
    qwen, other = whole.shapes
    assert later.open_cases(other) == []
    assert len(later.open_cases(qwen)) == 5
    fill(later, whole, 4)
    assert [found["run"] for found in later.document["results"]] == [0, 1, 1, 1, 1, 1]
    assert set(later.document["shapes"]) == {"qwen3-30b-a3b", "other"}


def test_a_shape_that_failed_is_left_out_until_a_new_attempt(tmp_path: Path) -> None:
    asked = suite.read(small_suite(tmp_path))
    results = Results(tmp_path / "out.json", asked, 4, COMMIT, METHOD)
    results.begin_run(run_of(4))
    results.fail("other", "they differ", Case(2048))
    again = Results(tmp_path / "out.json", asked, 4, COMMIT, METHOD)
    other = asked.shapes[1]
    assert again.open_cases(other) == []
    assert again.document["failures"][0]["what"] == "they differ"
    again.forget_failures()
    assert again.open_cases(other) == [Case(2048)]


@pytest.mark.parametrize("other", ["ranks", "commit", "rounds", "shapes"])
def test_a_document_of_something_else_is_not_continued(tmp_path: Path, other: str) -> None:
    asked = suite.read(small_suite(tmp_path))
    Results(tmp_path / "out.json", asked, 4, COMMIT, METHOD).write()
    text = small_suite(tmp_path).read_text()
    changes = {"rounds": ("rounds = 3", "rounds = 4"), "shapes": ("hidden = 64", "hidden = 72")}
    changed = suite.read(small_suite(tmp_path, text.replace(*changes.get(other, ("", "")))))
    ranks = 2 if other == "ranks" else 4
    commit = {"id": "f" * 16, "changed_files": []} if other == "commit" else COMMIT
    with pytest.raises(ValueError, match=f"{'benchmark' if other == 'ranks' else other} .*name an"):
        Results(tmp_path / "out.json", changed, ranks, commit, METHOD)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    asked = suite.read(small_suite(tmp_path))
    for text in ("[1]", "{"):
        (tmp_path / "out.json").write_text(text)
        with pytest.raises(ValueError, match=r"out\.json: not the results of a benchmark"):
            Results(tmp_path / "out.json", asked, 4, COMMIT, METHOD)


def test_a_number_that_json_has_no_word_for_never_reaches_the_file(tmp_path: Path) -> None:
    asked = suite.read(small_suite(tmp_path))
    results = Results(tmp_path / "out.json", asked, 4, COMMIT, METHOD)
    results.write()
    before = (tmp_path / "out.json").read_text()
    with pytest.raises(ValueError, match="JSON compliant"):
        results.begin_run({"rates": float("nan")})
    assert (tmp_path / "out.json").read_text() == before
    assert [file.name for file in tmp_path.glob("*.unfinished")] == []
