# SPDX-License-Identifier: Apache-2.0
"""How many files this process may still open, for what would end it where it gets none.

The only file that reads it. It knows nothing of what the files are for.
"""

from __future__ import annotations

import errno
import os
import resource


def require(needed: int, who: str, what: str) -> None:
    """Raises `OSError`, which names the limit, where so many files cannot be opened. `who` opens
    them, like "rank 1 of 4", and `what` is what needs them.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return
    try:
        left = most - len(os.listdir("/proc/self/fd")) + 1  # one is of the list itself
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # nobody tells
        left = 0
    if left < needed:
        raise OSError(
            errno.EMFILE,
            f"{who} may open {max(left, 0)} more files, and {what} may need {needed}. "
            f"RLIMIT_NOFILE (ulimit -n), open files of this process: {most}. Raise the limit to "
            f"{most - left + needed}, or close files",
        )
