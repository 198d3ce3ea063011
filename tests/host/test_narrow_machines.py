# SPDX-License-Identifier: Apache-2.0
"""Layers on machines with little: no room in /dev/shm, no file that can be written.

Each program runs in a mount namespace of its own, which only root can make.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.nightly import all_but
from tests.processes import IMPORTED, ROOT

UNSHARE = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"]


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = [*UNSHARE, "mount -t tmpfs -o size=1m none /dev/shm"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not may_unshare(), reason="needs root, who may mount")

MACHINES = {
    "1 MiB": "mount -t tmpfs -o size=1m none /dev/shm",
    "full": "mount -t tmpfs -o size=1m none /dev/shm; "
    "dd if=/dev/zero of=/dev/shm/full bs=4096 status=none 2>/dev/null || true; "
    "! echo more > /dev/shm/more 2>/dev/null",
    "read-only": "mount -t tmpfs -o ro none /dev/shm; mount -o remount,bind,ro /; "
    "if mountpoint -q /tmp; then mount -o remount,bind,ro /tmp; fi; "
    "! touch /tmp/written 2>/dev/null",
}


def machines(in_every_run: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("machine", all_but([in_every_run], MACHINES))


PROCESSES = """
from tests.layers import assert_matches, config, draw_call, draw_weights
from tests.processes import ForkedRanks, free_port, torchrun_environment
import moeos, os
cfg = config(max_tokens=4096)  # its heap takes several MiB
weights, port = draw_weights(cfg), free_port()
def live(rank):
    os.environ.update(torchrun_environment(rank, 2, port))
    call = draw_call(cfg, 64, rank)
    with moeos.init(deadline=100.0) as world:
        layer = weights.layer(world)
        for _ in range(2):
            assert_matches(weights, call, call(layer))
    return "right"
print(ForkedRanks(live, 2).ended(100.0))
"""
COMMAND = "from moeos.cli.start import main; main()"


def on(machine: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *UNSHARE,
            f'{MACHINES[machine]}; exec "$@"',
            "sh",
            sys.executable,
            "-c",
            IMPORTED + program,
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@machines("1 MiB")
def test_layers_of_processes_are_right(machine: str) -> None:
    ended = on(machine, PROCESSES)
    assert (ended.returncode, ended.stdout) == (0, "['right', 'right']\n"), ended.stderr


@machines("read-only")
def test_virtual_ranks_of_the_command_are_right(machine: str) -> None:
    demo = str(ROOT / "configs" / "demo.toml")
    arguments = ["run", demo, "--ranks", "2", "--iterations", "1", "--backend", "twin"]
    ended = on(machine, COMMAND, *arguments)
    assert ended.returncode == 0, ended.stderr
