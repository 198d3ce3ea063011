# SPDX-License-Identifier: Apache-2.0
"""A call's traces in a file: numpy's .npz with the events as they were noted, and what ran as JSON.

This file knows the layout, and only as much of the meaning of events as shows that a file is wrong.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from moeos.system.files import open_regular
from moeos.world.tracing import EVENT, KINDS, OS_ACTORS, TASK_KINDS, RankTrace

FORMAT = 3
_BEFORE_AWAITED = numpy.dtype(
    [("reserved" if name == "awaited" else name, EVENT[name]) for name in EVENT.names or ()]
)
"""Events of kernels whose processors never waited for inputs themselves: zeros in that place."""
MAX_BYTES = 1 << 30
"""The most that a file may hold, uncompressed."""

_NO_PEER = 0xFFFFFFFF


def save(file: Path, ranks: Sequence[RankTrace], about: Mapping[str, Any]) -> None:
    """Writes the traces of all ranks. Raises `OSError`."""
    arrays: dict[str, NDArray[Any]] = {
        "about": numpy.array(json.dumps({**about, "format": FORMAT, "ranks": len(ranks)}))
    }
    for trace in ranks:
        arrays[f"events_{trace.rank}"] = numpy.concatenate(trace.events)
        arrays[f"noted_{trace.rank}"] = numpy.array([len(events) for events in trace.events])
        arrays[f"dropped_{trace.rank}"] = numpy.array(trace.dropped)
        arrays[f"received_{trace.rank}"] = trace.received
        arrays[f"chunk_rows_{trace.rank}"] = numpy.array(trace.chunk_rows)
        arrays[f"experts_{trace.rank}"] = numpy.array(trace.experts, numpy.int64)
    memory = io.BytesIO()
    numpy.savez_compressed(memory, allow_pickle=False, **arrays)
    file.write_bytes(memory.getvalue())


def load(file: Path) -> tuple[list[RankTrace], dict[str, Any]]:
    """The traces in rank order, and what `save` was given about them.

    Raises `OSError` if the file cannot be read, and `ValueError` if it is not of `save`.
    """
    with open_regular(file) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                    raise ValueError(f"it holds more than {MAX_BYTES} bytes")
            stream.seek(0)
            with numpy.load(stream, allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                if about["format"] != FORMAT:
                    raise ValueError(f"its format is {about['format']}, not {FORMAT}")
                size = int(about["ranks"])
                return [_rank(arrays, rank, size) for rank in range(size)], about
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{file} is no trace that `moeos trace --save` wrote: {error}"
            ) from error


def _rank(arrays: Any, rank: int, size: int) -> RankTrace:
    events, noted, dropped, received, chunk_rows = (
        arrays[f"{name}_{rank}"]
        for name in ("events", "noted", "dropped", "received", "chunk_rows")
    )
    if events.dtype == _BEFORE_AWAITED:
        events = events.view(EVENT)
    if events.dtype != EVENT:
        raise ValueError(f"the events of rank {rank} have dtype {events.dtype}")
    if (
        noted.shape != dropped.shape
        or noted.ndim != 1
        or len(noted) <= len(OS_ACTORS)
        or noted.min() < 0
        or noted.sum() != len(events)
    ):
        raise ValueError(f"the lists of rank {rank} do not fit its events")
    if (
        received.ndim != 2
        or received.shape[0] != size
        or received.shape[1] < 1
        or received.dtype.kind not in "iu"
        or received.min() < 0
        or chunk_rows < 1
    ):
        raise ValueError(f"the rows that rank {rank} received are not those of {size} ranks")
    # Files from before there were placements have none.
    experts = arrays[f"experts_{rank}"] if f"experts_{rank}" in arrays else numpy.zeros(0, int)
    if experts.ndim != 1 or experts.dtype.kind not in "iu" or len(experts) > received.shape[1]:
        raise ValueError(f"the experts of rank {rank} are not as many as it received rows for")
    trace = RankTrace(
        rank,
        numpy.split(events, numpy.cumsum(noted)[:-1]),
        dropped.tolist(),
        received.astype(numpy.int64),
        int(chunk_rows),
        tuple(experts.tolist()),
    )
    parts = numpy.concatenate(trace.events[: trace.processors])
    steps = numpy.concatenate(trace.events[trace.processors :])
    products = parts[parts["expert"] != _NO_PEER]
    others = parts[parts["peer"] != _NO_PEER]
    if (
        (parts["kind"] >= len(TASK_KINDS)).any()
        or (steps["kind"] < len(TASK_KINDS)).any()
        or (steps["kind"] >= len(KINDS)).any()
        or (products["expert"] > received.shape[1]).any()  # the one after them: the shared experts
        or (others["peer"] >= size).any()
    ):
        raise ValueError(f"an event of rank {rank} names what the world does not have")
    dispatches, copies = (
        parts[parts["kind"] == TASK_KINDS.index(kind)] for kind in ("dispatch", "replicate")
    )
    # A chunk's rows are noted in the part that is complete last.
    announced = not len(dispatches) or bool(dispatches["rows"].any()) or any(trace.dropped)
    if len(others) != len(dispatches) + len(copies) or not announced:
        raise ValueError(f"an event of rank {rank} is of an older runtime")
    return trace
