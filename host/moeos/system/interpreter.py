# SPDX-License-Identifier: Apache-2.0
"""Refuses, when it is imported, an interpreter in which PyTorch or the twin would crash or race.

The package imports it first. It needs nothing of the package but a compiled module, which refuses
to be made twice.
"""

from __future__ import annotations

import sys


def _is_main() -> bool:
    """Whether this is the main interpreter of its process."""
    try:
        import ctypes
    except ImportError:  # which a sub-interpreter with a lock of its own refuses
        return False
    current = ctypes.pythonapi.PyInterpreterState_Get
    main = ctypes.pythonapi.PyInterpreterState_Main
    current.restype = main.restype = ctypes.c_void_p
    return bool(current() == main())


if not _is_main():
    raise ImportError(
        "moeos cannot be imported in a sub-interpreter, where PyTorch does not work: use threads "
        "of the main interpreter, or processes"
    )
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "moeos needs Python's global lock, and this free-threaded Python runs without it: set "
        "PYTHON_GIL=1, or use a build with the lock"
    )

from moeos import _runtime  # noqa: E402, F401 - before anything else is registered twice
