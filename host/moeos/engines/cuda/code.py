# SPDX-License-Identifier: Apache-2.0
"""Where a loaded kernel's instructions lie in the GPU's memory.

Must not depend on layers and their calls.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moeos.compile import jit
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.driver import ask


def code_address(library: Any, name: str) -> int:
    """The address of the first instruction of a library's kernel, the one whose launches are calls;
    0 if unknown.

    Waits for the current stream. Raises `RuntimeError` if the driver refuses.
    """
    driver = cuda_driver.load()
    # The driver loads a kernel when it is asked for, and only then it has an address.
    ask(driver.cuFuncLoad(cuda_driver.function(library, name)))
    found = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream()
    function = cuda_driver.function(library, jit.CODE_ADDRESS)
    arguments = ((found.data_ptr(),), (ctypes.c_void_p,))
    ask(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, arguments, 0))
    return int(found)
