"""Which tests run one after the other when two processes share the suite (launch/test).

Tests with deadlines must not meet each other on few cores, nor those that need a GPU on it; tests
that compile may run beside them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent

COMPILING = (
    "emulator",
    "kernels",
    "model",
    "native",
    "runtime",
    "test_style.py",
    "host/test_jit.py",
    "host/test_virtual_tsan.py",
)
"""Folders and files, below this one, of tests that mostly wait for a compiler; each file of them
is a group of its own."""


def group_of(path: Path) -> str:
    """The group of a test's file."""
    below = path.relative_to(TESTS)
    if below.parts[0] == "gpu":
        return "gpu"
    return str(below) if any(below.is_relative_to(one) for one in COMPILING) else "ranks"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts every test into its group."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path)))
