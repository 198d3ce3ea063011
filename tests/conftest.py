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
    "native",
    "emulator",
    "kernels",
    "host/test_jit.py",
    "host/test_virtual_tsan.py",
    "model",
    "runtime",
    "test_style.py",
)
"""Folders and files, below this one, of tests that mostly wait for a compiler or for spin; those
that take longest come first, so that the two processes end at about the same time."""

THE_REST = "the rest"


def place_of(node: str) -> int:
    """Where a test's folder or file stands in COMPILING; -1 if it does not."""
    file = file_of(node)
    return next((i for i, one in enumerate(COMPILING) if file.is_relative_to(one)), -1)


def group_of(node: str) -> str:
    """The group of a test: its file, or one name for all that do not compile."""
    return THE_REST if place_of(node) < 0 else str(file_of(node))


def file_of(node: str) -> Path:
    """A test's file, below this folder."""
    return Path(node.split("::")[0]).relative_to(TESTS.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's own groups (3.8) are not heeded with pytest 9.2, so it is told here."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # not by their number of tests, but as they come
    return ByGroup(config, log)
