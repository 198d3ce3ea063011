# SPDX-License-Identifier: Apache-2.0
"""World and TwinOptions: what they accept, and that a world ends in order and only once."""

import ctypes
import gc
import os
import threading
import weakref
from typing import Any

import pytest

from moeos.system.errors import PeerTimeout
from moeos.world import virtual
from moeos.world import world as world_module
from moeos.world.control import ControlPlane, SoloControl
from moeos.world.world import MAX_DEADLINE, TwinOptions, World
from tests.holdings import Held
from tests.host.world.test_control import in_threads


def world_of(control: ControlPlane, **changes: Any) -> World:
    settings: dict[str, Any] = {"backend": "twin", "deadline": 10.0, "twin": TwinOptions()}
    return World(control, **(settings | changes))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("processors", 0, ValueError),
        ("processors", 1025, ValueError),
        ("processors", 1.0, TypeError),
        ("processors", True, TypeError),
        ("jitter_us", -0.1, ValueError),
        ("jitter_us", float("nan"), ValueError),
        ("jitter_us", 2e6, ValueError),
        ("jitter_us", "1", TypeError),
        ("jitter_seed", -1, ValueError),
        ("jitter_seed", 2**63, ValueError),
        ("split_os", 1, TypeError),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_name_and_value(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{name} is {value!r}; (allowed|it must be)"):
        TwinOptions(**{name: value})


@pytest.mark.parametrize("deadline", [0, 0.0, -1.0, float("inf"), float("nan"), MAX_DEADLINE + 1])
def test_a_deadline_that_is_no_positive_time_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match=r"deadline is .*; allowed: above 0 and up to 86400"):
        world_of(SoloControl(), deadline=deadline)


@pytest.mark.parametrize(
    ("ranks_per_node", "error"), [(0, ValueError), (1 << 17, ValueError), (2.0, TypeError)]
)
def test_a_number_of_ranks_per_node_out_of_range_is_refused(
    ranks_per_node: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"ranks_per_node is {ranks_per_node}; (allowed|it must be)"):
        world_of(SoloControl(), ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("ranks_per_node", "near"),
    [
        (None, [[0, 1, 2, 3, 4]] * 5),
        (1, [[0], [1], [2], [3], [4]]),
        (2, [[0, 1], [0, 1], [2, 3], [2, 3], [4]]),
    ],
)
def test_consecutive_ranks_make_the_nodes_whose_memory_is_written_directly(
    ranks_per_node: int | None, near: list[list[int]]
) -> None:
    def rank_main(world: World) -> list[int]:
        return [peer for peer in range(world.size) if world.near(peer)]

    assert virtual.run(rank_main, ranks=5, ranks_per_node=ranks_per_node) == near


def test_processors_left_open_share_the_usable_cores_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [TwinOptions().processors_for(ranks) for ranks in (1, 3, 8, 9)] == [8, 2, 1, 1]


def test_processors_that_are_given_are_used_whatever_the_machine_has() -> None:
    assert TwinOptions(processors=5).processors_for(64) == 5
    assert world_of(SoloControl(), twin=TwinOptions(processors=5)).processors == 5


def test_a_world_tells_its_rank_size_backend_and_deadline() -> None:
    with world_of(SoloControl(), deadline=3) as world:
        assert (world.rank, world.size, world.backend, world.deadline) == (0, 1, "twin", 3.0)
        assert repr(world) == "World(rank=0, size=1, backend='twin')"


def test_engines_are_closed_last_first_and_before_their_heaps_are_unmapped() -> None:
    events: list[tuple[str, int]] = []
    world = world_of(SoloControl())
    heap = world.allocate_heap(64)
    ctypes.c_uint8.from_address(heap.addresses[0]).value = 9
    for name in ("first", "second"):
        Held(world, on_end=lambda name=name: events.append((name, len(heap.addresses))))  # type: ignore[misc]
    world.close()
    assert events == [("second", 1), ("first", 1)]
    assert heap.addresses == ()


def test_closing_twice_calls_nothing_twice() -> None:
    world = world_of(SoloControl())
    held = Held(world)
    world.close()
    world.close()
    assert held.ended == 1


def test_heaps_are_unmapped_even_if_an_engine_fails_to_close() -> None:
    def fail() -> None:
        raise OSError("the engine's error")

    world = world_of(SoloControl())
    heap = world.allocate_heap(64)
    Held(world, on_end=fail)
    with pytest.raises(OSError, match="the engine's error"):
        world.close()
    assert heap.addresses == ()


