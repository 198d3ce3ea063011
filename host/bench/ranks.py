"""Starts a command that every rank of a launcher runs: what all of them would say, one says.

It knows what a launcher tells of ranks, and nothing of what commands do.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable

import typer

from moeos import launchers


def start(command: Callable[..., None]) -> None:
    """Runs a command by its options, as `typer.run` does; help is shown by rank 0 alone."""
    quiet = "--help" in sys.argv[1:] and launchers.detect(os.environ).rank != 0
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        typer.run(command)
