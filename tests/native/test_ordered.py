# SPDX-License-Identifier: Apache-2.0
"""Orders of the device OS: all that actors share is ordered, and each order that is left out is
noticed.

The twin's polls and publishes are relaxed, as the GPU's, and fences order them. ThreadSanitizer
does not model fences; the explorer's witness of order (test_order.cpp) does. It says which places
of the program have ordered something, and can run as if one of them had not.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.native.test_native import (
    COMPILER,
    EXPLORE_SOURCES,
    OPTIMISED,
    ROOT,
    TESTS,
    Flavour,
    compile_all,
    execute,
    gemm_sources,
    in_one_file,
    run,
)
from tests.nightly import all_but

LINES = shutil.which("addr2line")
pytestmark = [
    pytest.mark.skipif(COMPILER is None or LINES is None, reason="needs g++ and addr2line"),
    pytest.mark.timeout(1200),
]

WATCHED = Flavour(("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"), {})
"""Calls functions of ThreadSanitizer's names, which the witness has."""
WRAPPED = ("memcpy", "memmove", "memset", "mmap", "munmap")

SOUND_RUNS, MORE_SOUND_RUNS, RUNS, MORE_RUNS = 15, 60, 300, 1500
"""Seeds, each in three scenarios and two strategies. The first show all orders, as 30 do. The last
are for orders that few worlds need."""

NO_FAILURE = "needed where a call fails, and none does here"
NOTHING_BEHIND = "publishes nothing but the word itself; the twin's puts have no weaker order"
NOT_NOTICED = {
    "ArrivalsSubscriber::decide, release": "what it publishes are numbers in atomic words",
    "Scheduler::step, acquire": "the same",
    "Scheduler::returns_are_awaited, acquire": "a fetch orders it, unless tiles were left over",
    "LandingsSubscriber::count_all, acquire": "the look at flags before has acquired this word",
    "ReturnsSubscriber::ReturnsSubscriber, release": "the twin has one returns subscriber",
    "TilePlan::find_free_places, acquire": "the scheduler mostly acquires more of a tile before "
    "its places are another's; none of 2100 seeds shows it, of which 300 use places again most",
    "Sender::step, release": "for the network, which reads on this actor's behalf",
    "Sender::echo, release": NOTHING_BEHIND,
    "Sender::reserve, release": NOTHING_BEHIND,
    "Sender::send, release": NOTHING_BEHIND,
    "send_word, release": NOTHING_BEHIND,
    "answer_inquiry, acquire": NO_FAILURE,
    "call_over, acquire": NO_FAILURE,
    "put_own_failure, acquire": NO_FAILURE,
    "take_in_failures, acquire": NO_FAILURE,
}
"""Orders that may be left out, and why the witness has nothing to say of it."""


@dataclasses.dataclass(frozen=True, order=True)
class Order:
    """What a line of the runtime orders.

    Attributes:
        file, line, function: where it is, by the innermost function of the device OS.
        half: acquire or release.
        places: of the program, in hexadecimal.
    """

    file: str
    line: int
    function: str
    half: str
    places: tuple[str, ...] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.function}, {self.half}"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer with its witness."""
    folder = tmp_path_factory.mktemp("watched")
    around = folder / "around.cpp"
    around.write_text(in_one_file(one for one in EXPLORE_SOURCES if one.name != "test_explore.cpp"))
    witness = compile_all(OPTIMISED, [TESTS / "test_order.cpp"], folder)
    couriers = TESTS / "ordered_couriers.cpp"
    watched = compile_all(WATCHED, [around, couriers, *gemm_sources()], folder)
    built = folder / "ordered"
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    linked = run([str(COMPILER), "-no-pie", *wraps, *watched, *witness, "-o", built])
    assert linked.returncode == 0, linked.stderr
    return built


@pytest.fixture(scope="module")
def orders(program: Path) -> list[Order]:
    """What the runtime orders in sound runs, in which nothing is unordered."""
    done = execute(WATCHED, program, 1, SOUND_RUNS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything is ordered" in done.stdout
    places = re.findall(r"^(acquire|release) ([0-9a-f]+)$", done.stdout, re.MULTILINE)
    # A call returns behind itself, perhaps to another line.
    calls = [f"{int(place, 16) - 1:x}" for _, place in places]
    listed = run([str(LINES), "-Cfie", program, "-a", *calls])
    assert listed.returncode == 0, listed.stderr
    # Of each its address, then a function and a line for each function that it is inlined in.
    told = re.split(r"^0x[0-9a-f]+\n", listed.stdout, flags=re.MULTILINE)[1:]
    found: dict[tuple[str, int, str, str], list[str]] = defaultdict(list)
    for (half, place), frames in zip(places, told, strict=True):
        where = in_device_os(frames.splitlines())
        if where is not None:
            found[(*where, half)].append(place)
    return sorted(Order(*where, tuple(places)) for where, places in found.items())


def in_device_os(frames: Sequence[str]) -> tuple[str, int, str] | None:
    """The innermost of some frames that is of the runtime, but for the platform below it."""
    for function, at in zip(frames[::2], frames[1::2], strict=True):
        path = Path(at.split(" ")[0])
        file, _, line = path.name.partition(":")
        inside = path.is_relative_to(ROOT / "runtime")
        if inside and path.parent.name not in ("platform", "twin"):
            return file, int(line), plain(function)
    return None


def plain(function: str) -> str:
    """A function's name without result, parameters, templates and namespace; a lambda has the name
    of the function that it stands in."""
    before = None
    while function != before:
        before = function
        function = re.sub(r"<[^<>]*>|\([^()]*\)| const\b", "", function)
    return function.split("::{lambda")[0].split()[-1].removeprefix("moeos::")


def test_everything_that_actors_share_is_ordered(orders: list[Order]) -> None:
    assert NOT_NOTICED.keys() <= set(map(str, orders)), "an order that there is no longer"


@pytest.mark.nightly
def test_everything_that_actors_share_is_ordered_in_more_runs(program: Path) -> None:
    done = execute(WATCHED, program, 1 + SOUND_RUNS, MORE_SOUND_RUNS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything is ordered" in done.stdout


@pytest.mark.parametrize("step", all_but([24], [24, 1]))
def test_an_order_that_is_left_out_is_noticed(
    step: int, program: Path, orders: list[Order]
) -> None:
    """Each of them, or each `step`-th."""

    def is_noticed(order: Order) -> bool:
        for first, runs in ((1, RUNS), (1 + RUNS, MORE_RUNS)):
            done = execute(WATCHED, program, first, runs, order.half, *order.places)
            assert done.returncode in (0, 1), done.stderr
            if re.search("nothing orders|gives a wrong result", done.stdout):
                return True
        return False

    needed = [order for order in orders if str(order) not in NOT_NOTICED][::step]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        noticed = dict(zip(needed, pool.map(is_noticed, needed), strict=True))
    assert not [order for order, found in noticed.items() if not found]
