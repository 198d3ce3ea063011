# SPDX-License-Identifier: Apache-2.0
"""A process that a fork has made of a rank: it uses nothing of the parent's world, and ends.

Programs fork by themselves, so that the child ends as a program does. A child that hangs is killed
and fails the test.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import programs
from tests.processes import IMPORTED, ROOT, free_port, mpirun, torchrun_environment

PROGRAM = """
import gc, os, sys, threading, time
import torch, moeos
from moeos.world import virtual

cfg = moeos.MoEConfig(hidden=256, intermediate=512, experts=8, top_k=2, max_tokens=256)
x = torch.randn(200, 256).bfloat16()
ids = torch.arange(2).expand(200, 2).contiguous()

def uses(world, layer):
    # At once, and as often as it is tried.
    for use in 2 * [
        lambda: layer(x), lambda: layer(x, ids, torch.ones(200, 2)), layer.check, layer.stats,
        layer.reset, lambda: moeos.MoELayer(cfg, world), world.__enter__,
    ]:
        try:
            use()
        except RuntimeError as error:
            assert f"rank {world.rank}" in str(error) and "after the fork" in str(error), error
        else:
            raise AssertionError("not refused")

def closes(world, layer):
    world.abort("the parent's, so this does nothing")
    world.close()
    world.close()
    assert world.closed

def collects(world, layer):
    layers.clear()
    world._holdings.clear()
    del layer
    gc.collect()

def fails(world, layer):
    sys.stderr = open(os.devnull, "w")
    raise KeyError("an error of the child, which is not the parent's")

def leaves(world, layer):
    pass

def makes_virtual_ranks(world, layer):
    outputs = virtual.run(lambda own: moeos.MoELayer(cfg, own)(x), 2)
    assert all(y.shape == x.shape and y.isfinite().all() for y in outputs)

def makes_a_world(world, layer):
    # Above the size from which torch divides a loop among threads.
    os.environ.clear()
    with moeos.init() as own:
        assert moeos.MoELayer(cfg, own)(x).isfinite().all()
        assert torch.randn(1000, 1000).mul(2).isfinite().all()

def forks(world, layer, what):
    pid = os.fork()
    if pid == 0:
        what(world, layer)
        sys.exit(3)  # through the with block
    ends = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > ends:
            os.kill(pid, 9)
            raise AssertionError(f"a child that {what.__name__} hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == (1 if what is fails else 3), what

alone, beside_calls = ([globals()[name] for name in names.split()] for names in sys.argv[1:])
with moeos.init(deadline=100.0) as world:
    layers = [moeos.MoELayer(cfg, world)]
    y = layers[0](x)
    for what in alone:
        forks(world, layers[0], what)
        assert torch.equal(layers[0](x), y)  # nothing of the parent's has changed

    # While another thread is in calls.
    again = []
    calls = threading.Thread(target=lambda: again.extend(layers[0](x) for _ in range(200)))
    calls.start()
    for what in beside_calls:
        forks(world, layers[0], what)
    calls.join()
    assert len(again) == 200 and all(torch.equal(z, y) for z in again)
print("done", flush=True)
"""


def ended_well(program: subprocess.Popen[str]) -> None:
    try:
        printed, complaint = program.communicate(timeout=300)
    finally:
        program.kill()
        program.wait()
    assert (program.returncode, printed, complaint) == (0, "done\n", "")


EVERYTHING = "uses closes collects fails leaves makes_virtual_ranks makes_a_world"


def started(
    environment: dict[str, str], alone: str = EVERYTHING, beside_calls: str = EVERYTHING
) -> subprocess.Popen[str]:
    """A rank that forks children which do this and that, also while a thread is in calls."""
    return subprocess.Popen(
        [sys.executable, "-c", IMPORTED + PROGRAM, alone, beside_calls],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_child_of_a_world_of_one_is_refused_its_use_and_may_make_its_own() -> None:
    ended = programs.ended(PROGRAM, EVERYTHING, "uses leaves", seconds=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.nightly
def test_a_child_that_is_made_amid_a_call_of_another_thread_is_no_different() -> None:
    ended_well(started({}))


@pytest.mark.parametrize(
    ("alone", "beside_calls"),
    [
        pytest.param("uses closes leaves", "fails", id="some", marks=pytest.mark.nightly),
        pytest.param(EVERYTHING, EVERYTHING, id="everything", marks=pytest.mark.nightly),
    ],
)
def test_a_child_of_a_rank_under_torchrun_leaves_the_store_and_the_peers_alone(
    alone: str, beside_calls: str
) -> None:
    """Rank 0 has the store's thread, for which the end of the child must not wait."""
    port = free_port()
    environments = [torchrun_environment(rank, 2, port) for rank in range(2)]
    for program in [started(one, alone, beside_calls) for one in environments]:
        ended_well(program)


@pytest.mark.nightly
def test_a_child_of_a_rank_under_mpirun_leaves_mpi_alone() -> None:
    ended = mpirun(2, PROGRAM, EVERYTHING, EVERYTHING)
    assert (ended.returncode, ended.stdout) == (0, "done\n" * 2), ended.stderr


VIRTUAL = """
import os, sys, threading
import torch, moeos
from moeos.world import virtual

cfg = moeos.MoEConfig(hidden=64, intermediate=64, experts=8, top_k=2, max_tokens=64)

def rank_main(world):
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    y = layer(x)
    pid = os.fork()
    if pid == 0:
        for use in (lambda: layer(x), world.control.barrier, lambda: moeos.MoELayer(cfg, world)):
            try:
                use()
            except RuntimeError as error:
                assert "after the fork" in str(error), error
            else:
                os._exit(1)
        assert virtual.run(lambda own: moeos.MoELayer(cfg, own)(x).shape, 2) == [x.shape] * 2
        world.close()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert torch.equal(layer(x), y)

virtual.run(rank_main, 4, deadline=100.0)
print("done")
"""


def test_a_child_of_a_virtual_rank_is_refused_and_the_ranks_go_on() -> None:
    ended = programs.ended(VIRTUAL)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
