# SPDX-License-Identifier: Apache-2.0
"""`moeos.topk` on a GPU: a kernel for a type of logits, and for how many of them are chosen.

Must not depend on derivatives: it knows tensors, the compiler and the driver.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

Softmax = Literal["all", "chosen"]
"""The argument `softmax` of `moeos.topk`."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits, in the order of MOEOS_TYPE in kernels/topk.cu."""

THREADS = 256
"""Threads of a block."""

_SOURCE, _KERNEL = "kernels/topk.cu", "moeos_topk"
_LANES = 32
_OF_A_LANE = 16  # logits, at least: fewer would leave more to be merged than to be sorted
_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32),
    *(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p),
)


def takes(logits: Tensor) -> bool:
    """Whether the kernel can take these: tensors with memory, which are not being traced and have
    no forward derivative; and whether there is a compiler for it.
    """
    return (
        logits.is_cuda
        and logits.dtype in TYPES
        and type(logits) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(logits)
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad.unpack_dual(logits).tangent is None
        and _can_compile()
    )


@functools.cache
def _can_compile() -> bool:
    """Whether what `moeos[cuda]` installs is here, for PyTorch's own kind of GPU."""
    if torch.version.hip is not None:
        return False
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


def cut(count: int, k: int) -> tuple[int, int]:
    """Keys that a lane keeps, and lanes of a row of `count` logits, both powers of two."""
    kept = _power(k)
    return kept, min(_LANES, _power(-(-count // max(_OF_A_LANE, kept))))


def number_of(softmax: Softmax | None) -> int:
    """The number of `softmax` in kernels/topk.cu."""
    return 0 if softmax is None else 1 + get_args(Softmax).index(softmax)


def run(logits: Tensor, k: int, softmax: Softmax | None) -> tuple[Tensor, Tensor]:
    """The values and the indices of `moeos.topk`, by one launch on the current stream.

    Raises `RuntimeError` if the kernel cannot be compiled for this GPU.
    """
    from moeos.engines.cuda import driver as cuda_driver  # spares hosts a GPU's modules

    rows = logits.detach().contiguous()
    *leading, count = rows.shape
    with torch.cuda.device(rows.device):
        dtype = rows.dtype if softmax is None else torch.float32
        values = torch.empty(*leading, k, dtype=dtype, device=rows.device)
        indices = torch.empty(*leading, k, dtype=torch.int64, device=rows.device)
        if values.numel() > 0:
            kept, lanes = cut(count, k)
            number = rows.numel() // count
            context, function = _loaded(rows.device, TYPES.index(rows.dtype), kept)
            given = (
                *(rows.data_ptr(), number, count, k, lanes, number_of(softmax)),
                *(values.data_ptr(), indices.data_ptr()),
            )
            blocks = -(-number // (THREADS // lanes))
            stream = torch.cuda.current_stream().cuda_stream
            driver = cuda_driver.load()
            # The thread's current context may not be set yet: torch does that when it needs it.
            cuda_driver.ask(driver.cuCtxSetCurrent(context))
            cuda_driver.ask(
                driver.cuLaunchKernel(
                    function, blocks, 1, 1, THREADS, 1, 1, 0, stream, (given, _ARGUMENTS), 0
                )
            )
    return values, indices


@functools.cache
def _loaded(device: torch.device, type_: int, kept: int) -> tuple[Any, Any]:
    """The device's context, and the kernel in it; the device is the current one."""
    from moeos.compile import jit  # spares hosts a GPU's modules
    from moeos.engines.cuda import driver as cuda_driver  # spares hosts a GPU's modules

    major, minor = torch.cuda.get_device_capability()
    cubin = jit.compile_file(_SOURCE, f"sm_{major}{minor}", ("TYPE", type_), ("KEPT", kept))
    driver = cuda_driver.load()
    number = cuda_driver.ask(driver.cuDeviceGet(device.index))
    context = cuda_driver.ask(driver.cuDevicePrimaryCtxRetain(number))  # which PyTorch has, too
    cuda_driver.ask(driver.cuCtxSetCurrent(context))
    library = cuda_driver.ask(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    return context, cuda_driver.function(library, _KERNEL)


def _power(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