def test_a_closed_world_gives_no_heap_and_cannot_be_entered() -> None:
    with world_of(SoloControl()) as world:
        pass
    assert world.closed
    with pytest.raises(RuntimeError, match="the world of rank 0 is closed"):
        world.allocate_heap(64)
    with pytest.raises(RuntimeError, match="the world of rank 0 is closed"), world:
        pass


def test_an_abort_after_the_close_reaches_no_engine() -> None:
    calls: list[str] = []
    world = world_of(SoloControl())
    Held(world, on_interrupt=calls.append)
    world.close()
    world.abort("too late")
    assert calls == []


def test_leaving_a_world_by_an_error_interrupts_this_ranks_engines() -> None:
    reasons: list[str] = []
    world = world_of(SoloControl())
    Held(world, on_interrupt=reasons.append)
    with pytest.raises(KeyError), world:
        raise KeyError("w1")
    assert reasons == ["KeyError: 'w1'"]
    assert world.closed


def test_leaving_a_world_by_an_error_ends_the_other_ranks_waits_with_its_reason() -> None:
    def one_fails(control: ControlPlane) -> None:
        with world_of(control) as world:
            if world.rank == 1:
                raise ValueError("a bad tensor")
            world.control.barrier()

    first, second, third = in_threads(one_fails, 3)
    assert isinstance(second, ValueError)
    for error in (first, third):
        assert isinstance(error, PeerTimeout)
        assert "rank 1 gave up: ValueError: a bad tensor" in str(error)


class Mute(Exception):
    """An error that raises what it was made with if it is asked what it says."""

    def __str__(self) -> str:
        raise self.args[0]


@pytest.mark.parametrize("raised", [RuntimeError("no text"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_that_says_nothing_comes_out_of_its_world_and_the_peers_are_told(
    raised: BaseException,
) -> None:
    mute = Mute(raised)

    def one_fails(control: ControlPlane) -> None:
        world = world_of(control)
        try:
            with world:
                if world.rank == 1:
                    raise mute
                world.control.barrier()
        finally:
            assert world.closed

    first, second = in_threads(one_fails, 2)
    assert second is mute
    assert isinstance(first, PeerTimeout)
    said = f"rank 1 gave up: Mute: its text cannot be had ({type(raised).__name__})"
    assert said in str(first)


def test_what_a_deleted_owner_held_ends_once_and_before_its_world() -> None:
    class Owner:
        pass

    with world_of(SoloControl()) as world:
        owner = Owner()
        held = Held(world)
        world._holdings.clear()
        world.hold(owner, held)
        assert held.ended == 0
        del owner
        assert held.ended == 1
    assert held.ended == 1


def test_what_an_owner_in_a_reference_cycle_held_ends_when_it_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.itself = self

    with world_of(SoloControl()) as world:
        held = Held(world)
        world.hold(Owner(), held)
        gc.collect()
        assert held.ended == 1


def test_what_cannot_end_yet_ends_when_the_next_is_made_or_with_the_world() -> None:
    with world_of(SoloControl()) as world:
        first, second = Held(world), Held(world)
        first.may_end = second.may_end = False
        for held in (first, second):
            world_module._give_back(weakref.ref(world), world._home, held)
        first.may_end = True
        Held(world)
        assert (first.ended, second.ended) == (1, 0)
    assert (first.ended, second.ended) == (1, 1)


def test_a_world_is_not_closed_within_a_call_in_the_same_thread() -> None:
    world = world_of(SoloControl())
    held = Held(world)

    def call() -> None:
        with pytest.raises(RuntimeError, match="cannot be closed within a call in the same"):
            world.close()

    held.gate.run(call)
    assert not world.closed
    world.close()
    assert held.ended == 1


def test_what_a_call_that_never_ends_may_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "MARGIN", 0.1)
    world = world_of(SoloControl(), deadline=0.1)
    reasons: list[str] = []
    held = Held(world, on_interrupt=reasons.append)
    heap = world.allocate_heap(64)
    leave, inside = threading.Event(), threading.Event()

    def call() -> None:
        inside.set()
        leave.wait(60)

    thread = threading.Thread(target=held.gate.run, args=(call,))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match=r"rank 0 is closed, but a call .* within 0\.2 s"):
        world.close()
    assert reasons == ["its world was closed during a call"]
    assert len(heap.addresses) == 1
    assert held.ended == 0
    leave.set()
    thread.join()
