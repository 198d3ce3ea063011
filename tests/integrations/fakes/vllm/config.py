# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: the config in force."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    enable_dbo: bool = False
    all2all_backend: str = "allgather_reducescatter"


@dataclasses.dataclass
class SchedulerConfig:
    max_num_batched_tokens: int = 8192


@dataclasses.dataclass
class VllmConfig:
    parallel_config: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    additional_config: dict[str, Any] = dataclasses.field(default_factory=dict)


_current: list[VllmConfig] = []


@contextlib.contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[None]:
    _current.append(vllm_config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config() -> VllmConfig:
    assert _current, "no vLLM config is set"
    return _current[-1]
