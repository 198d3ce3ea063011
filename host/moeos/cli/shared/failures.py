# SPDX-License-Identifier: Apache-2.0
"""How a command ends: with an exit code and, where it failed, one line on stderr.

This file must not depend on what commands do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import typer

from moeos.cli.shared import options, output
from moeos.system.errors import NumericalError
from moeos.world.world import World

DONE = 0
ABOVE_TOLERANCE = 1
"""The layer's output is not what the reference computes."""
LOST_REGISTERS = 1
"""The kernel spills registers or has a stack frame."""
DOES_NOT_FIT = 1
"""A rank needs more memory than its GPU has."""
BAD_INPUT = 2
"""An argument, a file or the environment is not as it must be."""
FAILURE = 3
"""A rank died, a deadline passed, a machine cannot do what was asked."""

_BAD_INPUT = (ValueError, TypeError, OSError)
_FAILURES = (RuntimeError, MemoryError)

_LONGEST = 2000  # characters of a sentence: a value in it may be as long as a file

Value = TypeVar("Value")


class Refused(Exception):
    """Bad input that makes all ranks leave, so that one of them can report it."""


def finish(command: Callable[[], int], json_file: Path | None = None) -> NoReturn:
    """Runs a command and ends it with the exit code that it returns or that its error means.

    Where it writes its JSON to stdout, nothing else comes there.
    """
    try:
        with output.alone(json_file):
            code = command()
    except _BAD_INPUT as error:
        say(error)
        code = BAD_INPUT
        _remember(error)
    except _FAILURES as error:
        say(error)
        code = FAILURE
        _remember(error)
    raise typer.Exit(code)


def say(error: BaseException) -> None:
    """Prints the error as one line on stderr."""
    print(f"moeos: {_sentence(error)}", file=sys.stderr, flush=True)


def agree(world: World, prepare: Callable[[], Value], what: str) -> Value:
    """What `prepare()` returns on this rank, if it returns on all ranks. Collective.

    Raises:
        Refused: it raised ValueError, TypeError or OSError somewhere; on all ranks, in the words of
            the lowest such rank. `what` names to a late peer what was prepared.
    """
    value: Value | None = None
    problem: str | None = None
    try:
        value = prepare()
    except _BAD_INPUT as error:
        problem = _sentence(error)
    problems = world.control.allgather(problem, what)
    for rank, found in enumerate(problems):
        if found is not None:
            everywhere = all(other == found for other in problems)
            raise Refused(found if everywhere else f"rank {rank}: {found}")
    return cast(Value, value)


def together(world: World, command: Callable[[], int]) -> int:
    """The exit code of a command that all ranks run; what all of them refuse is said by rank 0."""
    try:
        code = command()
    except (Refused, NumericalError) as error:
        if world.rank == 0:
            say(error)
        code = BAD_INPUT
    # A launcher ends the other ranks when the first exits with an error: let rank 0 speak first.
    world.control.barrier()
    return code


def _sentence(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    sentence = options.spoken(" ".join(text.split())) or type(error).__name__
    if len(sentence) > _LONGEST:
        sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
    # A name from a file may hold what would move a terminal's cursor.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence)


def _remember(error: Exception) -> None:
    """Marks this process as ended by an exception, as the interpreter does for one uncaught.

    The control plane then does not wait in MPI_Finalize for a peer that is stuck.
    """
    sys.last_value = error
