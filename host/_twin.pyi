# SPDX-License-Identifier: Apache-2.0
"""The device OS on a machine without a GPU."""

from collections.abc import Sequence

TILE_ROWS: int = 128

CHUNK_ROWS: int = 32

ROUTE_TOKENS: int = 32

SEGMENT_ALIGN: int = 8

MAX_SEGMENTS: int = 8

GATED_COLUMNS: int = 128

PLAIN_COLUMNS: int = 256

FAULTS: int = 16

FAULT_PLAN_BYTES: int = 1664

class Sizes:
    """Buffers and bounds of a layer, as the runtime derives them."""

    def __init__(
        self,
        *,
        world: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        intermediate: int,
        element_bytes: int,
        capacity: int,
        capacity_rows: bool,
        curve: int,
        gated: bool,
        alpha: float,
        up_offset: float,
        swiglu_limit: float,
        clamps_after: bool,
        scoring: int,
        renormalize: bool,
        routed_scaling: float,
        expert_groups: int,
        top_groups: int,
        group_score: int,
        zero_experts: int,
        weight_on_input: bool,
        fp32_router: bool,
        processors: int,
        couriers: int,
        remote: bool,
        tile_rows: int,
        route_tokens: int,
        route_slices: int,
        kept_bytes: int,
        gemm0_columns: int,
        gemm1_columns: int,
        narrow_rows: int,
        segment_align: int,
        large_experts: bool,
        once_rows: int,
        once_after: int,
        spread_tokens: int,
        whole_rows: int,
        trace_events: int,
    ) -> None: ...
    @property
    def heap_bytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def words_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def control_bytes(self) -> int: ...
    @property
    def tables_bytes(self) -> int: ...
    @property
    def records_bytes(self) -> int: ...
    @property
    def intermediate_bytes(self) -> int: ...
    @property
    def os_memory_bytes(self) -> int: ...
    @property
    def offsets(self) -> dict[str, int]: ...
    @property
    def first_cell(self) -> int: ...
    @property
    def cells(self) -> int: ...
    @property
    def intermediate_rows(self) -> int: ...
    @property
    def cell_rows(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def chunk_rows(self) -> int: ...
    @property
    def window_rows(self) -> int: ...
    def dispatch_parts(self, chunks: int, rows: int) -> int: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def route_tokens(self) -> int: ...
    @property
    def route_slices(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    def route_blocks(self, tokens: int) -> int: ...
    def route_parts(self, tokens: int) -> int: ...
    @property
    def tiles_max(self) -> int: ...
    @property
    def parts_max(self) -> int: ...
    @property
    def gemm0_parts(self) -> int: ...
    @property
    def gemm1_parts(self) -> int: ...
    @property
    def narrow_rows(self) -> int: ...
    @property
    def segment_align(self) -> int: ...
    @property
    def once_rows(self) -> int: ...
    @property
    def once_after(self) -> int: ...
    @property
    def spread_tokens(self) -> int: ...
    @property
    def whole_rows(self) -> int: ...
    def spreads(self, tokens: int) -> bool: ...
    def sends_once(self, rows: int) -> bool: ...
    def chunks_made_whole(self, rows: int) -> int: ...
    def may_await(self, tokens: int) -> bool: ...
    def combine_tokens(self, tokens: int) -> int: ...
    @property
    def large_experts(self) -> bool: ...
    @property
    def gemm0_narrow_parts(self) -> int: ...
    @property
    def gemm1_narrow_parts(self) -> int: ...

class Failure:
    """What ended a call before its time; host/failure.py has the sentences."""

    @property
    def kind(self) -> int: ...
    @property
    def actor(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def identity(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def waited_ns(self) -> int: ...

class Shared:
    """What the layers of a workspace share on one rank."""

    def __init__(
        self,
        *,
        rank: int,
        heaps: Sequence[int],
        heap_bytes: int,
        control_bytes: int,
        between_bytes: int,
    ) -> None: ...
    def clear(self) -> None: ...

class Records:
    """What a layer has of its own on one rank."""

    def __init__(self, *, sizes: Sizes, faults: bytes) -> None: ...
    def clear(self, faults: bytes) -> None: ...
    def counters(self) -> tuple[bytes, bytes, bytes]: ...
    def trace(self) -> tuple[bytes, bytes]: ...
    def rows_sent(self) -> list[int]: ...
    def rows_received(self, source: int) -> list[int]: ...

class Rank:
    """One rank of the layers of one shape: its threads and calls."""

    def __init__(
        self,
        *,
        sizes: Sizes,
        rank: int,
        shared: Shared,
        words_at: int,
        rows_at: int,
        stride_rows: int,
        deadline: float,
        split_os: bool,
        jitter_us: float,
        jitter_seed: int,
        ranks_per_node: int,
    ) -> None: ...
    def forward(
        self,
        *,
        records: Records,
        identity: int,
        bfloat16: bool,
        tokens: int,
        pair_limit: int,
        x: int,
        gate: int,
        selection_bias: int,
        router_bias: int,
        expert_scale: int,
        topk_ids: int,
        topk_weights: int,
        w1: int,
        b1: int,
        w2: int,
        b2: int,
        out: int,
    ) -> Failure: ...
    def abort(self) -> None: ...
    def clear(self) -> None: ...
    @property
    def epoch(self) -> int: ...

class Outcome:
    """What came of a run of explore()."""

    @property
    def wrong(self) -> str: ...
    @property
    def world(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def kinds(self) -> int: ...
    @property
    def points(self) -> int: ...
    @property
    def switches(self) -> int: ...
    @property
    def latency_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def happened(self) -> bool: ...
    @property
    def fault(self) -> str: ...

def explore(seed: int, strategy: int, scenario: int) -> Outcome:
    """
    Runs a small random world in an order and with a fault that the seed decides.
    """
