# SPDX-License-Identifier: Apache-2.0
"""The control planes: what they exchange, and that a missing rank is named and never waited for."""

import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from moeos.system.errors import ConfigMismatch, PeerTimeout
from moeos.world.control import (
    MAX_PAYLOAD_BYTES,
    ControlPlane,
    SoloControl,
    StoreControl,
    ThreadControl,
    _PolledControl,
    _Post,
    raise_together,
    require_equal,
)
from moeos.world.rendezvous import at_address
from tests.processes import ForkedRanks, free_port, mpirun

Value = TypeVar("Value")
RanksFunction = Callable[[ControlPlane], Any]


class RunRanks(Protocol):
    """Runs a function on every rank; an outcome is what it returned or the exception it raised."""

    def __call__(self, function: RanksFunction, size: int, deadline: float = 10.0) -> list[Any]: ...


def in_threads(function: RanksFunction, size: int, deadline: float = 10.0) -> list[Any]:
    controls = ThreadControl.group(size, deadline)
    outcomes: list[Any] = [None] * size

    def live(control: ThreadControl) -> None:
        try:
            outcomes[control.rank] = function(control)
        except Exception as error:
            outcomes[control.rank] = error
        finally:
            control.close()

    threads = [threading.Thread(target=live, args=(control,)) for control in controls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def control_at(port: int, rank: int, size: int, deadline: float) -> StoreControl:
    met = at_address(rank, size, deadline, host="127.0.0.1", port=port, serve=rank == 0)
    return StoreControl(rank, size, deadline, met.store, where=met.where, serves=met.serves)


def store_rank(function: RanksFunction, size: int, deadline: float = 10.0) -> Callable[[int], Any]:
    """What one process does: `function` with a control plane over a store that rank 0 serves."""
    port = free_port()

    def live(rank: int) -> Any:
        control = control_at(port, rank, size, deadline)
        try:
            return function(control)
        finally:
            control.close()

    return live


def over_a_store(function: RanksFunction, size: int, deadline: float = 10.0) -> list[Any]:
    return ForkedRanks(store_rank(function, size, deadline), size).ended()


def shorten_deadline(control: ControlPlane, seconds: float) -> None:
    """From here on; ranks that start at different speeds have met under the longer one."""
    control._deadline = seconds  # type: ignore[attr-defined]


@pytest.fixture(params=[in_threads, over_a_store], ids=["threads", "store"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    run: RunRanks = request.param
    return run


class _SlowEyes(_PolledControl):
    """A rank whose peer posts and gives up between its looks at the post and at aborts."""

    def __init__(self, posts: bool) -> None:
        super().__init__(0, 2, 5.0)
        self._looks = 0
        self._posts = posts

    def _post(self, post: _Post) -> None:
        pass

    def _take(self, peer: int) -> _Post | None:
        self._looks += 1
        return _Post("an exchange", "posted") if self._posts and self._looks > 1 else None

    def _find_abort(self) -> str | None:
        return "rank 1 gave up: enough"


def test_a_value_that_was_posted_counts_although_its_rank_gave_up() -> None:
    assert _SlowEyes(posts=True).allgather("mine") == ["mine", "posted"]
    with pytest.raises(PeerTimeout, match="stopped waiting for an exchange: rank 1 gave up"):
        _SlowEyes(posts=False).allgather("mine")


def test_every_rank_gets_the_values_of_all_in_rank_order(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(lambda control: control.allgather(("rank", control.rank)), 4)
    assert outcomes == [[("rank", 0), ("rank", 1), ("rank", 2), ("rank", 3)]] * 4


def test_exchanges_in_a_row_keep_their_order_when_ranks_run_at_different_speeds(
    run_ranks: RunRanks,
) -> None:
    def exchange_often(control: ControlPlane) -> bool:
        delays = random.Random(control.rank)
        for number in range(40):
            time.sleep(delays.choice([0.0, 0.0, 0.002]))
            if control.allgather((number, control.rank)) != [(number, r) for r in range(3)]:
                return False
        return True

    assert run_ranks(exchange_often, 3) == [True] * 3


def test_a_barrier_is_left_by_nobody_before_all_have_come(run_ranks: RunRanks) -> None:
    def come_late(control: ControlPlane) -> tuple[float, float]:
        time.sleep(0.1 * control.rank)
        came = time.monotonic()
        control.barrier()
        return came, time.monotonic()

    came, left = zip(*run_ranks(come_late, 4), strict=True)
    assert max(came) <= min(left)


def test_a_wait_past_the_deadline_names_exactly_the_ranks_that_are_missing(
    run_ranks: RunRanks,
) -> None:
    def skip_some(control: ControlPlane) -> None:
        control.barrier()
        shorten_deadline(control, 0.5)
        if control.rank not in (1, 3):
            control.allgather(0, "the test's values")

    outcomes = run_ranks(skip_some, 4)
    assert [type(outcome) for outcome in outcomes[1::2]] == [type(None)] * 2
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerTimeout)
        assert str(outcomes[rank]).startswith(
            f"rank {rank} of 4 waited 0.5 s for the test's values: ranks 1, 3 did not arrive"
        )


def test_an_abort_ends_the_waits_of_all_ranks_at_once_and_tells_the_reason(
    run_ranks: RunRanks,
) -> None:
    def one_gives_up(control: ControlPlane) -> None:
        if control.rank == 1:
            control.abort("the reason")
            return
        with pytest.raises(PeerTimeout, match="rank 1 gave up: the reason"):
            control.barrier()
        with pytest.raises(PeerTimeout, match="rank 1 gave up: the reason"):
            control.barrier()

    assert run_ranks(one_gives_up, 3, deadline=25.0) == [None] * 3


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (os.fsdecode(b"no file \xff\xfe"), r"no file \udcff\udcfe"),
        ("caf\u00e9 \U0001f4a5", r"caf\xe9 \U0001f4a5"),
        ("\udcff" * 10_000, r"\udcff" * 2_000),
    ],
    ids=["a file's name", "no ASCII", "long"],
)
def test_a_reason_that_cannot_be_encoded_reaches_the_peers(
    reason: str, told: str, run_ranks: RunRanks
) -> None:
    def one_gives_up(control: ControlPlane) -> str:
        control.barrier()
        if control.rank == 1:
            control.abort(reason)
            return ""
        with pytest.raises(PeerTimeout) as error:
            control.barrier()
        return str(error.value)

    outcomes = run_ranks(one_gives_up, 2)
    assert outcomes[1] == ""
    assert f"rank 1 gave up: {told}. Ranks of this world" in str(outcomes[0])


def test_an_exchange_after_a_timeout_fails_at_once_with_the_same_cause(run_ranks: RunRanks) -> None:
    def try_twice(control: ControlPlane) -> str:
        control.barrier()
        shorten_deadline(control, 0.3)
        if control.rank == 1:
            return ""
        with pytest.raises(PeerTimeout):
            control.barrier()
        with pytest.raises(PeerTimeout) as second:
            control.allgather(0, "another try")
        return str(second.value)

    message = run_ranks(try_twice, 2)[0]
    assert message.startswith("rank 0 cannot begin another try: rank 0 of 2 waited 0.3 s")


def test_a_closed_control_plane_exchanges_nothing_more(run_ranks: RunRanks) -> None:
    def close_twice(control: ControlPlane) -> bool:
        control.barrier()
        control.close()
        control.close()
        with pytest.raises(RuntimeError, match="its world is closed"):
            control.barrier()
        return True

    assert run_ranks(close_twice, 2) == [True, True]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_whoever_closes_last_the_store_is_there_until_then_and_nothing_is_left_in_it(
    last: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does torch say on stderr that it has lost the store."""
    port = free_port()

    def live(rank: int) -> int | None:
        control = control_at(port, rank, 3, 60.0)
        for _ in range(5):
            control.barrier()
        control._delete = slowly(control._delete)  # type: ignore[method-assign]
        if rank == last:
            time.sleep(1.0)
        control.close()
        if rank > 0:
            return None
        return dist.TCPStore("127.0.0.1", port, wait_for_workers=False).num_keys()

    assert ForkedRanks(live, 3).ended(90.0) == [3, None, None]  # how many worlds each rank had
    assert capfd.readouterr().err == ""


def slowly(function: Callable[[str], None]) -> Callable[[str], None]:
    def call(key: str) -> None:
        time.sleep(0.1)
        function(key)

    return call


class _Held(StoreControl):
    """A rank that has told its size, and reads nobody's before `let_go` is set."""

    let_go: threading.Event
    _told = 0

    def _ask(self, question: Callable[[], Value]) -> Value:
        if self._told == 2:  # it has connected, and told its size
            assert self.let_go.wait(30)
        self._told += 1
        return super()._ask(question)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 3, 2), (3, 2, 3)])
