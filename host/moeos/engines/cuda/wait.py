# SPDX-License-Identifier: Apache-2.0
"""Waits for a GPU in which the main thread sees signals.

Must not depend on what the GPU does.
"""

from __future__ import annotations

import threading

import torch

from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.driver import ask
from moeos.system.caller import interruptibly


def synchronize(device: torch.device) -> None:
    """Waits, as `torch.cuda.synchronize` does, for all that was launched on a device.

    In the main thread it raises at once what a signal's handler raises; the GPU goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        torch.cuda.synchronize(device)
        return
    driver = cuda_driver.load()
    with torch.cuda.device(device):
        context = ask(driver.cuCtxGetCurrent())

    def wait() -> None:
        # Not by torch, which fails if the interpreter ends while one of its threads waits.
        ask(driver.cuCtxSetCurrent(context))
        ask(driver.cuCtxSynchronize())

    interruptibly(wait)
