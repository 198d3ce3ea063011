# SPDX-License-Identifier: Apache-2.0
"""What a rank's memory says after a call: the failure, if there is one, counters and events.

`_runtime.Sizes.offsets` says where things lie. This file reads and waits for only its own copies.
"""

from __future__ import annotations

import struct
import threading

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeos._runtime import Failure, FailureKind
from moeos.compile.kernel_shape import KernelShape
from moeos.config.records import dtype_of
from moeos.engines import counters
from moeos.engines.counters import CallStats
from moeos.partition.placement import Placement, experts_of
from moeos.world import tracing
from moeos.world.tracing import EVENT, OS_ACTORS, RankTrace

CACHE_LINE = 128
FIRST_EPOCH = 1
_NONE = 0xFFFFFFFF
_FAILURE = dtype_of("Failure")


class HostFailure:
    """The host's copy of the failure that ended a call of this rank, which the kernel writes.

    In pinned memory, which the GPU addresses as the host does (CUDA programming guide, "unified
    virtual addressing"), so that looking at it waits for nothing.

    Attributes:
        address: of the record, for the kernel.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(
            CACHE_LINE // 4, dtype=torch.int32, device="cpu", pin_memory=True
        )
        self._words = self._memory.numpy()
        self._looked_at = memoryview(self._words)  # type: ignore[arg-type]
        self._order = threading.Lock()
        self.address = self._memory.data_ptr()

    def read(self) -> Failure | None:
        """The failure, or None as long as no kernel has left a call because of one."""
        # The kernel writes the kind last: a thread that reads the rest after it sees all. A lock
        # that is left and taken again keeps this order where loads may pass each other.
        with self._order:
            kind = self._looked_at[0]
        if kind == 0:
            return None
        with self._order:
            return Failure(self._words.tobytes())

    def clear(self) -> None:
        """Forgets the failure. No kernel of this rank may be running."""
        self._words[:] = 0


def first_failure(heap: Tensor, offsets: dict[str, int]) -> Failure | None:
    """The failure that raised a heap's abort word, or None. Waits for the current stream.

    A remote peer cannot raise the word; what it has put in place of it is raised by the next call's
    kernel, and counts here.
    """
    at = offsets["put_failures"]
    words = [heap[offsets["abort_word"] :][:8], heap[at : offsets["put_failures_end"]]]
    raised = [word for word in torch.cat(words).view(torch.int64).tolist() if word != 0]
    if not raised:
        return None
    failed = min(raised) & _NONE  # in the earliest call: the epoch is the upper half
    at = offsets["failures"] + (failed - 1) * CACHE_LINE
    return Failure(heap[at : at + _FAILURE.itemsize].cpu().numpy().tobytes())


def host_abort(rank: int) -> tuple[Tensor, Tensor]:
    """The bytes that a rank that gives up writes into a heap: its record, then the abort word."""
    record = numpy.zeros(1, _FAILURE)
    record["kind"], record["rank"] = FailureKind.HOST_ABORT, rank
    for name in ("peer", "expert", "chunk"):
        record[name] = _NONE
    word = struct.pack("<II", rank + 1, 0)  # from call 0 on: all calls
    return tuple(  # type: ignore[return-value]
        torch.frombuffer(bytearray(text), dtype=torch.uint8).pin_memory()
        for text in (record.tobytes(), word)
    )


def clear(heap: Tensor, control: Tensor, offsets: dict[str, int]) -> None:
    """Makes a rank's heap and control those of a first call, on the current stream."""
    heap.zero_()
    control.zero_()
    _words(control, offsets["epoch"], 1).fill_(FIRST_EPOCH)


