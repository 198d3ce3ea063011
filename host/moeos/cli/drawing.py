# SPDX-License-Identifier: Apache-2.0
"""matplotlib, which draws the plots and is not installed everywhere. This file must not depend on
any plot.
"""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install 'moeos[plots]'"


def matplotlib() -> Any:
    """The module. Raises `RuntimeError`, which says how to install it, if it is missing."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise RuntimeError(f"matplotlib, which draws plots, is missing: {INSTALL}") from error


def figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, without a window. Raises as `matplotlib` does."""
    matplotlib()
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height))


def polygons(corners: Any, **style: Any) -> Any:
    """Many polygons [n, corners, 2] as one collection."""
    matplotlib()
    return importlib.import_module("matplotlib.collections").PolyCollection(corners, **style)
