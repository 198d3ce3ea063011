# SPDX-License-Identifier: Apache-2.0
"""A kernel that is loaded on a GPU, and the arguments that a layer's launches of it are given.

Layers of one shape share a loaded kernel. Must not depend on what the bytes of the arguments mean.
"""

from __future__ import annotations

import contextlib

import numpy
from numpy.typing import NDArray

from moeos.compile import jit, machine_code
from moeos.compile.jit import Kernel
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.code import code_address
from moeos.engines.cuda.driver import ask
from moeos.engines.cuda.nvshmem_heap import fill_in_state, forget_state


class LaunchArguments:
    """The arguments of one layer's launches.

    Attributes:
        arguments: uint8, the records of the ranks of a launch, as they are when it is made.
        pointers_at: address of the pointer to them.
    """

    def __init__(self, arguments: NDArray[numpy.uint8]) -> None:
        # The driver copies the arguments in the launch, so one place serves all of them.
        self.arguments = arguments
        self._pointers = numpy.array([arguments.ctypes.data], dtype=numpy.uint64)
        self.pointers_at: int = self._pointers.ctypes.data

    @classmethod
    def of_ranks(cls, record: NDArray[numpy.uint8], ranks: int) -> LaunchArguments:
        """Arguments of one rank, whose record stays where it is, or of several, in a new array."""
        return cls(record if ranks == 1 else numpy.tile(record, ranks))


class LoadedKernel:
    """A kernel on the current device, and what its launches have in common.

    Args:
        by_nvshmem: whether the kernel puts by NVSHMEM.
        name: in the machine code.
        cooperative: whether its blocks wait for each other.

    Attributes:
        code: address of the kernel's instructions, and how many bytes they are; zeros if unknown.
    """

    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        by_nvshmem: bool,
        *,
        name: str = jit.KERNEL,
        cooperative: bool = True,
    ) -> None:
        driver = self._driver = cuda_driver.load()
        self._context = ask(driver.cuCtxGetCurrent())
        self._library = ask(driver.cuLibraryLoadData(kernel.cubin, [], [], 0, [], [], 0))
        self._by_nvshmem = by_nvshmem
        if by_nvshmem:
            fill_in_state(int(self._library))
        address = code_address(self._library, name) if cooperative else 0
        self.code = (0, 0)
        if address != 0:
            self.code = address, machine_code.instruction_bytes(kernel.cubin, name)
        self._function = cuda_driver.function(self._library, name)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask(driver.cuFuncSetAttribute(self._function, limit, kernel.report.shared_bytes))
        together = driver.CUlaunchAttribute()
        together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = int(cooperative)
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = kernel.report.threads, 1, 1
        launch.sharedMemBytes = kernel.report.shared_bytes
        launch.attrs = [together]
        launch.numAttrs = 1
        self._launch = launch
        self._stream: int | None = None  # the stream of the launch before

    def launch(self, stream: int, launch: LaunchArguments) -> None:
        """Launches it on a stream."""
        driver = self._driver
        # The thread's current context may not be set yet: torch does that when it first needs it.
        ask(driver.cuCtxSetCurrent(self._context))
        if stream != self._stream:
            self._launch.hStream = self._stream = stream
        ask(driver.cuLaunchKernelEx(self._launch, self._function, launch.pointers_at, 0))

    def unload(self) -> None:
        """Gives the kernel's memory back. No launch of it runs, and no graph has one."""
        with contextlib.suppress(RuntimeError), cuda_driver.current(self._context):
            if self._by_nvshmem:
                forget_state(int(self._library))
            ask(self._driver.cuLibraryUnload(self._library))