def stats_of(
    rank: int,
    records: Tensor,
    offsets: dict[str, int],
    shape: KernelShape,
    placement: Placement | None = None,
    *,
    left: bool = False,
) -> CallStats:
    """The counters of a layer's last call on a rank, from the layer's records. Waits for the
    current stream. `left`: the call left its partial sums, and sent none.
    """

    def noted(name: str, kind: numpy.dtype[numpy.void], count: int) -> NDArray[numpy.void]:
        at = offsets[name]
        return records[at : at + count * kind.itemsize].cpu().numpy().view(kind)

    sent, received = (
        _starts(records, offsets[name], shape) for name in ("send_start", "receive_start")
    )
    slicing = shape.slicing
    ranks = shape.world_size * (slicing.slices if slicing.sums else 1)
    place, _ = slicing.place(rank, ranks)
    stats = counters.read(
        place,
        noted("tallies", counters.TALLY, shape.processors + shape.couriers + 1),
        shape.processors,
        noted("record", counters.RECORD, 1),
        noted("peer_records", counters.PEER, shape.world_size),
        sent[:, -1].tolist(),
        received.diff(dim=1).tolist(),
        len(experts_of(shape.cfg, place, shape.world_size, placement)),
        shape.sizes.sent_bytes,
        shape.sizes.returned_bytes,
    )
    row_bytes = 0 if left else shape.sizes.row_bytes
    return counters.of_slices(stats, slicing, rank, ranks, row_bytes)


def trace_of(
    rank: int,
    records: Tensor,
    offsets: dict[str, int],
    shape: KernelShape,
    behind: int,
    placement: Placement | None = None,
) -> RankTrace:
    """The events that a rank's actors noted in a layer's last call, from the layer's records. Waits
    for the current stream.

    `behind`: by how many nanoseconds the GPU's clock is behind the one that times are given by.
    """
    actors = shape.processors + shape.couriers + len(OS_ACTORS)
    at, size = offsets["trace_events"], actors * shape.trace_events * EVENT.itemsize
    events = records[at : at + size].cpu().numpy().view(EVENT).reshape(actors, shape.trace_events)
    for moment in ("begin_ns", "end_ns"):
        events[moment] += numpy.uint64(behind % (1 << 64))  # modulo 2^64, like the sum
    counts = _words(records, offsets["trace_counts"], actors).cpu().numpy().view(numpy.uint32)
    starts = _starts(records, offsets["receive_start"], shape)
    received = starts.diff(dim=1).numpy()
    chunk_rows = shape.sizes.chunk_rows
    experts = () if placement is None else placement.ranks[rank]
    trace = tracing.read(
        rank, counts, events, received, chunk_rows, couriers=shape.couriers, experts=experts
    )
    slicing = shape.slicing
    ranks = shape.world_size * (slicing.slices if slicing.sums else 1)
    own = experts_of(shape.cfg, slicing.place(rank, ranks)[0], shape.world_size, placement)
    return tracing.of_slices(trace, slicing, ranks, own)


def write_table(records: Tensor, offsets: dict[str, int], placement: Placement) -> None:
    """Says in a layer's records where experts lie, on the current stream."""
    for name, numbers in zip(("places_from", "places"), placement.table(), strict=True):
        words = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        _words(records, offsets[name], len(words)).copy_(words)


def experts_at(placement: Placement, device: torch.device) -> Tensor:
    """int32 [places of all ranks]: of each place its expert; -1 of one without."""
    made = [-1] * (placement.world_size * placement.most)
    for rank, own in enumerate(placement.ranks):
        first = rank * placement.most
        made[first : first + len(own)] = own
    return torch.tensor(made, dtype=torch.int32, device="cpu").to(device)


def _starts(records: Tensor, offset: int, shape: KernelShape) -> Tensor:
    """int32 [P, X + 1]: of each rank, where each place's rows start, and the last one's end."""
    starts = shape.local_experts + 1
    return _words(records, offset, shape.world_size * starts).view(-1, starts).cpu()


def _words(memory: Tensor, offset: int, count: int) -> Tensor:
    return memory[offset : offset + 4 * count].view(torch.int32)
