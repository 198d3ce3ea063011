# SPDX-License-Identifier: Apache-2.0
"""The twin: a layer of the device OS on CPU threads, through the compiled module `moeos._twin`.

The default where there is no GPU, and the place where every invariant of the protocol is tested. It
is the same scheduler, subscribers, packets and tile plan as on the GPU; only the arithmetic is its
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy
import torch

from moeos import _runtime, _twin
from moeos.config.config import MoEConfig
from moeos.config.element_formats import exponent_value
from moeos.config.sizes import layer_sizes, of_gradients, parts, routed_alone, shared_cut
from moeos.engines import calls, counters, saved_tensors, values
from moeos.engines.base import CallTensors, GradientTensors, Recording, require_memory
from moeos.engines.counters import CallStats
from moeos.engines.failure import exception_of
from moeos.engines.pieces import gradient_pieces_of, pieces_of
from moeos.engines.reducing import Reduction
from moeos.engines.saved_rows import SavedRows, saved_rows
from moeos.engines.twin.workspace import TwinShape, TwinWorkspace
from moeos.partition.placement import Placement, experts_of, why_no_backward
from moeos.partition.slicing import WHOLE, Slicing, digest
from moeos.system.errors import PeerTimeout
from moeos.world import tracing
from moeos.world.faults import LayerFaults
from moeos.world.tracing import EVENT, OS_ACTORS, RankTrace
from moeos.world.world import SharedMemory, World

DTYPES = (torch.float32, torch.bfloat16)
"""Storage types that the twin computes with."""

_TILE_ROWS = 128
"""The GPU's number, so that both pack the same tiles."""
_ROUTE_TOKENS = 32
"""Few enough that several processors share a call of few tokens."""
_DEDUP_ROWS = 16
"""Sending tokens once gains nothing where peers share memory: low, so that tests exercise it."""
_DEDUP_AFTER = 1
"""Likewise: the first chunk from such a source brings all of its rows."""
_DISPATCH_TOKENS = 4
"""Likewise: calls of few tokens have some, and others none."""
_UP_FRONT_ROWS = 32
"""Likewise: some calls with remote peers are planned up front, others as rows arrive."""


def sizes_of(
    cfg: MoEConfig,
    world_size: int,
    processors: int,
    remote: bool = False,
    trace_events: int = 0,
    places: int = 0,
    rows: Mapping[str, int] | None = None,
) -> _runtime.Sizes:
    """Buffers and bounds of a layer on the twin; arguments and errors as of `layer_sizes`."""
    columns = (_twin.GATED_COLUMNS if cfg.gated else _twin.PLAIN_COLUMNS, _twin.PLAIN_COLUMNS)
    product0_parts, product1_parts = parts(cfg, *columns)
    cut = {
        "tile_rows": _TILE_ROWS,
        "route_tokens": _ROUTE_TOKENS,
        "route_slices": 1,
        "product0_parts": product0_parts,
        "product1_parts": product1_parts,
        "segment_align": _runtime.SEGMENT_ALIGN,
        "dedup_rows": _DEDUP_ROWS,
        "dedup_after": _DEDUP_AFTER,
        "dispatch_tokens": _DISPATCH_TOKENS,
        "up_front_rows": _UP_FRONT_ROWS,
        **shared_cut(cfg, columns[0]),
    }
    return layer_sizes(
        cfg,
        world_size,
        processors,
        cut,
        remote=remote,
        trace_events=trace_events,
        places=places,
        rows=rows,
    )


def gradient_sizes_of(
    cfg: MoEConfig,
    world_size: int,
    processors: int,
    remote: bool = False,
    trace_events: int = 0,
    places: int = 0,
    slicing: Slicing = WHOLE,
) -> _runtime.Sizes:
    """The sizes of a layer's calls of gradients, which have routed experts alone. Where experts are
    cut, each rank gets all sums.
    """
    routed = routed_alone(cfg)
    place = (world_size, processors, remote, trace_events, places)
    rows = dataclasses.replace(slicing, everywhere=True).sizes(cfg, world_size)
    plain = sizes_of(routed, *place, rows)
    sent, kept = _twin.gradient_row_bytes(plain, cfg.dtype == torch.bfloat16)
    return sizes_of(routed, *place, {**rows, **of_gradients(sent, kept)})


