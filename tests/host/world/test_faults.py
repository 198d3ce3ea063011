# SPDX-License-Identifier: Apache-2.0
"""Faults on demand: a rank that is late gives right results, one that is too late is named.

Ranks are virtual here, or forked processes, or started by torchrun and mpirun with MOEOS_FAULTS.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import moeos
from moeos import PeerTimeout, TwinOptions, World
from moeos.world import virtual
from moeos.world.faults import (
    Fault,
    FaultPlan,
    LayerFaults,
    SlowLink,
    SlowProcessor,
    Stage,
    StartDelay,
)
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but, at_night, in_turn
from tests.processes import (
    ForkedRanks,
    forked,
    free_port,
    mpirun,
    torchrun,
    torchrun_environment,
)

DEADLINE = 0.5
RANKS = 4
CULPRIT = 1
CFG = config(max_tokens=128)
WEIGHTS = draw_weights(CFG)
CALLS = [draw_call(CFG, 120 + rank, rank) for rank in range(RANKS)]
STAGES = get_args(Stage)
EVERYWHERE = [stage for stage in STAGES if stage != "replicate"]
"""What a rank does that is alone, or whose peers are all remote."""
OWED = {
    "start": "call 3 .* its row count .* has not made call 3",
    "route": "call 3 .* its row count .* has not made call 3",
    "dispatch": "call 3 .* rows from chunk 0 on: .* at least 0 have arrived",
    # Rows of quicker ranks may have landed before a lone processor has routed its own tokens.
    "replicate": "call 3 .* results of chunk|call 3 .* its row count",
    "product0": "call 3 .* results of chunk",
    "product1": "call 3 .* results of chunk",
    # A processor that holds a Combine computes nothing; or the others have all that they need.
    "combine": "call 3 .* results of chunk|call 4 .* its row count",
}
"""What others wait for when a rank stands still at a stage."""

Way = dict[str, Any]
WAYS: dict[str, Way] = {
    "one-thread": {"twin": TwinOptions(processors=1)},
    "mixed": {"twin": TwinOptions(processors=2, split_os=True), "ranks_per_node": 2},
    "remote": {"twin": TwinOptions(processors=2), "ranks_per_node": 1},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=[*WAYS])
IN_EVERY_RUN = (
    ("start", "one-thread"),
    ("route", "mixed"),
    ("dispatch", "remote"),
    ("replicate", "mixed"),
    ("product0", "mixed"),
    ("product1", "one-thread"),
    ("combine", "remote"),
)
at_stages = pytest.mark.parametrize(
    ("stage", "name"),
    all_but(
        IN_EVERY_RUN,
        [(stage, name) for name in WAYS for stage in (EVERYWHERE if name == "remote" else STAGES)],
    ),
)


@pytest.fixture(autouse=True)
def _no_plan_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEOS_FAULTS", raising=False)


def plan(kind: Any, stage: Any, *, call: int = 3, seconds: float = 0.0, **more: Any) -> FaultPlan:
    """A fault of the culprit's."""
    fault = Fault(kind=kind, rank=CULPRIT, call=call, stage=stage, seconds=seconds, **more)
    return FaultPlan(faults=(fault,))


def right_call(world: World, layer: moeos.MoELayer) -> float:
    """Makes a call whose result must be right; its seconds."""
    begin = time.monotonic()
    y = CALLS[world.rank](layer)
    seconds = time.monotonic() - begin
    assert_matches(WEIGHTS, CALLS[world.rank], y)
    return seconds


def last_call(world: World, layer: moeos.MoELayer, calls: int = 5) -> str:
    """Makes right calls up to one that raises `PeerTimeout`: its message."""
    for _ in range(calls):
        try:
            right_call(world, layer)
        except PeerTimeout as error:
            return str(error)
    raise AssertionError(f"rank {world.rank}: {calls} calls without an error")


def assert_named(message: str) -> None:
    """The error blames the culprit."""
    late = rf"for rank {CULPRIT}, which owes "
    alone = rf"^rank {CULPRIT}\b.* for its own processors"
    assert re.search(rf"{late}|{alone}", message), message


