"""The command `moeos` with all of its subcommands, and what its script starts.

Nothing but what starts the command imports this.
"""

from __future__ import annotations

import io
import sys

import typer

from moeos.cli.compile import compile_
from moeos.cli.doctor import doctor
from moeos.cli.fuzz import fuzz
from moeos.cli.plan import plan
from moeos.cli.run import run
from moeos.cli.trace import trace

app = typer.Typer(
    name="moeos",
    help="An expert-parallel Mixture-of-Experts layer in one persistent kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run)
app.command()(plan)
app.command()(doctor)
app.command("compile")(compile_)
app.command()(fuzz)
app.command()(trace)


def main() -> None:
    """What the script `moeos` starts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no text
    app()
