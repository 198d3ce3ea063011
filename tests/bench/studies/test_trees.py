# SPDX-License-Identifier: Apache-2.0
"""`bench.studies.trees` tells several trees in turn what to time, and gathers times."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from bench.studies import trees
from moeos.config.config import MoEConfig

RANK = """
import json, os, sys
name = open(os.path.join(os.environ["PYTHONPATH"], "moeos", "__init__.py")).read()
for line in sys.stdin:
    order = json.loads(line)
    if order["tokens"] == 13:
        sys.exit(3)
    rank = int(os.environ["RANK"])
    print(json.dumps({"answer": order["tokens"] * (2 if name == "slow" else 1) + rank}), flush=True)
"""


def tree(folder: Path, name: str) -> str:
    """A tree that is called so and whose text is its name."""
    (folder / name / "moeos").mkdir(parents=True)
    (folder / name / "moeos" / "__init__.py").write_text(name)
    return f"{name}={folder / name}"


def test_trees_have_turns_and_the_answers_of_rank_0_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    monkeypatch.setattr(trees, "_RANK", rank)
    folders = trees.parse_trees([tree(tmp_path, "fast"), tree(tmp_path, "slow")])
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(trees.Tree(name, of, ranks=2)) for name, of in folders.items()
        ]
        found = trees.measure(started, tokens=5, turns=3)
        processes = [process for each in started for process in each._ranks]
    assert found["times"]["fast"] == {"median": 5, "turns": [5, 5, 5]}
    assert found["times"]["slow"] == {"median": 10, "turns": [10, 10, 10]}
    assert [process.returncode for process in processes] == [0] * 4


def test_a_rank_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    monkeypatch.setattr(trees, "_RANK", rank)
    folders = trees.parse_trees([tree(tmp_path, "fast")])
    with (
        trees.Tree("fast", folders["fast"], ranks=1) as one,
        pytest.raises(RuntimeError, match="rank 0 of the tree fast gave no answer"),
    ):
        one.ask(tokens=13)


def test_a_layer_is_written_without_what_is_the_default(tmp_path: Path) -> None:
    cfg = MoEConfig(hidden=256, intermediate=128, experts=8, top_k=2, scoring="sigmoid")
    (file,) = trees.write_layers([cfg], tmp_path)
    assert MoEConfig.from_toml(file) == cfg
    assert "dtype" not in file.read_text()
    assert 'scoring = "sigmoid"' in file.read_text()


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["a"], "NAME=FOLDER"),
        (["=x"], "NAME=FOLDER"),
        (["a=nowhere"], "has no moeos"),
    ],
)
def test_what_is_no_tree_is_refused(texts: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        trees.parse_trees(texts)


def test_a_name_may_come_once(tmp_path: Path) -> None:
    text = tree(tmp_path, "a")
    with pytest.raises(ValueError, match="each name once"):
        trees.parse_trees([text, text])
