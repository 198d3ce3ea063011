# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of many layers side by side, so that no rank waits for them one by one.

It puts them where `moeos.compile.jit` looks for them, and knows nothing of what runs them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeos.cli.shared import machine
from moeos.compile.jit import compile_kernel, include_root, sources_in
from moeos.compile.kernel_shape import KernelShape
from moeos.config.config import MoEConfig

PATIENCE = 480.0
"""Seconds that all kernels together may take."""


class Compilation:
    """Kernels that are being compiled; made by `started`."""

    def __init__(self, pending: Mapping[concurrent.futures.Future[None], str]) -> None:
        self._pending = pending

    def wait(self, moved: Callable[[], None]) -> dict[str, str]:
        """What the compiler said of the layers whose kernel it refused, by name.

        Calls `moved` when a kernel is done. Raises `TimeoutError` after `PATIENCE` seconds.
        """
        refused = {}
        for done in concurrent.futures.as_completed(self._pending, PATIENCE):
            moved()
            error = done.exception()
            if error is not None:
                refused[self._pending[done]] = f"{type(error).__name__}: {error}"
        return refused


@contextlib.contextmanager
def started(
    layers: Sequence[tuple[str, MoEConfig]],
    ranks: int,
    multiprocessors: int,
    roots: Sequence[Path] = (),
    kinds: Sequence[Mapping[str, Any]] = ({},),
) -> Iterator[Compilation]:
    """Begins to compile, for GPUs of so many multiprocessors; for the length of a with block.

    Args:
        layers: with their names, of which several may have the same.
        ranks: of the world that runs them, a GPU each.
        roots: source trees, each of which has every layer's kernel compiled; without any, the
            installed one alone.
        kinds: of the kernels that each layer has: what else `KernelShape` is given.
    """
    if not layers:
        yield Compilation({})
        return
    roots = roots or (include_root(),)
    workers = min(len(layers) * len(roots) * len(kinds), machine.cores())
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        try:
            yield Compilation(
                {
                    pool.submit(_compile, root, cfg, ranks, multiprocessors - 1, kind): name
                    for root in roots
                    for name, cfg in layers
                    for kind in kinds
                }
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(
    root: Path, cfg: MoEConfig, ranks: int, processors: int, kind: Mapping[str, Any]
) -> None:
    with sources_in(root):
        compile_kernel(KernelShape(cfg=cfg, world_size=ranks, processors=processors, **kind))
