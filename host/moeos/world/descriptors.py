# SPDX-License-Identifier: Apache-2.0
"""Hands descriptors of open files to peers on this host, over sockets.

A descriptor that no path leads to, such as one of a GPU's memory, gets into another process only
by a message. Must not depend on what the descriptors are of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time

from moeos.system.place import place
from moeos.world.control import ControlPlane

_SECONDS = 10.0  # for a message that has been sent already
_MESSAGE_BYTES = 256


def exchange(control: ControlPlane, descriptor: int) -> list[int | None]:
    """[P] a descriptor from each rank; None for ranks in other places. Collective.

    This rank's own is a duplicate. The caller closes them all.

    Raises `PeerTimeout` if a rank does not take part. No rank sends or waits for what another one
    does not expect, so an `OSError` here is none of the peers' making.
    """
    rank, size = control.rank, control.size
    token = secrets.token_hex(16)  # a sender that has it got it from the control plane
    received: list[int | None] = [None] * size
    with contextlib.ExitStack() as open_until_all_have_read:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        open_until_all_have_read.enter_context(listener)
        name = f"\0moeos-{secrets.token_hex(16)}"  # no file's name: it ends with the process
        listener.bind(name)
        listener.listen(size)
        offers = control.allgather((place(), name, token), "the sockets of the ranks")
        sent = []
        for peer, (where, at, word) in enumerate(offers):
            if peer == rank or where != offers[rank][0]:
                continue
            # Neither call waits for the peer: it has room for all of its peers' messages.
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            open_until_all_have_read.enter_context(connection)
            with contextlib.suppress(OSError):
                connection.connect(at)
                socket.send_fds(connection, [f"{word} {rank}".encode()], [descriptor])
                sent.append(peer)
        every = control.allgather(sent, "the descriptors of the ranks")
        expected = {peer for peer, reached in enumerate(every) if rank in reached}
        try:
            received[rank] = os.dup(descriptor)
            _receive(listener, token, expected, received)
            control.barrier("the arrival of the descriptors")
        except BaseException:
            close(received)
            raise
    return received


def close(descriptors: list[int | None]) -> None:
    """Closes the descriptors that are not None."""
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _receive(
    listener: socket.socket, token: str, expected: set[int], received: list[int | None]
) -> None:
    ends = time.monotonic() + _SECONDS
    missing = set(expected)
    while missing:
        listener.settimeout(max(0.01, ends - time.monotonic()))
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(max(0.01, ends - time.monotonic()))
            message, descriptors, _, _ = socket.recv_fds(
                connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        word, _, sender = message.decode(errors="replace").partition(" ")
        if word == token and descriptors and sender.isdecimal() and int(sender) in missing:
            missing.discard(int(sender))
            received[int(sender)] = descriptors.pop()
        for other in descriptors:  # sent by a process that is no rank
            os.close(other)
