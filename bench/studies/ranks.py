# SPDX-License-Identifier: Apache-2.0
"""Starts a command that every rank of a launcher runs. It knows nothing of what commands do."""

from __future__ import annotations

from collections.abc import Callable

import typer

from moeos.cli.shared import help as helps


def start(command: Callable[..., None]) -> None:
    """Runs a command by its options, as `typer.run` does; help is shown by rank 0 alone."""
    with helps.shown_once():
        typer.run(command)
