"""compute-sanitizer finds nothing in the kernel: memcheck and racecheck, on virtual ranks.

memcheck sees accesses outside of allocations and misaligned ones. racecheck sees accesses to shared
memory that no barrier orders; it knows barriers alone. The warps of an OS block meet at none: they
publish by release and acquire, in runtime/, where ThreadSanitizer judges the same source on the
twin. So in OS blocks only accesses of one and the same warp are judged, which the twin, whose warps
have one lane, cannot show. The tool comes with CUDA's toolkit; without it the tests are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests.gpu.cases import blocks, why_not
from tests.gpu.sanitized import CONFIGS
from tests.processes import ROOT

TOOL = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
RANKS = 2
FOUND = 66
"""The exit code that the tool gives a program in which it found something."""
SECONDS = 280
LANES = 32

HAZARD = re.compile(
    r"(?:Error|Warning): Potential (\w+) hazard detected at __shared__ (\w+) in block \((\d+),0,0\)"
    r".*?\w+ Thread \((\d+),0,0\) at (.*?)\n.*?\w+ Thread \((\d+),0,0\) at (.*?)\n",
    re.DOTALL,
)

pytestmark = pytest.mark.skipif(
    bool(why_not()) or TOOL is None, reason=why_not() or "there is no compute-sanitizer"
)

all_configs = pytest.mark.parametrize("name", CONFIGS)


def watched(name: str, *options: str) -> tuple[int, str]:
    """A config's program under the tool: its exit code and all that is said."""
    assert TOOL is not None
    command = [
        *(TOOL, *options, "--error-exitcode", str(FOUND), "--kernel-name", "kns=moeos_forward"),
        # The bindings ask the driver for functions that an older one does not have.
        *("--report-api-errors", "no", "--print-limit", "1000000"),
        *(sys.executable, "-m", "tests.gpu.sanitized", name, str(RANKS)),
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    text = ended.stdout + ended.stderr
    assert "is right" in text, text[-5000:]
    return ended.returncode, text


@all_configs
def test_memcheck_finds_nothing(name: str) -> None:
    code, text = watched(name, "--tool", "memcheck")
    assert code == 0, text[-5000:]
    assert "ERROR SUMMARY: 0 errors" in text


@all_configs
def test_racecheck_finds_nothing_but_what_the_os_block_releases_and_acquires(name: str) -> None:
    code, text = watched(name, "--tool", "racecheck", "--racecheck-report", "hazard")
    assert code in (0, FOUND), text[-5000:]
    found = [match.groups() for match in HAZARD.finditer(text)]
    assert len(found) == text.count(" hazard detected at ")
    of_rank = blocks() // RANKS
    unexplained = {
        (kind, first, second)
        for kind, _, block, first_thread, first, second_thread, second in found
        if int(block) % of_rank != of_rank - 1
        or int(first_thread) // LANES == int(second_thread) // LANES
    }
    assert not unexplained, "\n".join(map(str, sorted(unexplained)))
