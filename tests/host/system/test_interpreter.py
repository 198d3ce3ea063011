# SPDX-License-Identifier: Apache-2.0
"""An interpreter in which PyTorch does not work is refused by name, before it crashes."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import moeos
from moeos.system import interpreter
from tests import programs

IN_A_SUB_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
if {first}:
    import moeos
sub = interpreters.create()
interpreters.run_string(sub, '''
try:
    import {module}
except ImportError as error:
    print(error, flush=True)
''')
interpreters.destroy(sub)
print("the end", flush=True)
"""


@pytest.mark.parametrize(
    ("module", "first"), [("moeos", False), ("moeos._twin", False), ("moeos", True)]
)
def test_a_sub_interpreter_is_refused(module: str, first: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_SUB_INTERPRETER.format(module=module, first=first)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    refusal, end = ended.stdout.splitlines()
    assert "moeos cannot be imported in a sub-interpreter" in refusal
    assert end == "the end"


AGAIN = """
import sys, torch
from unittest import mock
with mock.patch.dict(sys.modules):
    import moeos as first
for _ in range(2):
    try:
        import moeos
    except ImportError as error:
        print(error)
sys.modules["moeos"] = first
print(first.__version__)
"""


def test_moeos_that_has_left_sys_modules_is_not_imported_again() -> None:
    ended = programs.ended(AGAIN)
    assert (ended.returncode, ended.stderr) == (0, "")
    once, again, version = ended.stdout.splitlines()
    assert once == again
    assert once.startswith("moeos is in this process already, and has left sys.modules since")
    assert version == moeos.__version__


def test_a_free_threaded_python_that_runs_without_the_lock_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match="free-threaded Python runs without it: set PYTHON_GIL=1"):
        importlib.reload(interpreter)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
    importlib.reload(interpreter)
