# SPDX-License-Identifier: Apache-2.0
"""Which pieces of a text each step learns from: the same on all ranks, however many there are."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.train.model import LENGTH

SEQUENCES = 16
"""Sequences of a step, over all ranks."""
MAX_SEED = 2**31 - 1

_STEPS = 1_000_003  # between the seeds of two runs


def batch(text: Tensor, seed: int, step: int) -> Tensor:
    """Pieces of a text, uint8 [n]: int64 [SEQUENCES, LENGTH + 1], drawn for one step of a run.

    Raises `ValueError` where the text is too short.
    """
    last = len(text) - (LENGTH + 1)
    if last < 0:
        raise ValueError(f"the text has {len(text)} bytes; it needs {LENGTH + 1} at least")
    generator = torch.Generator().manual_seed(seed * _STEPS + step)
    starts = torch.randint(last + 1, (SEQUENCES, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()