def test_ranks_that_differ_in_size_keep_their_keys_until_the_last_has_read_them(
    sizes: tuple[int, ...], late: int
) -> None:
    store = dist.HashStore()
    others_ended = threading.Barrier(2, action=lambda: let_go.set())
    let_go = threading.Event()
    heard: dict[int, str] = {}

    def live(rank: int) -> None:
        kind = type("_HeldHere", (_Held,), {"let_go": let_go}) if rank == late else StoreControl
        try:
            kind(rank, sizes[rank], 5.0, store, where="a store").close()
        except (ConfigMismatch, PeerTimeout) as error:
            heard[rank] = str(error)
        if rank != late:
            others_ended.wait(30)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(heard.values())) == 1, heard
    assert heard[0].startswith("size must be the same on all ranks, but they differ: "), heard
    assert not store.check(["moeos/1/size/0"]), "the last rank deletes the keys"


def test_a_start_behind_one_that_failed_on_one_rank_alone_says_so() -> None:
    store = dist.HashStore()
    with pytest.raises(PeerTimeout, match="rank 0 did not arrive") as alone:
        StoreControl(1, 2, 0.2, store, where="a store")
    assert "over another store" not in str(alone.value), "nobody else has begun one"
    StoreControl(0, 2, 0.2, store, where="a store")  # it meets what rank 1 has left
    with pytest.raises(PeerTimeout) as error:
        StoreControl(1, 2, 0.2, store, where="a store")
    assert "this is world 2 of rank 1, and world 1 of rank 0: " in str(error.value)
    assert "begin the next one on all over another store" in str(error.value)


