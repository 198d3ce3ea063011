# SPDX-License-Identifier: Apache-2.0
"""Who shows a command's help: of the ranks that a launcher has started, rank 0 alone."""

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
    except ValueError:  # help is for who has set it up wrongly, too
        return False