@at_stages
def test_a_stalled_rank_is_named_by_all(stage: str, name: str) -> None:
    def rank_main(world: World) -> str:
        return last_call(world, WEIGHTS.layer(world))

    stalled = plan("stall", stage)
    for message in virtual.run(rank_main, RANKS, deadline=DEADLINE, faults=stalled, **WAYS[name]):
        assert_named(message)
        assert re.search(f"{OWED[stage]}|call 3 for its own processors", message), message


def test_a_rank_alone_says_itself_that_it_stands_still() -> None:
    """Nobody else could; one thread runs the scheduler, and no sender is there to be asked."""
    call = draw_call(CFG, 40, 0)
    for stage in EVERYWHERE:
        fault = Fault(kind="stall", rank=0, call=1, stage=stage)

        def rank_main(world: World) -> None:
            call(WEIGHTS.layer(world))

        with pytest.raises(PeerTimeout, match=r"rank 0\b"):
            virtual.run(rank_main, 1, deadline=0.3, faults=FaultPlan(faults=(fault,)))


def one_way_calls(alone: bool) -> list[Call]:
    """Calls of two ranks: rank 0's tokens go to rank 1, whose own, if it has any, stay there."""
    calls = []
    for rank, tokens in enumerate((10, 0 if alone else 10)):  # whose rows fit into a chunk
        elsewhere = torch.zeros(CFG.experts)
        elsewhere[: CFG.experts // 2] = -torch.inf
        calls.append(draw_given_call(CFG, tokens, rank, elsewhere, unused=0.0))
    return calls


@pytest.mark.parametrize(
    "way",
    [{"twin": TwinOptions(processors=2)}, WAYS["mixed"], WAYS["remote"]],
    ids=["direct", "mixed", "remote"],
)
def test_a_rank_to_which_all_came_back_blames_its_own_processors(way: Way) -> None:
    """The last that are asked are the scheduler's, whoever is there to be asked before."""
    calls = one_way_calls(alone=True)
    stalled = Fault(kind="stall", rank=0, call=1, stage="combine")

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        if world.rank == 1:
            calls[1](layer)
        else:
            with pytest.raises(PeerTimeout, match=r"^rank 0 waited .* for its own processors"):
                calls[0](layer)

    virtual.run(rank_main, 2, deadline=DEADLINE, faults=FaultPlan(faults=(stalled,)), **way)


@ways
def test_a_rank_whose_rows_have_not_left_does_not_blame_the_peer_that_lacks_them(way: Way) -> None:
    """The peer is busy with its own tokens, so that it is not the first to ask."""
    calls = one_way_calls(alone=False)
    faults = FaultPlan(
        faults=(
            Fault(kind="stall", rank=0, call=1, stage="dispatch"),
            Fault(kind="delay", rank=1, call=1, stage="route", seconds=0.1),
            Fault(kind="delay", rank=1, call=1, stage="combine", seconds=0.3),
        )
    )

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        with pytest.raises(PeerTimeout) as raised:
            calls[world.rank](layer)
        return str(raised.value)

    for message in virtual.run(rank_main, 2, deadline=DEADLINE, faults=faults, **way):
        assert re.search("^rank 0 .* for its own processors|for rank 0, which owes", message)


@at_stages
def test_results_are_right_beside_a_delay_within_the_deadline(stage: str, name: str) -> None:
    def rank_main(world: World) -> list[float]:
        layer = WEIGHTS.layer(world)
        return [right_call(world, layer) for _ in range(4)]

    held = plan("delay", stage, seconds=0.2)
    results = virtual.run(rank_main, RANKS, deadline=10.0, faults=held, **WAYS[name])
    assert results[CULPRIT][2] >= 0.2  # others take as long as the machine has them take


@ways
@pytest.mark.parametrize("stages", [("start",), ("route",), ("start", "route")])
def test_a_rank_without_tokens_is_held_before_its_counts(
    stages: tuple[Stage, ...], way: Way
) -> None:
    """It has no part of Route, whose processor could be held; and the others wait for it. Of two
    holds one begins when the other is over."""

    def rank_main(world: World) -> tuple[float, float, dict[str, Any]]:
        layer = WEIGHTS.layer(world)
        call = CALLS[world.rank] if world.rank != CULPRIT else draw_call(CFG, 0, 0)
        begin = time.monotonic()
        y = call(layer)
        end = time.monotonic()
        assert_matches(WEIGHTS, call, y)
        return begin, end, layer.stats()

    share = 0.2 / len(stages)
    delays = (plan("delay", stage, call=1, seconds=share).faults[0] for stage in stages)
    held = FaultPlan(faults=tuple(delays))
    found = virtual.run(rank_main, RANKS, deadline=10.0, faults=held, **way)
    began, _, of_culprit = found[CULPRIT]
    assert of_culprit["counts_after"][CULPRIT] >= 0.2
    for _, end, stats in found:
        assert end - began >= 0.2
        words = CFG.experts // RANKS + (2 if stats["tokens"] > 0 else 1)  # and where results go
        assert stats["count_bytes_to_peers"] == 8 * (RANKS - 1) * words


@ways
def test_a_rank_without_tokens_that_stands_still_is_named(way: Way) -> None:
    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        call = CALLS[world.rank] if world.rank != CULPRIT else draw_call(CFG, 0, 0)
        with pytest.raises(PeerTimeout) as raised:
            call(layer)
        return str(raised.value)

    faults = plan("stall", "start", call=1)
    for message in virtual.run(rank_main, RANKS, deadline=DEADLINE, faults=faults, **way):
        assert_named(message)


@pytest.mark.parametrize(
    ("stage", "name"), in_turn(["start", "dispatch", "product1"], ["one-thread", "mixed"])
)
def test_a_delay_beyond_the_deadline_is_named_and_a_reset_forgets_it(stage: str, name: str) -> None:
    way = WAYS[name]

    def rank_main(world: World) -> str:
        layer = WEIGHTS.layer(world)
        message = last_call(world, layer)
        layer.reset()
        for _ in range(4):
            right_call(world, layer)
        return message

    held = plan("delay", stage, seconds=60.0)
    for message in virtual.run(rank_main, RANKS, deadline=DEADLINE, faults=held, **way):
        assert_named(message)


def test_a_fault_is_of_the_layer_that_it_names() -> None:
    def rank_main(world: World) -> list[float]:
        layers = [WEIGHTS.layer(world) for _ in range(3)]
        return [right_call(world, layer) for layer in layers]

    held = plan("delay", "product0", call=1, seconds=0.3, layer=1)
    results = virtual.run(rank_main, RANKS, deadline=10.0, faults=held)
    assert results[CULPRIT][1] >= 0.3
    told = [LayerFaults(held, CULPRIT, layer, 1, pinned=False).packed() for layer in range(3)]
    assert [any(of_layer) for of_layer in told] == [False, True, False]


# --- slow parts of a rank -------------------------------------------------------------------------


@ways
def test_every_part_of_a_slow_processor_takes_longer(way: Way) -> None:
    """With one processor the call takes as long as its parts; beside others it may do fewer."""
    slow = FaultPlan(slow_processors=(SlowProcessor(rank=CULPRIT, processor=0, seconds=0.02),))

    def rank_main(world: World) -> tuple[float, int]:
        layer = WEIGHTS.layer(world)
        seconds = right_call(world, layer)
        return seconds, sum(layer.stats()["tasks"].values())

    results = virtual.run(rank_main, RANKS, deadline=10.0, faults=slow, **way)
    seconds, parts = results[CULPRIT]
    alone = way["twin"].processors == 1
    assert seconds >= 0.02 * (parts if alone else 1)


def test_a_slow_processor_takes_the_factor_of_its_own_time() -> None:
    cfg = config(hidden=256, intermediate=512, max_tokens=256)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 256, 0)
    slow = FaultPlan(slow_processors=(SlowProcessor(rank=0, processor=0, factor=8.0),))

    def rank_main(world: World) -> float:
        layer = weights.layer(world)
        busy = []
        for _ in range(3):
            y = call(layer)
            assert_matches(weights, call, y)
            busy.append(layer.stats()["busy_seconds"])
        return min(busy)

    usual = slowed = math.inf
    for _ in range(20):  # a busy machine makes some calls slow, but not the quickest of many
        usual = min(usual, *virtual.run(rank_main, 1))
        slowed = min(slowed, *virtual.run(rank_main, 1, faults=slow))
        if 5 * usual < slowed:
            break
    assert 5 * usual < slowed


