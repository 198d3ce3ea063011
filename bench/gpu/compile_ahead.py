# SPDX-License-Identifier: Apache-2.0
"""Compiles many kernels side by side, so that no rank waits for them one by one.

It puts them where `moeos.compile.jit` looks for them. Must not depend on what runs them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import moeos
from moeos.cli.shared import machine
from moeos.compile.jit import compile_kernel, include_root, sources_in
from moeos.compile.kernel_shape import KernelShape

PATIENCE = 480.0
"""Seconds that all kernels together may take."""


def together(
    world: moeos.World, kernels: Sequence[tuple[str, Mapping[str, Any]]]
) -> dict[str, str]:
    """The compiler's errors for refused kernels, by name. Collective.

    Each rank compiles its share. A kernel is a name, which several may have, and fields of
    `KernelShape`; the processors are this GPU's, the world's size is 1 unless it is there, and
    `root` is a source tree other than the installed one. Raises `TimeoutError` after `PATIENCE`
    seconds.
    """
    mine = kernels[world.rank :: world.size]
    processors = torch.cuda.get_device_properties().multi_processor_count - 1
    refused = {}
    workers = max(1, min(len(mine), machine.cores() // world.size))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        pending = {
            pool.submit(_compile, {"world_size": 1, "processors": processors, **fields}): name
            for name, fields in mine
        }
        try:
            for done in concurrent.futures.as_completed(pending, PATIENCE):
                error = done.exception()
                if error is not None:
                    refused[pending[done]] = f"{type(error).__name__}: {error}"
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    told = world.control.allgather(refused, "the ranks' kernels")
    return {name: what for of_rank in told for name, what in of_rank.items()}


def _compile(fields: dict[str, Any]) -> None:
    root: Path = fields.pop("root", None) or include_root()
    with sources_in(root):
        compile_kernel(KernelShape(**fields))
