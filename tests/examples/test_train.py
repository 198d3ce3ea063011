# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.train` in one process; tests/launch/test_train.py starts it on several
ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from typer.testing import CliRunner

from examples.train import saved
from examples.train.command import command
from examples.train.trainer import Trainer

CONFIG = """
hidden = 16
intermediate = 8
experts = 3
top_k = 2
activation = "swiglu"
dtype = "float32"
max_tokens = 1024

[run]
iterations = 3
text = ["text.txt"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    (tmp_path / "text.txt").write_text("Ranks send rows, and experts multiply them. " * 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield path
    torch.set_num_threads(threads)


def trained(config: Path, *arguments: object) -> tuple[int, str, str]:
    given = [str(one) for one in (config, "--backend", "twin", *arguments)]
    ended = CliRunner().invoke(command, given)
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.stdout, ended.stderr


def refused(config: Path, *arguments: object) -> str:
    """What is said of it."""
    code, out, err = trained(config, *arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    return line.removeprefix("moeos: ")


def test_one_rank_trains_saves_and_goes_on(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, whole, err = trained(config, "--steps", 5, "--seed", 3, "--json", "-")
    assert code == 0, err
    assert trained(config, "--seed", 3, "--save", folder)[0] == 0  # 3 steps, as the config says
    code, out, err = trained(config, "--steps", 5, "--resume", folder)
    assert code == 0, err
    assert "5 steps, from 3 on, each of 16 sequences of 64 bytes, from 880 bytes" in out
    assert out.splitlines()[-1] == (
        f"final loss {json.loads(whole)['losses'][-1]:.4f}, "
        f"reference {json.loads(whole)['references'][-1]:.4f}"
    )


def test_a_run_that_ends_early_goes_on_from_its_last_save(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    asked = ("--steps", 7, "--json", "-")
    code, whole, err = trained(config, *asked)
    assert code == 0, err
    step = Trainer.step

    def ends(trainer: Trainer, number: int, *arguments: Any) -> float:
        if number == 5:
            raise RuntimeError("the machine is taken away")
        return step(trainer, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", ends)
        assert trained(config, *asked, "--save", folder, "--save-every", 2)[0] == 3
    assert len(saved.read_history(folder).losses) == 4
    code, rest, err = trained(config, *asked, "--resume", folder)
    assert code == 0, err
    for name in ("losses", "references"):
        assert json.loads(rest)[name] == json.loads(whole)[name]


def test_a_run_goes_on_as_what_it_was(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert trained(config, "--steps", 2, "--save", folder)[0] == 0
    assert refused(config, "--steps", 2, "--resume", folder) == (
        f"steps is 2, in all; the run in {folder} has made 2"
    )
    assert refused(config, "--resume", folder, "--seed", 1) == (
        f"--seed is 1; the run in {folder} has 0: leave it away"
    )
    config.write_text(CONFIG.replace("experts = 3", "experts = 4"))
    assert refused(config, "--resume", folder) == f"experts is 4; the run in {folder} has 3"
    config.write_text(CONFIG)
    (tmp_path / "text.txt").write_text("Another text. " * 20)
    assert refused(config, "--resume", folder) == (
        f"the text has 280 bytes, and that of the run in {folder} had 880: it goes on with what "
        "it began with"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"swiglu"', '"gelu"', "activation is gelu; the stock model that trains beside has swiglu"),
        (
            "top_k",
            "bias = true\ntop_k",
            "bias is True; the stock model that trains beside has False",
        ),
        ('"float32"', '"float16"', "dtype is torch.float16; train in float32 or bfloat16"),
        ("1024", "512", "max_tokens is 512, and rank 0 of 1 passes 1024 tokens in a call"),
        ('text = ["text.txt"]', "", "[run] has no text, from which the model learns"),
        ("iterations = 3", "iterations = 0", "steps is 0; allowed: 1 to 100000"),
    ],
)
def test_a_config_that_cannot_train_is_refused(config: Path, old: str, new: str, said: str) -> None:
    config.write_text(CONFIG.replace(old, new))
    assert said in refused(config)


def test_saves_amid_a_run_need_a_folder_and_a_distance(config: Path, tmp_path: Path) -> None:
    assert refused(config, "--save-every", 2) == "--save-every is 2; --save names no folder"
    assert refused(config, "--save-every", 0, "--save", tmp_path / "run") == (
        "--save-every is 0; it must be at least 1"
    )
    assert not (tmp_path / "run").exists()


def test_a_seed_and_a_plot_that_cannot_be_are_refused(config: Path, tmp_path: Path) -> None:
    assert refused(config, "--seed", -1) == "--seed is -1; allowed: 0 to 2147483647"
    assert "--plot" in refused(config, "--plot", tmp_path / "missing" / "loss.png")


def _spoil(path: Path) -> None:
    path.write_bytes(b"no checkpoint")


@pytest.mark.parametrize("spoil", [Path.unlink, _spoil], ids=["gone", "damaged"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "stock.pt"])
def test_a_saved_run_that_is_damaged_is_named_in_one_line(
    config: Path,
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "run"
    assert trained(config, "--steps", 1, "--save", folder)[0] == 0
    spoil(folder / "step-1" / name)
    said = refused(config, "--steps", 2, "--resume", folder)
    # What a program without handlers of its own prints.
    assert [one for one in caplog.records if (one.name, one.levelname) == ("root", "WARNING")] == []
    assert said.startswith("rank 0 cannot read ")
    assert str(folder / "step-1") in said
    assert said.endswith("; resume another run, or begin anew without --resume")


def test_a_run_that_cannot_be_saved_is_refused_before_it_begins(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(config, "--save", config) == f"{config}: File exists"
    assert refused(config, "--save", config / "run") == f"{config / 'run'}: Not a directory"

    def save(*_: object, checkpoint_id: Path) -> None:
        whole(*_, checkpoint_id=config / "run")

    whole = state_dict_saver.save
    monkeypatch.setattr(state_dict_saver, "save", save)
    code, _, err = trained(config, "--steps", 1, "--save", tmp_path / "run")
    [line] = err.splitlines()
    assert code == 2
    assert line.startswith(f"moeos: rank 0 cannot write the run into {tmp_path / 'run'}")
    assert line.endswith("; make room there, or name another folder with --save")


def test_an_interrupt_amid_a_save_is_heard_behind_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    whole = state_dict_saver.save

    def save(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return whole(*arguments, **options)

    monkeypatch.setattr(state_dict_saver, "save", save)
    code, _, err = trained(config, "--steps", 3, "--save", folder, "--save-every", 1)
    assert (code, err) == (130, "")
    assert len(saved.read_history(folder).losses) == 1
