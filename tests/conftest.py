"""Which tests run one after the other when two processes share the suite (launch/test).

Tests with deadlines must not meet each other on few cores, nor those that need a GPU on it; tests
that compile may run beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
"""Folders and files, below this one, of tests that mostly wait for a compiler."""


def group_of(node: str) -> str:
    """The group of a test: its file, or one name for all that do not compile."""
    file = Path(node.split("::")[0]).relative_to(TESTS.name)
    return str(file) if any(file.is_relative_to(one) for one in COMPILING) else "the rest"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's own groups (3.8) are not heeded with pytest 9.2, so it is told here."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
