# SPDX-License-Identifier: Apache-2.0
"""A run on disk: a folder from which any number of ranks can go on.

Within it is a folder of one step. There the model and its optimizer lie as a checkpoint of
torch.distributed, which has all experts once, and the stock model, which rank 0 alone has. The file
that describes the run is written last: it says which step counts. So a run that ends during a save
can go on from the save before. This file must not depend on how a step is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.train.trainer import Trainer
from moeos.system import files
from moeos.system.held_signals import HeldSignals

_COMPLETE = "run.json"
_STOCK = "stock.pt"
_STEP = re.compile(r"step-\d+")
_ALONE = "torch.distributed is disabled"
"""How a warning begins that one process gets where it saves without a group."""
_AGAIN = "Detected an existing checkpoint"
"""How a warning begins where an earlier run ended during this save."""


@dataclasses.dataclass
class History:
    """What is known of a run.

    Attributes:
        seed: that it began with.
        layer: the digest of the layer's config.
        text: bytes that it learns from.
        losses: of the steps so far.
        references: those of the stock model.
    """

    seed: int
    layer: str
    text: int
    losses: list[float] = dataclasses.field(default_factory=list)
    references: list[float] = dataclasses.field(default_factory=list)


def read_history(folder: Path) -> History:
    """What is known of a saved run. Raises `ValueError` where the folder holds none that is whole,
    and `OSError` where it cannot be read.
    """
    path = folder / _COMPLETE
    try:
        history = History(**files.read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} holds no complete run: there is no {path}") from None
    except TypeError as error:
        raise ValueError(f"{path} does not tell of a run: {error}") from None
    step = _step_of(folder, history)
    if not step.is_dir():
        raise ValueError(f"{folder} holds no complete run: there is no {step}")
    return history


def save(folder: Path, history: History, trained: Trainer, stock: Trainer | None) -> None:
    """Writes a run in place of the one that the folder holds. Collective; `stock` is rank 0's.

    The one before counts until this one is complete, unless it is of the same step. Ctrl-C takes
    effect then: ranks that left during the save would get errors of each other's.

    Raises `ValueError` or `OSError` where something cannot be written.
    """
    from torch.distributed.checkpoint import state_dict_saver

    step = _step_of(folder, history)
    remedy = "make room there, or name another folder with --save"
    failed: OSError | None = None
    with HeldSignals():
        if stock is not None:
            try:
                if not _holds_another(folder, step):
                    (folder / _COMPLETE).unlink(missing_ok=True)
            except OSError as error:
                failed = error  # raised after what all ranks do together
        with warnings.catch_warnings(), _told(f"write the run into {step}", remedy):
            warnings.filterwarnings("ignore", f"{_ALONE}|{_AGAIN}")
            state_dict_saver.save(_state_of(trained), checkpoint_id=step)
        if failed is not None:
            raise failed
        if stock is not None:
            with _told(f"write {step / _STOCK}", remedy):
                torch.save([stock.model.state_dict(), stock.optimizer.state_dict()], step / _STOCK)
            known = json.dumps(dataclasses.asdict(history), indent=1)
            files.replace(folder / _COMPLETE, known + "\n")
            for other in folder.iterdir():
                if other != step and _STEP.fullmatch(other.name):
                    shutil.rmtree(other)


def load(folder: Path, history: History, trained: Trainer, stock: Trainer | None) -> None:
    """Reads what `save` wrote into models and optimizers of the same shapes. Collective.

    Raises `ValueError` where a file is damaged or gone.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import set_state_dict

    step = _step_of(folder, history)
    state = _state_of(trained)
    remedy = "resume another run, or begin anew without --resume"
    with (
        HeldSignals(),
        warnings.catch_warnings(),
        _without_tracebacks(),
        _told(f"read the run in {step}", remedy),
    ):
        warnings.filterwarnings("ignore", _ALONE)
        state_dict_loader.load(state, checkpoint_id=step)
    set_state_dict(
        trained.model,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if stock is not None:
        with _told(f"read {step / _STOCK}", remedy):
            model, optimizer = torch.load(step / _STOCK, map_location="cpu", weights_only=True)
        stock.model.load_state_dict(model)
        stock.optimizer.load_state_dict(optimizer)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps PyTorch's loader from logging, with a traceback, what it raises as well."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.module != "state_dict_loader"

    logger = logging.getLogger()  # to which it logs
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


@contextlib.contextmanager
def _told(failed: str, remedy: str) -> Iterator[None]:
    """Raises `ValueError` with one line in place of the tracebacks of all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException

    rank, cause = 0, None
    try:
        yield
    except CheckpointException as error:
        rank, cause = min((rank, found) for rank, (found, _) in error.failures.items())
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        cause = error
    if cause is not None:
        why = str(cause).strip().partition("\n")[0]
        raise ValueError(f"rank {rank} cannot {failed}: {type(cause).__name__}: {why}; {remedy}")


def _holds_another(folder: Path, step: Path) -> bool:
    """Whether a complete run of another step lies in the folder."""
    try:
        return _step_of(folder, read_history(folder)) != step
    except ValueError:
        return False


def _step_of(folder: Path, history: History) -> Path:
    return folder / f"step-{len(history.losses)}"


def _state_of(trained: Trainer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    return {"model": model, "optimizer": optimizer}
