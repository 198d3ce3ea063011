# SPDX-License-Identifier: Apache-2.0
"""The training of `launch/train`: it keeps to stock PyTorch, and can go on; also by launchers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nightly import all_but
from tests.processes import ROOT, forked, mpirun, torchrun

Start = Callable[..., subprocess.CompletedProcess[str]]
"""Of so many ranks of a program, with its arguments."""

TRAIN = "from examples.train.command import main; main()"
CONFIG = str(ROOT / "configs" / "train.toml")
LAST = r"final loss (\d\.\d{4}), reference (\d\.\d{4})"

ONE_WRONG_RANK = """
import torch

right = torch.Tensor.backward

def backward(loss, *arguments, **named):
    right(-loss if torch.distributed.get_rank() == 1 else loss, *arguments, **named)

torch.Tensor.backward = backward
"""

KILLED_AMID_STEP_3 = """
import os
import signal
import torch.distributed
from examples.train.trainer import Trainer

right = Trainer.step

def step(trainer, number, *arguments):
    if number == 2 and trainer._world is not None and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(trainer, number, *arguments)

Trainer.step = step
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The run's, of a text that never changes: so a run's losses never do."""
    found = tmp_path / "train.toml"
    found.write_text(re.sub("text = .*", f'text = ["{ROOT}/LICENSE"]', Path(CONFIG).read_text()))
    return found


def told(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def largest_difference(document: dict[str, Any]) -> float:
    pairs = zip(document["losses"], document["references"], strict=True)
    return max(abs(loss - reference) for loss, reference in pairs)


@pytest.mark.parametrize(("ranks", "fewer", "steps"), all_but([(2, 1, 6)], [(2, 1, 6), (4, 2, 12)]))
def test_ranks_keep_to_stock_pytorch_and_fewer_of_them_go_on(
    ranks: int, fewer: int, steps: int, config: Path, tmp_path: Path
) -> None:
    def trained(ranks: int, name: str, *arguments: object) -> dict[str, Any]:
        path = tmp_path / name
        ended = forked(ranks, TRAIN, str(config), *map(str, arguments), "--json", str(path))
        assert ended.returncode == 0, ended.stderr
        last = re.fullmatch(LAST, ended.stdout.rstrip().splitlines()[-1])
        document = told(path)
        assert last is not None
        assert last.groups() == tuple(f"{document[of][-1]:.4f}" for of in ("losses", "references"))
        assert ended.stdout.count("final loss") == 1  # one voice
        return document

    folder, plot = tmp_path / "run", tmp_path / "loss.png"
    whole = trained(ranks, "whole.json", "--steps", steps, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert whole["ranks"] == ranks
    assert len(whole["losses"]) == steps
    assert whole["losses"][-1] < whole["losses"][0] - 0.02  # it learns, while its rate still grows
    assert largest_difference(whole) <= 1e-5
    half = trained(ranks, "half.json", "--steps", steps // 2, "--save", folder)
    assert half["losses"] == whole["losses"][: steps // 2]
    rest = trained(fewer, "rest.json", "--steps", steps, "--resume", folder)
    assert rest["ranks"] == fewer
    assert rest["losses"][: steps // 2] == half["losses"]
    assert rest["references"] == whole["references"]
    assert largest_difference(rest) <= 1e-5


def test_a_run_that_is_killed_goes_on_from_its_last_save_on_other_ranks(tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "losses.json"
    asked = (CONFIG, "--steps", "4", "--save", str(folder), "--save-every", "2")
    ended = forked(2, KILLED_AMID_STEP_3 + TRAIN, *asked)
    assert ended.returncode not in (0, 1, 2)
    saved = told(folder / "run.json")
    assert len(saved["losses"]) == 2
    ended = forked(3, TRAIN, *asked, "--resume", str(folder), "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    rest = told(path)
    assert rest["losses"][:2] == saved["losses"]
    assert len(rest["losses"]) == 4
    assert largest_difference(rest) <= 1e-5  # the stock model goes on, too, in one process
    assert sorted(one.name for one in folder.iterdir()) == ["run.json", "step-4"]


@pytest.mark.parametrize("start", all_but([forked], [forked, torchrun]))
def test_ranks_train_in_bfloat16(start: Start, tmp_path: Path) -> None:
    text = Path(CONFIG).read_text().replace('"float32"', '"bfloat16"')
    config = tmp_path / "train.toml"
    config.write_text(text.replace("../", f"{ROOT}/"))
    path = tmp_path / "losses.json"
    ended = start(2, TRAIN, str(config), "--steps", "2", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    document = told(path)
    assert document["tolerances"] == [2e-2] * 2
    assert 0 < largest_difference(document) <= 2e-2


def test_a_rank_with_wrong_gradients_fails_the_run() -> None:
    ended = forked(2, ONE_WRONG_RANK + TRAIN, CONFIG, "--steps", "8")
    assert ended.returncode == 1, ended.stderr
    [found] = re.findall(r"largest difference (\S+) up to step 8 \(tolerance", ended.stdout)
    assert float(found) > 0.02


def test_what_all_ranks_refuse_is_one_line(tmp_path: Path) -> None:
    ended = forked(2, TRAIN, CONFIG, "--resume", str(tmp_path))
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("moeos")]
    missing = tmp_path / "run.json"
    assert said == [f"moeos: {tmp_path} holds no complete run: there is no {missing}"]


@pytest.mark.nightly
def test_two_hundred_steps_end_as_stock_pytorch_does(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    ended = mpirun(4, TRAIN, CONFIG, "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    document = told(path)
    assert document["tolerances"] == [1e-3] * 50 + [1e-2] * 150
    assert document["losses"][-1] < 3.0
