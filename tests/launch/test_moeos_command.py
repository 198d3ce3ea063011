# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any time ends the command with status 130 and nothing on stderr."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests import programs
from tests.nightly import all_but
from tests.processes import MOEOS, ROOT

AT_THE_IMPORT = """
import os, signal, sys
def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
"""
IN_PLACE_OF_THE_COMMAND = """
import os, signal, sys
import moeos.cli.start, moeos.cli.app
def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
def command():
{body}
moeos.cli.app.main = command
"""
BODIES = {
    "in-the-command": """
    while True:
        interrupt()
""",
    "in-a-destructor": """
    class Thing:
        __del__ = interrupt
    thing = Thing()
    del thing
    while True:
        pass
""",
    "as-it-fails": """
    try:
        sys.exit(3)
    finally:
        interrupt()
""",
    "at-exit": """
    import atexit
    atexit.register(interrupt)
""",
    "at-the-end-of-threads": """
    import threading
    def wait_and_interrupt():
        threading.main_thread().join()
        interrupt()
    threading.Thread(target=wait_and_interrupt).start()
""",
}


def ended(program: str, *arguments: str, ignoring: bool = False) -> tuple[int, str]:
    handler = signal.SIG_IGN if ignoring else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)  # which the child has as well, if it is SIG_IGN
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "module",
    all_but(
        ["torch", "moeos._twin"],
        ["torch", "numpy", "moeos.cli.app", "moeos._twin", "typer", "rich"],
    ),
)
def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(module: str) -> None:
    assert ended(AT_THE_IMPORT.format(module=module) + MOEOS, "--version") == (130, "")


@pytest.mark.parametrize("body", all_but(["in-the-command", "at-exit"], BODIES))
def test_ctrl_c_in_the_command_and_at_its_end_ends_it_quietly(body: str) -> None:
    found = programs.ended(IN_PLACE_OF_THE_COMMAND.format(body=BODIES[body]) + MOEOS)
    assert (found.returncode, found.stderr) == (130, "")


def test_a_command_that_is_to_ignore_ctrl_c_ignores_it() -> None:
    program = AT_THE_IMPORT.format(module="torch") + MOEOS
    assert ended(program, "--version", ignoring=True) == (0, "")
