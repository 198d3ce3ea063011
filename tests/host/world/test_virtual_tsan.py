# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks under Python with the twin built for ThreadSanitizer: calls, failures and resets.

tests/native sees every access of the protocol. This adds what lies around it: layers, worlds and
aborts that come from other threads. Python and PyTorch are not instrumented, so ThreadSanitizer
judges only the twin's accesses; it knows their locks, because it intercepts those of the C library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import BIN, ROOT

TESTS = [
    "tests/host/layer/test_layer.py::test_ways_to_run_it",
    "tests/host/call/test_autograd.py::test_backward_of_several_calls_in_any_order[(2, 1, 0)]",
    "tests/host/layer/test_layer_inputs.py::test_a_mismatch_leaves_the_world_usable",
    "tests/host/layer/test_layer_failure.py::test_many_calls_after_a_timeout_and_a_reset_are_right[split-os]",
    "tests/host/layer/test_layer_failure.py::test_leaving_a_world_by_an_exception_ends_the_peers_calls_"
    "at_once",
    "tests/host/layer/test_layer_failure.py::test_an_error_in_one_virtual_rank_ends_the_run_with_it",
    "tests/host/world/test_faults.py::test_a_stalled_rank_is_named_by_all[product0-mixed]",
    "tests/host/world/test_faults.py::test_every_part_of_a_slow_processor_takes_longer[mixed]",
    "tests/host/world/test_faults.py::test_a_slow_link_holds_back_what_is_announced_to_one_peer[mixed]",
]

# Runs pytest with the twin at argv[1] in the place of the installed one.
PROGRAM = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("moeos._twin", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
sys.exit(pytest.main(sys.argv[2:]))
"""

# The dynamic loader frees a thread's storage when it ends, and hands the memory on under a lock of
# its own that ThreadSanitizer does not see. No frame of moeos calls the loader's allocator.
SUPPRESSIONS = "race:rtld-malloc.h\n"

REPORTED = 66  # the exit status that ThreadSanitizer gives a program in which it found something


def library() -> str:
    """GCC's ThreadSanitizer, to be loaded before Python; "" where there is none."""
    if not (shutil.which("g++") and shutil.which("setarch")):
        return ""
    asked = ["g++", "-print-file-name=libtsan.so"]
    path = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    return str(path) if path.is_absolute() else ""


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("twin")
    options = [
        "-DMOEOS_SANITIZE=thread",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}",
    ]
    environment = os.environ | {"CXX": "g++"}
    configure: list[str | Path] = [BIN / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options]
    compile_: list[str | Path] = [BIN / "cmake", "--build", build]
    for command in (configure, compile_):
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    [module] = build.glob("_twin*.so")
    return module


@pytest.mark.skipif(not library(), reason="needs g++ with ThreadSanitizer, and setarch")
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_virtual_ranks_race_nowhere(instrumented: Path, tmp_path: Path) -> None:
    log = tmp_path / "report"
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    environment = os.environ | {
        "LD_PRELOAD": library(),
        "TSAN_OPTIONS": f"exitcode={REPORTED}:log_path={log}:suppressions={suppressions}",
    }
    # Without address randomisation: the shadow memory has its place.
    python: list[str | Path] = ["setarch", "-R", sys.executable, "-c", PROGRAM, instrumented]
    options: list[str | Path] = ["-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "tests"]
    ended = subprocess.run(
        [*python, *options, *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    reports = "".join(path.read_text() for path in tmp_path.glob("report.*"))
    assert not reports
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    found = re.search(r"(\d+) passed", ended.stdout)
    assert found is not None
    assert int(found[1]) >= len(TESTS)
