# SPDX-License-Identifier: Apache-2.0
"""Runs groups of tests in forked processes: `--numprocesses N`. Holds no test.

Tests are imported and collected once, which takes as long as many of them together. Then workers
are forked, and each takes the next group until none is left. Must not depend on: moeos, the content
of a group.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import multiprocessing.connection
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

Group = Sequence[int]
"""Numbers of tests, in the order in which they run."""

_LARGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
"""Of Linux 6.1 and later, on any machine; Python has no name for it."""


class Groups:
    """Groups that processes take one after the other, whoever comes first."""

    _NUMBER_BYTES = 2

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._taken, put = os.pipe()
        numbers = [number.to_bytes(self._NUMBER_BYTES, "little") for number in range(len(groups))]
        os.set_blocking(put, False)  # a pipe holds 64 KiB: more groups are an error
        assert os.write(put, b"".join(numbers)) == self._NUMBER_BYTES * len(groups)
        os.close(put)

    def __iter__(self) -> Iterator[Group]:
        # A pipe gives what is asked for to one reader, whole.
        while number := os.read(self._taken, self._NUMBER_BYTES):
            yield self._groups[int.from_bytes(number, "little")]


class _Reports:
    """What a worker's pytest has to say, sent to the process that started it."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config, self._sender = config, sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sender.send(("report", told))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        # Its class may be one that cannot be sent.
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        told = warnings.WarningMessage(
            text, Warning, warning_message.filename, warning_message.lineno
        )
        kwargs = {"when": when, "nodeid": nodeid, "location": location}
        self._sender.send(("warning", {"warning_message": told, **kwargs}))


class Worker:
    """A forked process that runs a group, and those that it takes after it.

    Attributes:
        running: the number of the test that it began last.
        left: what is left of its group then.
    """

    def __init__(
        self, session: pytest.Session, groups: Groups, first: Group, others: Sequence[Worker]
    ) -> None:
        self.connection, theirs = multiprocessing.connection.Pipe()
        self.running: int | None = None
        self.left: Group = ()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, (
            f"tests cannot be shared: the process that has collected them has {threads} threads, "
            "and a fork could wait for one for ever; find what starts it, or use --numprocesses 0"
        )
        self.process = os.fork()
        if self.process == 0:
            for one in (self, *others):  # so that each knows when the parent has ended
                one.connection.close()
            status = 1
            try:
                self._live(session, groups, first, theirs)
                status = 0
            except KeyboardInterrupt:
                theirs.send(("interrupted", None))
            except BaseException:
                traceback.print_exc()
            finally:
                atexit._run_exitfuncs()
                os._exit(status)
        theirs.close()

    def _live(
        self, session: pytest.Session, groups: Groups, first: Group, sender: Connection
    ) -> None:
        gather_pages()
        plugins = session.config.pluginmanager
        # Its own files for what tests print: the parent's have one place to write at.
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.unregister(name="terminalreporter")
        plugins.register(_Reports(session.config, sender))
        for group in itertools.chain([first], groups):
            for place, number in enumerate(group):
                if sender.poll():  # nobody wants to know
                    return
                sender.send(("begins", (number, group[place + 1 :])))
                item = session.items[number]
                # Behind a group nothing of it is left: the next one may never come.
                last = place + 1 == len(group)
                following = None if last else session.items[group[place + 1]]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                sender.send(("ends", number))


def gather_pages() -> None:
    """Has Linux keep what this process has of memory in large pages, where it can.

    A fork copies the table of pages, and its end clears it. Tests fork ranks: with all tests
    collected, 86 of them took 6.9 s of system time, and 8.7 s with pages of 4 KiB.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        found = re.findall(
            r"^(\w+)-(\w+) rw-p \w+ 00:00 0 *(?:\[heap\])?$", maps.read(), re.MULTILINE
        )
    for begin, end in found:
        first = -(-int(begin, 16) // _LARGE_PAGE) * _LARGE_PAGE
        size = int(end, 16) // _LARGE_PAGE * _LARGE_PAGE - first
        if size > 0:
            madvise(first, size, _MADV_COLLAPSE)  # an older Linux refuses, and all is as before


def run(session: pytest.Session, number: int, group_of: Callable[[pytest.Item], str]) -> None:
    """Runs a session's tests in so many processes; groups begin in the order of their first tests.

    A process that dies fails the test that it ran. Another one runs what it has left.
    """
    found: dict[str, list[int]] = {}
    for place, item in enumerate(session.items):
        found.setdefault(group_of(item), []).append(place)
    groups, ran = Groups([*found.values()]), set[int]()
    # One folder for all, which they would else have made each of its own, or each emptied.
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: list[Worker] = []
    for _ in range(number):
        workers.append(Worker(session, groups, (), workers))
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # files take turns
    try:
        while workers:
            of = {worker.connection: worker for worker in workers}
            for connection in multiprocessing.connection.wait([*of]):
                worker = of[connection]  # type: ignore[index]
                if not _hears(session, worker, ran):
                    workers.remove(worker)
                    if worker.running is not None or worker.left:  # it has died
                        workers.append(Worker(session, groups, worker.left, workers))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        lost = [item.nodeid for place, item in enumerate(session.items) if place not in ran]
        assert not lost, f"no process ran {lost}"
    finally:
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.connection.send("stop")
        for worker in workers:
            while _hears(session, worker, ran):
                pass


def _hears(session: pytest.Session, worker: Worker, ran: set[int]) -> bool:
    """Takes in what a worker says next; false when it has ended. `ran`: tests that are over."""
    hook = session.config.hook
    try:
        kind, told = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        _, status = os.waitpid(worker.process, 0)
        if worker.running is not None:
            ran.add(worker.running)
            died = _death(session.items[worker.running], os.waitstatus_to_exitcode(status))
            hook.pytest_runtest_logreport(report=died)
        return False
    if kind == "begins":
        worker.running, worker.left = told
        item = session.items[worker.running]
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=told)
        hook.pytest_runtest_logreport(report=report)
    elif kind == "ends":
        worker.running = None
        ran.add(told)
        item = session.items[told]
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    elif kind == "warning":
        hook.pytest_warning_recorded.call_historic(kwargs=told)
    else:
        worker.running = None
        raise KeyboardInterrupt
    return True


def _death(item: pytest.Item, status: int) -> pytest.TestReport:
    """The report of a test whose process has died."""
    how = f"status {status}" if status >= 0 else signal.Signals(-status).name
    return pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "failed",
        f"the process that ran {item.nodeid} died: {how}",
        "call",
    )
