# SPDX-License-Identifier: Apache-2.0
"""The GPU: a layer as one persistent kernel, launched once a call on the caller's stream.

Ranks are processes with a GPU each, or virtual ranks that share one GPU and one launch. This file
makes the device memory, loads the kernel and launches it; it holds no protocol.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy
import torch

from moeos import _runtime
from moeos.compile import jit, kernel_shape
from moeos.compile.jit import Kernel
from moeos.compile.kernel_shape import KernelShape
from moeos.config.config import MoEConfig
from moeos.config.sizes import routed_alone
from moeos.engines import calls, saved_tensors
from moeos.engines.base import CallTensors, GradientTensors, Recording, require_memory
from moeos.engines.counters import CallStats
from moeos.engines.cuda import backward_kernels as cuda_gradients
from moeos.engines.cuda import chain as cuda_chain
from moeos.engines.cuda import clock as cuda_clock
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda import records as cuda_records
from moeos.engines.cuda import wait as cuda_wait
from moeos.engines.cuda.arguments import (
    ADDRESS_ALIGNMENT,
    RECORD_BYTES,
    WEIGHT_TYPES,
    ArgumentPacker,
)
from moeos.engines.cuda.backward_arguments import (
    GRADIENT_RECORD_BYTES,
    SAVING_RECORD_BYTES,
    GradientPacker,
    SavingPacker,
)
from moeos.engines.cuda.backward_kernels import CudaGradients, CudaSaving
from moeos.engines.cuda.kernel import LaunchArguments, LoadedKernel
from moeos.engines.cuda.peers import Peers
from moeos.engines.cuda.workspace import CudaWorkspace
from moeos.engines.failure import different_calls, exception_of
from moeos.engines.pieces import gradient_pieces_of, pieces_of
from moeos.engines.reducing import Reduction
from moeos.engines.saved_rows import SavedRows, saved_rows
from moeos.partition.placement import Placement, experts_of, why_no_backward
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world.control import name_ranks, raise_together
from moeos.world.faults import LayerFaults
from moeos.world.tracing import RankTrace
from moeos.world.world import SharedMemory, World

CAPABILITY = (9, 0)
"""The capability of the GPUs that kernels are made for: Hopper."""
_COMPILING = 300.0  # seconds beyond the deadline that ranks wait for each other's compilers
MAX_ARGUMENT_BYTES = 32_764
"""The most bytes of arguments that one launch can be given."""


def _tokens_in(word: int) -> int | None:
    """The number of tokens in a word that ranks with slices compare, if the word is only that."""
    return word if word < _runtime.ROWS_APART else None


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

    def check_weighs(self) -> None:
        """See `Engine.check_weighs`."""
        routing = self._shape.cfg.routing
        if routing != "ids":
            raise ValueError(
                f"weigh is True, and routing is {routing!r}: on the GPU the gate weighs a caller's "
                "ids in layers whose caller always chooses, MoEConfig(routing='ids')"
            )

    def require_open(self) -> None:
        """See `Engine.require_open`."""
        self._world.require_open()
        if self._shared.closed:
            self._shared.require_open()  # which raises

    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        shared: SharedMemory,
        placement: Placement | None = None,
        slicing: Slicing = WHOLE,
    ) -> None:
        assert isinstance(shared, CudaWorkspace)
        self._world = world
        self._slicing, self._sums = slicing, slicing.sums
        self._adds_bias = slicing.adds_bias(world.rank)
        self._no_bias: torch.Tensor | None = None  # zeros in place of b2, where another adds it
        self._placement = placement
        self._shared = shared
        self._number = world.number_layer()
        self._identity = calls.identity(self._number)  # for a call in one piece
        self._virtual = world.control.shares_memory and world.size > 1
        self._device = self._agree(lambda: _usable_device(cfg, world), "the choice of a GPU")
        self._require_devices()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the driver is asked below: this thread has a context now
            peers = self._peers = Peers.find(world, self._device)
            self._by_nvshmem = peers.transport == "nvshmem"
            self._shape = self._agree(lambda: self._shape_of(cfg, peers), "the sizes of a layer")
            slicing.policy.require_fits(self._shape.sizes)
            self._last = self._shape  # the last call's shape
            rank, holders = slicing.place(world.rank, world.size)
            own = experts_of(cfg, rank, holders, placement)
            self._saved_rows = saved_rows(cfg, holders, len(own))
            kernel = self._compiled(self._shape, "the compiled kernel")
            self.report = kernel.report
            sizes = self._shape.sizes
            self._offsets = sizes.offsets
            key = (cfg, self._shape.places, slicing)
            mine = self._mine = shared.admit(key, sizes, peers, self._device, slicing)
            self._reduction = Reduction(cfg, world, shared, slicing)
            self._left = False  # whether the last call left its partial sums
            self._launches = shared.on_gpu.launches
            held = self._holdings = CudaHoldings(shared, self._faults, self._offsets, placement)
            world.hold(self, held)
            held.records = self._agree(lambda: self._zeros(sizes.records_bytes), "a layer's memory")
            held.clear(again=False)
            arguments = held.arguments = self._packer(cfg, sizes)
            arguments.use(shared.buffers(mine))
            shared.add(held, held.clear, lambda: arguments.use(shared.buffers(mine)))
            held.kernel = self._agree(
                lambda: self._load(kernel, self._shape, mine.kernels), "the loading of the kernel"
            )
            held.launch = LaunchArguments.of_ranks(arguments.record, self._shape.virtual_ranks)
            if held.kernel is not None:
                arguments.pack_code(*held.kernel.code)
            torch.cuda.synchronize()

    @property
    def number(self) -> int:
        """See `Engine.number`."""
        return self._number

    @property
    def cfg(self) -> MoEConfig:
        """See `Engine.cfg`."""
        return self._shape.cfg

    def forward(self, tensors: CallTensors) -> None:
        """Launches one call on the current stream and returns; see `Engine.forward`.

        Waits for nothing and allocates nothing, unless routing comes with strides or in float64.
        Virtual ranks wait for each other here, since one launch runs all of them.

        Raises `ValueError` for x or a parameter that is not on the engine's device or lies at an
        address that the kernel cannot read, and what `exception_of` says of a failure of a call
        before: then nothing is launched.
        """
        self._holdings.gate.run(lambda: self._forward(tensors))

    @property
    def slicing(self) -> Slicing:
        """See `Engine.slicing`."""
        return self._slicing

    def no_backward(self) -> str | None:
        """See `Engine.no_backward`."""
        if self._slicing.cuts:
            return None
        return why_no_backward(self._placement)

    @property
    def saved_rows(self) -> SavedRows:
        """See `Engine.saved_rows`."""
        return self._saved_rows

    def room_for_sums(
        self, parameter: torch.Tensor, pieces: int, main_grad: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Engine.room_for_sums`: one launch writes all of it; several are added up in fp32."""
        if pieces == 1:
            return torch.empty_like(parameter, dtype=self._shape.cfg.dtype)
        return torch.zeros_like(parameter, dtype=torch.float32)

    def record(self, tensors: CallTensors) -> Recording:
        """See `Engine.record`. Waits for a number of tokens that the device knows."""
        self.require_open()
        if self._holdings.gradients is None:
            self._world.together("the first backward of a layer", self._make_gradients)
        return self._holdings.gate.run(lambda: self._record(tensors))

    def backward(self, tensors: GradientTensors) -> None:
        """See `Engine.backward`. Launches two kernels a piece on the current stream."""
        self._holdings.gate.run(lambda: self._backward(tensors))

    def check(self) -> None:
        """Waits for this rank's calls so far and raises what `exception_of` says of a failure.

        The failed call may be one that a peer has made and this rank has not.
        """
        failure = self._holdings.gate.run(self._first_failure)
        if failure is not None:
            raise self._exception_of(failure, self._identity)

    def place(self, placement: Placement) -> None:
        """See `Engine.place`."""
        with torch.cuda.device(self._device):
            self._holdings.place(placement)
            torch.cuda.synchronize()
        self._placement = placement

    def stats(self) -> CallStats:
        """See `Engine.stats`. Waits for the calls so far."""
        return self._holdings.gate.run(self._stats)

    def trace(self) -> RankTrace:
        """See `Engine.trace`. Waits for the calls so far."""
        self._world.require_trace()
        return self._holdings.gate.run(self._trace)

    def _forward(self, tensors: CallTensors) -> None:
        if self._shared.closed:
            self._shared.require_open()  # which raises: the buffers may be gone
        # As torch.cuda.current_device(), but for whether CUDA has begun.
        if torch._C._cuda_getDevice() != self._device.index:
            with torch.cuda.device(self._device):
                self._forward(tensors)
            return
        tensors = self._readable(tensors)
        if self._sums:
            rows, counted = tensors.x.shape[0], tensors.tokens is not None
            self._left = self._reduction.leaves_partials(rows, counted=counted)
        if tensors.pieces == 1:
            self._piece(tensors, self._identity)
        else:
            self._pieces(tensors)
        if self._left:
            self._reduction.add_up(tensors.out)
            self._note_more()

    def _pieces(self, tensors: CallTensors) -> None:
        """Launches a call of several pieces."""
        identity = calls.identity(self._number, tensors.pieces)
        require_memory(tensors, "tokens")  # which PyTorch reads
        for piece in pieces_of(tensors, self._shape.cfg.max_tokens):
            self._piece(piece, identity)

    def _readable(self, tensors: CallTensors) -> CallTensors:
        """The call, whose routing the kernel can read."""
        ids, weights = tensors.topk_ids, tensors.topk_weights
        if ids is not None:
            readable = weights is None or (
                weights.dtype in WEIGHT_TYPES and weights.is_contiguous()
            )
            if not (readable and ids.is_contiguous()):
                return _with_readable_routing(tensors, ids, weights)
        return tensors

    def _make_gradients(self) -> None:
        held = self._holdings
        if held.gradients is not None:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            saves = self._shape.cfg.save == "preactivation"
            if saves and held.saving is None:
                held.saving = self._make_saving()
            shape = dataclasses.replace(self._shape, gradients=True, saves=saves)
            kernel = self._compiled(shape, "the kernel of gradients")
            assert cuda_gradients.sizes_agree(self._shape.sizes, shape.sizes)
            key = (shape.cfg, shape.places, self._slicing, "gradients")
            mine = self._shared.admit(key, shape.sizes, self._peers, self._device, self._slicing)
            blocks = torch.cuda.get_device_properties(self._device).multi_processor_count

            def make() -> CudaGradients:
                loaded = self._load(kernel, shape, mine.kernels)
                of_weights = LoadedKernel(
                    kernel, blocks, False, name=jit.WEIGHT_GRADIENTS, cooperative=False
                )
                cfg, sizes = routed_alone(shape.cfg), shape.sizes
                packer = GradientPacker(cfg, sizes, self._packer(cfg, sizes), blocks)
                return CudaGradients(shape, packer, loaded, of_weights)

            made = self._agree(make, "the loading of the kernel of gradients")
            arguments = made.arguments
            arguments.use(self._shared.buffers(mine))
            self._shared.add(made, _nothing, lambda: arguments.use(self._shared.buffers(mine)))
            if made.kernel is not None:
                arguments.pack_code(*made.kernel.code)
            held.gradients = made
            torch.cuda.synchronize()

    def _make_saving(self) -> CudaSaving:
        """The kernel that saves rows, for calls in the layer's own buffers."""
        shape, mine = dataclasses.replace(self._shape, saves=True), self._mine
        kernel = self._compiled(shape, "the kernel that saves rows")

        def make() -> CudaSaving:
            packer = SavingPacker(self._packer(shape.cfg, shape.sizes))
            return CudaSaving(shape, packer, self._load(kernel, shape, mine.kernels))

        made = self._agree(make, "the loading of the kernel that saves rows")
        arguments = made.arguments
        arguments.use(self._shared.buffers(mine))
        self._shared.add(made, _nothing, lambda: arguments.use(self._shared.buffers(mine)))
        if made.kernel is not None:
            arguments.pack_code(*made.kernel.code)
        return made

    def _record(self, tensors: CallTensors) -> Recording:
        rows, most = tensors.x.shape[0], self._shape.cfg.max_tokens
        tokens = rows
        if tensors.tokens is not None:
            tokens = min(rows, max(0, int(tensors.tokens)))
        slots = self._shape.cfg.slots
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        identity = calls.identity(self._number, tensors.pieces)
        rule, w1_rows = self._saved_rows, self._shape.cfg.w1_rows
        self._left = False
        with torch.cuda.device(self._device):
            saved = saved_tensors.room_for(rule, w1_rows, tensors.x, tensors.pieces)
            shares = saved_tensors.shares_of(rule, saved, tensors.x, tensors.pieces)
            readable = self._readable(tensors)
            for number, piece in enumerate(pieces_of(readable, most)):
                self._piece(piece, identity, shares[number])
                here = min(max(0, rows - number * most), most)
                tables = self._shared.buffers(self._mine).tables
                found.append(
                    cuda_gradients.routing_in(
                        tables,
                        self._offsets,
                        here,
                        slots,
                        pairs=self._slicing.slices if self._slicing.apart else 1,
                        zero_experts=self._shape.cfg.zero_experts > 0,
                        expert_at=self._holdings.expert_at,
                    )
                )
                self._note_more()
        ids, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Recording(ids, weights, tokens, saved, self._shared.begun)

    def _backward(self, tensors: GradientTensors) -> None:
        made = self._holdings.gradients
        assert made is not None  # made before the forward call
        if self._shared.closed:
            self._shared.require_open()  # which raises: the buffers may be gone
        require_memory(tensors)  # which may be gone since the forward call
        if tensors.d_out.data_ptr() % ADDRESS_ALIGNMENT != 0:
            tensors = tensors._replace(d_out=tensors.d_out.clone())
        if tensors.saved.data_ptr() % ADDRESS_ALIGNMENT != 0:
            tensors = tensors._replace(saved=tensors.saved.clone())
        shares = saved_tensors.shares_to_load(
            self._saved_rows, self._shape.cfg.w1_rows, tensors, self._world.rank
        )
        identity = self._saved_rows.identity_of_backward(self._number, tensors.pieces, tensors.of)
        adds = tensors.pieces > 1
        with torch.cuda.device(self._device):
            tensors.d_topk_weights.zero_()
            tensors.d_x[tensors.tokens :].zero_()
            pieces = gradient_pieces_of(tensors, self._shape.cfg.max_tokens)
            for piece, share in zip(pieces, shares, strict=True):
                if adds:
                    piece = cuda_gradients.with_own_weights(piece)
                self._gradient_piece(made, piece, share, identity)
                if adds:
                    cuda_gradients.add_weights(tensors, piece)

    def _gradient_piece(
        self,
        made: CudaGradients,
        piece: GradientTensors,
        share: saved_tensors.Share,
        identity: int,
    ) -> None:
        if self._faults.late:
            self._faults.before_call()
        self._last = made.shape
        sent_bytes = made.shape.sizes.sent_bytes
        sent = torch.empty((piece.tokens, sent_bytes), dtype=torch.uint8, device=self._device)
        if piece.b2 is not None and not self._adds_bias:
            piece = piece._replace(b2=self._zeros_like_b2(piece.b2))
        made.arguments.pack(piece, share, sent, identity)
        self._shared.note_backward(piece.of)
        self._start(made, identity)
        if cuda_gradients.wants_weights(piece):
            made.make_weights(torch._C._cuda_getCurrentRawStream(self._device.index))
            self._note_more()

    def _note_more(self) -> None:
        """Makes later calls wait for what has been launched after the last one, too."""
        if not torch._C._cuda_isCurrentStreamCapturing():
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            self._launches.launched(stream, lives=cuda_chain.lives(self._device.index))

    def _first_failure(self) -> _runtime.Failure | None:
        cuda_wait.synchronize(self._device)
        return self._shared.first_failure()

    def _stats(self) -> CallStats:
        cuda_wait.synchronize(self._device)
        return cuda_records.stats_of(
            *(self._world.rank, self._holdings.records, self._offsets, self._last),
            self._placement,
            left=self._left,
        )

    def _trace(self) -> RankTrace:
        cuda_wait.synchronize(self._device)
        # Ranks of one process share a GPU, and so its clock.
        behind = 0
        if not self._world.control.shares_memory:
            with torch.cuda.device(self._device):
                behind = cuda_clock.behind_host().nanoseconds
        return cuda_records.trace_of(
            self._world.rank,
            self._holdings.records,
            self._offsets,
            self._shape,
            behind,
            self._placement,
        )

    def _piece(
        self, tensors: CallTensors, identity: int, share: saved_tensors.Share | None = None
    ) -> None:
        """Launches a piece of a call; the engine's device is the current one. `share`: where it
        saves rows, in a layer that does.
        """
        if self._faults.late:
            self._faults.before_call()
        if not self._adds_bias:
            tensors = self._without_b2(tensors)
        self._last = self._shape
        saving = self._holdings.saving
        if share is None or saving is None:
            self._holdings.arguments.pack(tensors, identity, self._left)
            self._start(self._holdings, identity)
        else:
            saving.arguments.pack(tensors, share, identity)
            self._start(saving, identity)

    def _start(self, held: CudaHoldings | CudaSaving | CudaGradients, identity: int) -> None:
        """Launches the call that has been packed; the engine's device is the current one."""
        self._shared.begun += 1
        if self._virtual:
            self._launch_together(held, identity)
            return
        failure = self._shared.failure.read()
        if failure is not None:
            raise self._exception_of(failure, identity)
        assert held.kernel is not None  # only virtual ranks leave it to rank 0
        # As torch.cuda.current_stream() but for the object, whose making takes 3 µs.
        self._launch(
            held.kernel, held.launch, torch._C._cuda_getCurrentRawStream(self._device.index)
        )

    def _without_b2(self, tensors: CallTensors) -> CallTensors:
        """The call with zeros for b2, which the rank of another slice adds."""
        if tensors.b2 is None:
            return tensors
        return tensors._replace(b2=self._zeros_like_b2(tensors.b2))

    def _zeros_like_b2(self, b2: torch.Tensor) -> torch.Tensor:
        if self._no_bias is None:
            self._no_bias = torch.zeros_like(b2)
        return self._no_bias

    def _launch(self, kernel: LoadedKernel, launch: LaunchArguments, stream: int) -> None:
        """Launches a call after the world's last one, whose stream it mostly shares."""
        launches = self._launches
        if stream == launches.stream and not torch._C._cuda_isCurrentStreamCapturing():
            kernel.launch(stream, launch)
        elif launches.join(stream):
            self._note_capture()
            kernel.launch(stream, launch)
        else:
            kernel.launch(stream, launch)
            launches.launched(stream, lives=cuda_chain.lives(self._device.index))

    def _note_capture(self) -> None:
        self._holdings.captured = True
        self._shared.note_capture()

    def _exception_of(self, failure: _runtime.Failure, identity: int) -> Exception:
        world = self._world
        told = world.rank, identity, world.layer_names, world.group
        return exception_of(failure, *told, _tokens_in, self._shared.derived_in(failure.epoch))

    def _compiled(self, shape: KernelShape, what: str) -> Kernel:
        """The kernel of a shape. Every rank asks for it: the ranks of a host wait for one compiler,
        and all ranks wait for hosts that have no such kernel on their disk.
        """
        return self._agree(lambda: jit.compile_kernel(shape), what, beyond=_COMPILING)

    def _agree(self, do: Callable[[], Value], what: str, *, beyond: float = 0.0) -> Value:
        """What `do()` returns here, if it returns on all ranks; else its error, on all ranks."""
        error: Exception | None = None
        value: Value | None = None
        try:
            value = do()
        except (ValueError, RuntimeError) as raised:  # CUDA's and torch's are RuntimeErrors
            error = raised
        raise_together(self._world.control, error, what, beyond=beyond)
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

    def _shape_of(self, cfg: MoEConfig, peers: Peers) -> KernelShape:
        ranks = self._world.size if self._virtual else 1
        blocks = torch.cuda.get_device_properties(self._device).multi_processor_count
        most = min(blocks // 2, MAX_ARGUMENT_BYTES // RECORD_BYTES)
        if ranks > most:
            raise ValueError(f"{ranks} virtual ranks are too many for one launch; at most {most}")
        world, processors = self._world, blocks // ranks - 1
        self._faults = LayerFaults(world.faults, world.rank, self._number, processors, pinned=True)
        shape = KernelShape(
            cfg=cfg,
            world_size=self._slicing.place(world.rank, world.size)[1],
            processors=processors,
            virtual_ranks=ranks,
            transport=peers.transport,
            trace_events=self._world.trace_events,
            places=0 if self._placement is None else self._placement.most,
            slicing=self._slicing,
            faults=self._faults.on_device,
        )
        shape.sizes  # noqa: B018 - raises if a bound does not fit
        return shape

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _packer(self, cfg: MoEConfig, sizes: _runtime.Sizes) -> ArgumentPacker:
        """The packer of what this rank's launches of the layer are given."""
        world = self._world
        return ArgumentPacker(
            cfg,
            sizes,
            world.rank,
            world.deadline,
            self._shared.failure.address,
            self._holdings.records,
        )

    def _load(
        self, kernel: Kernel, shape: KernelShape, kernels: dict[bytes, LoadedKernel]
    ) -> LoadedKernel | None:
        """The kernel, which layers of one shape share: `kernels` has those of this shape."""
        record_bytes = SAVING_RECORD_BYTES if shape.saves else RECORD_BYTES
        record_bytes = GRADIENT_RECORD_BYTES if shape.gradients else record_bytes
        if kernel.report.argument_bytes != record_bytes:
            raise RuntimeError(
                f"the kernel takes {kernel.report.argument_bytes} bytes of arguments for each rank "
                f"and the host packs {record_bytes}: the installation mixes versions"
            )
        if self._virtual and self._world.rank != 0:
            return None
        if kernel.cubin not in kernels:
            blocks = (shape.processors + 1) * shape.virtual_ranks
            name = jit.kernel_name(shape)
            kernels[kernel.cubin] = LoadedKernel(kernel, blocks, self._by_nvshmem, name=name)
        return kernels[kernel.cubin]

    def _launch_together(
        self, held: CudaHoldings | CudaSaving | CudaGradients, identity: int
    ) -> None:
        """Launches the call of all virtual ranks, in the order of each rank's stream.

        A failure that any rank has seen raises on all.
        """
        stream = torch.cuda.current_stream()
        ready = torch.cuda.Event()
        ready.record(stream)
        offer = (identity, held.arguments.record.copy(), ready, self._shared.failure.read())
        offers = self._world.control.allgather(offer, "a call of a layer")
        for rank, (other, _, _, _) in enumerate(offers):
            if other != offers[0][0]:
                raise RuntimeError(
                    different_calls(0, offers[0][0], rank, other, self._world.layer_names)
                )
        for _, _, _, failure in offers:
            if failure is not None:
                raise self._exception_of(failure, identity)
        outcome: torch.cuda.Event | Exception | None = None
        if held.kernel is not None:
            try:
                for _, _, event, _ in offers:
                    stream.wait_event(event)
                records = [record for _, record, _, _ in offers]
                numpy.concatenate(records, out=held.launch.arguments)
                self._launch(held.kernel, held.launch, stream.cuda_stream)
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
        """Notes rank 0's launch, which is done when `stream` comes here."""
        if torch._C._cuda_isCurrentStreamCapturing():
            self._note_capture()
        else:
            self._launches.launched(stream, lives=cuda_chain.lives(self._device.index))


class CudaHoldings:
    """The part of a GPU that a layer has for itself; see `moeos.world.world.Holdings`.

    Attributes:
        records, arguments, launch, kernel: as they are made; gone after the end. No kernel on
            virtual ranks but rank 0.
        captured: whether a call of the layer is part of a graph, which may be replayed.
        expert_at: see `cuda_records.experts_at`; None where no table says where experts lie.
        gradients: what calls of gradients have; None before the first one is asked for.
        saving: what forward calls have that save rows for them; None likewise, and in a layer whose
            calls save nothing.
    """

    records: torch.Tensor
    arguments: ArgumentPacker
    launch: LaunchArguments
    kernel: LoadedKernel | None

    def __init__(
        self,
        shared: CudaWorkspace,
        faults: LayerFaults,
        offsets: dict[str, int],
        placement: Placement | None,
    ) -> None:
        self.gate = shared.gate
        self.captured = False
        self.expert_at: torch.Tensor | None = None
        self.gradients: CudaGradients | None = None
        self.saving: CudaSaving | None = None
        self._shared = shared
        self._faults = faults
        self._offsets = offsets
        self._placement = placement

    def clear(self, *, again: bool = True) -> None:
        """Forgets the last call, on the current stream; `again`: what goes wrong once has."""
        self.records.zero_()
        if self._faults.on_device:
            plan = torch.frombuffer(bytearray(self._faults.packed(again=again)), dtype=torch.uint8)
            self.records[self._offsets["faults"] :][: len(plan)].copy_(plan)
        if self._placement is not None:
            self.place(self._placement)

    def place(self, placement: Placement) -> None:
        """Says where experts lie, on the current stream."""
        self._placement = placement
        cuda_records.write_table(self.records, self._offsets, placement)
        self.expert_at = cuda_records.experts_at(placement, self.records.device)

    def interrupt(self, reason: str) -> None:
        """Does nothing: the workspace ends the call."""

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`."""
        records = vars(self).get("records")
        return {"records": 0 if records is None else len(records)}

    def end(self, *, world_ends: bool = False) -> bool:
        """Waits for the calls and gives the records back.

        False, unless the world ends, as long as a capture forbids to wait or a graph may replay a
        call.
        """
        if self.captured and not world_ends:
            return False
        if "records" in vars(self) and not world_ends:
            # A kernel that crashed has said so before.
            with contextlib.suppress(RuntimeError):
                if not self._shared.on_gpu.launches.wait():
                    return False
        self._shared.remove(self)
        if self.saving is not None:
            self._shared.remove(self.saving)
            self.saving = None
        if self.gradients is not None:
            self._shared.remove(self.gradients)
            self.gradients.unload()
            self.gradients = None
        self._faults.close()
        for name in ("records", "arguments", "launch", "kernel"):
            vars(self).pop(name, None)
        return True


def _nothing() -> None:
    """Clears nothing: the records of calls of gradients are the layer's."""


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
    tensors: CallTensors, ids: torch.Tensor, weights: torch.Tensor | None
) -> CallTensors:
    """The call with copies of its routing that the kernel can read."""
    require_memory(tensors, "topk_ids", "topk_weights")  # which PyTorch reads
    if weights is not None:
        weights = weights if weights.dtype in WEIGHT_TYPES else weights.float()
        weights = weights.contiguous()
    return tensors._replace(topk_ids=ids.contiguous(), topk_weights=weights)
