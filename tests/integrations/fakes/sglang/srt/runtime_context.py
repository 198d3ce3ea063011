# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: what a process is told before it makes a model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class GroupCoordinator:
    def __init__(self, ranks: list[int]) -> None:
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(dist.get_rank())
        self.cpu_group = dist.new_group(ranks, backend="gloo")

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        output = input_.clone()
        dist.all_reduce(output, group=self.cpu_group)
        return output


@dataclasses.dataclass
class ParallelContext:
    moe_ep_size: int = 1
    moe_ep_rank: int = 0
    moe_tp_size: int = 1
    moe_tp_rank: int = 0
    moe_ep_group: Any = None
    moe_tp_group: Any = None


CONTEXT = SimpleNamespace(
    parallel=ParallelContext(),
    schedule=SimpleNamespace(chunked_prefill_size=None, max_prefill_tokens=16384),
    exec=SimpleNamespace(moe=SimpleNamespace(enable_eplb=False)),
    lora=SimpleNamespace(enable_lora=False, lora_paths=None),
    flags=SimpleNamespace(
        moe=SimpleNamespace(tbo_enabled=False, runner_backend="auto", a2a_backend="none")
    ),
)
"""Of the stand-in alone: what the functions below return."""


def get_parallel() -> Any:
    return CONTEXT.parallel


def get_schedule() -> Any:
    return CONTEXT.schedule


def get_exec() -> Any:
    return CONTEXT.exec


def get_lora() -> Any:
    return CONTEXT.lora


def get_flags() -> Any:
    return CONTEXT.flags
