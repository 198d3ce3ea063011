# SPDX-License-Identifier: Apache-2.0
"""The language model of `examples.train`: its stock mixture, its batches, its saved runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.train import saved
from examples.train.batches import SEQUENCES, batch
from examples.train.model import BYTES, LENGTH, LanguageModel
from examples.train.saved import History
from examples.train.stock import StockMixture
from examples.train.trainer import Trainer
from moeos.config import reference
from moeos.system import files
from tests.layers import config


def test_the_stock_mixture_is_the_reference() -> None:
    cfg = config(activation="swiglu", top_k=3)
    torch.manual_seed(0)
    mixture = StockMixture(cfg.hidden, cfg.intermediate, cfg.experts, cfg.top_k, torch.float32)
    x = torch.randn(50, cfg.hidden)
    expected = reference.moe(x, mixture.gate.weight, mixture.w1, mixture.w2, cfg)
    assert reference.relative_error(mixture(x), expected) < 1e-6


def test_what_is_replicated_is_all_but_experts() -> None:
    mixtures = [StockMixture(16, 8, 4, 2, torch.bfloat16) for _ in range(2)]
    model = LanguageModel(16, mixtures, torch.bfloat16)
    replicated = {id(one) for one in model.replicated()}
    others = {name for name, one in model.named_parameters() if id(one) not in replicated}
    assert others == {f"blocks.{b}.mixture.{name}" for b in (0, 1) for name in ("w1", "w2")}
    logits = model(torch.randint(BYTES, (3, LENGTH)))
    assert logits.shape == (3, LENGTH, BYTES)
    assert logits.dtype == torch.float32


def test_a_symbol_sees_none_that_follow_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(16, [StockMixture(16, 8, 4, 2, torch.float32)], torch.float32)
    one = torch.randint(BYTES, (1, LENGTH))
    other = one.clone()
    other[:, 40:] = (one[:, 40:] + 1) % BYTES
    assert torch.equal(model(one)[:, :40], model(other)[:, :40])
    assert not torch.equal(model(one)[:, 40:], model(other)[:, 40:])


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    text = (torch.arange(1000) % 251).to(torch.uint8)
    pieces = batch(text, 3, 7)
    assert pieces.shape == (SEQUENCES, LENGTH + 1)
    assert torch.equal(pieces, batch(text, 3, 7))
    assert not torch.equal(pieces, batch(text, 3, 8))
    assert not torch.equal(pieces, batch(text, 4, 7))
    assert all(int(step) in (1, -250) for step in pieces.diff(dim=1).flatten())  # as in the text
    assert torch.equal(batch(text[: LENGTH + 1], 0, 0)[5], text[: LENGTH + 1].long())
    with pytest.raises(ValueError, match=r"the text has 64 bytes; it needs 65 at least"):
        batch(text[:LENGTH], 0, 0)


def test_a_folder_that_holds_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no complete run: there is no .*run\.json"):
        saved.read_history(tmp_path / "missing")
    (tmp_path / "run.json").write_text('{"seed": 1}')
    with pytest.raises(ValueError, match=r"run\.json does not tell of a run: .*'layer'"):
        saved.read_history(tmp_path)
    (tmp_path / "run.json").write_text('{"seed": 1, "layer": "{}", "text": 5, "losses": [2.0]}')
    with pytest.raises(ValueError, match=r"holds no complete run: there is no .*step-1$"):
        saved.read_history(tmp_path)
    (tmp_path / "step-1").mkdir()
    assert saved.read_history(tmp_path) == History(1, "{}", 5, [2.0])


def test_a_save_that_ends_early_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer() -> Trainer:
        mixture = StockMixture(16, 8, 4, 2, torch.float32)
        return Trainer(LanguageModel(16, [mixture], torch.float32), None)

    one, other, folder = trainer(), trainer(), tmp_path / "run"

    def save(steps: int) -> None:
        saved.save(folder, History(1, "{}", 5, [2.0] * steps), one, other)

    def numbers() -> list[Tensor]:
        return [tensor.clone() for tensor in one.model.state_dict().values()]

    one.step(0, batch(torch.arange(100, dtype=torch.uint8), 0, 0), SEQUENCES * LENGTH)
    before = numbers()
    (folder / "step-4").mkdir(parents=True)  # of a run that has ended amid a save
    save(2)
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "step-2"]
    one.step(1, batch(torch.arange(100, dtype=torch.uint8), 0, 1), SEQUENCES * LENGTH)

    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            save(4)
    found = saved.read_history(folder)
    assert len(found.losses) == 2
    after = numbers()
    saved.load(folder, found, one, other)
    assert all(map(torch.equal, numbers(), before))
    assert not all(map(torch.equal, after, before))
    with monkeypatch.context() as patch:  # the same step again: that of before is overwritten
        patch.setattr(files, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            save(2)
    with pytest.raises(ValueError, match="holds no complete run"):
        saved.read_history(folder)
    save(3)
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "step-3"]
