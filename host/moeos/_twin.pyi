# SPDX-License-Identifier: Apache-2.0
"""The device OS on a machine without a GPU."""

from collections.abc import Sequence

import moeos._runtime

GATED_COLUMNS: int = 128

PLAIN_COLUMNS: int = 256

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

    def __init__(
        self,
        *,
        sizes: moeos._runtime.Sizes,
        faults: bytes,
        places_from: Sequence[int],
        places: Sequence[int],
    ) -> None: ...
    def clear(self, faults: bytes) -> None: ...
    def place(self, *, places_from: Sequence[int], places: Sequence[int]) -> None: ...
    def counters(self) -> tuple[bytes, bytes, bytes]: ...
    def trace(self) -> tuple[bytes, bytes]: ...
    def rows_sent(self) -> list[int]: ...
    def rows_received(self, source: int) -> list[int]: ...

class Rank:
    """One rank of the layers of one shape: its threads and calls."""

    def __init__(
        self,
        *,
        sizes: moeos._runtime.Sizes,
        rank: int,
        shared: Shared,
        words_at: int,
        rows_at: int,
        results_at: int,
        stride_rows: int,
        deadline: float,
        split_os: bool,
        jitter_us: float,
        jitter_seed: int,
        ranks_per_node: int,
        gradients: bool,
        slice_number: int,
        peers: Sequence[int],
    ) -> None: ...
    def forward(
        self,
        *,
        records: Records,
        identity: int,
        inputs: int,
        bfloat16: bool,
        tokens: int,
        pair_limit: int,
        x: int,
        x_scale: int,
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
        w3: int,
        w1_scale: int,
        w2_scale: int,
        w1_scale_2: int,
        w2_scale_2: int,
        shared_w1: int,
        shared_w2: int,
        shared_gate: int,
        shared_w1_scale: int,
        shared_w2_scale: int,
        shared_w1_scale_2: int,
        shared_w2_scale_2: int,
        out: int,
        chosen_ids: int,
        chosen_weights: int,
        saved: int,
        saved_of_source: int,
        leaves_partials: bool,
    ) -> moeos._runtime.Failure: ...
    def backward(
        self,
        *,
        records: Records,
        identity: int,
        inputs: int,
        bfloat16: bool,
        tokens: int,
        pair_limit: int,
        x: int,
        d_out: int,
        topk_ids: int,
        topk_weights: int,
        w1: int,
        b1: int,
        w2: int,
        b2: int,
        w3: int,
        saved: int,
        saved_of_source: int,
        d_x: int,
        d_topk_weights: int,
        d_w1: int,
        d_b1: int,
        d_w2: int,
        d_b2: int,
        d_w3: int,
        d_x_added: int,
        d_shared: int,
    ) -> moeos._runtime.Failure: ...
    def abort(self, interrupted: bool = False) -> None: ...
    def failure(self) -> moeos._runtime.Failure: ...
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

def gradient_row_bytes(forward: moeos._runtime.Sizes, bfloat16: bool) -> tuple[int, int]:
    """
    Bytes of a row in a call of gradients: as it is sent, and as it is kept.
    """

def explore(seed: int, strategy: int, scenario: int) -> Outcome:
    """
    Runs a small random world in an order and with a fault that the seed decides.
    """