class TwinEngine:
    """One layer on one rank of the twin. Collective to make.

    Calls of the layers of a workspace may come from any threads, and run one at a time, in the same
    order on every rank. Calls of another workspace may run at the same time, in any order.
    """

    @staticmethod
    def check_supported(cfg: MoEConfig) -> None:
        """See `Engine.check_supported`."""
        if cfg.dtype not in DTYPES:
            allowed = " or ".join(map(str, DTYPES))
            raise ValueError(f"dtype is {cfg.dtype}; the twin computes with {allowed}")

    def check_weighs(self) -> None:
        """See `Engine.check_weighs`: the twin's can."""

    def require_open(self) -> None:
        """See `Engine.require_open`."""
        self._world.require_open()
        self._shared.require_open()

    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        shared: SharedMemory,
        placement: Placement | None = None,
        slicing: Slicing = WHOLE,
    ) -> None:
        assert isinstance(shared, TwinWorkspace)
        self._cfg = cfg
        self._world = world
        self._placement = placement
        self._slicing = slicing
        self._place, self._holders = slicing.place(world.rank, world.size)
        remote = not all(map(world.near, range(world.size)))
        places = 0 if placement is None else placement.most
        rows = slicing.sizes(cfg, self._holders)
        sizes = sizes_of(
            cfg, self._holders, world.processors, remote, world.trace_events, places, rows
        )
        slicing.policy.require_fits(sizes)
        self._sizes = sizes
        self._number = world.number_layer()
        self._faults = LayerFaults(
            world.faults, world.rank, self._number, world.processors, pinned=False
        )
        self._shared = shared
        self._holdings = TwinHoldings(shared, self._faults)
        world.hold(self, self._holdings)
        self._shape: TwinShape = shared.admit((cfg, places, slicing), sizes, slicing=slicing)
        self._reduction = Reduction(cfg, world, shared, slicing)
        self._left = False  # whether the last call left its partial sums
        self._gradients: TwinShape | None = None  # made when they are first asked for
        own = experts_of(cfg, self._place, self._holders, placement)
        self._saved_rows = saved_rows(cfg, self._holders, len(own))
        self._last = sizes  # sizes of the last call
        self._holdings.hold_records(self._shape.sizes, placement)

    def forward(self, tensors: CallTensors) -> None:
        """Runs one call on this thread and the rank's processor threads; see `Engine.forward`.

        Raises `ValueError` for an id, a number of tokens or a selection bias that cannot be, before
        anything is sent.
        """
        self._holdings.gate.run(lambda: self._forward(tensors))

    def record(self, tensors: CallTensors) -> Recording:
        """See `Engine.record`."""
        self.require_open()
        if self._gradients is None:
            self._world.together("the first backward of a layer", self._make_gradients)
        return self._holdings.gate.run(lambda: self._record(tensors))

    def backward(self, tensors: GradientTensors) -> None:
        """See `Engine.backward`."""
        self._holdings.gate.run(lambda: self._backward(tensors))

    @property
    def cfg(self) -> MoEConfig:
        """See `Engine.cfg`."""
        return self._cfg

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
        """See `Engine.room_for_sums`: what is added to, in fp32."""
        if main_grad is not None and main_grad.dtype == torch.float32:
            return main_grad
        return torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")

    def check(self) -> None:
        """See `Engine.check`: a call of the twin has raised by itself."""
        self._live()

    def place(self, placement: Placement) -> None:
        """See `Engine.place`."""
        begins, places = placement.table()
        self._live().place(places_from=begins, places=places)
        self._placement = placement

    def stats(self) -> CallStats:
        """See `Engine.stats`."""
        return self._holdings.gate.run(self._stats)

    def trace(self) -> RankTrace:
        """See `Engine.trace`."""
        self._world.require_trace()
        return self._holdings.gate.run(self._trace)

    def _forward(self, tensors: CallTensors) -> None:
        checked = self._checked(tensors)  # all of it, before anything is sent
        rows, counted = checked.x.shape[0], checked.tokens is not None
        self._left = self._reduction.leaves_partials(rows, counted=counted)
        if not self._left:
            self._call_pieces(checked)
            return
        self._reduction.begin()
        try:
            self._call_pieces(checked)
            self._add_up(checked)
        except BaseException as error:
            # After the kernel, too, a rank that leaves without sums fails the workspace.
            self._shared.give_up(interrupted=not isinstance(error, PeerTimeout))
            raise

    def _call_pieces(self, tensors: CallTensors) -> None:
        for piece in pieces_of(tensors, self._cfg.max_tokens):
            self._call(piece)

    def _add_up(self, tensors: CallTensors) -> None:
        identity = calls.identity(self._number, tensors.pieces)
        rank = self._shape.rank
        assert rank is not None  # only the end of the workspace ends it

        def look() -> None:
            failure = rank.failure()
            if failure.epoch < rank.epoch:  # a peer may have failed in a call after this
                self._require_well(failure, identity)

        self._reduction.add_up(tensors.out, look)

    def _make_gradients(self) -> None:
        if self._gradients is None:
            cfg, slicing, world = self._cfg, self._slicing, self._world
            remote = bool(self._sizes.remote)
            places = 0 if self._placement is None else self._placement.most
            machine = (world.processors, remote, world.trace_events)
            sizes = gradient_sizes_of(cfg, self._holders, *machine, places, slicing)
            key = (cfg, places, slicing)
            self._gradients = self._shared.admit(key, sizes, gradients=True, slicing=slicing)

    def _record(self, tensors: CallTensors) -> Recording:
        checked = self._checked(tensors)
        self._left = False
        tokens = values.count_tokens(checked.tokens, checked.x.shape[0])
        ids, weights = checked.topk_ids, checked.topk_weights
        chosen: tuple[torch.Tensor, torch.Tensor] | None = None
        if ids is None or weights is None:
            slots = (checked.x.shape[0], self._cfg.slots)
            ids = torch.full(slots, -1, dtype=torch.int32, device="cpu")
            weights = torch.zeros(slots, dtype=torch.float32, device="cpu")
            chosen = ids, weights
        x, pieces, rule = checked.x, checked.pieces, self._saved_rows
        saved = saved_tensors.room_for(rule, self._cfg.w1_rows, x, pieces)
        shares = saved_tensors.shares_of(rule, saved, x, pieces)
        for number, piece in enumerate(pieces_of(checked, self._cfg.max_tokens)):
            first = number * self._cfg.max_tokens
            its = None if chosen is None else (chosen[0][first:], chosen[1][first:])
            self._call(piece, its, shares[number])
        rank = self._shape.rank
        assert rank is not None  # only the end of the workspace ends it
        return Recording(ids, weights, tokens, saved, rank.epoch - 1)  # which is that of the next

    def _backward(self, tensors: GradientTensors) -> None:
        cfg, shape = self._cfg, self._gradients
        records = self._live()
        require_memory(tensors)  # which may be gone since the forward call
        assert shape is not None  # made before the forward call
        rank = shape.rank
        assert rank is not None  # only the end of the workspace ends it
        shares = saved_tensors.shares_to_load(
            self._saved_rows, cfg.w1_rows, tensors, self._world.rank
        )
        identity = self._saved_rows.identity_of_backward(self._number, tensors.pieces, tensors.of)
        for number, piece in enumerate(gradient_pieces_of(tensors, cfg.max_tokens)):
            capacity = cfg.capacity(piece.tokens)
            self._shared.go_on_alone()
            self._faults.before_call()
            self._last = shape.sizes
            failure = rank.backward(
                records=records,
                identity=identity,
                inputs=self._inputs(
                    piece.tokens,
                    x=piece.x,
                    topk_ids=piece.topk_ids,
                    topk_weights=piece.topk_weights,
                    d_out=piece.d_out,
                ),
                bfloat16=cfg.dtype == torch.bfloat16,
                tokens=piece.tokens,
                pair_limit=cfg.max_tokens if capacity is None else capacity,
                x=piece.x.data_ptr(),
                d_out=piece.d_out.data_ptr(),
                topk_ids=_given(piece.topk_ids),
                topk_weights=_given(piece.topk_weights),
                w1=piece.w1.data_ptr(),
                b1=_address(piece.b1),
                w2=piece.w2.data_ptr(),
                b2=_address(piece.b2) if self._slicing.adds_bias(self._world.rank) else 0,
                w3=_address(piece.w3),
                saved=shares[number].rows.data_ptr(),
                saved_of_source=shares[number].of_source,
                d_x=piece.d_x.data_ptr(),
                d_topk_weights=piece.d_topk_weights.data_ptr(),
                d_w1=_address(piece.d_w1),
                d_b1=_address(piece.d_b1),
                d_w2=_address(piece.d_w2),
                d_b2=_address(piece.d_b2),
                d_w3=_address(piece.d_w3),
                d_x_added=_address(piece.d_x_added),
                d_shared=_address(piece.d_shared),
            )
            self._require_well(failure, identity, tensors.of)
        tensors.d_x[tensors.tokens :].zero_()
        tensors.d_topk_weights[tensors.tokens :].zero_()

    def _require_well(self, failure: _runtime.Failure, identity: int, derives: int = 0) -> None:
        """Raises what went wrong in a call, if something did. `derives`: as of `exception_of`."""
        if failure.kind != 0:
            world = self._world
            told = world.rank, identity, world.layer_names, world.group
            raise exception_of(failure, *told, lambda word: word % self._tokens_apart, derives)

    def _inputs(
        self, tokens: int, *of_all: torch.Tensor | None, **of_tokens: torch.Tensor | None
    ) -> int:
        """The word that ranks with slices of the same experts compare: a digest of what must be
        equal, of tensors with one row per token and of others.
        """
        if not self._slicing.sums:
            return 0
        rows = {
            name: None if tensor is None else tensor[:tokens] for name, tensor in of_tokens.items()
        }
        found = digest({**rows, **{str(n): tensor for n, tensor in enumerate(of_all)}})
        return found // self._tokens_apart * self._tokens_apart

    @property
    def _tokens_apart(self) -> int:
        """A digest is a multiple of this, so that its sum with the number of tokens shows both."""
        return 1 << self._cfg.max_tokens.bit_length()

    def _stats(self) -> CallStats:
        records = self._live()
        tallies, record, peers = records.counters()
        stats = counters.read(
            self._place,
            numpy.frombuffer(tallies, counters.TALLY),
            self._world.processors,
            numpy.frombuffer(record, counters.RECORD),
            numpy.frombuffer(peers, counters.PEER),
            records.rows_sent(),
            [records.rows_received(source) for source in range(self._holders)],
            len(experts_of(self._cfg, self._place, self._holders, self._placement)),
            self._last.sent_bytes,
            self._last.returned_bytes,
        )
        world = self._world
        return counters.of_slices(
            stats, self._slicing, world.rank, world.size, 0 if self._left else self._last.row_bytes
        )

    def _trace(self) -> RankTrace:
        records = self._live()
        counts, events = records.trace()
        actors = self._world.processors + len(OS_ACTORS)
        trace = tracing.read(
            self._world.rank,
            numpy.frombuffer(counts, numpy.uint32),
            numpy.frombuffer(events, EVENT).reshape(actors, -1),
            numpy.array([records.rows_received(source) for source in range(self._holders)]),
            self._sizes.chunk_rows,
            experts=() if self._placement is None else self._placement.ranks[self._world.rank],
        )
        own = experts_of(self._cfg, self._place, self._holders, self._placement)
        return tracing.of_slices(trace, self._slicing, self._world.size, own)

    def _checked(self, tensors: CallTensors) -> CallTensors:
        """The call with routing as the twin reads it. Raises for values that cannot be, and for
        memory that is not there.
        """
        cfg = self._cfg
        require_memory(tensors)
        tokens = values.count_tokens(tensors.tokens, tensors.x.shape[0])
        if tensors.selection_bias is not None:
            values.check_selection_bias(tensors.selection_bias)
        scale = tensors.x_scale
        if scale is not None and scale.dtype == torch.uint8:
            tensors = tensors._replace(x_scale=exponent_value(scale))
        ids, weights = tensors.topk_ids, tensors.topk_weights
        if ids is None:
            return tensors
        if tensors.any_ids:
            ids = values.without_others(ids, cfg.router_rows)
        values.check_ids(ids[:tokens], cfg.router_rows)
        return tensors._replace(
            topk_ids=ids.to(torch.int32).contiguous(),
            topk_weights=None if weights is None else weights.to(torch.float32).contiguous(),
        )

    def _call(
        self,
        tensors: CallTensors,
        chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
        saved: saved_tensors.Share | None = None,
    ) -> None:
        """Runs one piece. `chosen`: where the gate's choice is written, and `saved`: where GEMM0's
        results are, if they are wanted.
        """
        cfg = self._cfg
        tokens = values.count_tokens(tensors.tokens, tensors.x.shape[0])
        ids, weights = tensors.topk_ids, tensors.topk_weights
        capacity = cfg.capacity(tokens)
        self._shared.go_on_alone()
        self._faults.before_call()
        records = self._live()
        rank = self._shape.rank
        assert rank is not None  # only the end of the workspace ends it
        identity = calls.identity(self._number, tensors.pieces)
        self._last = self._sizes
        failure = rank.forward(
            records=records,
            identity=identity,
            inputs=self._inputs(
                *(tokens, tensors.gate, tensors.selection_bias),
                *(tensors.router_bias, tensors.expert_scale),
                # The all-reduce of all rows needs equally many from each slice.
                torch.tensor(tensors.x.shape[0], device="cpu") if self._left else None,
                x=tensors.x,
                x_scale=tensors.x_scale,
                topk_ids=ids,
                topk_weights=weights,
            ),
            bfloat16=cfg.dtype == torch.bfloat16,
            tokens=tokens,
            pair_limit=cfg.max_tokens if capacity is None else capacity,
            x=tensors.x.data_ptr(),
            x_scale=_given(tensors.x_scale),
            gate=_address(tensors.gate),
            selection_bias=_address(tensors.selection_bias),
            router_bias=_address(tensors.router_bias),
            expert_scale=_address(tensors.expert_scale),
            topk_ids=_given(ids),
            topk_weights=_given(weights),
            w1=tensors.w1.data_ptr(),
            b1=_address(tensors.b1),
            w2=tensors.w2.data_ptr(),
            b2=_address(tensors.b2) if self._slicing.adds_bias(self._world.rank) else 0,
            w3=_address(tensors.w3),
            w1_scale=_address(tensors.w1_scale),
            w2_scale=_address(tensors.w2_scale),
            w1_scale_2=_address(tensors.w1_scale_2),
            w2_scale_2=_address(tensors.w2_scale_2),
            shared_w1=_address(tensors.shared_w1),
            shared_w2=_address(tensors.shared_w2),
            shared_gate=_address(tensors.shared_gate),
            shared_w1_scale=_address(tensors.shared_w1_scale),
            shared_w2_scale=_address(tensors.shared_w2_scale),
            shared_w1_scale_2=_address(tensors.shared_w1_scale_2),
            shared_w2_scale_2=_address(tensors.shared_w2_scale_2),
            out=tensors.out.data_ptr(),
            chosen_ids=0 if chosen is None else chosen[0].data_ptr(),
            chosen_weights=0 if chosen is None else chosen[1].data_ptr(),
            saved=0 if saved is None else saved.rows.data_ptr(),
            saved_of_source=0 if saved is None else saved.of_source,
            leaves_partials=self._left,
        )
        self._require_well(failure, identity)
        tensors.out[tokens:].zero_()

    def _live(self) -> _twin.Records:
        self.require_open()
        records = self._holdings.records
        assert records is not None  # only the end of this engine or of its world ends it
        return records

    @property
    def number(self) -> int:
        """See `Engine.number`."""
        return self._number


