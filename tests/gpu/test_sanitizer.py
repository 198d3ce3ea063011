# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in the kernel: memcheck and racecheck, on virtual ranks.

memcheck sees accesses outside of allocations and misaligned ones. racecheck sees accesses to shared
memory that no barrier orders; it knows barriers alone. Two orders it does not follow:

* The warps of an OS block meet at no barrier: they publish by release and acquire, in runtime/,
  where ThreadSanitizer judges the same source on the twin. So in OS blocks only accesses of one and
  the same warp are judged, which the twin, whose warps have one lane, cannot show.
* A warp's lanes are ordered by __syncwarp before the one of them that arrives at an mbarrier, and
  behind the one that has waited there. A test of its own shows that the tool does not follow that
  (racecheck_control.py), so that the exception ends when it does. It holds between the functions in
  HAND_OVERS alone.

The tool comes with CUDA's toolkit; without it the tests are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests.gpu.cases import blocks, why_not
from tests.gpu.sanitized import CONFIGS, TRAINED
from tests.processes import ROOT

TOOL = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
RANKS = 2
FOUND = 66
"""The exit code that the tool gives a program in which it found something."""
SECONDS = 280
LANES = 32
RACECHECK = ("--tool", "racecheck", "--racecheck-report", "hazard")

HAZARD = re.compile(
    r"(?:Error|Warning): (?:\(Warp Level Programming\) )?"  # within a warp, or not
    r"Potential (\w+) hazard detected at __shared__ (\w+) in block \((\d+),0,0\)"
    r".*?\w+ Thread \((\d+),0,0\) at (.*?)\n.*?\w+ Thread \((\d+),0,0\) at (.*?)\n",
    re.DOTALL,
)

HAND_OVERS = {
    frozenset({"load_bytes", "sum_tokens"}),  # Combine's rows, by stage_empty
    frozenset({"list_unsent", "write_unsent"}),  # its lists, by stage_full and stage_empty
    frozenset({"list_unsent", "sum_tokens"}),  # by stage_empty
    frozenset({"load_bytes", "write_unsent"}),  # likewise
}
"""Functions of two warps between which one lane arrives, or waits, for its warp."""

pytestmark = pytest.mark.skipif(
    bool(why_not()) or TOOL is None, reason=why_not() or "there is no compute-sanitizer"
)

all_configs = pytest.mark.parametrize("name", CONFIGS)


def watched(kernel: str, program: tuple[str, ...], *options: str) -> tuple[int, str]:
    """A program under the tool, which looks at one kernel: its exit code and all that is said."""
    assert TOOL is not None
    command = [
        *(TOOL, *options, "--error-exitcode", str(FOUND), "--kernel-name", f"kns={kernel}"),
        # The bindings ask the driver for functions that an older one does not have.
        *("--report-api-errors", "no", "--print-limit", "1000000"),
        *(sys.executable, "-m", *program),
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    text = ended.stdout + ended.stderr
    assert "is right" in text, text[-5000:]
    return ended.returncode, text


def layer(name: str) -> tuple[str, ...]:
    """The program that runs a config."""
    return ("tests.gpu.sanitized", name, str(RANKS))


def functions(first: str, second: str) -> frozenset[str]:
    """The names of the functions that two accesses are in."""
    return frozenset(
        re.sub(r"<.*", "", where.split("(")[0]).split("::")[-1] for where in (first, second)
    )


@all_configs
def test_memcheck_finds_nothing(name: str) -> None:
    code, text = watched("moeos_forward", layer(name), "--tool", "memcheck")
    assert code == 0, text[-5000:]
    assert "ERROR SUMMARY: 0 errors" in text


@pytest.mark.parametrize("name", TRAINED)
def test_memcheck_finds_nothing_in_calls_of_gradients(name: str) -> None:
    code, text = watched("moeos_", layer(name), "--tool", "memcheck")
    assert code == 0, text[-5000:]
    assert "ERROR SUMMARY: 0 errors" in text


@all_configs
def test_racecheck_finds_nothing_but_what_the_os_block_releases_and_acquires(name: str) -> None:
    code, text = watched("moeos_forward", layer(name), *RACECHECK)
    assert code in (0, FOUND), text[-5000:]
    found = [match.groups() for match in HAZARD.finditer(text)]
    told = len(re.findall(" hazard detected at ", text))
    assert len(found) == told, "a hazard is told in a form that HAZARD does not know"
    of_rank = blocks() // RANKS
    unexplained = {
        (kind, first, second)
        for kind, _, block, first_thread, first, second_thread, second in found
        if int(first_thread) // LANES == int(second_thread) // LANES
        or (int(block) % of_rank != of_rank - 1 and functions(first, second) not in HAND_OVERS)
    }
    assert not unexplained, "\n".join(map(str, sorted(unexplained)))


@pytest.mark.parametrize(("arrivals", "follows"), [(1, False), (LANES, True)])
def test_racecheck_follows_every_lane_that_arrives_but_not_one_for_its_warp(
    arrivals: int, follows: bool
) -> None:
    program = ("tests.gpu.racecheck_control", str(arrivals))
    code, text = watched("hand_over", program, *RACECHECK)
    assert code == (0 if follows else FOUND), text[-5000:]
    assert (" hazard detected at " in text) != follows
