# SPDX-License-Identifier: Apache-2.0
"""Shows a command's help on rank 0 alone, where a launcher has started several ranks."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from moeos.system import launchers


@contextlib.contextmanager
def shown_once() -> Iterator[None]:
    """Hides what is printed here, if help is asked for and another rank shows it."""
    quiet = "--help" in sys.argv[1:] and _another_rank_speaks()
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        yield


def _another_rank_speaks() -> bool:
    try:
        return launchers.detect(os.environ).rank not in (0, None)
    except ValueError:  # help is shown in a wrong setup, too
        return False
