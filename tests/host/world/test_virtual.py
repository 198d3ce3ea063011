# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: results in order, and the error that caused the others, promptly."""

import threading
from typing import Any

import pytest
import torch

import moeos
from moeos.system.errors import PeerTimeout
from moeos.world import virtual
from moeos.world.world import TwinOptions, World
from tests.holdings import Held


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_results_come_in_rank_order(ranks: int) -> None:
    def meet(world: World) -> tuple[int, int]:
        world.control.barrier()
        return world.rank, world.size

    assert moeos.virtual.run(meet, ranks=ranks) == [(rank, ranks) for rank in range(ranks)]


def test_every_rank_has_a_thread_of_its_own_and_one_processor() -> None:
    def look(world: World) -> tuple[int, int]:
        world.control.barrier()
        return threading.get_ident(), world.processors

    threads, processors = zip(*virtual.run(look, ranks=3), strict=True)
    assert len(set(threads)) == 3
    assert processors == (1, 1, 1)


def test_worlds_are_closed_when_all_ranks_have_ended() -> None:
    worlds = virtual.run(lambda world: world, ranks=3)
    assert [world.closed for world in worlds] == [True] * 3


def test_options_reach_every_world() -> None:
    options = TwinOptions(processors=2, jitter_us=1.0, jitter_seed=3)
    worlds = virtual.run(lambda world: world, ranks=2, backend="auto", deadline=4.0, twin=options)
    assert [(w.twin, w.deadline, w.backend) for w in worlds] == [(options, 4.0, "twin")] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 0}, ValueError, "ranks is 0; allowed: 1 to 64"),
        ({"ranks": 65}, ValueError, "ranks is 65; allowed: 1 to 64"),
        ({"ranks": 2.0}, TypeError, "ranks is 2.0; it must be an integer"),
        ({"backend": "twins"}, ValueError, "did you mean 'twin'"),
        ({"deadline": 0}, ValueError, "deadline is 0; allowed"),
        ({"twin": {"processors": 1}}, TypeError, "twin is {'processors': 1}; it must be"),
    ],
)
def test_a_bad_argument_is_refused_before_any_rank_starts(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    started: list[int] = []
    with pytest.raises(error) as raised:
        virtual.run(lambda world: started.append(world.rank), **arguments)
    assert message in str(raised.value)
    assert started == []


def test_the_error_of_a_rank_is_raised_as_it_is_with_the_rank_named() -> None:
    mine = ValueError("mine")

    def fail(world: World) -> None:
        if world.rank == 2:
            raise mine
        world.control.barrier()

    with pytest.raises(ValueError, match="mine") as raised:
        virtual.run(fail, ranks=4)
    assert raised.value is mine
    assert notes_of(mine) == ["raised on virtual rank 2 of 4"]


class Stubborn(Exception):
    """An error that cannot be asked what it says, and takes no note."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"no {name}")


def test_an_error_that_says_nothing_is_raised_and_the_peers_are_told() -> None:
    told: list[str] = []

    def rank_main(world: World) -> None:
        if world.rank == 1:
            raise Stubborn
        with pytest.raises(PeerTimeout) as error:
            world.control.barrier()
        told.append(str(error.value))

    with pytest.raises(Stubborn):
        virtual.run(rank_main, ranks=2)
    assert len(told) == 1
    assert "rank 1 gave up: Stubborn: its text cannot be had (RuntimeError)" in told[0]


def test_of_several_errors_the_lowest_ranks_is_raised_but_none_that_is_a_consequence() -> None:
    def fail(world: World) -> None:
        if world.rank == 0:
            world.control.barrier()
        raise KeyError(world.rank)

    with pytest.raises(KeyError) as raised:
        virtual.run(fail, ranks=3)
    assert raised.value.args == (1,)


def test_a_timeout_is_raised_where_it_is_all_there_is_and_names_the_missing_rank() -> None:
    def skip(world: World) -> None:
        if world.rank != 1:
            world.control.barrier()

    with pytest.raises(PeerTimeout, match=r"waited 0\.2 s for a barrier: rank 1 did not arrive"):
        virtual.run(skip, ranks=3, deadline=0.2)


def test_the_end_of_the_interpreter_asked_for_by_a_rank_is_not_lost() -> None:
    def leave(world: World) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        virtual.run(leave, ranks=2)


def test_a_failing_rank_wakes_ranks_that_are_inside_a_call() -> None:
    def fail_or_call(world: World) -> str:
        woken = threading.Event()
        reasons: list[str] = []

        def wake(reason: str) -> None:
            reasons.append(reason)
            woken.set()

        Held(world, on_interrupt=wake)
        world.control.barrier()
        if world.rank == 1:
            raise ValueError("bad")
        assert woken.wait(20)
        return reasons[0]

    with pytest.raises(ValueError, match="bad"):
        virtual.run(fail_or_call, ranks=3, deadline=25.0)


def test_a_rank_that_does_not_end_is_left_behind_with_its_heap_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual, "MARGIN", 0.1)
    leave = threading.Event()
    worlds: list[World] = []

    def one_fails_one_sticks(world: World) -> None:
        world.allocate_heap(64)
        if world.rank == 0:
            raise ValueError("bad")
        worlds.append(world)
        leave.wait(30)

    with pytest.raises(ValueError, match="bad") as raised:
        virtual.run(one_fails_one_sticks, ranks=2, deadline=0.5)
    assert notes_of(raised.value) == [
        "raised on virtual rank 0 of 2; virtual rank 1 did not end in time"
    ]
    assert not worlds[0].closed
    leave.set()
    worlds[0].close()


def test_a_ranks_backward_is_its_own_threads() -> None:
    """Else one thread of autograd's runs the backwards of all ranks of a GPU in turn, and the
    first one waits for the others for ever.
    """
    asked = virtual.run(lambda world: torch._C._is_multithreading_enabled(), ranks=2)
    assert asked == [False, False]
    assert torch._C._is_multithreading_enabled()
