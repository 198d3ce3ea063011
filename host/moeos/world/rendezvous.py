# SPDX-License-Identifier: Apache-2.0
"""How the ranks that a launcher has started come to one store of torch.distributed.

They meet at an address, by the id of their job where all are on one host, or by MPI. Must not
depend on environment variables, nor on what the store is for.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from moeos.system import open_files
from moeos.system.caller import Caller
from moeos.system.errors import PeerTimeout
from moeos.system.place import boot
from moeos.system.process import Home, keep_in_children
from moeos.system.thread_limits import no_thread

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

Value = TypeVar("Value")

_HERE = "127.0.0.1"
_PAUSE = 5e-3  # seconds between two looks for rank 0
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED's process, user, group
_ADDRESS_BYTES = 512
_FILES = 16  # that a rank opens, with the layers of its world; seen: 4
_FILES_OF_STORE = 16  # that the process of a store opens; seen: 11
_FILES_OF_PEER = 2  # there, connections of a rank

# Stores that this process serves, by port or job, until it ends: a peer may be quick to come back.
_served: dict[int | str, TCPStore] = {}


class Meeting(NamedTuple):
    """A store, what an error calls it, and whether it ends with this process."""

    store: Store
    where: str
    serves: bool


def at_address(
    rank: int, size: int, deadline: float, *, host: str, port: int, serve: bool
) -> Meeting:
    """The store at `host`:`port`, which this rank holds if it is to serve.

    Raises `PeerTimeout` if no store answers there within `deadline` seconds, and `RuntimeError` if
    this rank is to serve one there and cannot.
    """
    where = f"the store at {host}:{port} (rank 0 or its launcher serves it)"
    _require_files(rank, size, serves=serve)
    try:
        store = within(
            deadline, lambda: _connect(host, port, serve, deadline), f"rank {rank} of {size}"
        )
    except (RuntimeError, concurrent.futures.TimeoutError) as error:
        if serve:
            why = str(error) or f"no store was there after {deadline:g} s; is {host} this host?"
            raise RuntimeError(f"rank {rank} cannot serve {where}: {why}") from error
        waited = f"rank {rank} of {size} waited {deadline:g} s for {where}"
        raise PeerTimeout(f"{waited} {error}".rstrip()) from error
    if serve:
        _served[port] = store
    return Meeting(store, where, serve)


def on_this_host(rank: int, size: int, deadline: float, *, job: str) -> Meeting:
    """The store of rank 0 of a job whose ranks are all on this host, by the job's id.

    Rank 0 sends the port over a socket in Linux's abstract namespace, whose name has the job's id
    and this user's. The name ends with the process, however that ends, and two jobs never meet.

    Raises `PeerTimeout` if rank 0 does not come within `deadline` seconds, and `RuntimeError` if
    another process has its place.
    """
    where = f"the store of rank 0 of job {job} on this host"
    name = "\0moeos-" + hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()
    if rank == 0:
        if job not in _served:
            _require_files(rank, size, serves=True)
            _served[job] = _serve_here(name, where, size, deadline)
        return Meeting(_served[job], where, True)
    ends = time.monotonic() + deadline
    port: int | None = None
    while (port := _port_told_by(name)) is None:
        if time.monotonic() > ends:
            raise PeerTimeout(
                f"rank {rank} of {size} waited {deadline:g} s for {where}: rank 0 did not arrive "
                "(ended, stuck, or never made this call)"
            )
        time.sleep(_PAUSE)
    return at_address(rank, size, deadline, host=_HERE, port=port, serve=False)


def can_ask_mpi() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def by_mpi(deadline: float) -> tuple[int, int, Meeting]:
    """This process's rank in MPI.COMM_WORLD, the number of its ranks, and the store of rank 0.

    MPI does no more than to broadcast the store's address, once in a process. Importing mpi4py
    starts MPI, which has no deadline: it waits until every process of the job has done so.

    Raises `PeerTimeout` if rank 0 does not broadcast within `deadline` seconds.
    """
    global _broadcast
    _start_mpi()
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if _broadcast is None:
        address = bytearray(_ADDRESS_BYTES)
        if rank == 0:
            _require_files(rank, size, serves=True)
            _served["mpi"] = serve(deadline)
            text = announcement(_served["mpi"]).encode()
            address[: len(text)] = text
        _broadcast = MPI.COMM_WORLD.Ibcast([address, MPI.BYTE], root=0), address
    request, address = _broadcast
    ends = time.monotonic() + deadline
    while not request.Test():
        if time.monotonic() > ends:
            raise PeerTimeout(
                f"rank {rank} of {size} waited {deadline:g} s for rank 0 to tell the address of "
                "its store by MPI (ended, stuck, or never made this call)"
            )
        time.sleep(_PAUSE)
    if rank == 0:
        return rank, size, Meeting(_served["mpi"], "the store of this rank", True)
    return rank, size, at_announced(rank, size, deadline, bytes(address).rstrip(b"\0").decode())


_broadcast: tuple[Any, bytearray] | None = None  # the request of MPI, and the bytes


def serve(deadline: float) -> TCPStore:
    """A store that this process holds, at any free port."""
    return within(deadline, lambda: _connect(_HERE, 0, True, deadline))


def _require_files(rank: int, size: int, *, serves: bool) -> None:
    """Raises `OSError` where a rank cannot open what a world needs. PyTorch's store aborts the
    process then, or hangs.
    """
    needed = _FILES + (_FILES_OF_STORE + _FILES_OF_PEER * size if serves else 0)
    open_files.require(needed, f"rank {rank} of {size}", "a world of so many ranks")


def announcement(store: TCPStore) -> str:
    """Where ranks on any host find a store that this process holds: host, port, boot."""
    return f"{socket.gethostname()} {store.port} {boot()}"


def at_announced(rank: int, size: int, deadline: float, announced: str) -> Meeting:
    """The store of an `announcement`; raises `PeerTimeout` as `at_address` does."""
    host, port, its_boot = announced.split()
    host = _HERE if its_boot == boot() else host
    return at_address(rank, size, deadline, host=host, port=int(port), serve=False)


def within(deadline: float, ask: Callable[[], Value], who: str = "") -> Value:
    """What `ask` returns; `futures.TimeoutError` if it takes more than `deadline` seconds.

    `who`: see `Caller`.
    """
    caller = Caller("moeos-store", who)
    try:
        return caller.result(ask, deadline)
    finally:
        caller.close()


def _connect(host: str, port: int, serve: bool, deadline: float) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host,
        port,
        is_master=serve,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        multi_tenant=port != 0,
    )
    keep_in_children(store)
    return store


def _serve_here(name: str, where: str, size: int, deadline: float) -> TCPStore:
    """Rank 0's store; a thread sends its port to processes of this user that ask at `name`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(size)
        store = serve(deadline)
    except (OSError, RuntimeError, concurrent.futures.TimeoutError) as error:
        listener.close()
        raise RuntimeError(f"rank 0 of {size} cannot serve {where}: {error}") from error

    def tell() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the peer may be gone
                if _is_of_this_user(connection):
                    connection.sendall(str(store.port).encode())

    try:
        threading.Thread(target=tell, name="moeos-port", daemon=True).start()
    except RuntimeError as error:
        listener.close()
        raise no_thread("the thread moeos-port", "start fewer ranks here") from error
    return store


def _port_told_by(name: str) -> int | None:
    """The port of rank 0's store; None if rank 0 is not there yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(name)
            if not _is_of_this_user(connection):
                return None
            text = b""
            while piece := connection.recv(16):
                text += piece
            return int(text) if text else None
        except OSError:
            return None


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _start_mpi() -> None:
    """Starts MPI, if it is not started, so that this process ends MPI, and no child does.

    mpi4py ends MPI in a child as well, where MPI_Finalize waits for ever. It waits so in a process
    whose peer is stuck: one that an exception ends skips it, and its launcher ends the job.

    Raises `RuntimeError` if mpi4py finds no MPI.
    """
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py, by which mpirun's ranks meet, finds no MPI ({error}): set MASTER_ADDR to the "
            "address of rank 0's host on all ranks, or pip install 'moeos[mpi]'"
        ) from error
    if MPI.Is_initialized():
        return
    MPI.Init_thread()
    home = Home()

    def end() -> None:
        failed = getattr(sys, "last_value", None) is not None
        if home.here and not failed and not MPI.Is_finalized():
            MPI.Finalize()

    atexit.register(end)
