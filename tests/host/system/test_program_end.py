# SPDX-License-Identifier: Apache-2.0
"""Programs that end beside daemon threads, whatever these do with moeos, end with their own status.

What a thread would do behind moeos's end is told by a callback at exit that was registered before
moeos was imported, and so is called behind moeos's own.
"""

from __future__ import annotations

import pytest

from moeos.system import program_end
from tests import programs

FAR = 100.0
BEGIN = """
import atexit, sys, threading, time
behind = threading.Event()  # moeos's end
done = []

def at_the_end():
    behind.set()
    time.sleep(0.5)
    print(done, flush=True)

atexit.register(at_the_end)
import moeos, torch
from moeos import _twin; from moeos.world import virtual

cfg = moeos.MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2, dtype=torch.float32)
x = torch.randn(5, 64)
begun = threading.Event()

def wait_in(function):
    def called(*given, **named):
        begun.set()
        time.sleep(0.5)
        return function(*given, **named)
    return called
"""
END = """
threading.Thread(target=work, daemon=True).start()
begun.wait()
sys.exit(7)
"""


def assert_ends_well(program: str, said: str) -> None:
    found = programs.ended(BEGIN + program + END, seconds=FAR)
    assert (found.returncode, found.stdout, found.stderr) == (7, said, "")


def test_a_layer_that_is_being_made_is_waited_for_and_not_until_the_deadline() -> None:
    """Its thread is within two gates, of the world and of the workspace that grows."""
    assert_ends_well(
        """
_twin.Shared = wait_in(_twin.Shared)

def work():
    world = moeos.init(backend="twin", deadline=86400)
    moeos.MoELayer(cfg, world)
    done.append("made")
""",
        "[]\n",
    )


def test_behind_the_end_no_thread_makes_a_world() -> None:
    assert_ends_well(
        """
def work():
    begun.set()
    behind.wait()
    while True:
        with moeos.init(backend="twin") as world:
            done.append(world)
            moeos.MoELayer(cfg, world)(x)
""",
        "[]\n",
    )


def test_behind_the_end_no_thread_runs_virtual_ranks() -> None:
    assert_ends_well(
        """
def work():
    begun.set()
    behind.wait()
    while True:
        virtual.run(lambda world: done.append(world), ranks=2)
""",
        "[]\n",
    )


def test_a_close_that_has_begun_is_waited_for() -> None:
    assert_ends_well(
        """
def work():
    world = moeos.init(backend="twin", deadline=FAR)
    moeos.MoELayer(cfg, world)(x)
    end = world.control.close
    world.control.close = wait_in(lambda: done.append("closed") or end())
    world.close()
    done.append("went on")
""".replace("FAR", str(FAR)),
        "['closed']\n",
    )


def test_a_close_beside_a_call_of_a_third_thread_ends_as_well() -> None:
    """The close has begun when the end begins, and makes the call end behind that."""
    assert_ends_well(
        """
from moeos.engines.twin.engine import TwinEngine
world = moeos.init(backend="twin")
layer = moeos.MoELayer(cfg, world)
ends = threading.Event()
begins = moeos.system.program_end.begin
moeos.system.program_end.begin = lambda: (begins(), ends.set())
make_leave = world._make_leave
forward = TwinEngine._forward
TwinEngine._forward = lambda engine, tensors: (ends.wait(), forward(engine, tensors))

def call():
    try:
        layer(x)
    finally:
        done.append("went on")

def leave_at_the_end(reason):
    begun.set()
    ends.wait()
    return make_leave(reason)

def work():
    world._make_leave = leave_at_the_end
    threading.Thread(target=call, daemon=True).start()
    while not any(gate.busy for gate in world._gates()):
        time.sleep(0.001)
    world.close()
""",
        "[]\n",
    )


def test_a_thread_that_moves_between_two_calls_is_waited_for() -> None:
    """It comes to the gate when the end has begun, and stands still there."""
    assert_ends_well(
        """
world = moeos.init(backend="twin")
layer = moeos.MoELayer(cfg, world)
first = threading.Event()
begins = moeos.system.program_end.begin
moeos.system.program_end.begin = lambda: (begins(), first.set())

def work():
    layer(x)
    begun.set()
    first.wait()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    done.append("came")
    layer(x)
    done.append("went on")
""",
        "['came']\n",
    )


MAKES = {
    "worlds with layers": """
def work():
    while True:
        with moeos.init(backend="twin") as world:
            moeos.MoELayer(cfg, world)(x)
            begun.set()
""",
    "layers": """
world = moeos.init(backend="twin")

def work():
    while True:
        moeos.MoELayer(cfg, world)
        begun.set()
""",
    "virtual ranks": """
def work():
    while True:
        virtual.run(lambda world: moeos.MoELayer(cfg, world)(x), ranks=2)
        begun.set()
""",
}


@pytest.mark.nightly
@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize("what", MAKES)
def test_programs_end_with_their_own_status_beside_threads_that_make(
    what: str, attempt: int
) -> None:
    twice = "\nthreading.Thread(target=work, daemon=True).start()\n"
    assert_ends_well(f"{MAKES[what]}{twice}time.sleep({0.05 * attempt})", "[]\n")


def test_the_end_does_not_begin_by_itself() -> None:
    assert not program_end.begun
