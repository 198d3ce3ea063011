# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver through cuda-bindings, which need not be installed where no GPU is used."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from moeos.compile.jit import INSTALL


def load() -> Any:
    """The bindings' module. Raises `RuntimeError` if they are not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeError(f"cuda-bindings, which loads kernels, is missing: {INSTALL}") from error


def ask(answer: tuple[Any, ...]) -> Any:
    """What the driver answers; raises `RuntimeError` if its status is not success."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"CUDA's driver failed: {answer[0].name}")
    return answer[1] if len(answer) == 2 else None


@contextlib.contextmanager
def current(context: Any) -> Iterator[None]:
    """Makes a context the thread's, and at the end the one before: it is also what PyTorch takes
    for the thread's current device.
    """
    driver = load()
    before = ask(driver.cuCtxGetCurrent())
    ask(driver.cuCtxSetCurrent(context))
    try:
        yield
    finally:
        ask(driver.cuCtxSetCurrent(before))


def function(library: Any, name: str) -> Any:
    """A kernel of a loaded library, for launches in the current context."""
    driver = load()
    return ask(driver.cuKernelGetFunction(ask(driver.cuLibraryGetKernel(library, name.encode()))))


def has_atomics(device: Any, peer: Any) -> bool:
    """Whether atomics of one GPU on another's memory are atomic: over NVLink, and not over PCIe."""
    driver = load()
    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(ask(driver.cuDeviceGetP2PAttribute(attribute, device, peer)))


def visible_gpus() -> dict[str, Any]:
    """The GPUs that this process may use, by their UUID in hexadecimal digits."""
    driver = load()
    ask(driver.cuInit(0))
    gpus = [ask(driver.cuDeviceGet(i)) for i in range(ask(driver.cuDeviceGetCount()))]
    return {bytes(ask(driver.cuDeviceGetUuid(gpu)).bytes).hex(): gpu for gpu in gpus}
