# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel on the emulated GPU of gpu.hpp: the same source, run lane by lane on a CPU.

Holds no test. `build` compiles the kernel of one layer with the macros that NVRTC would be given;
an `EmulatedLayer` has the memory of all virtual ranks and makes calls.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeos import MoEConfig, Placement, _runtime
from moeos.compile import jit
from moeos.compile.kernel_shape import KernelShape
from moeos.engines.counters import CallStats
from moeos.engines.cuda import backward_kernels as cuda_gradients
from moeos.engines.cuda import records as cuda_records
from moeos.engines.shared_heap import SharedHeap
from moeos.partition.slicing import WHOLE, Slicing
from tests.compiled import PARTS, keep
from tests.layers import (
    Call,
    Weights,
    assert_matches,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.processes import ROOT
from tests.weight_layouts import in_layout

DEADLINE_NS = 1_000_000
"""Of the emulated clock, as every other time."""
TICK_NS = 100
"""A turn of all warps, as in gpu.cpp."""
LIMIT_NS = 4 * DEADLINE_NS + 6_000_000
"""How long a kernel may take: a failure ends it within three deadlines, or a trap 5 ms later."""

_SAID_BYTES = 1 << 16
_CUDA = "tests/emulator/cuda.hpp"
_INCLUDED = ("runtime", "kernels", "tests/emulator")
_OPTIONS = (
    *("-std=c++20", "-fPIC", "-w", "-I", "."),
    "-DMOEOS_PLANTS",  # a library has all faults, and plants one or none as it is loaded
    "-mf16c",  # or a library's functions convert each number of 16 bits; and products.cpp needs it
)
_LAYER_OPTIONS = ("-Og", *_OPTIONS)
"""Of a kernel: it runs as fast as with -O1, and is compiled in two thirds of the time."""
_COMPILING_GPU = threading.Lock()
_FIELDS = (
    *("heap", "control", "tables", "records", "intermediate", "host_failure"),
    *("x", "gate", "w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2"),
    *("selection_bias", "router_bias", "expert_scale"),
    *("shared_w1", "shared_w2", "shared_gate", "shared_w1_scale", "shared_w2_scale"),
    *("shared_w1_scale_2", "shared_w2_scale_2", "ids", "weights", "token_count", "x_scale", "out"),
    *("d_out", "d_x", "d_topk_weights", "d_w1", "d_w2", "d_b1", "d_b2", "d_x_added"),
    *("d_shared", "saved", "w3", "d_w3"),
)
"""Tensors of RankTensors in emulated.cpp."""


class EmulatorFault(AssertionError):
    """The kernel hangs, or does what the GPU would not forgive; says where."""


FOREVER = (1 << 64) - 1


class Starved(ctypes.Structure):
    """A warp that is given no turn: `Starved(block, warp, first tick, tick behind the last)`."""

    _fields_ = (
        ("block", ctypes.c_uint),
        ("warp", ctypes.c_uint),
        ("from_tick", ctypes.c_uint64),
        ("until_tick", ctypes.c_uint64),
    )


def _compile(arguments: Sequence[str]) -> None:
    ended = subprocess.run(
        ["g++", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@functools.cache
def _compiled_gpu() -> tuple[tempfile.TemporaryDirectory[str], list[str], Path]:
    """What no layer has one of its own of: the emulated GPU with its products, and CUDA's built-ins
    with the standard library below them, a third of a kernel's compilation; and their folder, while
    we run."""
    folder = tempfile.TemporaryDirectory(prefix="moeos-emulator-")
    parts = {name: Path(folder.name) / f"{name}.o" for name in ("gpu", "products")}
    for name, part in parts.items():
        arguments = ["-O3", *_OPTIONS, "-c", f"tests/emulator/{name}.cpp", "-o", str(part)]
        make = functools.partial(_compile, arguments)  # amid the making of a library
        keep(part, [*arguments[:-1]], _INCLUDED, make, PARTS)
    cuda = Path(folder.name) / "cuda.hpp"
    # Only cuda.hpp.gch is there, so that one which does not fit is an error.
    _compile([*_LAYER_OPTIONS, "-x", "c++-header", _CUDA, "-o", f"{cuda}.gch"])
    return folder, [*map(str, parts.values())], cuda


def build(
    cfg: MoEConfig,
    ranks: int,
    processors: int,
    folder: Path,
    *,
    faults: bool = False,
    large_experts: bool = False,
    plans_up_front: bool = True,
    between_rows: int | None = None,
    ring_rows: int | None = None,
    places: int = 0,
    gradients: bool = False,
    saves: bool = False,
    slicing: Slicing = WHOLE,
    remote: bool = False,
) -> Path:
    """Compiles the kernel of `ranks` virtual ranks; the shared library in `folder`.

    `faults`: the kernel that does what fault plans say. `large_experts`: the kernel believes that
    they are, whatever their size. `plans_up_front`: unless it is false, calls whose counts come in
    time are planned up front. `between_rows`, `ring_rows`: Geometry's, if not the layer's.
    `places`: of a rank, where a table says which experts they have.
    `gradients`: the kernel of calls of gradients. `saves`: the kernel that saves rows, or finds
    them saved.
    `slicing`: how experts are cut. `remote`: each rank reaches all others by puts.
    """
    shape = KernelShape(
        cfg=slicing.cut(cfg),
        world_size=slicing.place(0, ranks)[1],
        processors=processors,
        virtual_ranks=ranks,
        places=places,
        slicing=slicing,
        transport="mapped" if remote else "none",
        faults=faults,
        gradients=gradients,
        saves=saves,
    )
    library = folder / "emulated.so"
    values = jit.macros(shape)
    if large_experts:
        values["GEOMETRY"] = _with_size(values["GEOMETRY"], "large_experts", 1)
    if not plans_up_front:
        values["GEOMETRY"] = _with_size(values["GEOMETRY"], "up_front_rows", 0)
    if between_rows is not None:
        values["GEOMETRY"] = _with_size(values["GEOMETRY"], "between_rows", between_rows)
    if ring_rows is not None:
        values["GEOMETRY"] = _with_size(values["GEOMETRY"], "ring_rows", ring_rows)
    macros = [f"-DMOEOS_{name}={value}" for name, value in values.items()]
    # The stand-ins of what is PTX come first. Several libraries are loaded into one process, each
    # with a kGeometry of its own.
    options = ["-I", "tests/emulator/shadow", *_LAYER_OPTIONS, *macros]
    options += ["-shared", "-fno-gnu-unique", "-Wl,-Bsymbolic"]

    def make() -> None:
        with _COMPILING_GPU:
            _, gpu, cuda = _compiled_gpu()
        inputs = ["-include", str(cuda), "tests/emulator/emulated.cpp", *gpu]
        _compile([*options, *inputs, "-o", str(library)])

    keep(library, options, _INCLUDED, make)
    return library


def build_topk(library: Path, type_: int, kept: int) -> None:
    """Compiles the kernel of `moeos.topk` with its two macros into a shared library."""
    options = ["-I", "tests/emulator/shadow", *_LAYER_OPTIONS]
    options += [f"-DMOEOS_TYPE={type_}", f"-DMOEOS_KEPT={kept}"]
    options += ["-shared", "-fno-gnu-unique", "-Wl,-Bsymbolic"]

    def make() -> None:
        with _COMPILING_GPU:
            _, gpu, cuda = _compiled_gpu()
        inputs = ["-include", str(cuda), "tests/emulator/topk.cpp", *gpu]
        _compile([*options, *inputs, "-o", str(library)])

    keep(library, [*options, "topk"], _INCLUDED, make)


def _with_size(geometry: str, name: str, value: int) -> str:
    """A geometry's text in which a size has another value."""
    text, found = re.subn(rf"\.{name}=\d+,", f".{name}={value},", geometry)
    assert found == 1, name
    return text


class EmulatedLayer:
    """All ranks of a layer on one emulated GPU; `plans`: of each, what `LayerFaults` packs;
    `placement`: where experts lie, of a kernel that was built for as many places; `slicing`: how
    they are cut, of one that was built so.

    `patience`: so many times the deadline, and the time in which a launch must end.

    Attributes:
        any_ids: of its calls, see `moeos.engines.base.CallTensors`.
        leaves_partials: whether its calls leave partial sums, see runtime/words/call.hpp.
        saved: of each rank, the rows that its kernel saves or finds saved; None of one that does
            neither.
        saved_of_source: rows of each source among them.
    """

    def __init__(
        self,
        library: Path,
        weights: Weights,
        ranks: int,
        plans: Sequence[bytes] = (),
        patience: int = 1,
        placement: Placement | None = None,
        slicing: Slicing = WHOLE,
    ) -> None:
        self._placement = placement
        self._slicing = slicing
        self.any_ids = False
        self.leaves_partials = False
        self.saved: list[Tensor | None] = [None] * ranks
        self.saved_of_source = 0
        self._patience = patience
        self._library = ctypes.CDLL(str(library))
        for name in ("heap", "control", "tables", "records", "intermediate"):
            getattr(self._library, f"emulated_{name}_bytes").restype = ctypes.c_uint64
        self._library.emulated_faults_at.restype = ctypes.c_uint64
        self._library.emulated_barriers.restype = ctypes.c_char_p
        self._weights = weights
        self._ranks = ranks
        self._heaps = self._memories("heap")
        self._control = self._memories("control")
        self._tables = self._memories("tables")
        self._records = self._memories("records")
        self._between = self._memories("intermediate")
        self._failures = [torch.zeros(128, dtype=torch.uint8) for _ in range(ranks)]
        self.identities = [0] * ranks
        self._place = (0, 0, 0, 0)  # in a heap of its own
        self.set_epoch(1)
        for own, plan in zip(self._records, plans, strict=False):
            own[self._library.emulated_faults_at() :][: len(plan)] = torch.frombuffer(
                bytearray(plan), dtype=torch.uint8
            )
        if placement is not None:
            begins, places = (
                (ctypes.c_uint * len(numbers))(*numbers) for numbers in placement.table()
            )
            for own in self._records:
                self._library.emulated_place(ctypes.c_void_p(own.data_ptr()), begins, places)

    def __call__(
        self, calls: Sequence[Call], seed: int, starved: Starved | None = None
    ) -> list[Tensor]:
        """The outputs of a call of each rank; raises `EmulatorFault`."""
        return self.at_once([calls], seed, 0, starved)[0]

    def at_once(
        self,
        launches: Sequence[Sequence[Call]],
        seed: int,
        apart_ns: int,
        starved: Starved | None = None,
    ) -> list[list[Tensor]]:
        """The outputs of launches that do not wait for each other, [launch][rank]; each begins so
        much behind the one before. Raises `EmulatorFault`."""
        outputs = [
            [torch.full_like(call.x, torch.nan, dtype=self._weights.cfg.dtype) for call in calls]
            for calls in launches
        ]
        kept: list[Tensor] = []
        records: list[int] = []
        for calls, outs in zip(launches, outputs, strict=True):
            for rank, (call, out) in enumerate(zip(calls, outs, strict=True)):
                records += self._record(rank, call, out, kept)
        said = ctypes.create_string_buffer(_SAID_BYTES)
        status = self._library.emulated_call(
            (ctypes.c_uint64 * len(records))(*records),
            ctypes.c_uint64(len(launches)),
            ctypes.c_uint64(apart_ns),
            ctypes.c_uint64(seed),
            ctypes.c_uint64(self._patience * DEADLINE_NS),
            ctypes.c_uint64(self._patience * LIMIT_NS),
            None if starved is None else ctypes.byref(starved),
            said,
            ctypes.c_uint64(_SAID_BYTES),
        )
        if status != 0:
            raise EmulatorFault(self._with_names(said.value.decode()))
        return outputs

    def set_epoch(self, epoch: int) -> None:
        """Makes the next call of all ranks number `epoch`."""
        for own in self._control:
            self._library.emulated_set_epoch(ctypes.c_void_p(own.data_ptr()), ctypes.c_uint(epoch))

    def share(self, others: Sequence[EmulatedLayer], shapes: Sequence[_runtime.Sizes]) -> None:
        """Makes this layer and others, of other shapes, layers of one workspace; `shapes`: of all,
        this one's first. Their ranks and processors are as many.
        """
        layers = [self, *others]
        plan = SharedHeap()
        for sizes in shapes:
            plan = plan.with_shape(sizes)
        self._heaps = [_aligned(plan.size) for _ in range(self._ranks)]
        most = max(sizes.intermediate_bytes for sizes in shapes)
        self._between = [_aligned(most) for _ in range(self._ranks)]
        for index, layer in enumerate(layers):
            place = plan.place(index)
            layer._place = dataclasses.astuple(place)
            layer._heaps, layer._between = self._heaps, self._between
            layer._control, layer._failures = self._control, self._failures

    def reset(self) -> None:
        """What a reset of all ranks does, but for fault plans."""
        parts = (self._heaps, self._control, self._tables, self._records, self._failures)
        for memory in itertools.chain(*parts):
            memory.zero_()
        self.set_epoch(1)

    def _record(self, rank: int, call: Call, out: Tensor, kept: list[Tensor]) -> list[int]:
        """RankTensors of a rank's launch; `kept` must live as long as it runs."""
        w = self._weights.of_rank(rank, self._ranks, self._placement)
        if self._slicing.cuts:
            w = self._weights.of_slice(self._slicing, rank, self._ranks)
        tensors = {
            "heap": self._heaps[rank],
            "control": self._control[rank],
            "tables": self._tables[rank],
            "records": self._records[rank],
            "intermediate": self._between[rank],
            "host_failure": self._failures[rank],
            "x": call.x,
            "x_scale": call.x_scale,
            "gate": w.gate,
            **{"b2": w.b2, **w.scales(), **in_layout(w)},
            "selection_bias": w.selection_bias,
            "router_bias": w.router_bias,
            "expert_scale": w.expert_scale,
            "shared_w1": w.shared_w1,
            "shared_w2": w.shared_w2,
            "shared_gate": w.shared_gate,
            **w.shared_scales(),
            "ids": call.ids,
            "weights": call.weights,
            "token_count": None,
            "out": out,
            "saved": self.saved[rank],
            **self._of_gradients(rank, call),
        }
        record: list[int] = []
        kept += [tensor for tensor in tensors.values() if tensor is not None]
        for name in _FIELDS:
            tensor = tensors.get(name)
            assert tensor is None or tensor.is_contiguous()
            record.append(0 if tensor is None else tensor.data_ptr())
        record += [len(w.w1), self.saved_of_source, len(call.x), int(self.any_ids)]
        record += [int(self.leaves_partials), self.identities[rank]]
        return [*record, *self._place]

    def _of_gradients(self, rank: int, call: Call) -> dict[str, Tensor | None]:
        """The tensors of a call of gradients besides."""
        return {}

    def stats(self, rank: int, processors: int) -> CallStats:
        """What a rank counted in the last call; `processors`: that the kernel was built with."""
        shape = self._shape(processors)
        return cuda_records.stats_of(
            rank, self._records[rank], shape.sizes.offsets, shape, self._placement
        )

    def routing(self, rank: int, processors: int, tokens: int) -> tuple[Tensor, Tensor]:
        """How the last call of a rank routed, as a call that keeps a gradient finds it."""
        cfg, placed, offsets = self._weights.cfg, None, self._shape(processors).sizes.offsets
        if self._placement is not None:
            placed = cuda_records.experts_at(self._placement, torch.device("cpu"))
        zero = cfg.zero_experts > 0
        tables = self._tables[rank]
        return cuda_gradients.routing_in(
            tables, offsets, tokens, cfg.slots, zero_experts=zero, expert_at=placed
        )

    def _shape(self, processors: int) -> KernelShape:
        return KernelShape(
            cfg=self._slicing.cut(self._weights.cfg),
            world_size=self._slicing.place(0, self._ranks)[1],
            processors=processors,
            virtual_ranks=self._ranks,
            slicing=self._slicing,
            places=0 if self._placement is None else self._placement.most,
        )

    def _with_names(self, said: str) -> str:
        """A report with the barriers' names for their offsets in shared memory."""
        for line in self._library.emulated_barriers().decode().splitlines():
            name, offset, count = line.split()
            for index in range(int(count)):
                at = f"an mbarrier at {int(offset) + 8 * index}"
                said = said.replace(at, f"{name}[{index}]")
        return said

    def failures(self) -> list[bytes]:
        """What each rank has shown its host: the record, all zeros for none."""
        return [bytes(failure.numpy().tobytes()) for failure in self._failures]

    def _memories(self, name: str) -> list[Tensor]:
        size = getattr(self._library, f"emulated_{name}_bytes")()
        return [_aligned(size) for _ in range(self._ranks)]


def _aligned(size: int) -> Tensor:
    """So many bytes of zeros, from a cache line on."""
    # Room to spare: an address beyond is a mistake that the debug checks should have found.
    made = torch.zeros(size + 128, dtype=torch.uint8)
    return made[-made.data_ptr() % 128 :][:size]


def assert_computes(
    cfg: MoEConfig, ranks: int, folder: Path, patience: int, weights: Weights | None = None
) -> None:
    """Calls of many and of few tokens, routed by the layer and by the caller, are the reference's;
    `patience`: of `EmulatedLayer`; `weights`: None for drawn ones.
    """
    weights = weights or draw_weights(cfg)
    emulated = EmulatedLayer(build(cfg, ranks, 3, folder), weights, ranks, patience=patience)
    for number, tokens in enumerate((200, 3, 70, 0)):
        calls = [
            draw_call(cfg, max(0, tokens - rank), 10 * number + rank)
            if number % 2 == 0
            else draw_given_call(cfg, max(0, tokens - rank), 10 * number + rank, unused=0.5)
            for rank in range(ranks)
        ]
        for call, y in zip(calls, emulated(calls, number), strict=True):
            assert_matches(weights, call, y, f"call {number}")
