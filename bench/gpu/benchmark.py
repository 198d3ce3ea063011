# SPDX-License-Identifier: Apache-2.0
"""`launch/bench gpu`: moeos on GPUs beside the best of stock PyTorch and the machine's limits.

One run measures every case of a suite on 1 or more GPUs of one host; see bench.gpu.one_rank
for what is measured and how, and bench.gpu.results for the JSON that it writes as it goes.
Started by hand it starts the ranks itself; under torchrun or mpirun each process is a rank.

It watches the ranks that it starts. If one fails or stands still, it notes what happened, ends
them, and starts them again for the shapes that are left. Run again with the same --out, it measures
what is missing there.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer

from bench.gpu import one_rank
from bench.gpu import suite as suites
from bench.gpu.one_rank import Order
from bench.gpu.results import Results
from moeos.cli.shared import failures, output, provenance
from moeos.system import launchers

STANDSTILL = 150.0
"""Seconds without a step of the ranks after which they are ended."""

RANK = (sys.executable, "-m", "bench.gpu.one_rank")
"""What starts a rank, but for its order."""

_LOOK = 0.1  # seconds between two looks at the ranks
_FAREWELL = 5.0  # seconds that the ranks get to end after the first that failed
_NO_LIMIT = 86_400.0


def main(
    out: Annotated[Path, typer.Option(help="Where the results go; continued if it exists.")],
    suite: Annotated[Path, typer.Option(help="TOML file of the suite.")] = Path(
        "configs/suites/gpu.toml"
    ),
    ranks: Annotated[int | None, typer.Option(help="GPUs; all by default.")] = None,
    shapes: Annotated[str, typer.Option(help="Shapes of the suite, comma between.")] = "",
    tokens: Annotated[str, typer.Option(help="Token counts of it, comma between.")] = "",
    time_limit: Annotated[float, typer.Option(help="Seconds that the run may take.")] = _NO_LIMIT,
    commit: Annotated[
        str | None, typer.Option(help="The commit that is measured, where git cannot tell.")
    ] = None,
) -> None:
    """Measures a suite's cases on this host's GPUs and writes the results as it goes."""
    began = time.monotonic()

    def command() -> int:
        order = Order(
            suite=str(suite.absolute()),
            shapes=tuple(name for name in shapes.split(",") if name),
            tokens=suites.token_counts(tokens),
            out=str(out.absolute()),
            ends=began + time_limit,
            commit=provenance.commit() if commit is None else {"id": commit, "changed_files": []},
            command=provenance.command("bench.gpu"),
        )
        output.check_writable(out, "--out")
        if launchers.detect(os.environ).launcher != "none":
            if ranks is not None:
                raise ValueError(f"--ranks is {ranks}, but a launcher started the ranks")
            one_rank.run(order)
            return failures.DONE
        return execute(order, _gpus_here() if ranks is None else ranks)

    failures.finish(command)


def _gpus_here() -> int:
    found = torch.cuda.device_count()
    if found == 0:
        raise RuntimeError(
            "PyTorch finds no GPU on this host: `moeos doctor` says what is missing; "
            "`launch/bench twin` measures without one"
        )
    return found


def execute(order: Order, ranks: int, rank_command: Sequence[str] = RANK) -> int:
    """Has the ranks measure until nothing is left to do or time is up; the exit code.

    Raises:
        ValueError, TypeError, OSError: an argument or a file is not as it must be.
        RuntimeError: the ranks cannot start.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1, with a GPU each")
    results = order.results(ranks)
    results.forget_failures()
    results.write()
    # A program that ends this one by a signal ends the ranks with it.
    signal.signal(signal.SIGTERM, _leave)
    while True:
        what = _attempt(order, ranks, rank_command)
        results = order.results(ranks)
        stopped_at = results.document.pop("measuring", None)
        if what is None or time.monotonic() >= order.ends:
            break
        known = {shape.name for shape in order.selected().shapes}
        if stopped_at is None or stopped_at["shape"] not in known:
            results.write()
            raise RuntimeError(what)
        results.fail(stopped_at["shape"], what)
        print(f"moeos: {stopped_at['shape']}: {what}", file=sys.stderr, flush=True)
    results.write()
    return _tell(results)


def _attempt(order: Order, ranks: int, rank_command: Sequence[str]) -> str | None:
    """Starts the ranks and waits for their end; what went wrong, None if nothing did."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _started(order, ranks, rank_command, Path(folder)) as processes,
    ):
        moved, last_move = None, time.monotonic()
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            found = _modified(Path(order.out))
            if found != moved:
                moved, last_move = found, now
            if now > order.ends:
                return "time is up"
            if now > last_move + STANDSTILL:
                return f"the ranks stood still for {STANDSTILL:g} s"
            if any(process.poll() for process in processes):
                _wait(processes, _FAREWELL)
                break
            time.sleep(_LOOK)
        codes = [process.poll() for process in processes]
        if not any(codes):
            return None
        said = [
            f"rank {rank}: {file.read_text(encoding='utf-8')}"
            for rank in range(ranks)
            if (file := _failure_file(Path(folder), rank)).exists()
        ]
        return said[0] if said else f"the ranks ended with codes {codes}"


@contextlib.contextmanager
def _started(
    order: Order, ranks: int, rank_command: Sequence[str], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks, in an environment as torchrun makes it; none is left after the with block."""
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            fields: dict[str, Any] = vars(order) | {"failure": str(_failure_file(folder, rank))}
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            processes.append(
                subprocess.Popen(
                    [*rank_command, Order(**fields).to_json()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **environment},
                )
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        _wait(processes, _FAREWELL)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and any(process.poll() is None for process in processes):
        time.sleep(_LOOK)


def _tell(results: Results) -> int:
    """Says what was measured and what not; the exit code."""
    document = results.document
    for found in document["results"]:
        medians = {name: of["median"] for name, of in found["times"].items()}
        print(
            f"{found['shape']:16} {found['tokens']:5} tokens{' on rank 0' if found['lone'] else ''}"
            f"{'' if found['routing'] == 'gate' else ' ' + found['routing']}: "
            + ", ".join(f"{name} {output.duration(value)}" for name, value in medians.items())
        )
    for failure in document["failures"]:
        print(f"failed: {failure['shape']}: {failure['what']}")
    missing: dict[str, list[str]] = {}
    for entry in document["not_measured"]:
        missing.setdefault(entry["shape"], []).append(str(entry["tokens"]))
    for name, counts in missing.items():
        print(f"not measured: {name} with {', '.join(counts)} tokens")
    sys.stdout.flush()
    return failures.FAILURE if document["failures"] else failures.DONE


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return math.nan


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
