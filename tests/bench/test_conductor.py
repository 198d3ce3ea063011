# SPDX-License-Identifier: Apache-2.0
"""The conductor: members answer together, one that dies is named, no process is left behind."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.twin import conductor
from bench.twin.conductor import LoadMeter, started

MEMBERS = """
import json, os, socket, sys
address, workload = sys.argv[1:]
rank = 1 if os.fork() == 0 else 0
connection = socket.socket(socket.AF_UNIX)
connection.connect(address)
stream = connection.makefile("rwb")
answer = {"rank": rank}
while True:
    stream.write(json.dumps(answer).encode() + b"\\n")
    stream.flush()
    line = stream.readline()
    if not line:
        sys.exit()
    order = json.loads(line)
    if order["job"] == "die":
        sys.exit(3)
    begin = 10.0 + rank
    answer = {
        "begin": begin, "end": begin + order["tokens"], "process": os.getpid(),
        "cpu_begin": 1.0, "cpu_end": 1.5 + rank, "tasks": 5, "busy_seconds": 0.25,
    }
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # pytest's own may be too long for a socket
        yield Path(path)


def test_a_job_lasts_from_the_first_begin_to_the_last_end_and_work_is_summed(folder: Path) -> None:
    with started("pair", [sys.executable, "-c", MEMBERS], folder, "{}", 2) as pair:
        outcome = pair.do("call", 4)
        assert (outcome.seconds, outcome.cpu_seconds) == (5.0, 2.0)
        assert (outcome.tasks, outcome.busy_seconds) == (10, 0.5)
        assert pair.cpu_seconds == 2.0
        pair.do("call", 4)
        assert pair.cpu_seconds == 2.0  # from the first begin to the last end, not a sum


def test_a_contestant_that_dies_in_a_job_is_named(folder: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the contestant pair ended in the middle"),
        started("pair", [sys.executable, "-c", MEMBERS], folder, "{}", 2) as pair,
    ):
        pair.do("die", 0)


def test_a_contestant_that_never_takes_part_is_named_with_its_exit_code(folder: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="contestant stillborn ended with code 5 before it took"),
        started("stillborn", [sys.executable, "-c", "exit(5)"], folder, "{}", 1),
    ):
        pass


def test_a_contestant_that_does_not_answer_ends_the_wait_and_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "PATIENCE", 0.5)
    monkeypatch.setattr(conductor, "_FAREWELL", 0.5)
    silent = "import time; time.sleep(60)"
    with (
        pytest.raises(RuntimeError, match=r"contestant silent did not take part within 0\.5 s"),
        started("silent", [sys.executable, "-c", silent], folder, json.dumps({}), 1),
    ):
        pass


def test_load_of_other_processes_is_seen() -> None:
    meter = LoadMeter([])
    spin = "import time\nends = time.process_time() + 0.5\nwhile time.process_time() < ends: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert meter.others() > 0.1
