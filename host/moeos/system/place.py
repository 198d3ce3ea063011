# SPDX-License-Identifier: Apache-2.0
"""Which machine, and which network of it, this process runs on."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def boot() -> str:
    """An identifier of this host, as long as it runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox may not show it
        return socket.gethostname()


def place() -> tuple[str, int]:
    """An identifier that processes share if they can reach each other's sockets: host and network.

    Two containers of one host mostly have networks of their own, and are two places.
    """
    try:
        return boot(), os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return boot(), 0
