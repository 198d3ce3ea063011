# SPDX-License-Identifier: Apache-2.0
"""GPUs for tests of the host where there are none: a driver whose memory is files in memory.

What is shared between processes really is, by the same descriptors. `install` puts it where the
host looks for CUDA's driver; devices are `torch.device("cpu")`.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest

from moeos.engines.cuda import device_heap
from moeos.engines.cuda import driver as cuda_driver

GRANULE = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = Status.CUDA_SUCCESS


class Driver:
    """The part of `cuda.bindings.driver` that makes and shares memory.

    Attributes:
        shares: whether memory can be exported.
        maps: whether a GPU can map memory that a peer has made.
        memory: bytes that there are.
    """

    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.shares = self.maps = True
        self.memory = 1 << 30
        self.ranges: dict[int, int] = {}
        self.handles: set[int] = set()
        self._imported: set[int] = set()

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Status, int]:
        return OK, GRANULE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if size > self.memory:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY, None)
        handle = os.memfd_create("moeos-fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(handle, size)
        self.handles.add(handle)
        return OK, handle

    def cuMemRelease(self, handle: int) -> tuple[Status]:
        self.handles.remove(handle)
        os.close(handle)
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        if not self.shares:
            return (Status.CUDA_ERROR_NOT_SUPPORTED, None)
        return OK, os.dup(handle)

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> tuple[Any, ...]:
        handle = os.dup(descriptor)
        self.handles.add(handle)
        self._imported.add(handle)
        return OK, handle

    def cuMemAddressReserve(self, size: int, alignment: int, at: int, flags: int) -> Any:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, size, 0, flags, -1, 0)
        self.ranges[address] = size
        return OK, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Status]:
        assert self.ranges.pop(address) == size
        _libc.munmap(address, size)
        return (OK,)

    def cuMemMap(self, address: int, size: int, at: int, handle: int, flags: int) -> Any:
        if handle in self._imported and not self.maps:
            return (Status.CUDA_ERROR_NOT_SUPPORTED,)
        assert os.fstat(handle).st_size == size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, handle, 0)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Status]:
        _libc.mmap(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[Status]:
        assert count == len(access) == 1
        return (OK,)


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver that is used from here on, also by processes that are forked then."""
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(cuda_driver, "visible_gpus", dict)
    monkeypatch.setattr(device_heap, "_synchronize", lambda device: None)
    monkeypatch.setattr(device_heap, "_uuid_of", lambda device: "the one there is")
    return driver