def test_an_error_on_some_ranks_is_raised_on_all_of_them_as_the_lowest_ranks(
    run_ranks: RunRanks,
) -> None:
    def some_fail(control: ControlPlane) -> None:
        error = ValueError(f"from rank {control.rank}") if control.rank in (1, 2) else None
        raise_together(control, error, "a check")

    outcomes = run_ranks(some_fail, 4)
    assert [(type(error), str(error)) for error in outcomes] == [(ValueError, "from rank 1")] * 4


def test_no_error_on_any_rank_raises_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(lambda control: raise_together(control, None, "a check"), 3) == [None] * 3


def test_ranks_may_agree_on_what_takes_longer_than_the_deadline() -> None:
    control = Mock(rank=0)
    control.allgather.return_value = [None, None]
    raise_together(control, None, "the compiled kernel", beyond=300.0)
    control.allgather.assert_called_once_with(None, "the compiled kernel", beyond=300.0)


def test_unequal_values_raise_one_message_on_all_ranks_that_says_who_holds_what(
    run_ranks: RunRanks,
) -> None:
    def differ(control: ControlPlane) -> None:
        require_equal(control, 8 if control.rank == 2 else 4, "top_k")

    outcomes = run_ranks(differ, 4)
    assert [type(error) for error in outcomes] == [ConfigMismatch] * 4
    assert {str(error) for error in outcomes} == {
        "top_k must be the same on all ranks, but they differ: ranks 0, 1, 3: 4; rank 2: 8"
    }


