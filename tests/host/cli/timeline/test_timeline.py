# SPDX-License-Identifier: Apache-2.0
"""What is read out of traces: causes, the chain, sums, and the files; by hand and on the twin."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from moeos import TwinOptions, World
from moeos.cli import drawing
from moeos.cli.timeline import causes, chrome, files, picture, summary, weights
from moeos.cli.timeline.call import NONE, PRODUCT0, PRODUCT1, CallTrace, phases, work_time
from moeos.cli.timeline.weights import Weights
from moeos.world import virtual
from moeos.world.tracing import EVENT, KINDS, OS_ACTORS, TASK_KINDS, RankTrace
from tests.host.cli.timeline import chrome_format
from tests.layers import config, draw_given_call, draw_weights

NOBODY = 0xFFFFFFFF
CHUNK_ROWS = 32
CHAIN = ["combine", "product1", "product0", "dispatch", "route"]


def event(kind: str, begin: int, end: int, **fields: int) -> Any:
    """A part from `begin` to `end` whose results are in memory when it ends."""
    made = numpy.zeros((), EVENT)
    made["peer"] = made["expert"] = NOBODY
    made["kind"] = KINDS.index(kind)
    made["begin_ns"], made["end_ns"] = 10**15 + begin, 10**15 + end
    made["computed"] = made["stored"] = end - begin
    for name, value in fields.items():
        made[name] = value
    return made


def rank_trace(
    rank: int,
    received: list[list[int]],
    *processors: list[Any],
    returns: tuple[tuple[int, int], ...] = (),
) -> RankTrace:
    """`returns`: when the steps of its returns subscriber began and ended."""
    steps = [event("returns", begin, end) for begin, end in returns]
    lists = [numpy.array(noted, EVENT) for noted in [*processors, [], [], [], steps]]
    rows = numpy.array(received, numpy.int64)
    return RankTrace(rank, lists, [0] * len(lists), rows, CHUNK_ROWS)


def caused(call: CallTrace) -> dict[tuple[Any, ...], tuple[Any, ...] | None]:
    """(rank, kind, place, part) of each part -> that of its cause."""
    found = causes.find(call)

    def name(index: int) -> tuple[Any, ...]:
        part = call.parts[index]
        place, number = int(part["place"]), int(part["part"])
        return int(part["rank"]), TASK_KINDS[part["kind"]], place, number

    return {
        name(index): None if cause == NONE else name(cause)
        for index, cause in enumerate(found.part.tolist())
    }


def lone_rank(dispatched: tuple[int, int]) -> CallTrace:
    """One rank with 40 rows of expert 0 and 24 of expert 1, in two chunks that end as given."""
    return CallTrace.of(
        [
            rank_trace(
                0,
                [[40, 24]],
                [event("route", 0, 10), event("route", 20, 30, part=1)],
                [
                    event("dispatch", 31, end, peer=0, place=chunk, part=chunk, rows=1)
                    for chunk, end in enumerate(dispatched)
                ],
                [
                    event("product0", 100, 110, expert=0, place=0, rows=32),
                    event("product0", 110, 119, expert=0, place=1, rows=8),
                    event("product0", 120, 130, expert=1, place=2, rows=24, part=0),
                    event("product0", 130, 141, expert=1, place=2, rows=24, part=1),
                    event("product1", 150, 190, expert=0, place=0, rows=32),  # after the others
                    event("product1", 162, 175, expert=0, place=1, rows=8),
                    event("product1", 176, 180, expert=1, place=2, rows=24),
                ],
                [
                    event("combine", 200, 210, place=0, rows=8),
                    event("combine", 215, 222, place=8, rows=3),
                    event("combine", 211, 213, place=11, rows=5),
                    event("combine", 60, 65, part=3, place=NOBODY, rows=2),
                ],
                returns=((176, 179), (181, 189), (195, 199), (214, 215)),
            )
        ]
    )


def test_causes_follow_from_rows_tiles_and_chunks() -> None:
    assert caused(lone_rank((40, 50))) == {
        (0, "route", 0, 0): None,
        (0, "route", 0, 1): None,
        (0, "dispatch", 0, 0): (0, "route", 0, 1),
        (0, "dispatch", 1, 1): (0, "route", 0, 1),
        (0, "product0", 0, 0): (0, "dispatch", 0, 0),  # its 32 rows are chunk 0
        (0, "product0", 1, 0): (0, "dispatch", 1, 1),  # rows 32 to 39
        (0, "product0", 2, 0): (0, "dispatch", 1, 1),
        (0, "product0", 2, 1): (0, "dispatch", 1, 1),
        (0, "product1", 0, 0): (0, "product0", 0, 0),
        (0, "product1", 1, 0): (0, "product0", 1, 0),
        (0, "product1", 2, 0): (0, "product0", 2, 1),  # the tile's last part
        (0, "combine", 0, 0): (0, "product1", 0, 0),  # visible before the step from 195 to 199
        (0, "combine", 8, 0): (0, "product1", 0, 0),  # before the next place was claimed
        (0, "combine", 11, 0): (0, "product1", 0, 0),
        (0, "combine", NONE, 3): (0, "route", 0, 1),  # tokens without rows
    }


def test_tiles_of_tokens_that_are_read_in_place_wait_for_route() -> None:
    call = CallTrace.of(
        [
            rank_trace(
                0,
                [[1, 1]],
                [event("route", 0, 10), event("route", 0, 30, part=1)],
                [
                    event("product0", 25, 40, expert=0, place=0, rows=1, awaited=1),
                    event("product0", 41, 50, expert=1, place=1, rows=1, awaited=1),
                ],
            )
        ]
    )
    assert caused(call) == {
        (0, "route", 0, 0): None,
        (0, "route", 0, 1): None,
        (0, "product0", 0, 0): (0, "route", 0, 1),
        (0, "product0", 1, 0): (0, "route", 0, 1),
    }
    assert causes.find(call).certain.all()


def test_a_part_of_dispatch_may_send_several_chunks() -> None:
    """Of 128 rows in four chunks: rows 32 to 127 come with one part, which ends first."""
    parts = [
        event("dispatch", 11, 30, peer=0, place=0, rows=1),
        event("dispatch", 11, 20, peer=0, place=1, rows=3, carried=96),
        event("product0", 40, 50, expert=0, place=0, rows=32),
        event("product0", 50, 60, expert=1, place=1, rows=96),
    ]
    call = CallTrace.of([rank_trace(0, [[32, 96]], parts)])
    found = caused(call)
    # The chunks of the second part have arrived when the first one's has.
    assert found[0, "product0", 1, 0] == (0, "dispatch", 0, 0)
    parts[0] = event("dispatch", 11, 15, peer=0, place=0, rows=1)
    found = caused(CallTrace.of([rank_trace(0, [[32, 96]], parts)]))
    assert found[0, "product0", 0, 0] == (0, "dispatch", 0, 0)
    assert found[0, "product0", 1, 0] == (0, "dispatch", 1, 0)
    of = chrome.arguments(call, call.parts[call.parts["place"] == 1][0])
    chunks = {"peer": 0, "chunk": 1, "chunks": 3, "first_expert": 1, "last_expert": 1}
    assert of == {**chunks, "rows": 96}


@pytest.mark.parametrize(("awaited", "chunk", "certain"), [(0, 1, True), (1, 0, False)])
def test_a_tile_whose_processor_waited_had_what_was_here_when_it_was_claimed(
    awaited: int, chunk: int, certain: bool
) -> None:
    products = [
        event("dispatch", 5, 20, peer=0, place=0, rows=1, carried=32),
        event("dispatch", 5, 40, peer=0, place=1, rows=1, carried=32),
        event("product0", 30, 60, expert=0, place=0, rows=2 * CHUNK_ROWS, awaited=awaited),
    ]
    call = CallTrace.of([rank_trace(0, [[2 * CHUNK_ROWS]], products)])
    [index] = numpy.flatnonzero(call.parts["kind"] == TASK_KINDS.index("product0"))
    assert caused(call)[0, "product0", 0, 0] == (0, "dispatch", chunk, 0)
    assert causes.find(call).certain[index] == certain


def combining(
    *returns: tuple[int, int],
    unsent: int = 5,
    claimed: int = 100,
    subscriber: int = 0,
    awaited: int = 0,
    block: int = 0,
) -> CallTrace:
    """Three tiles done at 40, 60 and 80, the second without rows of ours; steps as given. The part
    at place 0 is a subscriber's, the other one of the first.
    """
    products = [
        *(event("product0", 3, 9, expert=tile, place=tile, rows=8) for tile in range(3)),
        event("product1", 10, 40, expert=0, place=0, rows=8),
        event("product1", 10, 60, expert=1, place=1, rows=8),
        event("product1", 10, 70, expert=2, place=2, rows=8, part=0),
        event("product1", 10, 80, expert=2, place=2, rows=8, part=1),
    ]
    own = [
        event("combine", 2, unsent, place=NOBODY, rows=1, part=block),
        event("combine", claimed, claimed + 10, rows=8, part=subscriber, awaited=awaited),
        event("combine", 150, 160, place=8, rows=8),
    ]
    return CallTrace.of(
        [
            rank_trace(0, [[8, 0, 8], [8, 8, 8]], products, own, returns=returns),
            rank_trace(1, [[0, 0, 0], [0, 0, 0]], [], returns=((85, 86), (88, 89))),
        ]
    )


def combined_after(call: CallTrace, place: int) -> tuple[tuple[Any, ...] | None, bool]:
    """The cause of the Combine part at a place, and whether it is certain."""
    kinds = call.parts["kind"] == TASK_KINDS.index("combine")
    [index] = numpy.flatnonzero(kinds & (call.parts["place"] == place))
    subscriber = int(call.parts["part"][index])
    return caused(call)[0, "combine", place, subscriber], bool(causes.find(call).certain[index])


@pytest.mark.parametrize(
    ("call", "place", "cause", "certain"),
    [
        (combining((45, 50), (82, 90)), 0, ("product1", 2, 1), False),
        (combining((45, 50), (79, 90)), 0, ("product1", 0, 0), False),  # not visible yet
        (combining((45, 50), (82, 101)), 0, ("product1", 0, 0), False),  # ends behind the claim
        (combining((45, 50), (82, 101)), 8, ("product1", 2, 1), False),
        (combining((65, 70)), 0, ("product1", 0, 0), False),  # at 60 nothing of ours was done
        (combining((39, 41)), 0, ("product1", 0, 0), False),  # the first: at least that
        (combining((45, 110)), 0, ("product1", 0, 0), False),  # posted before the step ended
        (combining((45, 50), (82, 90), claimed=170), 0, ("product1", 2, 1), False),
        (combining((45, 50), (82, 160), claimed=170), 0, ("product1", 0, 0), False),  # as place 8
        # Of a subscriber whose steps are not noted: when it was claimed.
        (combining((45, 50), (82, 101), subscriber=1), 0, ("product1", 2, 1), False),
        (combining((45, 50), (82, 160), claimed=170, subscriber=1), 0, ("product1", 2, 1), False),
        # And of one whose processor waited itself.
        (combining((45, 50), (82, 160), claimed=170, awaited=1), 0, ("product1", 2, 1), False),
        (combining((45, 50), (82, 90), claimed=79, awaited=1), 0, ("product1", 0, 0), False),
        (combining((45, 50), (82, 90), unsent=79), 0, ("product1", 2, 1), False),
        (combining((45, 50), (82, 90), unsent=81), 0, ("combine", NONE, 0), True),
        (combining((45, 50), (82, 90), unsent=81, block=300), 0, ("combine", NONE, 300), True),
    ],
)
def test_combine_waited_for_what_was_back_when_its_part_was_posted(
    call: CallTrace, place: int, cause: tuple[Any, ...], certain: bool
) -> None:
    assert combined_after(call, place) == ((0, *cause), certain)


def test_no_cause_of_a_combine_is_named_without_all_steps_of_the_returns() -> None:
    call = combining((45, 50), (82, 90))
    lossy = dataclasses.replace(call.ranks[0], dropped=[0, 0, 0, 0, 0, 1])
    for wrong in (combining(), CallTrace.of([lossy, call.ranks[1]])):
        assert caused(wrong)[0, "combine", 0, 0] is None


def sent_once(shift: int = 0) -> CallTrace:
    """Rank 1 sends rank 0 70 rows of expert 0 and 26 of expert 1, in three chunks, and each token
    once; rank 0 has 20 own ones of expert 0.

    `shift`: ns that rank 1's clock is ahead.
    """
    copying = [
        event("replicate", 52, 60, peer=1, place=0, rows=1, carried=12),
        event("replicate", 55, 90, peer=1, place=1, rows=1, carried=0),
        event("replicate", 56, 70, peer=1, place=2, rows=1, carried=32),
    ]
    own = [
        event("route", 0, 10),
        event("dispatch", 11, 65, peer=0, rows=1, carried=20),
        event("product0", 66, 75, expert=0, place=0, rows=50),
        event("product0", 100, 110, expert=0, place=1, rows=40),
        event("product0", 120, 130, expert=1, place=2, rows=26),
    ]
    sending = [
        event("route", 0, 10),
        event("dispatch", 11, 40, peer=0, place=0, rows=1, carried=20),
        event("dispatch", 12, 50, peer=0, place=1, rows=1, carried=32),
        event("dispatch", 13, 45, peer=0, place=2, rows=0, carried=0),
        event("dispatch", 14, 44, peer=0, place=2, rows=1, carried=0, part=1),
    ]
    for noted in sending:
        noted["begin_ns"] += shift
        noted["end_ns"] += shift
    ranks = [
        rank_trace(0, [[20, 0], [70, 26]], own, copying),
        rank_trace(1, [[0, 0], [0, 0]], sending),
    ]
    return CallTrace.of(ranks)


def test_a_chunk_is_replicated_when_it_and_those_before_it_have_arrived() -> None:
    found = caused(sent_once())
    assert found[0, "replicate", 0, 0] == (1, "dispatch", 0, 0)
    assert found[0, "replicate", 1, 0] == (1, "dispatch", 1, 0)
    assert found[0, "replicate", 2, 0] == (1, "dispatch", 1, 0)  # chunk 2 was there before chunk 1


def test_a_tile_waits_for_the_replicas_of_chunks_that_were_sent_once() -> None:
    call = sent_once()
    found = caused(call)
    # 32 rows of the peer at 60, and 20 own ones, which nobody replicates, at 65.
    assert found[0, "product0", 0, 0] == (0, "dispatch", 0, 0)
    assert found[0, "product0", 1, 0] == (0, "replicate", 1, 0)
    assert found[0, "product0", 2, 0] == (0, "replicate", 1, 0)  # chunk 2 is behind chunk 1
    assert causes.find(call).certain.all()


def test_a_tile_does_not_wait_for_replicas_of_chunks_that_brought_all_of_their_rows() -> None:
    ranks = list(sent_once().ranks)
    own, copying, *others = ranks[0].events
    own = own.copy()
    own[own["kind"] == KINDS.index("dispatch")] = event("dispatch", 11, 30, peer=0, rows=1)
    assert copying["place"][0] == 0
    ranks[0] = dataclasses.replace(ranks[0], events=[own, copying[1:], *others])
    found = caused(CallTrace.of(ranks))
    # 20 own rows are here at 30, the peer's first 32 at 40, and its chunk 1 at 90.
    assert found[0, "product0", 0, 0] == (1, "dispatch", 0, 0)
    assert found[0, "product0", 1, 0] == (0, "replicate", 1, 0)


def test_clocks_that_contradict_the_cause_of_a_replica_are_found() -> None:
    call = sent_once(shift=30)  # the chunks seem to be there at 70 and 80
    assert causes.lead(call, causes.find(call)) == {(1, 0): 25}


def test_viewers_see_a_row_come_and_be_replicated() -> None:
    call = sent_once()
    config = {"hidden": 8, "dtype": "float32"}
    events = chrome_format.check(chrome.document(call, causes.find(call), {"config": config}))
    names = {event["name"] for event in events if event["ph"] == "s"}
    expected = {
        "route → dispatch",
        "dispatch → replicate",
        "replicate → product0",
        "dispatch → product0",
    }
    assert names == expected
    [second] = [e for e in events if e["name"] == "replicate" and e["args"]["chunk"] == 2]
    of = {"peer": 1, "chunk": 2, "chunks": 1, "first_expert": 0, "last_expert": 1, "rows": 32}
    assert second["args"] == of
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads[second["tid"]] == "processor 1, beside 2"  # three at once on the processor
    levels: dict[str, list[tuple[int, int]]] = {}
    for found in events:
        if found["ph"] == "C":
            [level] = found["args"].values()
            levels.setdefault(found["name"], []).append((chrome_format.ns(found["ts"]), level))
    # Only what crosses the link, 20 and 32 rows of 32 bytes.
    assert levels["dispatched bytes to peers in flight"] == [
        *((11, 640), (12, 1664), (13, 1664), (14, 1664)),
        *((40, 1024), (44, 1024), (45, 1024), (50, 0)),
    ]
    assert levels["replicate ready"] == [(40, 1), (50, 3), (52, 2), (55, 1), (56, 0)]


def test_replicas_are_made_beside_what_else_a_processor_does() -> None:
    call = sent_once()
    stages = {stage.kind: stage for stage in summary.stages_of(call, causes.find(call))}
    assert (stages["replicate"].parts, stages["replicate"].work) == (3, 38)  # from 52 to 90
    assert stages["replicate"].waited == pytest.approx((12 + 5 + 6) / 3)
    interval = summary.intervals_of(call, 13)[5]
    assert (interval.begin, interval.end) == (50, 60)
    assert interval.working["replicate"] == pytest.approx((8 + 5 + 4) / 30)
    assert interval.rest == 1.0


def test_a_chunk_has_arrived_when_those_before_it_have() -> None:
    found = caused(lone_rank((60, 50)))
    assert all(
        cause == (0, "dispatch", 0, 0) for part, cause in found.items() if part[1] == "product0"
    )


def two_ranks(shift: int = 0) -> CallTrace:
    """Rank 1 routes late, and expert 0, on rank 0, has two tiles with rows of both ranks.

    `shift`: ns that rank 1's clock is ahead.
    """
    first = rank_trace(
        0,
        [[130], [20]],
        [event("route", 0, 10)],
        [event("dispatch", 11, 20 + chunk, peer=0, place=chunk, rows=1) for chunk in range(5)],
        [
            event("product0", 30, 40, place=0, expert=0, rows=128),
            event("product0", 500, 510, place=1, expert=0, rows=22),
            event("product1", 60, 70, place=0, expert=0, rows=128),
            event("product1", 530, 540, place=1, expert=0, rows=22),
            event("combine", 560, 570, rows=130),
        ],
        returns=((550, 555),),
    )
    late = [
        event("route", 400, 450),
        event("dispatch", 460, 470, peer=0, rows=1),
        event("combine", 600, 620, rows=20),
    ]
    for noted in late:
        noted["begin_ns"] += shift
        noted["end_ns"] += shift
    step = (580 + shift, 590 + shift)
    return CallTrace.of([first, rank_trace(1, [[0], [0]], late, returns=(step,))])


def test_the_chain_leads_back_to_the_rank_that_was_late() -> None:
    call = two_ranks()
    found = causes.find(call)
    chain = summary.chain_of(call, found)
    steps = [call.parts[link.part] for link in chain]
    assert [(TASK_KINDS[part["kind"]], part["rank"], part["place"]) for part in steps] == [
        ("combine", 1, 0),
        ("product1", 0, 1),
        ("product0", 0, 1),
        ("dispatch", 1, 0),
        ("route", 1, 0),
    ]
    assert [link.waited for link in chain] == [60, 20, 30, 10, None]
    # Rank 0 did nothing between the first tile's Product1, which ended at 70, and the second's
    # Product0.
    assert chain[2].idle == 430
    assert chain[2].busy == 0.0


def test_work_just_before_a_claim_does_not_hide_the_idle_time_before_it() -> None:
    trace = rank_trace(
        0,
        [[130], [0]],
        [event("route", 0, 10)],
        [event("dispatch", 11, 20 + chunk, peer=0, place=chunk, rows=1) for chunk in range(5)],
        # Both tiles of Product1 wait for a Product0 of 30 to 40. The first begins a moment earlier.
        [
            event("product0", 30, 40, place=0, expert=0, rows=128),
            event("product0", 30, 40, place=1, expert=0, rows=22),
        ],
        [event("product1", 1040, 1050, place=0, expert=0, rows=128)],
        [event("product1", 1051, 1060, place=1, expert=0, rows=22)],
        [event("combine", 1070, 1080, rows=130)],
        returns=((1062, 1065),),
    )
    other = rank_trace(1, [[0], [0]], [event("route", 0, 5)])
    call = CallTrace.of([trace, other])
    chain = summary.chain_of(call, causes.find(call))
    product1 = next(one for one in chain if call.parts[one.part]["kind"] == PRODUCT1)
    assert int(call.parts[product1.part]["claimed"]) == 1051
    assert product1.idle == 1000


def test_a_cause_that_the_events_do_not_determine_is_not_called_certain() -> None:
    call = two_ranks()
    found = causes.find(call)
    combines = numpy.flatnonzero(call.parts["kind"] == TASK_KINDS.index("combine"))
    assert not found.certain[combines].any()
    assert found.certain[call.parts["kind"] != TASK_KINDS.index("combine")].all()
    names = {
        event["name"]
        for event in chrome_format.check(chrome.document(call, found, {}))
        if event["ph"] == "s"
    }
    assert names == {"route → dispatch", "dispatch → product0", "product0 → product1"}


def test_clocks_that_contradict_causes_are_found() -> None:
    assert causes.lead(two_ranks(), causes.find(two_ranks())) == {}
    call = two_ranks(shift=100)  # the Dispatch seems to end at 570, its Product0 begins at 500
    assert causes.lead(call, causes.find(call)) == {(1, 0): 70}


def test_no_cause_is_claimed_where_parts_are_missing() -> None:
    call = two_ranks()
    lossy = dataclasses.replace(call.ranks[1], dropped=[1, 0, 0, 0, 0])
    call = CallTrace.of([call.ranks[0], lossy])
    found = causes.find(call)
    assert (found.part == NONE).all()
    assert summary.chain_of(call, found) == []
    # What only the OS block's actors lack says nothing about parts.
    lossy = dataclasses.replace(lossy, dropped=[0, 1, 0, 0, 0])
    assert (causes.find(CallTrace.of([call.ranks[0], lossy])).part != NONE).any()


def pipelined() -> CallTrace:
    """One processor as on the GPU: parts overlap, and Dispatch has no moments of consumers."""
    return CallTrace.of(
        [
            rank_trace(
                0,
                [[64]],
                [
                    event("route", 0, 10, loading=1, computing=2, computed=8, stored=9),
                    event("dispatch", 12, 40, peer=0, rows=1, loading=3, computed=0, stored=23),
                    event(
                        *("dispatch", 14, 50),
                        **{"peer": 0, "place": 1, "rows": 1},
                        **{"loading": 16, "computed": 0, "stored": 33},
                    ),
                    event("product0", 30, 90, expert=0, loading=10, computing=20, computed=40),
                    event(
                        "product1", 91, 99, expert=0, loading=1, computing=1, computed=5, stored=6
                    ),
                ],
            )
        ]
    )


def test_phases_end_with_the_moments_that_a_part_has() -> None:
    call = pipelined()
    lengths = {
        name: [
            None if e == NONE else e - b for b, e in zip(begin.tolist(), end.tolist(), strict=True)
        ]
        for name, begin, end in phases(call.parts)
    }
    assert lengths == {
        "fetching": [1, 3, 16, 10, 1],
        "loading": [1, None, None, 10, 0],
        "computing": [6, None, None, 20, 4],
        "storing": [1, 20, 17, 20, 1],
        "publishing": [1, 5, 3, 0, 2],
    }
    stages = {stage.kind: stage for stage in summary.stages_of(call, causes.find(call))}
    assert stages["dispatch"].phases == {"fetching": 9.5, "storing": 18.5, "publishing": 4.0}
    assert stages["combine"].phases == {}
    assert stages["combine"].first_claimed is None


def test_work_that_overlaps_on_a_processor_counts_once() -> None:
    call = pipelined()
    intervals = call.parts[["work_begin", "work_end"]].tolist()
    assert intervals == [(2, 8), (15, 35), (30, 47), (50, 70), (92, 96)]
    assert work_time(call.parts) == 6 + 32 + 20 + 4
    [rank] = summary.ranks_of(call)
    assert rank.share == pytest.approx(62 / 99)
    stages = summary.stages_of(call, causes.find(call))
    assert [stage.work for stage in stages] == [6, 32, 0, 20, 4, 0]


def test_intervals_say_what_processors_did_when() -> None:
    first, second, third = summary.intervals_of(pipelined(), 3)
    assert [(one.begin, one.end) for one in (first, second, third)] == [(0, 33), (33, 66), (66, 99)]
    of = 33
    assert first.working == pytest.approx(
        {"route": 6 / of, "dispatch": 21 / of}
        | dict.fromkeys(("replicate", "product0", "product1", "combine"), 0)
    )
    assert first.storing["route"] == pytest.approx(1 / of)
    assert first.rest == pytest.approx(26 / of)  # Dispatch is beside whatever else there is
    assert (second.working["dispatch"], second.working["product0"]) == (16 / of, 16 / of)
    assert second.rest == pytest.approx(17 / of)
    assert (third.working["product0"], third.storing["product0"]) == (4 / of, 20 / of)
    assert (third.working["product1"], third.storing["product1"]) == (4 / of, 1 / of)
    assert third.rest == pytest.approx(4 / of)


def test_overlapping_parts_lie_on_threads_beside_each_other() -> None:
    call = pipelined()
    events = chrome_format.check(chrome.document(call, causes.find(call), {}))
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    parts = {
        (e["name"], e["args"].get("chunk", 0)): threads[e["tid"]]
        for e in events
        if e.get("cat") == "part"
    }
    assert parts == {
        ("route", 0): "processor 0",
        ("dispatch", 0): "processor 0",
        ("dispatch", 1): "processor 0, beside 1",
        ("product0", 0): "processor 0, beside 2",
        ("product1", 0): "processor 0",
    }
    assert set(threads.values()) == {*parts.values(), "scheduler"} | {
        f"{name} subscriber" for name in OS_ACTORS[1:]
    }


def first_gemms(*tiles: int) -> CallTrace:
    """One rank's: the parts of each tile, one after the other.

    Tiles 0 to 2 are of expert 0 and have two parts; tile 3, which has four, is of expert 1.
    """
    parts = [(tile, part) for tile in tiles for part in range(4 if tile == 3 else 2)]
    noted = [
        event("product0", 10 * i, 10 * i + 9, expert=tile // 3, place=tile, part=part)
        for i, (tile, part) in enumerate(parts)
    ]
    return CallTrace.of([rank_trace(0, [[24, 8]], noted)])


@pytest.mark.parametrize(
    ("tiles", "cache", "read"),
    [
        ((0, 1, 2, 3), 1000, 2000),  # one expert's weights stay: each is read once
        ((0, 3, 1, 2), 1000, 3000),  # the other's drive them out
        ((0, 3, 1, 2), 2000, 2000),  # unless there is room for both
        ((0, 1, 2, 3), 999, 4000),  # a part's are gone when the next tile asks for them
    ],
)
def test_weights_are_read_again_when_a_cache_has_lost_them(
    tiles: tuple[int, ...], cache: int, read: int
) -> None:
    found = weights.replay(first_gemms(*tiles), {PRODUCT0: 1000, PRODUCT1: 700}, cache)
    assert found == {
        "product0": Weights(once=2000, asked=4000, read=read),
        "product1": Weights(once=0, asked=0, read=0),
    }


def test_counters_say_how_many_parts_are_in_flight_and_ready() -> None:
    call = lone_rank((40, 50))
    events = chrome_format.check(chrome.document(call, causes.find(call), {}))
    levels: dict[str, list[tuple[int, int]]] = {}
    for found in events:
        if found["ph"] == "C":
            point = (chrome_format.ns(found["ts"]), found["args"]["parts"])
            levels.setdefault(found["name"], []).append(point)
    assert levels["dispatch in flight"] == [(31, 2), (40, 1), (50, 0)]
    assert levels["product0 ready"] == [(40, 1), (50, 4), (100, 3), (110, 2), (120, 1), (130, 0)]
    assert "route ready" not in levels


@pytest.mark.parametrize(("seed", "ranks_per_node"), [(0, None), (1, None), (2, 1)])
def test_on_the_twin_no_part_begins_before_its_cause(seed: int, ranks_per_node: int | None) -> None:
    """All causes are found, and none is contradicted by the clock."""
    cfg = config(experts=6, max_tokens=700)
    weights = draw_weights(cfg)
    twin = TwinOptions(processors=2, jitter_us=30.0, jitter_seed=seed)

    def rank_main(world: World) -> RankTrace:
        layer = weights.layer(world)
        for number in range(2):
            draw_given_call(cfg, 700 - 200 * world.rank, 9 * seed + world.rank + number)(layer)
        return layer.trace()

    call = CallTrace.of(
        virtual.run(rank_main, 3, twin=twin, trace_events=4096, ranks_per_node=ranks_per_node)
    )
    found = causes.find(call)
    kinds = numpy.array(TASK_KINDS)[call.parts["kind"]]
    known = found.part != NONE
    assert known[kinds != "route"].all()
    # Nor is it said for which of an expert's chunks a processor has waited itself.
    awaited = (kinds == "product0") & (call.parts["awaited"] != 0)
    assert found.certain[(kinds != "combine") & ~awaited].all()
    assert not found.certain[awaited].any()
    tiles = call.parts[(kinds == "product0") & (call.parts["part"] == 0)]
    assert len(tiles) > len(set(tiles[["rank", "expert"]].tolist()))  # some experts have several
    # What the last Route part posts, Dispatch and Combine of tokens without rows, may be claimed
    # while it is still at work.
    behind = known & ~numpy.isin(kinds[found.part], ["route"])
    waits = (call.parts["claimed"] - found.since(call.parts))[behind]
    assert len(waits) > 0
    assert waits.min() >= 0
    assert causes.lead(call, found) == {}
    chain = [link.part for link in summary.chain_of(call, found)]
    # A processor may stand still with tokens that sent no row until all else is back.
    unsent_last = call.parts["place"][chain[1]] == NONE
    assert found.certain[chain[0]] == unsent_last
    # Own rows are not replicated, nor are those of remote peers.
    waited = [kind for kind in kinds[chain] if kind != "replicate"]
    assert waited == (["combine", "combine", "route"] if unsent_last else CHAIN)
    assert (kinds == "replicate").any() == (ranks_per_node is None)
    chrome_format.check(chrome.document(call, found, {}))


@pytest.mark.parametrize("call", [two_ranks(), sent_once()], ids=["two ranks", "sent once"])
def test_a_saved_call_is_the_same_when_it_is_loaded(call: CallTrace, tmp_path: Path) -> None:
    files.save(tmp_path / "call.npz", call.ranks, {"what": "a test", "seed": 3})
    ranks, about = files.load(tmp_path / "call.npz")
    assert (about["what"], about["seed"]) == ("a test", 3)
    again = CallTrace.of(ranks)
    assert again.parts.tolist() == call.parts.tolist()
    documents = [json.dumps(chrome.document(c, causes.find(c), {})) for c in (call, again)]
    assert documents[0] == documents[1]


_OTHERS = [event("route", 0, 1), event("route", 0, 1), event("returns", 0, 1)]
OLD_COMBINE = [event("combine", 0, 1, peer=1), *_OTHERS]
OLD_DISPATCH = [event("dispatch", 0, 1, peer=1), *_OTHERS]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"received_1": None}, "received_1"),
        ({"about": numpy.array("{}")}, "format"),
        ({"about": numpy.array('{"format": 9, "ranks": 2}')}, "its format is 9, not 3"),
        # There kinds had other numbers.
        ({"about": numpy.array('{"format": 2, "ranks": 2}')}, "its format is 2, not 3"),
        ({"events_0": numpy.zeros(3)}, "the events of rank 0 have dtype float64"),
        ({"noted_0": numpy.array([1, 2, 3])}, "the lists of rank 0 do not fit"),
        ({"received_0": numpy.array([[130]])}, "rank 0 received are not those of 2 ranks"),
        ({"received_1": numpy.array([[], []])}, "rank 1 received are not those of 2 ranks"),
        ({"events_1": numpy.full(4, 7, numpy.uint8).repeat(64).view(EVENT)}, "rank 1 names what"),
        ({"events_1": numpy.array(OLD_COMBINE, EVENT)}, "rank 1 is of an older runtime"),
        ({"events_1": numpy.array(OLD_DISPATCH, EVENT)}, "rank 1 is of an older runtime"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "call.npz"
    files.save(path, two_ranks().ranks, {})
    with numpy.load(path) as arrays:
        changed = {**arrays, **change}
    numpy.savez(path, **{name: array for name, array in changed.items() if array is not None})
    with pytest.raises(ValueError, match=message) as raised:
        files.load(path)
    assert str(raised.value).startswith(f"{path} is no trace that `moeos trace --save` wrote")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 1000])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "call.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"call\.npz is no trace"):
        files.load(path)


def test_traces_must_be_of_all_ranks_of_one_world() -> None:
    first, second = two_ranks().ranks
    for wrong in ([], [first], [second, first]):
        with pytest.raises(ValueError, match="they must be those of all ranks of one world"):
            CallTrace.of(wrong)
    with pytest.raises(ValueError, match="no event"):
        CallTrace.of([rank_trace(0, [[0]], [])])


def test_replicas_have_a_colour_of_their_own(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib, which draws, brings pillow")
    for call, some in ((sent_once(), True), (two_ranks(), False)):
        picture.draw(call, "a title", tmp_path / "call.png")
        drawn = image.open(tmp_path / "call.png").convert("RGB")
        # Also in the legend, which names what there is.
        assert ((227, 119, 194) in {colour for _, colour in drawn.getcolors(1 << 20)}) == some


def test_a_picture_shows_where_a_delay_ends_and_another_layer_beside_it(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib, which draws, brings pillow")
    call, brown = two_ranks(), (140, 86, 75)

    def columns_of(colour: tuple[int, int, int], rows: slice) -> NDArray[numpy.int64]:
        drawn = numpy.asarray(image.open(tmp_path / "call.png").convert("RGB"))[rows]
        return numpy.flatnonzero((drawn == colour).all(axis=2).any(axis=0))

    everywhere = slice(None)
    picture.draw(call, "a title", tmp_path / "call.png")
    assert not len(columns_of(brown, everywhere))
    # As long as the other layer, so that its bar of rank 0 ends at the right edge.
    end = 4.0 * max(call.length, 1e6)
    beside = picture.OtherCall("another", [0.0, end / 2], [end, 0.75 * end])
    marks = [picture.Mark(1, end / 2, "the delay ends")]
    picture.draw(call, "a title", tmp_path / "call.png", marks, beside)
    bars = columns_of(brown, everywhere)
    middle = (bars[0] + bars[-1]) / 2
    height = image.open(tmp_path / "call.png").height
    dashes = columns_of((0, 0, 0), slice(height // 4, height // 2))
    # The dashed line of rank 1 lies in the middle of the bar of rank 0, to a few dots.
    assert numpy.abs(dashes - middle).min() <= 3


@pytest.mark.parametrize(("nanoseconds", "unit"), [(999_000, "µs"), (1_000_000, "ms")])
def test_a_picture_of_a_millisecond_has_milliseconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nanoseconds: int, unit: str
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    made = drawing.figure(2, 2)
    monkeypatch.setattr(drawing, "figure", lambda *_: made)
    mark = picture.Mark(0, nanoseconds, "here")
    picture.draw(two_ranks(), "a title", tmp_path / "call.png", [mark])
    assert made.axes[-1].get_xlabel() == f"{unit} since the first event"
    assert made.axes[-1].get_xlim()[1] * {"µs": 1e3, "ms": 1e6}[unit] == pytest.approx(nanoseconds)


def test_a_picture_carries_the_digest_of_what_it_shows(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib, which draws, brings pillow")
    call = two_ranks()
    picture.draw(call, "a title", tmp_path / "call.png")
    drawn = image.open(tmp_path / "call.png")
    assert drawn.info["Description"] == picture.digest(call) != picture.digest(two_ranks(1))
    colours = {colour for _, colour in drawn.convert("RGB").getcolors(1 << 20)}
    assert {(148, 103, 189), (255, 127, 14), (31, 119, 180), (44, 160, 44), (214, 39, 40)} < colours
