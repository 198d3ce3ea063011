# SPDX-License-Identifier: Apache-2.0
"""The command `moeos` with all of its subcommands, and what its script starts.

Nothing but what starts a command imports this.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moeos.cli import streams
from moeos.cli.compile import compile_
from moeos.cli.doctor import doctor
from moeos.cli.fuzz import fuzz
from moeos.cli.plan import plan
from moeos.cli.run import run
from moeos.cli.shared import failures, machine
from moeos.cli.shared import help as helps
from moeos.cli.trace import trace

app = typer.Typer(
    name="moeos",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"moeos {machine.version_of('moeos')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints it.")
    ] = False,
) -> None:
    """An expert-parallel Mixture-of-Experts layer in one persistent kernel."""


app.command()(run)
app.command()(plan)
app.command()(doctor)
app.command("compile")(compile_)
app.command()(fuzz)
app.command()(trace)


def main(command: typer.Typer = app) -> None:
    """Runs a command to its end: what the script `moeos` starts, or an example."""
    written = streams.prepare()
    try:
        with helps.shown_once():
            command()
    finally:
        sys.stdout.flush()
        if isinstance(written.failure, BrokenPipeError):
            sys.exit(streams.CLOSED_PIPE)
        if written.failure is not None:
            failures.say(
                OSError(written.failure.errno, written.failure.strerror, "standard output")
            )
            sys.exit(failures.BAD_INPUT)
