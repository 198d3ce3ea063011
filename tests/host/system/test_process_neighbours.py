# SPDX-License-Identifier: Apache-2.0
"""What a program does beside a layer: process pools, data loaders, event loops, hooks, exits.

Where its children may import it, or it matters how it ends, it is a program of its own.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.nightly import all_but, at_night
from tests.processes import ROOT, forked

HEAD = '''
import asyncio, atexit, concurrent.futures, multiprocessing, os, signal, sys, threading, time
import gc
gc.disable()
import torch, moeos
from torch.utils.data import DataLoader, TensorDataset
gc.freeze()
gc.enable()

torch.set_num_threads(1)
cfg = moeos.MoEConfig(hidden=64, intermediate=64, experts=8, top_k=2, max_tokens=64)

def own_layer(number):
    with moeos.init() as world:
        layer = moeos.MoELayer(cfg, world)
        x = torch.randn(10, 64).bfloat16()
        assert torch.equal(layer(x), layer(x))
    return number

def await_feeders():
    """Threads of multiprocessing's queues have the last references to their semaphores. Python may
    end while one forgets a semaphore; its resource tracker then says that the semaphore leaked."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join()

def parents_layer(number):
    try:
        layer(x)
    except RuntimeError as error:
        return "after the fork" in str(error)
'''


def run(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(HEAD + body)
    return subprocess.run(
        [sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def assert_ends_well(ended: subprocess.CompletedProcess[str]) -> None:
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


POOLS = """
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with moeos.init(deadline=100.0) as world:
        layer = moeos.MoELayer(cfg, world)
        x = torch.randn(50, 64).bfloat16()
        y = layer(x)
        with context.Pool({workers}) as pool:
            assert pool.map(own_layer, range(4)) == [0, 1, 2, 3]
            if {method!r} == "fork":
                assert pool.map(parents_layer, range(4)) == [True] * 4
            pool.close()
            pool.join()
        with concurrent.futures.ProcessPoolExecutor({workers}, mp_context=context) as executor:
            assert list(executor.map(own_layer, range(4))) == [0, 1, 2, 3]
        process = context.Process(target=own_layer, args=(0,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert torch.equal(layer(x), y)
    print("done")
"""


@pytest.mark.parametrize("method", ["fork", at_night("spawn"), at_night("forkserver")])
def test_processes_of_a_pool_make_worlds_of_their_own_beside_the_parents(
    method: str, tmp_path: Path
) -> None:
    workers = 2 if method == "fork" else 1  # each of the others imports PyTorch for itself
    assert_ends_well(run(POOLS.format(method=method, workers=workers), tmp_path))


LOADERS = """
if __name__ == "__main__":
    data = TensorDataset(torch.randn(200, 64).bfloat16())
    with moeos.init(deadline=100.0) as world:
        layer = moeos.MoELayer(cfg, world)
        here = [layer(x) for (x,) in DataLoader(data, 50)]
        loader = DataLoader(data, 50, num_workers={workers}, multiprocessing_context={method!r},
                            persistent_workers={stays})
        for _ in range(2):
            there = [layer(x) for (x,) in loader]
            assert len(there) == 4 and all(map(torch.equal, there, here))
        if {stays}:
            iter(loader)  # workers are alive when the world ends
        else:
            await_feeders()
    print("done")
"""


@pytest.mark.parametrize(
    ("method", "stays"),
    all_but(
        [("fork", False), ("forkserver", True)],
        itertools.product(["fork", "spawn", "forkserver"], [False, True]),
    ),
)
def test_the_workers_of_a_data_loader_work_beside_a_world(
    method: str, stays: bool, tmp_path: Path
) -> None:
    workers = 2 if method == "fork" else 1
    body = LOADERS.format(method=method, stays=stays, workers=workers)
    assert_ends_well(run(body, tmp_path))


LOOPS = """
async def main():
    loop = asyncio.get_running_loop()
    many = await asyncio.gather(*(loop.run_in_executor(None, layer, x) for _ in range(20)))
    assert all(torch.equal(z, y) for z in many)
    waits = asyncio.create_task(asyncio.to_thread(layer, x))
    await asyncio.sleep(0)
    waits.cancel()
    try:
        await waits
    except asyncio.CancelledError:
        pass
    else:
        raise AssertionError("not cancelled")
    try:  # the call in the thread goes on, and is over when the next one is
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 0.05), 0.01)
    except asyncio.TimeoutError:
        pass
    assert torch.equal(await asyncio.to_thread(layer, x), y)

with moeos.init(deadline=100.0) as world:
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    y = layer(x)
    asyncio.run(main())
    assert torch.equal(layer(x), y)
print("done")
"""


def test_an_event_loop_calls_a_layer_in_its_executor_and_cancels_who_waits() -> None:
    assert_ends_well(forked(1, HEAD + LOOPS))


HOOKS = """
with moeos.init(deadline=100.0) as world:
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    y = layer(x)
    def fail(*_):
        raise LookupError("of a hook")
    for register in (layer.register_forward_pre_hook, layer.register_forward_hook,
                     layer.gate.register_forward_hook):
        hook = register(fail)
        try:
            layer(x)
        except LookupError:
            pass
        hook.remove()
        assert torch.equal(layer(x), y)
print("done")
"""


def test_an_error_of_a_hook_comes_out_of_the_call_and_the_next_call_is_right() -> None:
    assert_ends_well(forked(1, HEAD + HOOKS))


EXITS = """
def report(when):
    try:
        said = torch.equal(layer(x), y)
    except RuntimeError as error:
        said = "closed" in str(error)
    print(when, said, flush=True)

def closes():
    world.close()
    world.close()

def calls():
    try:
        for _ in range(20):
            layer(x)
    except RuntimeError as error:
        assert "closed" in str(error), error

world = moeos.init(deadline=100.0)
layer = moeos.MoELayer(cfg, world)
x = torch.randn(50, 64).bfloat16()
y = layer(x)
atexit.register(report, "at exit")
threading.Thread(target=calls).start()
{late}
"""


@pytest.mark.parametrize(
    "late", all_but(["atexit.register(closes)"], ["pass", "atexit.register(closes)", "closes()"])
)
def test_calls_and_closes_at_exit_work_or_raise_in_any_order(late: str) -> None:
    ended = programs.ended(HEAD + EXITS.format(late=late))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "at exit True\n", "")


def test_a_callback_at_exit_from_before_moeos_was_imported_runs_behind_its_end() -> None:
    program = EXITS.format(late="pass")
    before_moeos = 'import atexit\natexit.register(lambda: report("behind moeos"))\n'
    ended = programs.ended(before_moeos + HEAD + program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "at exit True"
    assert ended.stdout.splitlines()[1].startswith("behind moeos")
