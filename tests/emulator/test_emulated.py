# SPDX-License-Identifier: Apache-2.0
"""The GPU's own kernel, run on the emulated GPU: results, failures, and the faults that it finds.

Each run has a seed, which decides in what order warps and lanes take turns and how late copies
land; a failure names it, and is repeated by it.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moeos import MoEConfig
from moeos._runtime import FailureKind
from moeos.compile import kernel_shape
from moeos.config import reference
from moeos.world.faults import Fault, FaultPlan, LayerFaults, SlowLink, SlowProcessor
from tests.emulator.emulated import (
    DEADLINE_NS,
    TICK_NS,
    EmulatedLayer,
    EmulatorFault,
    Starved,
    build,
)
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
    pair_experts,
)
from tests.nightly import all_but

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}


@dataclasses.dataclass(frozen=True)
class Emulated:
    """A layer, and the GPU that it is emulated on: few processors, so that each has much to do."""

    cfg: MoEConfig
    ranks: int
    processors: int
    calls: int
    large_experts: bool = False
    plans_up_front: bool = True
    between_rows: int | None = None
    ring_rows: int | None = None
    first_seed: int = 0

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.calls)


def _layer(
    ranks: int,
    processors: int,
    calls: int,
    *,
    large_experts: bool = False,
    plans_up_front: bool = True,
    between_rows: int | None = None,
    ring_rows: int | None = None,
    first_seed: int = 0,
    **changes: object,
) -> Emulated:
    sizes = {"hidden": 256, "intermediate": 256, "experts": 8, "top_k": 2, "max_tokens": 100}
    cfg = config(**{"dtype": torch.bfloat16, **sizes, **changes})
    return Emulated(
        cfg,
        ranks,
        processors,
        calls,
        large_experts,
        plans_up_front,
        between_rows,
        ring_rows,
        first_seed,
    )


LAYERS = {
    "one processor, tiles of several large experts": _layer(
        2,
        1,
        4,
        max_tokens=560,
        intermediate=64,
        experts=12,
        large_experts=True,
        plans_up_front=False,
    ),
    "large experts, full tiles of two sources": _layer(
        2, 2, 4, max_tokens=400, experts=4, large_experts=True, plans_up_front=False
    ),
    "the same, planned up front": _layer(2, 2, 4, max_tokens=400, experts=4, large_experts=True),
    "a large expert's tiles by turns": _layer(
        1, 7, 6, max_tokens=400, experts=4, large_experts=True
    ),
    "two ranks, odd sizes, biases": _layer(2, 2, 6, hidden=264, intermediate=136, bias=True),
    "a last rank with fewer experts": _layer(3, 2, 6, experts=7, top_k=3),
    "a rank without experts": _layer(4, 2, 4, experts=5, top_k=3, bias=True, intermediate=64),
    "a shared expert": _layer(
        1,
        2,
        2,
        max_tokens=200,
        shared_experts=1,
        shared_intermediate=136,
        shared_gate=True,
    ),
    "second GEMMs in halves": _layer(
        1, 8, 4, hidden=392, intermediate=264, experts=2, max_tokens=120, activation="gelu"
    ),
    "long rows, a router in slices": _layer(
        2, 4, 4, hidden=3848, intermediate=64, experts=4, max_tokens=60
    ),
    "blocks that parts share, and others": _layer(
        1, 2, 2, hidden=1544, intermediate=64, experts=4, max_tokens=130, dtype=torch.float16
    ),
    "and more experts than registers for their sums": _layer(
        1, 2, 1, hidden=2056, intermediate=64, experts=136, max_tokens=40
    ),
    "tokens that fill more than a stage": _layer(
        1, 2, 2, hidden=3848, intermediate=64, top_k=8, max_tokens=20
    ),
    "eight ranks, capacity": _layer(
        8,
        2,
        2,
        experts=16,
        top_k=4,
        max_tokens=60,
        intermediate=192,  # parts without some of their columns
        activation="silu",
        dtype=torch.float16,
        capacity_factor=0.6,
    ),
    "places between the products used in turn": _layer(
        2,
        3,
        6,
        experts=4,
        top_k=3,
        max_tokens=200,
        intermediate=136,
        shared_experts=1,
        shared_intermediate=64,
        between_rows=1,  # so as few as may be, two tiles
    ),
    "cells as rings": _layer(
        2,
        3,
        6,
        experts=4,
        top_k=3,
        max_tokens=260,
        intermediate=64,
        ring_rows=1,  # so as few places as may be: those of 160 rows, and a tail
    ),
    "cells as rings, places in turn": _layer(
        2,
        3,
        6,
        experts=4,
        top_k=3,
        max_tokens=260,
        intermediate=136,
        shared_experts=1,
        shared_intermediate=64,
        between_rows=1,
        ring_rows=1,
    ),
    "an fp32 router": _layer(1, 2, 2, top_k=3, router_dtype=torch.float32),
    "an fp32 router of many experts, in slices": _layer(
        1,
        2,
        1,
        hidden=1032,
        intermediate=64,
        experts=136,
        top_k=5,
        max_tokens=40,
        scoring="sigmoid",
        router_dtype=torch.float32,
    ),
    "an fp32 router of float16 tokens, in slices": _layer(
        1,
        2,
        2,
        hidden=1544,
        intermediate=64,
        experts=72,
        top_k=3,
        max_tokens=130,
        dtype=torch.float16,
        router_dtype=torch.float32,
    ),
    "groups whose best expert counts": _layer(
        1,
        2,
        2,
        experts=64,
        top_k=6,
        expert_groups=8,
        top_groups=3,
        group_score="max",
        renormalize=False,
        routed_scaling=16.0,
    ),
    "groups that end amid a lane's experts": _layer(
        1,
        2,
        2,
        experts=160,  # DeepSeek-V2's
        top_k=6,
        expert_groups=8,
        top_groups=3,
        group_score="max",
        renormalize=False,
        max_tokens=40,
        intermediate=64,
    ),
    "many groups that end amid a lane's experts": _layer(
        1,
        2,
        2,
        experts=60,
        top_k=6,
        scoring="sigmoid",
        selection_bias=True,
        expert_groups=20,
        top_groups=7,
        max_tokens=60,
        intermediate=64,
        first_seed=4,  # the first of which the layer routes tokens
    ),
    "groups of one expert": _layer(
        1, 2, 2, experts=24, top_k=3, expert_groups=24, top_groups=5, scoring="sigmoid"
    ),
    "groups": _layer(
        2,
        2,
        2,
        experts=64,
        top_k=6,
        scoring="sigmoid",
        expert_groups=4,
        top_groups=2,
        selection_bias=True,
        activation="gelu",
        dtype=torch.float16,
        first_seed=4,  # as above
    ),
}


@pytest.fixture(scope="module", autouse=True)
def tokens_sent_once() -> Iterator[None]:
    """Makes calls of a few dozen rows take each token once to a rank, as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_shape, "ONCE_BYTES", 10 << 10)
        patch.setattr(kernel_shape, "DEDUP_TOKENS", 1)
        patch.setattr(kernel_shape, "HOPPER_BLOCKS", 1)
        yield


