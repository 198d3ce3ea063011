"""The GPU: a layer as one persistent kernel, launched once a call on the caller's stream.

Ranks are processes with a GPU each, or virtual ranks that share one GPU and one launch. This file
makes the device memory, loads the kernel and launches it; it holds no protocol.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from moeos import _twin, cuda_driver, jit, kernel_shape, machine_code
from moeos.config import MoEConfig
from moeos.control import name_ranks, raise_together
from moeos.counters import CallStats
from moeos.cuda_driver import ask
from moeos.device_heap import DeviceHeap
from moeos.engines import cuda_chain, cuda_clock, cuda_records, cuda_wait
from moeos.engines.base import CallTensors
from moeos.engines.cuda_arguments import (
    RECORD_BYTES,
    WEIGHT_TYPES,
    ArgumentPacker,
    RankBuffers,
)
from moeos.engines.cuda_code import code_address
from moeos.engines.cuda_peers import Peers
from moeos.engines.cuda_shared import SharedOnGpu
from moeos.engines.pieces import pieces_of
from moeos.failure import exception_of
from moeos.faults import LayerFaults
from moeos.jit import Kernel
from moeos.kernel_shape import KernelShape
from moeos.nvshmem_heap import fill_in_state, finish_puts, forget_state
from moeos.tracing import RankTrace
from moeos.world import World

CAPABILITY = (9, 0)
"""Of the GPUs that kernels are made for: Hopper."""
MAX_ARGUMENT_BYTES = 32_764
"""That one launch can be given."""

Value = TypeVar("Value")


class CudaEngine:
    """One layer on one rank's current CUDA device. Collective to make.

    Its calls may come from any threads and on any streams: a launch waits for the launch before of
    any layer of the world (`cuda_chain`). A layer that is deleted gives back what it holds, but for
    one with captured calls: a graph may replay them, so it holds all until its world is closed.

    A call returns when its kernel is launched. What only the device sees (a late peer, logits that
    are not finite, wrong ids) ends the call there, on all ranks; each rank's kernel then shows the
    failure to its host, and the next `forward` that finds it raises, as `check` does. From the
    failure to `reset` kernels that are launched end at once, with an output that is not defined.

    Attributes:
        report: what the compiler says of the kernel.

    Raises:
        ValueError: the GPU does not have such a layer; see `kernel_shape.check_supported`.
        RuntimeError: there is no GPU of compute capability 9.0, ranks share one that should not,
            a package is missing, the kernel cannot be compiled, there is no memory; on all ranks.
    """

    @staticmethod
    def check_supported(cfg: MoEConfig) -> None:
        """See `Engine.check_supported`."""
        kernel_shape.check_supported(cfg)

    def require_open(self) -> None:
        """See `Engine.require_open`."""
        self._world.require_open()

    def __init__(self, cfg: MoEConfig, world: World) -> None:
        self._world = world
        self._number = world.number_layer()
        self._virtual = world.control.shares_memory and world.size > 1
        self._device = self._agree(lambda: _usable_device(cfg, world), "the choice of a GPU")
        self._require_devices()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the driver is asked below: this thread has a context now
            self._peers = Peers.find(world, self._device)
            self._shape = self._agree(lambda: self._shape_of(cfg), "the sizes of a layer")
            # Every rank asks for it, so that all wait for the compiler and none for a rank.
            kernel = self._agree(lambda: jit.compile_kernel(self._shape), "the compiled kernel")
            self.report = kernel.report
            sizes = self._shape.sizes
            self._offsets = sizes.offsets
            shared = SharedOnGpu.of(world, self._device)
            self._launches = shared.launches
            held = self._holdings = CudaHoldings(world, shared, self._peers, sizes, self._device)
            world.hold(self, held)
            held.faults = self._faults
            held.heap = shared.take_heap(sizes.heap_bytes)
            held.buffers = self._agree(lambda: self._allocate(cfg), "the memory of a layer")
            held.failure = self._agree(cuda_records.HostFailure, "the host's pinned memory")
            held.arguments = ArgumentPacker(
                cfg, sizes, world.rank, world.deadline, held.buffers, held.failure.address
            )
            held.kernel = self._agree(lambda: self._load(kernel), "the loading of the kernel")
            self._clear()
            torch.cuda.synchronize()
        world.control.barrier()  # every heap is clean before anyone writes into it

    def forward(self, tensors: CallTensors) -> None:
        """Launches one call on the current stream and returns; see `Engine.forward`.

        Waits for nothing and allocates nothing, unless routing comes with strides or in float64.
        Virtual ranks wait for each other here, since one launch runs all of them.

        Raises `ValueError` for x or a parameter that is not on the engine's device or lies at an
        address that the kernel cannot read, and what `exception_of` says of a failure of a call
        before: then nothing is launched.
        """
        self._holdings.gate.run(lambda: self._forward(tensors))

    def check(self) -> None:
        """Waits for this rank's calls so far and raises what `exception_of` says of a failure.

        The failed call may be one that a peer has made and this rank has not.
        """
        failure = self._holdings.gate.run(self._first_failure)
        if failure is not None:
            raise exception_of(failure, self._world.rank)

    def stats(self) -> CallStats:
        """See `Engine.stats`. Waits for the calls so far."""
        return self._holdings.gate.run(self._stats)

    def trace(self) -> RankTrace:
        """See `Engine.trace`. Waits for the calls so far."""
        self._world.require_trace()
        return self._holdings.gate.run(self._trace)

    def reset(self) -> None:
        """See `Engine.reset`."""
        self._holdings.gate.run(self._reset)

    def _forward(self, tensors: CallTensors) -> None:
        ids, weights = tensors.topk_ids, tensors.topk_weights
        if ids is not None and weights is not None:  # or neither
            readable = weights.dtype in WEIGHT_TYPES and weights.is_contiguous()
            if not (readable and ids.is_contiguous()):
                tensors = _with_readable_routing(tensors, ids, weights)
        # As torch.cuda.current_device(), but for whether CUDA has begun.
        if torch._C._cuda_getDevice() == self._device.index:
            self._call(tensors)
        else:
            with torch.cuda.device(self._device):
                self._call(tensors)

    def _first_failure(self) -> cuda_records.Failure | None:
        cuda_wait.synchronize(self._device)
        return cuda_records.first_failure(self._holdings.buffers.heap, self._offsets)

    def _stats(self) -> CallStats:
        cuda_wait.synchronize(self._device)
        return cuda_records.stats_of(
            self._world.rank, self._holdings.buffers.memory, self._offsets, self._shape
        )

    def _trace(self) -> RankTrace:
        cuda_wait.synchronize(self._device)
        # Ranks of one process share a GPU, and so its clock.
        behind = 0
        if not self._world.control.shares_memory:
            with torch.cuda.device(self._device):
                behind = cuda_clock.behind_host().nanoseconds
        return cuda_records.trace_of(
            self._world.rank, self._holdings.buffers.memory, self._offsets, self._shape, behind
        )

    def _reset(self) -> None:
        cuda_wait.synchronize(self._device)
        if self._peers.transport == "nvshmem":
            with torch.cuda.device(self._device):
                finish_puts(self._world.rank, self._world.deadline)
        self._world.control.barrier()  # no rank's kernel runs any more, nothing is on the way
        self._clear(again=True)
        self._holdings.failure.clear()
        torch.cuda.synchronize(self._device)
        self._world.control.barrier()  # every heap is clean before anyone writes into it

    def _call(self, tensors: CallTensors) -> None:
        """Launches a call's pieces; the engine's device is the current one."""
        if tensors.pieces == 1:
            self._piece(tensors)
            return
        for piece in pieces_of(tensors, self._shape.cfg.max_tokens):
            self._piece(piece)

    def _piece(self, tensors: CallTensors) -> None:
        self._faults.before_call()
        held = self._holdings
        held.arguments.pack(tensors)
        if self._virtual:
            self._launch_together()
            return
        failure = held.failure.read()
        if failure is not None:
            raise exception_of(failure, self._world.rank)
        assert held.kernel is not None  # only virtual ranks leave it to rank 0
        # As torch.cuda.current_stream() but for the object, whose making takes 3 µs.
        self._launch(held.kernel, torch._C._cuda_getCurrentRawStream(self._device.index))

    def _launch(self, kernel: _LoadedKernel, stream: int) -> None:
        """Launches a call behind the world's last one, whose stream it mostly shares."""
        launches = self._launches
        if stream == launches.stream and not torch._C._cuda_isCurrentStreamCapturing():
            kernel.launch(stream)
        elif launches.join(stream):
            self._holdings.captured = True
            kernel.launch(stream)
        else:
            kernel.launch(stream)
            launches.launched(stream, lives=cuda_chain.lives(self._device.index))

    def _agree(self, do: Callable[[], Value], what: str) -> Value:
        """What `do()` returns here, if it returns on all ranks; else its error, on all ranks."""
        error: Exception | None = None
        value: Value | None = None
        try:
            value = do()
        except (ValueError, RuntimeError) as raised:  # CUDA's and torch's are RuntimeErrors
            error = raised
        raise_together(self._world.control, error, what)
        return value  # type: ignore[return-value]

    def _require_devices(self) -> None:
        """Raises unless virtual ranks share one GPU, or processes have one each."""
        properties = torch.cuda.get_device_properties(self._device)
        identity = str(properties.uuid)
        found = self._world.control.allgather(identity, "the names of the ranks' GPUs")
        if self._virtual and len(set(found)) > 1:
            raise RuntimeError(
                f"virtual ranks share one GPU, but these have {len(set(found))}: set the same "
                "device in each"
            )
        sharing = [rank for rank, other in enumerate(found) if other == identity]
        if not self._virtual and len(sharing) > 1:
            raise RuntimeError(
                f"{name_ranks(sharing)} use one GPU, {identity}; each needs its own: call "
                "torch.cuda.set_device first, or start one rank for each GPU"
            )

    def _shape_of(self, cfg: MoEConfig) -> KernelShape:
        ranks = self._world.size if self._virtual else 1
        blocks = torch.cuda.get_device_properties(self._device).multi_processor_count
        most = min(blocks // 2, MAX_ARGUMENT_BYTES // RECORD_BYTES)
        if ranks > most:
            raise ValueError(f"{ranks} virtual ranks are too many for one launch; at most {most}")
        world, processors = self._world, blocks // ranks - 1
        self._faults = LayerFaults(world.faults, world.rank, self._number, processors, pinned=True)
        shape = KernelShape(
            cfg=cfg,
            world_size=world.size,
            processors=processors,
            virtual_ranks=ranks,
            transport=self._peers.transport,
            trace_events=self._world.trace_events,
            faults=self._faults.on_device,
        )
        shape.sizes  # noqa: B018 - raises if a bound does not fit
        return shape

    def _allocate(self, cfg: MoEConfig) -> RankBuffers:
        sizes, heap = self._shape.sizes, self._holdings.heap
        return RankBuffers(
            heap=heap.own,
            memory=torch.zeros(sizes.memory_bytes, dtype=torch.uint8, device=self._device),
            # Zeros, because the second product reads rows that no tile of this call has written.
            intermediate=torch.zeros(
                (sizes.intermediate_rows, cfg.intermediate), dtype=cfg.dtype, device=self._device
            ),
            peers=torch.tensor(self._peers.table(heap), device=self._device),
        )

    def _load(self, kernel: Kernel) -> _LoadedKernel | None:
        if kernel.report.argument_bytes != RECORD_BYTES:
            raise RuntimeError(
                f"the kernel takes {kernel.report.argument_bytes} bytes of arguments for each rank "
                f"and the host packs {RECORD_BYTES}: the installation mixes versions"
            )
        if self._virtual and self._world.rank != 0:
            return None
        ranks = self._shape.virtual_ranks
        record = self._holdings.arguments.record
        arguments = numpy.tile(record, ranks) if self._virtual else record
        blocks = (self._shape.processors + 1) * ranks
        loaded = _LoadedKernel(kernel, blocks, arguments, self._peers.transport == "nvshmem")
        if loaded.code != 0:
            size = machine_code.instruction_bytes(kernel.cubin, jit.KERNEL)
            self._holdings.arguments.pack_code(loaded.code, size)
        return loaded

    def _clear(self, *, again: bool = False) -> None:
        """Makes heap and memory those of a first call; `again`: what goes wrong once has."""
        buffers = self._holdings.buffers
        memory = buffers.memory
        cuda_records.clear(buffers.heap, memory, self._offsets)
        if self._shape.faults:
            plan = torch.frombuffer(bytearray(self._faults.packed(again=again)), dtype=torch.uint8)
            memory[self._offsets["faults"] :][: len(plan)].copy_(plan)

    def _launch_together(self) -> None:
        """Launches the call of all virtual ranks, ordered behind and before each rank's stream.

        A failure that any of them has been shown raises on all.
        """
        held = self._holdings
        stream = torch.cuda.current_stream()
        ready = torch.cuda.Event()
        ready.record(stream)
        offer = (self._number, held.arguments.record.copy(), ready, held.failure.read())
        calls = self._world.control.allgather(offer, "a call of the layer")
        numbers = [number for number, _, _, _ in calls]
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"the ranks call different layers: of the layers of their worlds, from 0 on, "
                f"{numbers} in rank order; all ranks must call the layers in the same order"
            )
        for _, _, _, failure in calls:
            if failure is not None:
                raise exception_of(failure, self._world.rank)
        outcome: torch.cuda.Event | Exception | None = None
        if held.kernel is not None:
            try:
                for _, _, event, _ in calls:
                    stream.wait_event(event)
                records = [record for _, record, _, _ in calls]
                numpy.concatenate(records, out=held.kernel.arguments)
                self._launch(held.kernel, stream.cuda_stream)
                outcome = torch.cuda.Event()
                outcome.record(stream)
            except RuntimeError as error:
                outcome = error
        done = self._world.control.allgather(outcome, "the launch of the layer")[0]
        if isinstance(done, Exception):
            raise copy.copy(done)
        assert done is not None  # rank 0 launches
        stream.wait_event(done)
        if held.kernel is None:
            self._note_launch(stream.cuda_stream)

    def _note_launch(self, stream: int) -> None:
        """What rank 0 has launched on a stream of its own is done when `stream` comes here."""
        if torch._C._cuda_isCurrentStreamCapturing():
            self._holdings.captured = True
        else:
            self._launches.launched(stream, lives=cuda_chain.lives(self._device.index))