@ways
def test_a_slow_link_holds_back_what_is_announced_to_one_peer(way: Way) -> None:
    latency, rate = 0.05, 50_000.0
    link = SlowLink(rank=CULPRIT, peer=3, seconds=latency, bytes_per_second=rate)

    def rank_main(world: World) -> tuple[float, int]:
        layer = WEIGHTS.layer(world)
        return right_call(world, layer), layer.stats()["pairs_sent"][3]

    slow = FaultPlan(slow_links=(link,))
    results = virtual.run(rank_main, RANKS, deadline=10.0, faults=slow, **way)
    seconds, rows = results[CULPRIT]  # which has sent them before its call is over
    assert rows > 0
    assert seconds >= latency + rows * CFG.hidden * 4 / rate


@pytest.mark.parametrize(
    "slow",
    [
        FaultPlan(slow_links=(SlowLink(rank=CULPRIT, peer=2, seconds=60.0),)),
        FaultPlan(slow_processors=(SlowProcessor(rank=CULPRIT, processor=0, seconds=60.0),)),
    ],
    ids=["link", "processor"],
)
@ways
def test_what_is_slower_than_the_deadline_is_named(slow: FaultPlan, way: Way) -> None:
    def rank_main(world: World) -> str:
        return last_call(world, WEIGHTS.layer(world))

    for message in virtual.run(rank_main, RANKS, deadline=DEADLINE, faults=slow, **way):
        assert_named(message)


