# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap of the twin: memory of equal size on every rank, mapped by all of them.

Between processes each rank makes an anonymous shared-memory object (a memfd), which the others open
through /proc. It has no name, so it ends with the last process that maps it, however that process
ends. Between virtual ranks, threads of one process, plain memory is enough. Must not depend on what
lies in a heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator

from moeos.system import host_memory
from moeos.world.control import ControlPlane, raise_together, require_equal

MAX_HEAP_BYTES = 1 << 46
"""The largest heap that may be asked for; it bounds a mistake, not a use."""

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SymmetricHeap:
    """One rank's view of the heaps of all ranks. Collective to make, with one size on all ranks.

    `World.allocate_heap` makes it and `World.close` unmaps it: by then no thread may use its
    addresses.

    Attributes:
        size: bytes of each rank's heap, as asked for. The memory starts as zeros.
        addresses: where this process sees each rank's heap, in rank order; page-aligned.

    Raises:
        TypeError, ValueError: `size` is not an integer from 1 to MAX_HEAP_BYTES.
        ConfigMismatch: ranks ask for different sizes.
        OSError: there is no memory or no address space for it on some rank; on all ranks.
        RuntimeError: a rank cannot open a peer's memory; on all ranks.
        PeerTimeout: a rank did not take part.
    """

    def __init__(self, control: ControlPlane, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"size is {size!r}; it must be an integer number of bytes")
        if not 1 <= size <= MAX_HEAP_BYTES:
            raise ValueError(f"size is {size}; allowed: 1 to {MAX_HEAP_BYTES} bytes")
        require_equal(control, size, "the size of a heap")
        self.size = size
        self._mappings = (
            _share(control, size) if control.shares_memory else _exchange(control, size)
        )
        self.addresses = tuple(mapping.address for mapping in self._mappings)

    def close(self) -> None:
        """Gives back this rank's mappings; idempotent. Addresses must not be used any more."""
        mappings, self._mappings = self._mappings, []
        self.addresses = ()
        for mapping in mappings:
            mapping.release()


class _Mapping:
    """Zeroed or shared memory of this process, unmapped when the last of its users releases it."""

    def __init__(self, rank: int, size: int, users: int, descriptor: int | None = None) -> None:
        flags = mmap.MAP_SHARED
        if descriptor is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(
            None, size, protection, flags, -1 if descriptor is None else descriptor, 0
        )
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(
                code,
                f"rank {rank} cannot map a heap of {size} bytes: {os.strerror(code)}. "
                f"{host_memory.limits()}. Raise the limit that is reached, lower max_tokens, or "
                "start fewer ranks",
            )
        self.address: int = address
        self._size = size
        self._users = users
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _libc.munmap(self.address, self._size)


def _share(control: ControlPlane, size: int) -> list[_Mapping]:
    """The heaps of ranks that live in one address space: each makes its own, all use all."""
    with _agreement(control, "the memory of a heap") as held:
        held.append(_Mapping(control.rank, size, users=control.size))
    return control.allgather(held[0], "the addresses of a heap")


def _exchange(control: ControlPlane, size: int) -> list[_Mapping]:
    """The heaps of ranks that are processes of one host."""
    with contextlib.ExitStack() as descriptors:
        with _agreement(control, "the memory of a heap"):
            descriptor = _make(control.rank, size)
            descriptors.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        offer = (os.getpid(), descriptor, (status.st_dev, status.st_ino, status.st_size))
        offers = control.allgather(offer, "the addresses of a heap")
        with _agreement(control, "the mapping of a heap") as held:
            for rank, (process, number, identity) in enumerate(offers):
                path = f"/proc/{process}/fd/{number}"
                with _opened(control.rank, rank, path, identity) as peer:
                    held.append(_Mapping(control.rank, size, users=1, descriptor=peer))
        return held  # every rank has mapped every heap: the descriptors may go


def _make(rank: int, size: int) -> int:
    """A descriptor of new memory. Raises `OSError`, which names the rank and the limit it meets.

    Its pages come when they are first written. So what the machine does not have at all is refused
    here: in a call the kernel would end the process.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create("moeos-heap", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)  # it is made with 0777
        room = host_memory.available()
        if size > room:
            raise OSError(errno.ENOMEM, f"{room} bytes are available")
        os.ftruncate(descriptor, size)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        code = error.errno or errno.EIO
        remedy = {
            errno.ENOMEM: f", {error.strerror}; lower max_tokens, or start fewer ranks",
            errno.EFBIG: "; raise the limit of this process, ulimit -f",
            errno.EMFILE: "; raise the limit of this process, ulimit -n",
        }.get(code, "")
        raise OSError(
            code, f"rank {rank} cannot make a heap of {size} bytes: {os.strerror(code)}{remedy}"
        ) from error
    return descriptor


@contextlib.contextmanager
def _agreement(control: ControlPlane, what: str) -> Iterator[list[_Mapping]]:
    """Runs a block that may fail on one rank; if it does, all ranks free what it made and raise."""
    held: list[_Mapping] = []
    error: Exception | None = None
    try:
        yield held
    except (OSError, RuntimeError) as raised:
        error = raised
    try:
        raise_together(control, error, what)
    except BaseException:
        for mapping in held:
            mapping.release()
        raise


@contextlib.contextmanager
def _opened(rank: int, peer: int, path: str, identity: tuple[int, int, int]) -> Iterator[int]:
    """A descriptor of the peer's memory, checked to be what the peer offered."""
    why = "there is another file"
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        why = os.strerror(error.errno or 0)
    try:
        if descriptor >= 0:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino, status.st_size) == identity:
                yield descriptor
                return
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    raise RuntimeError(
        f"rank {rank} cannot open the heap of rank {peer} at {path}: {why}. The ranks of the "
        "twin must run as one user in one PID namespace: on one host, in one container"
    )