class CudaHoldings:
    """What a layer holds on a GPU and of its host's memory; see `moeos.world.Holdings`.

    Attributes:
        heap, buffers, failure, arguments, kernel, faults: as they are made; gone after the end. No
            kernel on virtual ranks but rank 0.
        captured: whether a call of the layer is part of a graph, which may be replayed.
    """

    heap: DeviceHeap
    buffers: RankBuffers
    failure: cuda_records.HostFailure
    arguments: ArgumentPacker
    kernel: _LoadedKernel | None
    faults: LayerFaults

    def __init__(
        self,
        world: World,
        shared: SharedOnGpu,
        peers: Peers,
        sizes: _twin.Sizes,
        device: torch.device,
    ) -> None:
        self.gate = world.gate  # launches of all layers are in one order
        self.captured = False
        self._rank = world.rank
        self._shared = shared
        self._peers = peers
        self._offsets = sizes.offsets
        self._device = device
        self._abort_stream = torch.cuda.Stream()
        self._abort_record, self._abort_word = cuda_records.host_abort(world.rank)
        self._lock = threading.Lock()  # nothing is given back while an abort writes into heaps

    def interrupt(self, reason: str) -> None:
        """Raises the abort words of this rank and, as far as they can be reached, of its peers.

        The record has no room for the reason.
        """
        with self._lock:
            if "heap" in vars(self):
                self._abort()

    def end(self, *, world_ends: bool = False) -> bool:
        """Waits for the calls and gives back memory, kernel and heap.

        False beside an interruption and, unless the world ends, as long as a capture forbids to
        wait or a graph may replay a call.
        """
        if (self.captured and not world_ends) or not self._lock.acquire(blocking=world_ends):
            return False
        try:
            # A kernel that crashed has said so before.
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
                if world_ends:
                    torch.cuda.synchronize(self._device)
                elif not self._shared.launches.wait():
                    return False
            mine = vars(self)
            if "faults" in mine:
                self.faults.close()
            kernel = mine.pop("kernel", None)
            if kernel is not None:
                kernel.unload()
            for name in ("buffers", "failure", "arguments"):
                mine.pop(name, None)
            heap = mine.pop("heap", None)
            if heap is not None:
                self._shared.give_heap_back(heap)
        finally:
            self._lock.release()
        return True

    def _abort(self) -> None:
        heaps = self.heap.heaps
        own = self._rank
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._abort_stream):
            for peer in [own, *range(own), *range(own + 1, len(heaps))]:
                heap = heaps[peer]
                if not self._peers.direct[peer]:
                    self._put_abort(peer)
                elif heap is not None and cuda_records.first_failure(heap, self._offsets) is None:
                    at = self._offsets["failures"] + own * cuda_records.CACHE_LINE
                    record, word = self._abort_record, self._abort_word
                    heap[at : at + len(record)].copy_(record, non_blocking=True)
                    at = self._offsets["abort_word"]
                    heap[at : at + len(word)].copy_(word, non_blocking=True)
            self._abort_stream.synchronize()

    def _put_abort(self, peer: int) -> None:
        """Puts what a sender would put of this rank's failure (runtime/watchdog.hpp), if it is the
        one that has ended the calls here."""
        own = self._rank
        failure = cuda_records.first_failure(self.heap.own, self._offsets)
        if failure is not None and failure.rank == own:
            word = self._abort_word
            at = self._offsets["put_failures"] + own * len(word)
            self.heap.own[at : at + len(word)].copy_(word, non_blocking=True)
            record_at = self._offsets["failures"] + own * cuda_records.CACHE_LINE
            self.heap.put(peer, record_at, cuda_records.CACHE_LINE)
            self.heap.put(peer, at, len(word))


