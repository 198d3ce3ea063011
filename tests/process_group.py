# SPDX-License-Identifier: Apache-2.0
"""Ranks that also are ranks of torch.distributed, as those of a training program; for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

import moeos
from moeos import World
from tests.processes import ForkedRanks, free_port, torchrun_environment


def ranks_of_torch(
    function: Callable[[World], Any],
    ranks: int,
    seconds: float = 120.0,
    killed: Collection[int] = (),
) -> list:
    """What `function(world)` returns on each of `ranks` processes, which gloo connects, too.

    Raises the lowest rank's error, if there is one. Those in `killed` must end without a word.
    """
    port, store = free_port(), free_port()

    def live(rank: int) -> Any:
        torch.set_num_threads(1)
        os.environ.update(torchrun_environment(rank, ranks, port))
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=ranks
        )
        try:
            with moeos.init("twin", deadline=60.0) as world:
                return function(world)
        finally:
            dist.destroy_process_group()

    outcomes = ForkedRanks(live, ranks).ended(seconds)
    for rank, outcome in enumerate(outcomes):
        if (outcome is None) != (rank in killed):
            raise AssertionError(
                f"rank {rank} ended with {outcome!r}; to be killed: {list(killed)}"
            )
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
