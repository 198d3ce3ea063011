# SPDX-License-Identifier: Apache-2.0
"""A run on disk: a folder from which any number of ranks can go on.

The model and its optimizer lie there as a checkpoint of torch.distributed, which has all experts
once. The stock model, which rank 0 alone has, and what is known of the run lie beside it. The last
file that is written says that the folder is complete. It knows nothing of how a step is made.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from moeos import files
from moeos.language.trainer import Trainer

_COMPLETE = "run.json"
_STOCK = "stock.pt"
_ALONE = "torch.distributed is disabled"
"""How a warning begins that one process gets where it saves without a group."""


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
        return History(**files.read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} holds no complete run: there is no {path}") from None
    except TypeError as error:
        raise ValueError(f"{path} does not tell of a run: {error}") from None


def save(folder: Path, history: History, trained: Trainer, stock: Trainer | None) -> None:
    """Writes a run. Collective; `stock` is rank 0's.

    What another run has left in the folder does not count from now on.
    """
    if stock is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _COMPLETE).unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        state_dict_saver.save(_state_of(trained), checkpoint_id=folder)
    if stock is not None:
        torch.save([stock.model.state_dict(), stock.optimizer.state_dict()], folder / _STOCK)
        files.replace(folder / _COMPLETE, json.dumps(dataclasses.asdict(history), indent=1) + "\n")


def load(folder: Path, trained: Trainer, stock: Trainer | None) -> None:
    """Reads what `save` wrote into models and optimizers of the same shapes. Collective."""
    state = _state_of(trained)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(
        trained.model,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if stock is not None:
        model, optimizer = torch.load(folder / _STOCK, map_location="cpu", weights_only=True)
        stock.model.load_state_dict(model)
        stock.optimizer.load_state_dict(optimizer)


def _state_of(trained: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    return {"model": model, "optimizer": optimizer}