def test_what_is_slow_stays_slow_after_a_reset() -> None:
    slow = FaultPlan(slow_processors=(SlowProcessor(rank=0, processor=0, seconds=0.02),))

    def rank_main(world: World) -> tuple[float, int]:
        layer = WEIGHTS.layer(world)
        right_call(world, layer)
        layer.reset()
        return right_call(world, layer), sum(layer.stats()["tasks"].values())

    [(seconds, parts)] = virtual.run(rank_main, 1, faults=slow)
    assert seconds >= 0.02 * parts


# --- starts ---------------------------------------------------------------------------------------


def test_start_delays_add_up_and_are_drawn_by_seed_rank_and_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("moeos.faults.time.sleep", slept.append)

    def sleeps(rank: int, layer: int, seed: int = 7) -> list[float]:
        delays = (
            StartDelay(distribution="uniform", low=0.0, high=1.0),
            StartDelay(distribution="constant", seconds=10.0, rank=1),
            StartDelay(distribution="constant", seconds=100.0, layer=2),
        )
        slept.clear()
        faults = LayerFaults(
            FaultPlan(start_delays=delays, seed=seed), rank, layer, 1, pinned=False
        )
        assert not faults.on_device
        for _ in range(3):
            faults.before_call()
        return list(slept)

    assert sleeps(0, 0) == sleeps(0, 0)
    assert len({*sleeps(0, 0), *sleeps(0, 1), *sleeps(0, 0, seed=8)}) == 9
    assert all(int(seconds) == 110 for seconds in sleeps(1, 2))
    assert all(int(seconds) == 10 for seconds in sleeps(1, 0))
    assert all(int(seconds) == 0 for seconds in sleeps(0, 0))