IN_EVERY_RUN = (
    "large experts, full tiles of two sources",
    "two ranks, odd sizes, biases",
    "second GEMMs in halves",
    "cells as rings, places in turn",
)
"""Plans by arrival and up front, one rank and two. In every run groups are in test_banks.py, and an
fp32 router is in test_rules.py; float16 and eight ranks run at night."""


class Libraries:
    """The emulated kernels by the names of their layers, each compiled when it is asked for."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            layer = LAYERS[name]
            self._made[name] = build(
                layer.cfg,
                layer.ranks,
                layer.processors,
                self._folder(),
                large_experts=layer.large_experts,
                plans_up_front=layer.plans_up_front,
                between_rows=layer.between_rows,
                ring_rows=layer.ring_rows,
            )
        return self._made[name]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return Libraries(lambda: tmp_path_factory.mktemp("emulated"))


def draw_calls(layer: Emulated, seed: int) -> list[Call]:
    """A call of each rank: routed by the gate or by the caller, with any number of tokens."""
    drawn = random.Random(seed)
    most = layer.cfg.max_tokens
    counts = [drawn.choice([0, 1, most, drawn.randint(0, most)]) for _ in range(layer.ranks)]
    if drawn.random() < 0.5:
        return [draw_call(layer.cfg, n, 1000 * seed + rank) for rank, n in enumerate(counts)]
    popular = drawn.choice(list(PREFERENCES.values()))(layer.cfg.experts, max(2, layer.ranks))
    unused = drawn.choice([0.0, 0.3, 0.9])
    return [
        draw_given_call(layer.cfg, n, 1000 * seed + rank, popular, unused)
        for rank, n in enumerate(counts)
    ]


def run(
    layer: Emulated,
    library: Path,
    weights: Weights,
    seeds: range,
    starved: Starved | None = None,
) -> None:
    """Makes calls one after the other and compares every output with the reference."""
    emulated = EmulatedLayer(library, weights, layer.ranks)
    for seed in seeds:
        calls = draw_calls(layer, seed)
        outputs = emulated(calls, seed, starved)
        assert not any(map(any, emulated.failures())), f"seed {seed}: a rank has failed"
        for rank, (call, y) in enumerate(zip(calls, outputs, strict=True)):
            sure = weights.sure(call)
            if layer.cfg.capacity_factor is not None and not sure.all():
                continue  # a near tie could move others' drops
            error = reference.relative_error(y[sure], weights.expected(call)[sure])
            assert error <= TOLERANCE[layer.cfg.dtype], f"seed {seed}, rank {rank}: error {error}"


def packed(plan: FaultPlan, layer: Emulated) -> list[bytes]:
    """A plan as the kernel of each rank reads it."""
    return [
        LayerFaults(plan, rank, 0, layer.processors, pinned=False).packed()
        for rank in range(layer.ranks)
    ]


def emulate(name: str, libraries: Libraries) -> tuple[Emulated, EmulatedLayer]:
    """A layer, and its ranks, with weights."""
    layer = LAYERS[name]
    return layer, EmulatedLayer(libraries[name], draw_weights(layer.cfg), layer.ranks)


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_outputs_are_those_of_the_reference(name: str, libraries: Libraries) -> None:
    layer = LAYERS[name]
    weights = draw_weights(layer.cfg)
    if layer.cfg.router_dtype is not None:
        weights = pair_experts(weights)
    run(layer, libraries[name], weights, layer.seeds)


@pytest.mark.parametrize(
    "name",
    all_but(
        ["second GEMMs in halves"],
        [
            "second GEMMs in halves",
            "an fp32 router of float16 tokens, in slices",
            "blocks that parts share, and others",
        ],
    ),
)
def test_a_tokens_output_does_not_depend_on_how_many_others_there_are(
    name: str, libraries: Libraries
) -> None:
    layer, emulated = emulate(name, libraries)
    drawn = draw_call(layer.cfg, 66, 7)
    whole = dataclasses.replace(drawn, x=2 * drawn.x)  # larger logits, whose last bits count
    y = emulated([whole], 0)[0]
    for tokens in (31, 1):  # other blocks than 66 tokens have, and other parts of a block
        few = dataclasses.replace(whole, x=whole.x[:tokens].clone())
        assert torch.equal(emulated([few], tokens)[0], y[:tokens]), tokens


def test_ids_that_are_no_experts_are_unused_slots_where_the_call_says_so(
    libraries: Libraries,
) -> None:
    layer, emulated = emulate("two ranks, odd sizes, biases", libraries)
    calls = [draw_given_call(layer.cfg, 70, rank) for rank in range(layer.ranks)]
    outsiders = torch.tensor([-1, -2, layer.cfg.experts, 1 << 32, -(1 << 62), (1 << 40) + 1])
    strange = []
    for rank, call in enumerate(calls):
        assert call.ids is not None
        drawn = outsiders[torch.arange(call.ids.numel()).view_as(call.ids) % len(outsiders)]
        strange.append(dataclasses.replace(call, ids=torch.where(call.ids < 0, drawn, call.ids)))
        assert (strange[rank].ids != call.ids).sum() > 5
    expected = emulated(calls, 0)
    emulated.any_ids = True
    for y, right in zip(emulated(strange, 1), expected, strict=True):
        assert torch.equal(y, right)
    assert not any(map(any, emulated.failures()))
    emulated.any_ids = False
    emulated(strange, 2)
    assert all(map(any, emulated.failures()))


def test_counters_are_those_of_the_routing_and_in_the_order_of_time(
    libraries: Libraries,
) -> None:
    layer, emulated = emulate("two ranks, odd sizes, biases", libraries)
    tokens = [100, 37]
    emulated([draw_call(layer.cfg, n, rank) for rank, n in enumerate(tokens)], 3)
    found = [emulated.stats(rank, layer.processors) for rank in range(layer.ranks)]
    for rank, stats in enumerate(found):
        assert stats.tokens == tokens[rank]
        assert sum(stats.pairs_sent) == tokens[rank] * layer.cfg.top_k
        assert stats.pairs_received == [other.pairs_sent[rank] for other in found]
        assert sum(stats.row_bytes_by_peer) == stats.row_bytes_to_peers > 0
        assert stats.processors == layer.processors
        assert stats.seconds is not None
        assert stats.first_tile_after is not None
        assert 0 < stats.first_tile_after < stats.seconds
        for counts, rows, results in zip(
            stats.counts_after, stats.rows_after, stats.results_after, strict=True
        ):
            assert None not in (counts, rows, results)
            assert 0 < counts <= rows <= stats.seconds  # type: ignore[operator]
            assert 0 < results <= stats.seconds  # type: ignore[operator]
        assert sum(stats.pairs_received) >= max(stats.rows_before_counts)
        assert stats.sweeps >= 1
        assert 1 <= stats.waiting_most <= sum(stats.tasks.values())
        assert stats.busy_share is not None
        assert 0 < stats.busy_share <= 1


def test_logits_that_are_not_finite_end_the_call_on_all_ranks(libraries: Libraries) -> None:
    layer, emulated = emulate("two ranks, odd sizes, biases", libraries)
    calls = [draw_call(layer.cfg, 70, rank) for rank in range(layer.ranks)]
    calls[1].x[66] = torch.nan
    emulated(calls, 0)
    shown = [torch.frombuffer(bytearray(f), dtype=torch.int32)[:6] for f in emulated.failures()]
    for failure in shown:  # kind, actor, rank, peer, expert, token
        assert failure.tolist() == [6, 3, 1, -1, -1, 66]


@pytest.mark.nightly
@pytest.mark.parametrize("weight", [torch.inf, 1e5], ids=["infinite", "beyond float16"])
def test_a_weight_of_an_fp32_router_that_float16_has_not_ends_the_call(
    weight: float, libraries: Libraries
) -> None:
    name = "an fp32 router of float16 tokens, in slices"
    layer = LAYERS[name]
    weights = draw_weights(layer.cfg)
    weights.gate[71, 1543] = weight
    emulated = EmulatedLayer(libraries[name], weights, 1)
    emulated([draw_call(layer.cfg, 1, 0)], 0)
    failure = torch.frombuffer(bytearray(emulated.failures()[0]), dtype=torch.int32)[:6]
    assert failure.tolist() == [6, 3, 0, -1, -1, 0]  # as for logits that are not finite


def with_faults(plan: FaultPlan, library: Path, ends_well: bool) -> None:
    """Makes two calls of two ranks, of which rank 1 is late in the second: too late, or not."""
    layer = LAYERS["two ranks, odd sizes, biases"]
    weights = draw_weights(layer.cfg)
    emulated = EmulatedLayer(library, weights, layer.ranks, packed(plan, layer))
    calls = [draw_call(layer.cfg, 90, rank) for rank in range(layer.ranks)]
    for seed in range(2):
        outputs = emulated(calls, seed)
        shown = [torch.frombuffer(bytearray(f), dtype=torch.int32) for f in emulated.failures()]
        if seed == 0 or ends_well:
            assert not any(failure.any() for failure in shown)
            for call, y in zip(calls, outputs, strict=True):
                sure = weights.sure(call)
                error = reference.relative_error(y[sure], weights.expected(call)[sure])
                assert error <= TOLERANCE[layer.cfg.dtype]
            continue
        for failure in shown:
            kind, _, rank, peer, _, _, epoch, _ = failure[:8].tolist()
            blamed = rank if kind == FailureKind.TASKS_LATE else peer
            assert (blamed, epoch) == (1, 2), failure.tolist()


@pytest.mark.nightly
def test_the_kernel_with_faults_is_late_or_stands_still_as_it_is_told(tmp_path: Path) -> None:
    layer = LAYERS["two ranks, odd sizes, biases"]
    library = build(layer.cfg, layer.ranks, layer.processors, tmp_path, faults=True)
    stalled = Fault(kind="stall", rank=1, call=2, stage="product1")
    with_faults(FaultPlan(faults=(stalled,)), library, ends_well=False)
    late = FaultPlan(
        faults=(Fault(kind="delay", rank=1, call=2, stage="dispatch", seconds=DEADLINE_NS / 10e9),),
        slow_processors=(SlowProcessor(rank=1, processor=0, seconds=1e-6, factor=2.0),),
        slow_links=(SlowLink(rank=1, peer=0, seconds=1e-5, bytes_per_second=1e9),),
    )
    with_faults(late, library, ends_well=True)


@dataclasses.dataclass(frozen=True)
class Planted:
    """The layer that must notice a fault (runtime/words/planted.hpp) in so many calls, and what is
    said of it; `starved`: a warp that is given no turn for a while."""

    layer: str
    seeds: int
    report: str | None = None
    starved: Starved | None = None


FAULTS = {
    "shared_rows_are_of_the_first_tile": Planted("a shared expert", 6),
    "boxes_share_a_place": Planted("two ranks, odd sizes, biases", 6),
    "parts_are_of_the_first_tile": Planted("large experts, full tiles of two sources", 4),
    "words_given_back_are_lost": Planted("one processor, tiles of several large experts", 4),
    "tiles_by_turns_repeat_parts": Planted("a large expert's tiles by turns", 5),
    "turns_go_beyond_tiles": Planted("a large expert's tiles by turns", 5),
    "segments_results_lie_apart": Planted("large experts, full tiles of two sources", 4),
    "half_of_the_halves_is_missing": Planted("second GEMMs in halves", 2),
    "halves_load_whole_weights": Planted("second GEMMs in halves", 1),
    "shares_end_a_number_late": Planted("large experts, full tiles of two sources", 4),
    "neighbours_keep_their_halves": Planted("two ranks, odd sizes, biases", 1),
    "weight_boxes_end_beyond_the_matrix": Planted("eight ranks, capacity", 1),
    # A warp that counts returned rows finds several chunks at once when it has not looked for long.
    "found_chunks_share_a_place": Planted(
        "large experts, full tiles of two sources",
        6,
        starved=Starved(5, 5, 100, 100 + DEADLINE_NS // TICK_NS // 4),
    ),
    "first_parts_are_of_the_tile_before": Planted("two ranks, odd sizes, biases", 4),
    "first_tile_has_all_turns": Planted("the same, planned up front", 4),
    "segments_share_a_place": Planted("groups", 4),
    "awaited_rows_lie_elsewhere": Planted("second GEMMs in halves", 2),
    "pairs_are_of_the_block_before": Planted("two ranks, odd sizes, biases", 4),
    "rows_go_where_others_stay": Planted("two ranks, odd sizes, biases", 4),
    "first_chunks_have_no_courier": Planted("two ranks, odd sizes, biases", 4),
    "tokens_take_others_slots": Planted("two ranks, odd sizes, biases", 2),
    "slices_are_routed_alone": Planted("long rows, a router in slices", 6),
    "skipped_stages_are_not_followed": Planted("a large expert's tiles by turns", 5),
    "lanes_decide_alone": Planted("two ranks, odd sizes, biases", 30),
    "stages_carry_the_first_tokens": Planted("long rows, a router in slices", 2),
    "pieces_are_the_first": Planted("tokens that fill more than a stage", 2),
    "unsent_rows_are_summed": Planted("eight ranks, capacity", 4),
    "unsent_tokens_are_listed_with_gaps": Planted("eight ranks, capacity", 6),
    # The kernel ends by itself, where nobody else could end it.
    "a_copy_never_lands": Planted("two ranks, odd sizes, biases", 1, "trap"),
}


FOUND_IN_EVERY_RUN = (
    "boxes_share_a_place",
    "segments_results_lie_apart",
    "halves_load_whole_weights",
    "awaited_rows_lie_elsewhere",
    "first_chunks_have_no_courier",
    "lanes_decide_alone",
    "unsent_tokens_are_listed_with_gaps",
)
"""Faults that few calls show: of loads, of products, of the device OS, and of lanes."""


@pytest.mark.parametrize("name", all_but(FOUND_IN_EVERY_RUN, FAULTS))
def test_a_planted_fault_is_noticed(
    name: str, libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    layer = LAYERS[fault.layer]
    monkeypatch.setenv("MOEOS_PLANT", name)
    library = Path(shutil.copy(libraries[fault.layer], tmp_path))  # loaded with the fault
    with pytest.raises((EmulatorFault, AssertionError), match=fault.report):
        run(layer, library, draw_weights(layer.cfg), range(fault.seeds), fault.starved)
