# SPDX-License-Identifier: Apache-2.0
"""What a command does where its output cannot be written, or not as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeos.cli import streams
from tests import programs
from tests.nightly import at_night
from tests.processes import MOEOS, ROOT

PLAN = ["plan", str(ROOT / "configs" / "demo.toml")]
RUN = ["run", str(ROOT / "configs" / "demo.toml"), "--ranks", "2"]


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MOEOS, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "arguments", [PLAN, at_night(RUN), at_night(["--help"])], ids=lambda found: found[0]
)
def test_a_reader_that_leaves_is_a_quiet_end(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does once it has its line
    ended = programs.ended(MOEOS, *arguments, stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (streams.CLOSED_PIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [PLAN, at_night(["--help"])], ids=lambda found: found[0])
def test_a_full_disk_is_named(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = programs.ended(MOEOS, *arguments, stdout=full.fileno())
    message = "moeos: standard output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, message)


def test_streams_that_are_closed_are_done_without() -> None:
    def close() -> None:
        os.close(1)

    ended = run(PLAN, preexec_fn=close)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_message_does_not_go_to_stdout_where_stderr_is_closed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MOEOS, "plan", "absent.toml"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.close(2),
        timeout=200,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize(
    "arguments", [PLAN, at_night(["compile", "--help"])], ids=lambda found: found[0]
)
def test_a_terminal_that_knows_ascii_alone_is_given_ascii(arguments: list[str]) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    ended = run(arguments, stdout=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.isascii()
    assert "\\x" not in ended.stdout  # each sign has plain letters