class TwinHoldings:
    """The part of the twin that a layer has for itself; see `moeos.world.world.Holdings`.

    Attributes:
        records: what it noted of its last call; None before they are made and after the end.
    """

    def __init__(self, shared: TwinWorkspace, faults: LayerFaults) -> None:
        self.gate = shared.gate
        self.records: _twin.Records | None = None
        self._shared = shared
        self._faults = faults
        self._bytes = 0

    def hold_records(self, sizes: _runtime.Sizes, placement: Placement | None) -> None:
        """Makes the records, with where experts lie."""
        begins, places = ([], []) if placement is None else placement.table()
        self.records = _twin.Records(
            sizes=sizes, faults=self._faults.packed(), places_from=begins, places=places
        )
        self._bytes = sizes.records_bytes
        self._shared.add(self, self._clear)

    def interrupt(self, reason: str) -> None:
        """Does nothing: the workspace ends the call."""

    def memory(self) -> dict[str, int]:
        """See `Holdings.memory`."""
        return {"records": self._bytes}

    def end(self, *, world_ends: bool = False) -> bool:
        """Gives the records back."""
        self._shared.remove(self)
        self._faults.close()
        self.records = None
        return True

    def _clear(self) -> None:
        if self.records is not None:
            self.records.clear(self._faults.packed(again=True))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _given(tensor: torch.Tensor | None) -> int:
    """The address of an optional tensor that is given; never 0, which means that there is none."""
    if tensor is None:
        return 0
    return tensor.data_ptr() or torch.iinfo(torch.int64).max
