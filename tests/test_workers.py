# SPDX-License-Identifier: Apache-2.0
"""Processes that share tests: each test is run once and told of, whatever its process does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT

CONFTEST = """
from tests import workers

def pytest_runtestloop(session):
    workers.run(session, 2, lambda item: item.nodeid.split("::")[0])
    return True
"""
TESTS = {
    "test_dies.py": """
import os, pathlib, time, warnings
import pytest

@pytest.fixture(scope="module")
def until_the_other_runs():
    while not pathlib.Path("runs").exists():
        time.sleep(0.01)

def test_before(until_the_other_runs):
    print("it waited")
    assert False

def test_which_dies():
    os.abort()

def test_behind():
    warnings.warn("somebody listens", stacklevel=1)
""",
    "test_runs.py": """
import os, pathlib

def test_first():
    pathlib.Path("runs").touch()

def test_last():
    os._exit(0)
""",
    "test_skips.py": """
import pytest

def test_none():
    pytest.skip("for a reason")
""",
}


def ended(folder: Path, *arguments: str) -> str:
    """What pytest prints of the tests above."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]")
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    command = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-rs", *arguments]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_each_test_is_told_of_once_and_a_process_that_dies_fails_its_own(tmp_path: Path) -> None:
    told = ended(tmp_path)
    assert re.search(r"3 failed, 2 passed, 1 skipped, 1 warning in", told)
    assert "test_which_dies died: SIGABRT" in told
    assert "test_last died: status 0" in told
    assert "it waited" in told
    assert "somebody listens" in told
    assert "for a reason" in told


def test_nothing_begins_behind_the_last_failure_that_is_allowed(tmp_path: Path) -> None:
    told = ended(tmp_path, "--exitfirst", "--verbose")
    assert "stopping after" in told
    assert "test_behind" not in told
