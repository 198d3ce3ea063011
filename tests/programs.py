# SPDX-License-Identifier: Apache-2.0
"""Python programs that end as any other, and begin with PyTorch imported, for tests. Holds none.

Importing PyTorch takes two seconds of a core. One process does it once, and is forked for each
program. What it forks runs to its interpreter's end: callbacks, threads, streams and status are as
of a program that was started. Who tests the start, or an environment that is read there, starts
one. Must not depend on: moeos, which a program imports itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_MOST_BYTES = 1 << 17
"""Of a program with its arguments and its environment."""

_ORIGIN = f"""
import gc; gc.disable(); import torch; gc.freeze(); gc.enable()
import json, os, socket, sys

def _next():
    "What a fork of this process is asked to be."
    door = socket.socket(fileno=int(sys.argv[1]))
    while True:
        asked, files, _, _ = socket.recv_fds(door, {_MOST_BYTES}, 2)
        if not asked:
            os._exit(0)  # who asks has ended
        child = os.fork()
        if child == 0:
            door.close()
            for place, file in enumerate(files, 1):
                os.dup2(file, place)
        for file in files:
            os.close(file)
        if child == 0:
            return json.loads(asked)
        door.send(child.to_bytes(8, "little"))
        door.send(os.waitpid(child, 0)[1].to_bytes(8, "little"))

_program, sys.argv[1:], _environment = _next()
os.environ.clear()
os.environ.update(_environment)
exec(compile(_program, "<string>", "exec"))
"""


@functools.cache
def _door(_process: int) -> socket.socket:
    """Where this process asks for programs. The process behind it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    origin = subprocess.Popen(
        [sys.executable, "-c", _ORIGIN, str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # as a pipe or a file, which is buffered by blocks
    )
    theirs.close()
    atexit.register(origin.wait)
    atexit.register(ours.close)  # before the wait
    return ours


def ended(
    program: str,
    *arguments: str,
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = 200.0,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, in the repository's folder.

    `stdout`: a file for its output, which else is in the result. `environment`: what it has beside
    this process's. One that has not ended after so many seconds is killed, and an error.
    """
    door = _door(os.getpid())
    asked = json.dumps([program, arguments, {**os.environ, **(environment or {})}]).encode()
    assert len(asked) < _MOST_BYTES
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaints:
        files = [out.fileno() if stdout is None else stdout, complaints.fileno()]
        socket.send_fds(door, [asked], files)
        child = int.from_bytes(door.recv(8), "little")
        door.settimeout(seconds)
        try:
            status = door.recv(8)
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            door.settimeout(None)
            door.recv(8)
            raise AssertionError(f"the program did not end within {seconds:g} s") from None
        door.settimeout(None)
        out.seek(0)
        complaints.seek(0)
        code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return subprocess.CompletedProcess(program, code, out.read(), complaints.read())