def _usable_device(cfg: MoEConfig, world: World) -> torch.device:
    """This rank's GPU, if it can run such a layer."""
    kernel_shape.check_supported(cfg)
    if not torch.cuda.is_available():
        raise RuntimeError('backend is "cuda", but PyTorch sees no GPU: use "twin"')
    device = world.device or torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
            f"{capability[1]}; kernels are made for {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200): "
            'use backend "twin"'
        )
    cuda_driver.load()
    torch.cuda.init()
    return device


def _with_readable_routing(
    tensors: CallTensors, ids: torch.Tensor, weights: torch.Tensor
) -> CallTensors:
    """The call with copies of its routing that the kernel can read."""
    if weights.dtype not in WEIGHT_TYPES:
        weights = weights.float()
    return tensors._replace(topk_ids=ids.contiguous(), topk_weights=weights.contiguous())


class _LoadedKernel:
    """The kernel on the current device, and what its launches have in common.

    Args:
        by_nvshmem: whether the kernel puts by NVSHMEM.

    Attributes:
        arguments: uint8, the records of the ranks of a launch, as they are when it is made.
        code: address of the kernel's instructions; 0 if unknown.
    """

    def __init__(
        self,
        kernel: Kernel,
        blocks: int,
        arguments: numpy.ndarray[Any, numpy.dtype[numpy.uint8]],
        by_nvshmem: bool,
    ) -> None:
        driver = self._driver = cuda_driver.load()
        self._context = ask(driver.cuCtxGetCurrent())
        self._library = ask(driver.cuLibraryLoadData(kernel.cubin, [], [], 0, [], [], 0))
        self._by_nvshmem = by_nvshmem
        if by_nvshmem:
            fill_in_state(int(self._library))
        self.code = code_address(self._library)
        self._function = cuda_driver.function(self._library, jit.KERNEL)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask(driver.cuFuncSetAttribute(self._function, limit, kernel.report.shared_bytes))
        # The driver copies the arguments in the launch, so one place serves all of them.
        self.arguments = arguments
        self._pointers = numpy.array([arguments.ctypes.data], dtype=numpy.uint64)
        self._pointers_at = self._pointers.ctypes.data
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = kernel.report.threads, 1, 1
        launch.sharedMemBytes = kernel.report.shared_bytes
        launch.attrs = [cooperative]
        launch.numAttrs = 1
        self._launch = launch
        self._stream: int | None = None  # of the launch before

    def launch(self, stream: int) -> None:
        driver = self._driver
        # The thread's current context may not be set yet: torch does that when it first needs it.
        ask(driver.cuCtxSetCurrent(self._context))
        if stream != self._stream:
            self._launch.hStream = self._stream = stream
        ask(driver.cuLaunchKernelEx(self._launch, self._function, self._pointers_at, 0))

    def unload(self) -> None:
        with contextlib.suppress(RuntimeError):
            ask(self._driver.cuCtxSetCurrent(self._context))
            if self._by_nvshmem:
                forget_state(int(self._library))
            ask(self._driver.cuLibraryUnload(self._library))
