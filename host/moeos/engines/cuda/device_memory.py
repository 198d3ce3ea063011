# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that the processes of one host share, by CUDA's virtual memory management.

The driver counts the processes that have mapped a piece of memory, so it stays until the last of
them unmaps it or ends, in whatever order and however that happens. Must not depend on ranks, nor on
what lies in the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.driver import ask


class Mapping:
    """A range of addresses at which one GPU sees memory, its own or another's.

    Attributes:
        address, size: of the range; at least as large as was asked for.
    """

    def __init__(self, handle: Any, size: int, device: torch.device) -> None:
        driver = cuda_driver.load()
        self._driver = driver
        self._device = device
        self.size = size
        self.address = int(ask(driver.cuMemAddressReserve(size, 0, 0, 0)))
        try:
            ask(driver.cuMemMap(self.address, size, 0, handle, 0))
            try:
                access = driver.CUmemAccessDesc()
                access.location = _location(driver, device)
                access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                ask(driver.cuMemSetAccess(self.address, size, [access], 1))
            except BaseException:
                driver.cuMemUnmap(self.address, size)
                raise
        except BaseException:
            driver.cuMemAddressFree(self.address, size)
            raise

    def tensor(self, size: int) -> Tensor:
        """uint8 [size], the first bytes of the range; no use of it may outlive the range.

        Its device is the one that sees the memory, wherever that lies.
        """
        storage: Any = torch._C._construct_storage_from_data_pointer(
            self.address, self._device, self.size
        )
        memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        memory.set_(storage, 0, (size,), (1,))
        return memory

    def unmap(self) -> None:
        """Ends the range. Nothing may use it any more."""
        ask(self._driver.cuMemUnmap(self.address, self.size))
        ask(self._driver.cuMemAddressFree(self.address, self.size))


def make(size: int, device: torch.device) -> tuple[Mapping, int]:
    """New memory of a GPU, at least `size` bytes of anything, and a descriptor of it.

    The caller closes the descriptor. Raises `RuntimeError` if there is no memory, or if the driver
    does not share any.
    """
    driver = cuda_driver.load()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(driver, device)
    properties.requestedHandleTypes = _file(driver)
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granule = int(ask(driver.cuMemGetAllocationGranularity(properties, least)))
    size = -(-size // granule) * granule
    handle = ask(driver.cuMemCreate(size, properties, 0))
    try:
        mapping = Mapping(handle, size, device)
        try:
            return mapping, int(ask(driver.cuMemExportToShareableHandle(handle, _file(driver), 0)))
        except BaseException:
            mapping.unmap()
            raise
    finally:
        driver.cuMemRelease(handle)  # what is mapped stays


def map_shared(descriptor: int, size: int, device: torch.device) -> Mapping:
    """Another process's memory, of which `make` has given the descriptor, `size` bytes in all.

    Raises `RuntimeError` if the GPU cannot address it.
    """
    driver = cuda_driver.load()
    handle = ask(driver.cuMemImportFromShareableHandle(descriptor, _file(driver)))
    try:
        return Mapping(handle, size, device)
    finally:
        driver.cuMemRelease(handle)


def _location(driver: Any, device: torch.device) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.index
    return location


def _file(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
