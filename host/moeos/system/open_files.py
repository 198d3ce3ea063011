# SPDX-License-Identifier: Apache-2.0
"""How many files this process may still open, for code that would end it where it gets none.

The only file that reads the limit. Must not depend on what the files are for.
"""

from __future__ import annotations

import errno
import os
import resource


def require(needed: int, who: str, what: str) -> None:
    """Raises `OSError`, which names the limit, where `needed` files cannot be opened. `who`, such
    as "rank 1 of 4", opens them for `what`.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return
    try:
        left = most - len(os.listdir("/proc/self/fd")) + 1  # one is of the list itself
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # the number cannot be read
        left = 0
    if left < needed:
        raise OSError(
            errno.EMFILE,
            f"{who} may open {max(left, 0)} more files, and {what} may need {needed}. "
            f"RLIMIT_NOFILE (ulimit -n), open files of this process: {most}. Raise the limit to "
            f"{most - left + needed}, or close files",
        )