def test_ranks_in_different_exchanges_hear_of_both_and_go_on(run_ranks: RunRanks) -> None:
    def differ(control: ControlPlane) -> tuple[str, list[int]]:
        names = ["the number of apples", "reset", "the number of apples"]
        with pytest.raises(ConfigMismatch) as caught:
            control.allgather(control.rank, names[control.rank])
        return str(caught.value), control.allgather(control.rank, "the ranks")

    outcomes = run_ranks(differ, 3)
    [sentence] = {said for said, _ in outcomes}
    assert "rank 0 came to the number of apples, and rank 1 to reset" in sentence
    assert [ranks for _, ranks in outcomes] == [[0, 1, 2]] * 3


def test_a_barrier_may_wait_beyond_the_deadline(run_ranks: RunRanks) -> None:
    def come_late(control: ControlPlane) -> str:
        control.barrier()
        shorten_deadline(control, 0.2)
        if control.rank == 1:
            time.sleep(0.5)
        control.barrier("reset", beyond=30.0)
        return "passed"

    assert run_ranks(come_late, 2) == ["passed"] * 2


def test_virtual_ranks_keep_no_more_than_the_last_two_posts_of_each() -> None:
    controls = ThreadControl.group(1, 1.0)
    for number in range(10):
        controls[0].allgather(number)
    assert len(controls[0]._board.posts) == 2


def test_a_value_that_is_too_large_is_refused_before_it_is_sent() -> None:
    def send_much(control: ControlPlane) -> None:
        control.allgather(b"x" * MAX_PAYLOAD_BYTES)

    (error,) = over_a_store(send_much, 1)
    assert isinstance(error, ValueError)
    assert f"allowed: {MAX_PAYLOAD_BYTES}" in str(error)


def test_one_rank_alone_exchanges_with_itself() -> None:
    control = SoloControl()
    control.barrier()
    assert control.allgather("mine") == ["mine"]


def test_a_rank_killed_in_mid_life_is_named_by_the_others() -> None:
    def lose_one(control: ControlPlane) -> None:
        control.barrier()
        shorten_deadline(control, 0.5)
        if control.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        control.barrier()

    first, second, killed = over_a_store(lose_one, 3)
    assert killed is None
    for error in (first, second):
        assert isinstance(error, PeerTimeout)
        assert "rank 2 did not arrive" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_end_of_the_rank_that_serves_the_store_ends_the_others(number: signal.Signals) -> None:
    left = multiprocessing.get_context("fork").Semaphore(0)

    def lose_the_server(control: ControlPlane) -> None:
        control.barrier()
        shorten_deadline(control, 1.0)
        if control.rank == 0:
            for _ in range(2):
                assert left.acquire(timeout=60)
            os.kill(os.getpid(), number)
        left.release()
        control.barrier()

    ranks = ForkedRanks(store_rank(lose_the_server, 3), 3)
    outcomes = ranks.ended(ranks=[1, 2])
    ranks.signal(0, signal.SIGKILL)
    ranks.ended(ranks=[0])
    for rank, error in enumerate(outcomes, start=1):
        assert isinstance(error, PeerTimeout)
        assert "the store at" in str(error)
        assert str(error).startswith(f"rank {rank} ")


def test_a_store_that_nobody_serves_is_given_up_at_the_deadline() -> None:
    with pytest.raises(PeerTimeout, match=r"rank 1 of 2 waited 0\.5 s for the store at 127"):
        control_at(free_port(), 1, 2, 0.5)


STUCK_PROGRAM = """
import time
import moeos

with moeos.init(deadline=3.0) as world:
    if world.rank == 1:
        time.sleep(300)
    world.control.barrier()
"""


def test_a_stuck_rank_does_not_keep_a_failed_job_of_mpirun_alive() -> None:
    ended = mpirun(2, STUCK_PROGRAM)
    assert ended.returncode != 0
    [line] = re.findall(r"^moeos\.system\.errors\.PeerTimeout: rank 0 .*$", ended.stderr, re.M)
    assert "waited 3 s for a barrier: rank 1 did not arrive" in line
