# SPDX-License-Identifier: Apache-2.0
"""What the script `moeos` starts. From its first line on Ctrl-C ends the command with status 130.

The script would else end with a traceback of whatever is being imported, which takes seconds. So
this file imports next to nothing, nor do the packages that it lies in. This file must not depend on
what the command does but that `KeyboardInterrupt` ends it.

Not covered: the milliseconds before this is imported.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended: 128 + SIGINT, as a shell has it for others."""


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    """Ends the process at once. While it imports and when it has done all, nothing is lost."""
    os._exit(INTERRUPTED)


def _interrupted_where_nothing_is_raised(unraisable: UnraisableHookArgs) -> None:
    """A destructor, say, ignores what is raised in it: Ctrl-C would do nothing but print."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


# A shell that starts a command in the background has it ignore Ctrl-C: then it stays ignored.
_listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _listens:
    signal.signal(signal.SIGINT, _leave)


def main() -> None:
    """The command; it ends as `moeos.cli.app.main` does, or by Ctrl-C."""
    gc.disable()  # what is imported stays; to look for garbage there takes a quarter of the time
    try:
        from moeos.cli.app import main as command  # spares it what takes seconds: see above

        gc.freeze()
        gc.enable()
        if _listens:
            sys.unraisablehook = _interrupted_where_nothing_is_raised
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            command()
        finally:
            if _listens:
                signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
