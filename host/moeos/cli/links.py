# SPDX-License-Identifier: Apache-2.0
"""The links between GPUs, tried out with the kernels of kernels/links.cu.

Every ordered pair of GPUs exchanges payload, flags and credits as a layer does, each round with a
fresh pattern that the receiver checks, and then the sender's stores are timed. One process tries
all GPUs that it sees by CUDA's peer access; ranks with a GPU each try each other's memory through
the symmetric heap. Every wait has a deadline. This file must not depend on how links are shown.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moeos.compile import jit
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.device_heap import DeviceHeap
from moeos.engines.cuda.driver import ask
from moeos.world.world import World

SECONDS = 1.0
"""How long all pairs together exchange rounds."""
DEADLINE = 2.0
"""Seconds that one wait of a kernel may take."""
PAYLOAD_BYTES = 1 << 16
"""Bytes that a round carries."""

_SOURCE = "kernels/links.cu"
_THREADS = 1024
_STREAM_BYTES = 1 << 26
_STREAMS = 16  # timed together
_REPORT = struct.Struct("<3Q")  # LinkReport
_WORD = 16

# A GPU's part of the memory: a cache line each for the flag, the credit and the two reports.
_FLAG, _CREDIT, _SENT, _RECEIVED, _CONTROL_BYTES = 0, 128, 256, 384, 512
_PAYLOAD = 4096
_MEMORY_BYTES = _PAYLOAD + _STREAM_BYTES  # the payload is where the stream goes

_NO_ACCESS = (
    "CUDA gives no peer access; see `nvidia-smi topo -p2p rw`: layers need GPUs that are joined by "
    'NVLink, or backend="twin"'
)
_NO_ATOMICS = (
    "there are no atomics between these GPUs, so they are joined by PCIe; layers need NVLink, or "
    'backend="twin"'
)
_ADVICE = (
    "see `nvidia-smi nvlink --status` and `nvidia-smi topo -p2p rw`; in a virtual machine or over "
    'PCIe, ACS or an IOMMU may be in the way; until it is mended use backend="twin"'
)


@dataclasses.dataclass(frozen=True)
class Link:
    """The result of trying one direction between two GPUs.

    Attributes:
        source, destination: GPUs as this process numbers them, or ranks.
        rounds: of payload, flag and credit that ended well.
        gigabytes_per_second: 10^9 bytes of 16-byte stores; None where they were not tried.
        problem: what is wrong and what to do; "" where nothing is.
    """

    source: int
    destination: int
    rounds: int
    gigabytes_per_second: float | None
    problem: str


def try_local_links() -> list[Link]:
    """Tries all ordered pairs of the GPUs that this process sees; a single GPU with itself.

    Raises `RuntimeError` if a package or a GPU is missing, or a kernel cannot be compiled or run.
    """
    driver = cuda_driver.load()
    ask(driver.cuInit(0))
    gpus = [Endpoint(index) for index in range(ask(driver.cuDeviceGetCount()))]
    if not gpus:
        raise RuntimeError("CUDA sees no GPU")
    try:
        for gpu in gpus:
            gpu.allocate()
        pairs = list(itertools.permutations(gpus, 2)) or [(gpus[0], gpus[0])]
        return [_try_local_link(*pair, SECONDS / len(pairs)) for pair in pairs]
    finally:
        for gpu in gpus:
            gpu.close()


def try_world_links(world: World) -> list[Link]:
    """Tries all ordered pairs of ranks, through the symmetric heap of a world. Collective.

    Every rank returns all links. Raises what `DeviceHeap` raises, and `RuntimeError` as
    `try_local_links` does.
    """
    device = world.device or torch.device("cuda", torch.cuda.current_device())
    gpu = Endpoint(device.index)
    heap = DeviceHeap(world.control, _MEMORY_BYTES, device)
    addresses = [heap.of(peer).data_ptr() for peer in range(world.size)]
    gpu.address = addresses[world.rank]
    found: dict[tuple[int, int], Link] = {}
    pairs = list(itertools.permutations(range(world.size), 2))
    try:
        for pair in pairs:
            world.control.barrier()  # no rank uses this rank's part any more
            problem = _problem_of(gpu.clear)
            world.control.barrier()
            if world.rank in pair:
                found[pair] = _try_half(gpu, world.rank, pair, addresses, SECONDS / len(pairs))
                if problem:
                    found[pair] = dataclasses.replace(found[pair], problem=problem)
        every = world.control.allgather(found, "what came of trying the links")
    finally:
        gpu.close()
        heap.close()
    return [_join(every[source][source, to], every[to][source, to]) for source, to in pairs]


def _try_half(
    gpu: Endpoint, rank: int, pair: tuple[int, int], addresses: Sequence[int], seconds: float
) -> Link:
    """This rank's part in trying a link between ranks: what the rank sees as the link's sender or
    receiver.
    """
    source, destination = pair
    rounds = 0
    bandwidth: float | None = None
    try:
        if rank == destination:
            gpu.receive(addresses[source], seed=source)
            rounds, problem = gpu.received()
        else:
            gpu.send(addresses[destination], source, seconds)
            rounds, problem = gpu.sent()
            bandwidth = gpu.bandwidth(addresses[destination])
    except RuntimeError as error:
        problem = f"{error}; {_ADVICE}"
    return Link(source, destination, rounds, bandwidth, problem)


def _join(sender: Link, receiver: Link) -> Link:
    """One link from what its two ends saw; the receiver knows better what went wrong."""
    return Link(
        sender.source,
        sender.destination,
        min(sender.rounds, receiver.rounds),
        sender.gigabytes_per_second,
        receiver.problem or sender.problem,
    )


def _problem_of(do: Callable[[], None]) -> str:
    try:
        do()
    except RuntimeError as error:
        return f"{error}; {_ADVICE}"
    return ""


def _try_local_link(source: Endpoint, destination: Endpoint, seconds: float) -> Link:
    problem = source.reach(destination) or destination.reach(source)
    if problem:
        return Link(source.index, destination.index, 0, None, problem)
    for gpu in (source, destination):
        gpu.clear()
    destination.receive(source.address, source.index)
    source.send(destination.address, source.index, seconds)
    sent, sender_problem = source.sent()
    received, problem = destination.received()
    bandwidth = source.bandwidth(destination.address)
    return _join(
        Link(source.index, destination.index, sent, bandwidth, sender_problem),
        Link(source.index, destination.index, received, None, problem),
    )


class Endpoint:
    """One GPU's end of links: its kernels, and the part of memory at `address` that peers write."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.address = 0
        driver = self._driver = cuda_driver.load()
        self._device = ask(driver.cuDeviceGet(index))
        self._context = ask(driver.cuDevicePrimaryCtxRetain(self._device))
        self._enter()
        attribute = driver.CUdevice_attribute
        capability = "".join(
            str(ask(driver.cuDeviceGetAttribute(which, self._device)))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self._blocks = ask(
            driver.cuDeviceGetAttribute(
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self._device
            )
        )
        self._module = ask(driver.cuModuleLoadData(jit.compile_file(_SOURCE, f"sm_{capability}")))
        self._kernels = {
            name: ask(driver.cuModuleGetFunction(self._module, f"moeos_link_{name}".encode()))
            for name in ("send", "receive", "stream")
        }
        # Two, because a single GPU is at both ends of its link.
        self._streams = [
            ask(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            for _ in range(2)
        ]
        self._events = [ask(driver.cuEventCreate(0)) for _ in range(2)]
        self._allocated = 0

    def allocate(self) -> None:
        """Gives the GPU memory of its own."""
        self._enter()
        self.address = self._allocated = int(ask(self._driver.cuMemAlloc(_MEMORY_BYTES)))

    def reach(self, peer: Endpoint) -> str:
        """Maps the peer's memory here; why it cannot be used, or ""."""
        driver = self._driver
        if self is peer:
            return ""
        if not ask(driver.cuDeviceCanAccessPeer(self._device, peer._device)):
            return _NO_ACCESS
        if not cuda_driver.has_atomics(self._device, peer._device):
            return _NO_ATOMICS
        self._enter()
        (status,) = driver.cuCtxEnablePeerAccess(peer._context, 0)
        if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            ask((status,))
        return ""

    def clear(self) -> None:
        """Makes this GPU's part that of a first round."""
        self._enter()
        ask(self._driver.cuMemsetD8(self.address, 0, _CONTROL_BYTES))
        ask(self._driver.cuMemsetD8(self.address + _PAYLOAD, 0xFF, PAYLOAD_BYTES))
        ask(self._driver.cuCtxSynchronize())

    def send(self, peer: int, seed: int, seconds: float) -> None:
        """Starts the sender; `peer` is the address of the receiver's part."""
        self._launch(
            "send",
            1,
            self._streams[0],
            (peer + _PAYLOAD, ctypes.c_void_p),
            (peer + _FLAG, ctypes.c_void_p),
            (self.address + _CREDIT, ctypes.c_void_p),
            (PAYLOAD_BYTES // _WORD, ctypes.c_uint32),
            (seed, ctypes.c_uint32),
            (int(seconds * 1e9), ctypes.c_uint64),
            (int(DEADLINE * 1e9), ctypes.c_uint64),
            (self.address + _SENT, ctypes.c_void_p),
        )

    def receive(self, peer: int, seed: int) -> None:
        """Starts the receiver; `peer` is the address of the sender's part."""
        self._launch(
            "receive",
            1,
            self._streams[1],
            (self.address + _PAYLOAD, ctypes.c_void_p),
            (self.address + _FLAG, ctypes.c_void_p),
            (peer + _CREDIT, ctypes.c_void_p),
            (PAYLOAD_BYTES // _WORD, ctypes.c_uint32),
            (seed, ctypes.c_uint32),
            (int(DEADLINE * 1e9), ctypes.c_uint64),
            (self.address + _RECEIVED, ctypes.c_void_p),
        )

    def sent(self) -> tuple[int, str]:
        """Waits for the sender: its rounds, and what went wrong."""
        rounds, _, timed_out = self._report(_SENT, self._streams[0])
        if timed_out:
            return rounds, (
                f"the credit of round {rounds + 1}, an atomic add to the sender's memory, did not "
                f"come within {DEADLINE:g} s; {_ADVICE}"
            )
        return rounds, ""

    def received(self) -> tuple[int, str]:
        """Waits for the receiver: its rounds, and what went wrong."""
        rounds, wrong, timed_out = self._report(_RECEIVED, self._streams[1])
        if wrong:
            return rounds, (
                f"{wrong} words of 16 bytes were not what the sender had stored when their flag "
                f"came, in {rounds} rounds; {_ADVICE}"
            )
        if timed_out:
            return rounds, (
                f"the flag of round {rounds + 1} did not come within {DEADLINE:g} s; {_ADVICE}"
            )
        return rounds, ""

    def bandwidth(self, peer: int) -> float:
        """10^9 bytes a second that this GPU stores into the peer's part."""
        driver, stream = self._driver, self._streams[0]
        for count, event in ((1, self._events[0]), (_STREAMS, self._events[1])):
            for _ in range(count):
                self._launch(
                    "stream",
                    self._blocks,
                    stream,
                    (peer + _PAYLOAD, ctypes.c_void_p),
                    (_STREAM_BYTES // _WORD, ctypes.c_uint64),
                )
            ask(driver.cuEventRecord(event, stream))
        ask(driver.cuEventSynchronize(self._events[1]))
        milliseconds = ask(driver.cuEventElapsedTime(*self._events))
        return float(_STREAMS * _STREAM_BYTES / milliseconds / 1e6)

    def close(self) -> None:
        """Gives everything back."""
        driver = self._driver
        self._enter()
        driver.cuCtxSynchronize()  # a kernel that failed has been reported
        for event in self._events:
            driver.cuEventDestroy(event)
        for stream in self._streams:
            driver.cuStreamDestroy(stream)
        if self._allocated:
            driver.cuMemFree(self._allocated)
        driver.cuModuleUnload(self._module)
        driver.cuDevicePrimaryCtxRelease(self._device)

    def _enter(self) -> None:
        ask(self._driver.cuCtxSetCurrent(self._context))

    def _report(self, place: int, stream: Any) -> Sequence[int]:
        self._enter()
        ask(self._driver.cuStreamSynchronize(stream))
        report = bytearray(_REPORT.size)
        ask(self._driver.cuMemcpyDtoH(report, self.address + place, _REPORT.size))
        return _REPORT.unpack(report)

    def _launch(self, name: str, blocks: int, stream: Any, *arguments: tuple[int, Any]) -> None:
        self._enter()
        values, types = zip(*arguments, strict=True)
        ask(
            self._driver.cuLaunchKernel(
                self._kernels[name], blocks, 1, 1, _THREADS, 1, 1, 0, stream, (values, types), 0
            )
        )
