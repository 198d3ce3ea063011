# SPDX-License-Identifier: Apache-2.0
"""Which tests run one after the other when processes share the suite (launch/test).

Tests with short deadlines must not meet each other on few cores, nor those that need a GPU on it;
all others may run beside them, and give way to them.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import workers

TESTS = Path(__file__).parent

# A shell that starts a command in the background has it ignore interrupts, and all that it starts.
# Tests interrupt what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported stays, and so do the tests: nobody looks for garbage among them.
gc.disable()

# The store of torch.distributed asks DNS for the name of each peer, and answers nobody meanwhile.
# One lost reply takes seconds: longer than the tests' deadlines. So nobody here asks DNS; and the
# store does not warn of names that it has not got.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Whatever launch/environment.sh was told: a pool's threads that wait for work keep a core busy, and
# where there is one, processes that share the tests cannot be forked (tests/workers.py).
os.environ["OMP_NUM_THREADS"] = "1"

# What a processor's vectors can do is nothing to the tests: Inductor tries each out for seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

PROGRAMS = (
    "gpu",
    "launch",
    "bench/test_evaluate.py",
    "bench/test_straggler.py",
    "bench/test_twin.py",
    "host/cli/test_doctor.py",
    "host/cli/test_run.py",
    "host/cli/test_trace.py",
)
"""Folders and files, below this one, of tests that start programs with ranks, or need a GPU: one
group."""

ONE_BY_ONE = (
    "host/world/test_bootstrap.py",
    "host/world/test_control.py",
    "host/engines/test_counters.py",
    "host/world/test_faults.py",
    "host/world/test_heap.py",
    "host/layer/test_layer_epochs.py",
    "host/layer/test_layer_failure.py",
    "host/layer/test_layer_inputs.py",
    "host/layer/test_layer_properties.py",
    "host/world/test_signals.py",
    "host/world/test_tracing.py",
    "host/world/test_virtual.py",
    "host/world/test_virtual_tsan.py",
    "host/world/test_world.py",
)
"""The same of tests with ranks that wait for each other by the clock: one group."""

LONG = (
    "emulator",
    "native",
    "host/compile/test_jit.py",
    "host/engines/test_explore.py",
    "model",
    "integrations",
    "host/call/test_custom_op.py",
    "host/call/test_backward_operators.py",
)
"""Those that take longest of the others, which come first, so that the processes end at about the
same time."""

NICE = 5
"""Of a process whose tests may run beside those two groups: it has a third of their claim to a
core. They wait for each other half of the time, and leave more than a core to the others."""


@pytest.fixture(autouse=True, scope="module")
def compiles_of_its_own() -> Iterator[None]:
    """Dynamo counts what it compiles of a function, and gives the function up at a limit, for the
    whole process: without this the tests of one file could use up the limit of another file's.
    """
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@functools.cache
def place_of(file: Path) -> int:
    """Where a file's group stands in the order in which groups are begun."""
    groups = [ONE_BY_ONE, PROGRAMS, *((one,) for one in LONG)]
    return next((i for i, one in enumerate(groups) if is_below(file, one)), len(groups))


def group_of(node: str) -> str:
    """The group of a test: its file, or one name for all of ONE_BY_ONE, and one for PROGRAMS.

    Emulated kernels are a group, too: a process that compiles one compiles a header for all.
    """
    file = file_of(node)
    if is_below(file, ONE_BY_ONE):
        return "one by one"
    if is_below(file, ("emulator",)):
        return "emulator"
    return "programs" if is_below(file, PROGRAMS) else str(file)


def is_below(file: Path, folders: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or in one of them."""
    return any(file.is_relative_to(folder) for folder in folders)


def file_of(node: str) -> Path:
    """A test's file, below this folder."""
    return below_tests(node.split("::")[0])


@functools.cache
def below_tests(file: str) -> Path:
    return Path(file).relative_to(TESTS.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(file_of(item.nodeid)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    first = is_below(file_of(item.nodeid), (*ONE_BY_ONE, *PROGRAMS))
    if item.config.option.numprocesses > 0 and not first:
        give_way()


@functools.cache  # for good: neither group follows, they are the first
def give_way() -> None:
    os.nice(NICE)


def pytest_addoption(parser: pytest.Parser) -> None:
    sharing = parser.getgroup("processes that share the tests")
    sharing._addoption("-n", "--numprocesses", type=int, default=0, help="how many; 0: this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    processes, collects = session.config.option.numprocesses, session.config.option.collectonly
    # What is forked where CUDA has begun cannot use it, and tests of a GPU begin it as they are
    # collected. So a host with a GPU runs all tests in this process.
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    if processes == 0 or collects or session.testsfailed or on_gpu:
        return None
    workers.run(session, processes, lambda item: group_of(item.nodeid))
    return True