def test_a_rank_that_starts_late_holds_up_the_others_and_is_named_beyond_the_deadline() -> None:
    def late(seconds: float) -> FaultPlan:
        delay = StartDelay(distribution="constant", seconds=seconds, rank=CULPRIT)
        return FaultPlan(start_delays=(delay,))

    def right_calls(world: World) -> float:
        layer = WEIGHTS.layer(world)
        return right_call(world, layer) + right_call(world, layer)

    seconds = virtual.run(right_calls, RANKS, deadline=5.0, faults=late(0.2))
    assert seconds[CULPRIT] >= 0.4
    assert min(seconds) >= 0.2  # the second calls wait, whenever the first ones began

    def one_call(world: World) -> str:
        return last_call(world, WEIGHTS.layer(world))

    messages = virtual.run(one_call, RANKS, deadline=DEADLINE, faults=late(1.2))
    for rank, message in enumerate(messages):
        if rank != CULPRIT:
            assert_named(message)


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "name"),
    all_but(
        [("combine", "one-thread"), ("dispatch", "remote")],
        [
            *((stage, "one-thread") for stage in ("start", "product0", "combine")),
            ("dispatch", "remote"),
        ],
    ),
)
def test_a_process_that_is_killed_at_a_stage_is_named_by_the_others(stage: str, name: str) -> None:
    way = WAYS[name]
    port = free_port()

    def live(rank: int) -> str:
        os.environ.update(torchrun_environment(rank, RANKS, port))
        with moeos.init("twin", deadline=2.0, faults=plan("kill", stage), **way) as world:
            layer = WEIGHTS.layer(world)
            return last_call(world, layer)

    ranks = ForkedRanks(live, RANKS)
    survivors = [rank for rank in range(RANKS) if rank != CULPRIT]
    outcomes = ranks.ended(ranks=survivors)
    assert ranks.ended(ranks=[CULPRIT]) == [None]
    assert ranks.processes[CULPRIT].exitcode == -signal.SIGKILL
    for outcome in outcomes:
        assert isinstance(outcome, str), repr(outcome)
        assert_named(outcome)


PROGRAM = """
import torch, moeos
torch.set_num_threads(1)
with moeos.init("twin", deadline=10.0) as world:
    cfg = moeos.MoEConfig(hidden=64, intermediate=64, experts=6, top_k=2, max_tokens=64)
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 64).bfloat16()
    layer(x)
    try:
        layer(x)
        layer(x)
    except moeos.PeerTimeout as error:
        print(f"[{world.rank}: {error}]", flush=True)
    world.control.barrier()  # no launcher ends a rank because another was faster
"""


@pytest.mark.parametrize("launch", [forked, at_night(torchrun), at_night(mpirun)])
def test_a_started_program_takes_its_plan_from_the_environment(
    launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "faults.toml"
    file.write_text('[[fault]]\nkind = "stall"\nrank = 1\ncall = 2\nstage = "product0"\n')
    monkeypatch.setenv("MOEOS_FAULTS", str(file))
    ended = launch(2, PROGRAM)
    said = re.findall(r"\[(\d): ([^]]*)\]", ended.stdout)
    assert sorted(rank for rank, _ in said) == ["0", "1"], ended.stdout + ended.stderr
    for _, message in said:
        assert "for rank 1, which owes results" in message


def test_a_plan_that_is_given_goes_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "faults.toml"
    file.write_text("seed = 5\n")
    monkeypatch.setenv("MOEOS_FAULTS", str(file))

    def seed(world: World) -> int:
        assert world.faults is not None
        return world.faults.seed

    assert virtual.run(seed, 2) == [5, 5]
    assert virtual.run(seed, 2, faults=FaultPlan(seed=3)) == [3, 3]
    monkeypatch.setenv("MOEOS_FAULTS", str(tmp_path / "none.toml"))
    with pytest.raises(FileNotFoundError, match="MOEOS_FAULTS names a file that cannot be read"):
        moeos.init("twin")


def test_sixteen_delays_of_one_rank_all_happen() -> None:
    held = FaultPlan(
        faults=tuple(
            Fault(kind="delay", rank=CULPRIT, call=call, stage=stage, seconds=0.02)
            for call, stage in zip(range(1, 17), (STAGES * 3)[:16], strict=True)
        )
    )

    def rank_main(world: World) -> float:
        layer = WEIGHTS.layer(world)
        return sum(right_call(world, layer) for _ in range(17))

    assert min(virtual.run(rank_main, 2, faults=held)) >= 16 * 0.019


def test_a_world_without_a_plan_has_no_faults() -> None:
    faults = LayerFaults(None, 0, 0, 1, pinned=False)
    assert not faults.on_device
    assert not any(faults.packed())
    assert torch.equal(
        *(
            virtual.run(lambda world: CALLS[world.rank](WEIGHTS.layer(world)), 2, faults=given)[0]
            for given in (None, FaultPlan())
        )
    )
