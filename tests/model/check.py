# SPDX-License-Identifier: Apache-2.0
"""The protocol's models, checked by spin: the worlds that must hold, the mutations that must not.

`python -m tests.model.check` prints all numbers; `check_all` gives them to other programs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from moeos.cli.shared import machine, provenance

FOLDER = Path(__file__).parent
SECONDS_MAX = 900  # of one search; those of every day take a few


@dataclasses.dataclass(frozen=True)
class Check:
    """One search through all states of a model.

    Attributes:
        name: unique, in words.
        model: tests/model/<model>.pml.
        macros: that choose a world, and perhaps a mutation.
        liveness: look for fair cycles that violate the model's temporal formula, not for
            assertions and deadlocks.
        fair: of cycles, look only at those in which every process that could go on does.
        violation: what spin must report, "..." standing for anything, or "" where it must find
            nothing.
        states: how many a complete search has at least, so that a model which no longer moves is
            noticed.
    """

    name: str
    model: str
    macros: tuple[str, ...]
    liveness: bool = False
    fair: bool = True
    violation: str = ""
    states: int = 0


@dataclasses.dataclass(frozen=True)
class Checked:
    """What a search has found.

    Attributes:
        name: of the check.
        states, transitions: explored; where there is an error, those before it.
        errors: 1 or 0, because a search ends with the first.
        seconds: of the search, without its compilation.
        violation: in spin's words, or "".
        complete: every state was visited; nothing was cut off or only hashed.
    """

    name: str
    states: int
    transitions: int
    errors: int
    seconds: float
    violation: str
    complete: bool


def world(
    name: str, model: str, states: int, *macros: str, liveness: bool = False, fair: bool = True
) -> Check:
    return Check(name, model, macros, liveness, fair, "", states)


def mutation(
    name: str, model: str, violation: str, macro: str, *macros: str, liveness: bool = False
) -> Check:
    return Check(name, model, (f"MUTATION_{macro}", *macros), liveness, True, violation)


# What spin prints of them; "..." stands for how it writes an index.
READS_WRONG_ROW = "assertion violated (row_seen[...]==epoch[_pid])"
READS_WRONG_RESULT = "assertion violated (result_seen[...]==epoch[_pid])"
COPIES_WRONG_ROW = "assertion violated (row_landed[...]==epoch[_pid])"
READS_WRONG_ORIGIN = "assertion violated ((origin_seen[...]/2)==epoch[_pid])"
OVERWRITES_ROW = "assertion violated  !(row_needed[...])"
OVERWRITES_ORIGIN = "assertion violated  !(origin_needed[...])"
OVERWRITES_RESULT = "assertion violated  !(result_needed[...])"
WRONG_CREDIT = "assertion violated (returned[...]==...)"
SKEW = "assertion violated (epoch[_pid]<=(epoch[i]+1))"
DEADLOCK = "invalid end state"
NEVER_ENDS = "acceptance cycle"

LATER_COUNT = "assertion violated  !((...count_visible[...]/4)>epoch[_pid])))"
TWO_RECORDS = "assertion violated (record[...]==0)"
NO_RECORD = "assertion violated (record[...]==2)"  # VISIBLE
SOMEONE_STAYS = "assertion violated (out==3)"
NOT_EARLIEST = "assertion violated ((deaths>0)||...==earliest))"
WRONG_CALL = "assertion violated ((abort_word[...]/4)<=epoch[...])"
READS_WRONG_PUT = "assertion violated (row_here[...]==epoch[_pid])"
READS_NO_ROW = "assertion violated (row[...]==call)"
READS_NO_PRODUCT = "assertion violated (inner[...]==call)"
READS_NO_RESULT = "assertion violated (result[...]==call)"
RUNS_TWICE = "assertion violated  !(ran[...])"
SLOTS_ARE_TAKEN = "assertion violated (published==0)"
OVERWRITES_PLACE = "assertion violated ((reader[...]==255)||(reader[...]==tile))"  # NONE
REPLACES_ROW = "assertion violated  !(needed[...])"
READS_OLD_ROW = "assertion violated (at[...]==(1+row))"
READS_WRONG_PARTIAL = "assertion violated (seen[...]==epoch[_pid])"
READS_WRONG_TOTAL = "assertion violated (total_seen[...]==epoch[_pid])"
OVERWRITES_PARTIAL = "assertion violated  !(needed[...])"
OVERWRITES_TOTAL = "assertion violated  !(total_needed[...])"
BEYOND_WINDOW = "assertion violated (...bytes_under_way[...<=1)"

THREE_CALLS = ("RANKS=2", "EPOCHS=3")
ONCE = ("RANKS=2", "ROWS=2", "ONCE")
ONE_GROUP = ("RANKS=2", "OWNERS=1", "TOKENS=2")  # of two tokens; rank 1 owns none
NODES = ("NODE_RANKS=2", "FAILURES=1")  # ranks 0 and 1 are of one node, 2 of another

# The slowest first, because they run beside each other.
WORLDS = [
    world(
        "3 ranks, 3 calls, a row to each peer",
        "exchange",
        1_400_000,
        *("RANKS=3", "EPOCHS=3", "TOTAL_ROWS=2", "COARSE"),
    ),
    world(
        "2 ranks, 1 call, tokens once, themselves included",
        "exchange",
        1_300_000,
        *(*ONCE, "EPOCHS=1", "CHUNK_ROWS=2", "TOTAL_ROWS=2", "WITH_SELF"),
    ),
    world(
        "2 ranks, 2 calls, tokens once, two chunks of a row",
        "exchange",
        700_000,
        *(*ONCE, "EPOCHS=2", "CHUNK_ROWS=1", "TOTAL_ROWS=2"),
    ),
    world(
        "2 ranks, 2 calls, tokens once, of two chunks the first brings all rows",
        "exchange",
        700_000,
        *(*ONCE, "EPOCHS=2", "CHUNK_ROWS=1", "TOTAL_ROWS=2", "ONCE_AFTER=1"),
    ),
    world(
        "2 ranks, 2 calls, tokens once, termination under fairness",
        "exchange",
        90_000,
        *(*ONCE, "EPOCHS=2", "CHUNK_ROWS=2", "TOTAL_ROWS=2", "SWEEPS"),
        liveness=True,
    ),
    world(
        "2 ranks, 2 calls, two chunks of a row",
        "exchange",
        300_000,
        *("RANKS=2", "EPOCHS=2", "ROWS=2", "CHUNK_ROWS=1"),
    ),
    world(
        "2 ranks, 3 calls, a chunk of two rows",
        "exchange",
        50_000,
        *("RANKS=2", "EPOCHS=3", "ROWS=2", "CHUNK_ROWS=2"),
    ),
    world(
        "2 ranks, 3 calls, tokens once, a chunk of two rows",
        "exchange",
        300_000,
        *(*ONCE, "EPOCHS=3", "CHUNK_ROWS=2"),
    ),
    world(
        "2 ranks, 4 calls, a row to each, themselves included",
        "exchange",
        10_000,
        *("RANKS=2", "EPOCHS=4", "WITH_SELF", "COARSE"),
    ),
    world(
        "2 ranks, 1 call, two rows each way",
        "windows",
        500_000,
        *("EPOCHS=1", "ROWS=2", "WINDOW=1"),
    ),
    world("2 ranks, 3 calls, a row each way", "windows", 100_000, "EPOCHS=3", "ROWS=1", "WINDOW=1"),
    world(
        "2 ranks, 2 calls, two rows one way, a window of two",
        "windows",
        700_000,
        *("EPOCHS=2", "ROWS=2", "WINDOW=2", "ONE_WAY"),
    ),
    world("2 ranks, 2 calls, planned up front, one processor", "up_front", 1_000_000, "PARTS=1"),
    world("2 ranks, 2 calls, one planned up front, one by rows", "up_front", 600_000, "BY_ROWS=1"),
    world("few rows of two sources, three processors", "decision", 2_000_000, "PROCESSORS=3"),
    world("few rows of three sources", "decision", 150_000, "SOURCES=3", "PARTS=1"),
    world("few rows of two sources", "decision", 80_000),
    world("rows of two sources that are not few", "decision", 60_000, "MANY"),
    world("a pool of two rows, a processor, parts", "pool", 300_000, "PROCESSORS=1"),
    world("a pool of two rows, four tiles", "pool", 200_000, "TILES=4", "PARTS=1"),
    world("a pool of two rows, three tiles", "pool", 50_000, "PARTS=1"),
    world(
        "2 ranks, 2 calls, sums of groups of two tokens, for all",
        "sums",
        600_000,
        *("RANKS=2", "EPOCHS=2", "TOKENS=2", "EVERYWHERE"),
    ),
    world(
        "3 ranks, 2 calls, sums of one owner, for all",
        "sums",
        400_000,
        *("RANKS=3", "EPOCHS=2", "OWNERS=1", "EVERYWHERE"),
    ),
    world(
        "3 ranks, 2 calls, sums of one owner",
        "sums",
        250_000,
        *("RANKS=3", "EPOCHS=2", "OWNERS=1"),
    ),
    world("2 ranks, 3 calls, sums for all", "sums", 30_000, "RANKS=2", "EVERYWHERE"),
    world("2 ranks, 3 calls, sums", "sums", 20_000, "RANKS=2"),
    world("2 ranks, 3 calls, sums of a group of two tokens", "sums", 12_000, *ONE_GROUP),
    world(
        "2 ranks, 3 calls, sums of a group of two tokens, for all",
        "sums",
        12_000,
        *(*ONE_GROUP, "EVERYWHERE"),
    ),
    world(
        "2 ranks, 3 calls, sums of two groups of one owner",
        "sums",
        25_000,
        *("RANKS=2", "OWNERS=1", "GROUPS=2"),
    ),
    world("2 ranks, rings of two rows", "rings", 100_000),
    world("2 ranks, rings of two rows, two couriers", "rings", 1_000_000, "COURIERS=2", "COARSE"),
    world("3 ranks, two failures", "abort", 400_000, "FAILURES=2"),
    world("3 ranks, one dies", "abort", 500_000, "FAILURES=2", "DEATHS=1"),
    world(
        "2 ranks, one dies while it tells of a failure",
        "abort",
        40_000,
        *("RANKS=2", "FAILURES=2", "DEATHS=1"),
    ),
    world("3 ranks of two nodes, a failure", "abort", 100_000, *NODES),
    world(
        "2 ranks of two nodes, two failures",
        "abort",
        150_000,
        *("RANKS=2", "NODE_RANKS=1", "FAILURES=2"),
    ),
    world(
        "2 ranks of two nodes, a failure and a host that tells of it",
        "abort",
        1_000,
        *("RANKS=2", "NODE_RANKS=1", "FAILURES=1", "WITH_HOST"),
    ),
    world("3 ranks, two actors fail at once", "abort", 15_000, "FAILURES=1", "ACTORS=2"),
    world(
        "3 ranks, everyone leaves under fairness",
        "abort",
        10_000,
        *("FAILURES=1", "TOLD"),
        liveness=True,
    ),
    world("2 ranks, 4 calls, a row", "exchange", 30_000, "RANKS=2", "EPOCHS=4"),
    world("2 ranks, 3 calls, results in two parts", "exchange", 30_000, *THREE_CALLS, "PARTS=2"),
    world(
        "2 ranks, 3 calls, termination under fairness",
        "exchange",
        25_000,
        *THREE_CALLS,
        "SWEEPS",
        liveness=True,
    ),
]

# What takes minutes and gigabytes, so not every day: `python -m tests.model.check large`.
LARGE_WORLDS = [
    world(
        "2 ranks, 3 calls, tokens once, two chunks of a row",
        "exchange",
        4_000_000,
        *(*ONCE, "EPOCHS=3", "CHUNK_ROWS=1"),
    ),
    world(
        "2 ranks, 2 calls, tokens once, themselves included",
        "exchange",
        4_900_000,
        *(*ONCE, "EPOCHS=2", "CHUNK_ROWS=2", "TOTAL_ROWS=2", "WITH_SELF"),
    ),
    world(
        "2 ranks, a call, planned up front, two processors",
        "up_front",
        15_000_000,
        *("PROCESSORS=2", "EPOCHS=1", "PARTS=1"),
    ),
    world(
        "2 ranks, 2 calls, one planned up front, one by rows, two processors",
        "up_front",
        6_900_000,
        *("BY_ROWS=1", "PARTS=1", "PROCESSORS=2"),
    ),
    world(
        "2 ranks, 2 calls, two rows each way",
        "windows",
        19_000_000,
        *("EPOCHS=2", "ROWS=2", "WINDOW=1"),
    ),
    world("a pool of three rows, four tiles", "pool", 7_000_000, "PLACES=3", "TILES=4", "PARTS=1"),
    world(
        "3 ranks of two nodes, two failures",
        "abort",
        15_000_000,
        *("NODE_RANKS=2", "FAILURES=2"),
    ),
    world(
        "2 ranks, 3 calls, two rows one way, a window of two",
        "windows",
        3_800_000,
        *("EPOCHS=3", "ROWS=2", "WINDOW=2", "ONE_WAY"),
    ),
]

MUTATIONS = [
    mutation("second GEMMs handed out first", "up_front", DEADLOCK, "SECOND_GEMMS_FIRST"),
    mutation("Combine handed out first", "up_front", DEADLOCK, "COMBINE_FIRST"),
    mutation("rows that are not awaited", "up_front", READS_NO_ROW, "ROWS_NOT_AWAITED"),
    mutation(
        "one part of a first GEMM that is awaited",
        "up_front",
        READS_NO_PRODUCT,
        *("ONE_PART_AWAITED", "PROCESSORS=2"),
    ),
    mutation("results that are not awaited", "up_front", READS_NO_RESULT, "RESULTS_NOT_AWAITED"),
    mutation("a counter of parts that stays", "up_front", DEADLOCK, "COUNTER_STAYS"),
    mutation(
        "credits cleared before processors have seen them",
        "up_front",
        DEADLOCK,
        "CREDITS_CLEARED_WHEN_SEEN",
    ),
    mutation("credits that stay", "up_front", DEADLOCK, "CREDITS_STAY"),
    mutation(
        "chunks that are not listed when a call ends", "up_front", DEADLOCK, "LISTS_NOT_AWAITED"
    ),
    mutation(
        "places that are not awaited", "pool", OVERWRITES_PLACE, "PLACES_NOT_AWAITED", "PARTS=1"
    ),
    mutation(
        "places that any tile frees", "pool", OVERWRITES_PLACE, "ANY_TILE_FREES_PLACES", "PARTS=1"
    ),
    mutation(
        "places of a tile of which one part is multiplied",
        "pool",
        OVERWRITES_PLACE,
        *("ONE_PART_READ", "PROCESSORS=1"),
    ),
    mutation(
        "processors that wait for places",
        "pool",
        DEADLOCK,
        *("PROCESSORS_AWAIT_PLACES", "PROCESSORS=1", "PARTS=1"),
    ),
    mutation("places that stay taken", "pool", DEADLOCK, "PLACES_STAY_TAKEN"),
    mutation("a plan by one source's counts", "decision", DEADLOCK, "ONE_COUNT_DECIDES"),
    mutation("processors that plan what is told", "decision", RUNS_TWICE, "PROCESSORS_DO_NOT_ASK"),
    mutation("tiles of what processors plan", "decision", RUNS_TWICE, "SUBSCRIBER_DOES_NOT_ASK"),
    mutation("parts without slots", "decision", DEADLOCK, "NO_SLOTS_ARE_RESERVED"),
    mutation("slots that are taken before", "decision", SLOTS_ARE_TAKEN, "SLOTS_ARE_TAKEN_BEFORE"),
    mutation("rows that do not wait for their places", "rings", REPLACES_ROW, "PLACES_NOT_AWAITED"),
    mutation("rows behind a ring that stay old", "rings", READS_OLD_ROW, "TAILS_STAY_OLD"),
    mutation("remainders that wait for all sources", "rings", DEADLOCK, "REMAINDERS_WAIT"),
    mutation("a ring planned up front", "rings", DEADLOCK, "PLANNED_UP_FRONT"),
    mutation(
        "a flag without its release", "exchange", READS_WRONG_ROW, "FLAG_RELAXED", *THREE_CALLS
    ),
    mutation(
        "a flag that is not acquired", "exchange", READS_WRONG_ROW, "ACQUIRE_DROPPED", *THREE_CALLS
    ),
    mutation(
        "a flag before its rows", "exchange", READS_WRONG_ROW, "FLAG_BEFORE_DATA", *THREE_CALLS
    ),
    mutation(
        "a flag that names no call", "exchange", READS_WRONG_ROW, "FLAG_WITHOUT_EPOCH", *THREE_CALLS
    ),
    mutation(
        "a credit without its release",
        "exchange",
        READS_WRONG_RESULT,
        *("CREDIT_RELAXED", *THREE_CALLS),
    ),
    mutation(
        "parts of a tile counted relaxed",
        "exchange",
        READS_WRONG_RESULT,
        *("PARTS_COUNTED_RELAXED", *THREE_CALLS, "PARTS=2"),
    ),
    mutation(
        "a credit that is not reset",
        "exchange",
        READS_WRONG_RESULT,
        *("CREDIT_NOT_RESET", *THREE_CALLS),
    ),
    mutation(
        "a reset that the end of the kernel does not order",
        "exchange",
        DEADLOCK,
        *("KERNEL_BOUNDARY_ORDERS_NOTHING", *THREE_CALLS),
    ),
    mutation("a credit for padding", "exchange", WRONG_CREDIT, "PADDING_CREDITED", *THREE_CALLS),
    mutation("counts in one parity", "exchange", LATER_COUNT, "SINGLE_PARITY", *THREE_CALLS),
    mutation(
        "counts in one parity, among three ranks",
        "exchange",
        DEADLOCK,
        *("SINGLE_PARITY", "RANKS=3", "EPOCHS=2", "TOTAL_ROWS=1", "COARSE"),
    ),
    mutation(
        "a count left out when zero", "exchange", DEADLOCK, "COUNT_OMITTED_WHEN_ZERO", *THREE_CALLS
    ),
    mutation(
        "a count left out when zero, under fairness",
        "exchange",
        NEVER_ENDS,
        *("COUNT_OMITTED_WHEN_ZERO", *THREE_CALLS, "SWEEPS"),
        liveness=True,
    ),
    mutation(
        "a bound that begins with nothing", "exchange", SKEW, "BOUND_STARTS_EMPTY", *THREE_CALLS
    ),
    mutation(
        "a call that ends with rows owed", "exchange", SKEW, "ENDS_BEFORE_RETURNED", *THREE_CALLS
    ),
    mutation(
        "a call that ends when its rows are sent",
        "exchange",
        OVERWRITES_ROW,
        *("ENDS_WHEN_SENT", *THREE_CALLS),
    ),
    mutation(
        "a call that ends when its Combine is posted",
        "exchange",
        OVERWRITES_RESULT,
        *("ENDS_WHEN_POSTED", *THREE_CALLS),
    ),
    mutation(
        "an epoch that does not wait for a late processor",
        "exchange",
        DEADLOCK,
        *("EPOCH_ADVANCED_EARLY", *THREE_CALLS),
    ),
    mutation(
        "no Combine for a token without rows",
        "exchange",
        DEADLOCK,
        "UNSENT_NOT_POSTED",
        *THREE_CALLS,
    ),
    mutation("a flag that wakes once", "exchange", DEADLOCK, "FLAG_LOOKED_AT_ONCE", *THREE_CALLS),
    mutation(
        "a flag that wakes once, under fairness",
        "exchange",
        NEVER_ENDS,
        *("FLAG_LOOKED_AT_ONCE", *THREE_CALLS, "SWEEPS"),
        liveness=True,
    ),
    mutation(
        "a chunk listed before one that has not landed",
        "exchange",
        COPIES_WRONG_ROW,
        *("LANDS_IN_ANY_ORDER", *ONCE, "CHUNK_ROWS=1"),
    ),
    mutation(
        "a tile that waits for the peer's flag, not for copies",
        "exchange",
        READS_WRONG_ROW,
        *("COPIES_NOT_AWAITED", *ONCE, "CHUNK_ROWS=2"),
    ),
    mutation(
        "a tile that waits for copies only where there are any",
        "exchange",
        OVERWRITES_ORIGIN,
        *("ORIGINS_NOT_AWAITED", *ONCE, "CHUNK_ROWS=2"),
    ),
    mutation(
        "a tile that waits for copies where a chunk has brought all rows",
        "exchange",
        DEADLOCK,
        *("COPIES_AWAITED_IN_VAIN", *ONCE, "CHUNK_ROWS=1", "ONCE_AFTER=1"),
    ),
    mutation(
        "a chunk called whole before it is copied",
        "exchange",
        READS_WRONG_ROW,
        *("RAISED_BEFORE_COPY", *ONCE, "CHUNK_ROWS=2"),
    ),
    mutation(
        "a chunk called whole without a release",
        "exchange",
        READS_WRONG_ROW,
        *("RAISED_RELAXED", *ONCE, "CHUNK_ROWS=2"),
    ),
    mutation(
        "origins behind the flag",
        "exchange",
        READS_WRONG_ORIGIN,
        *("ORIGINS_BEHIND_FLAG", *ONCE, "CHUNK_ROWS=2"),
    ),
    mutation(
        "own rows taken for tokens sent once",
        "exchange",
        READS_WRONG_ORIGIN,
        *("OWN_ROWS_COPIED", *ONCE, "CHUNK_ROWS=2", "WITH_SELF"),
    ),
    mutation("a window that nobody looks at", "windows", BEYOND_WINDOW, "WINDOW_UNCHECKED"),
    mutation("landed rows told before they land", "windows", BEYOND_WINDOW, "PUTS_UNORDERED"),
    mutation("a signal that overtakes its bytes", "windows", READS_WRONG_PUT, "SIGNAL_OVERTAKES"),
    mutation("a call that ends before its puts", "windows", DEADLOCK, "ENDS_BEFORE_PUT"),
    mutation(
        "an echo that says the sum",
        "windows",
        DEADLOCK,
        *("ECHO_IS_A_SUM", "EPOCHS=2", "WINDOW=2", "ONE_WAY"),
    ),
    mutation("an echo that waits for a put", "windows", DEADLOCK, "ECHO_WAITS_FOR_ROOM"),
    mutation("an echo forgotten between calls", "windows", DEADLOCK, "ECHO_FORGOTTEN"),
    mutation(
        "partial sums flagged without a release",
        "sums",
        READS_WRONG_PARTIAL,
        "PARTIALS_FLAGGED_RELAXED",
    ),
    mutation(
        "partial sums counted relaxed",
        "sums",
        READS_WRONG_PARTIAL,
        *("PARTIALS_COUNTED_RELAXED", *ONE_GROUP),
    ),
    mutation(
        "a group announced by its first token",
        "sums",
        READS_WRONG_PARTIAL,
        *("FIRST_TOKEN_ANNOUNCES", *ONE_GROUP),
    ),
    mutation("sums that are not acquired", "sums", READS_WRONG_PARTIAL, "FLAGS_NOT_ACQUIRED"),
    mutation("partial sums of one slice", "sums", READS_WRONG_PARTIAL, "ONE_SLICE_AWAITED"),
    mutation("partial sums of any call", "sums", READS_WRONG_PARTIAL, "ANY_CALLS_FLAG"),
    mutation(
        "totals flagged without a release",
        "sums",
        READS_WRONG_TOTAL,
        *("TOTALS_FLAGGED_RELAXED", "EVERYWHERE"),
    ),
    mutation(
        "a call that ends when its tokens are combined",
        "sums",
        OVERWRITES_PARTIAL,
        "ENDS_WITHOUT_SUMS",
    ),
    mutation(
        "a call that ends without other owners' totals",
        "sums",
        OVERWRITES_TOTAL,
        *("ENDS_WITHOUT_TOTALS", "EVERYWHERE"),
    ),
    mutation(
        "a call that ends before all slices are heard",
        "sums",
        SKEW,
        *("ENDS_UNHEARD", "OWNERS=1"),
    ),
    mutation(
        "a call that is told before it begins",
        "sums",
        SKEW,
        *("TOLD_BEFORE_THE_CALL", "OWNERS=1"),
    ),
    mutation(
        "one row for partial sums of two calls", "sums", OVERWRITES_PARTIAL, "ONE_ROUND_OF_ROWS"
    ),
    mutation("flags of sums in one parity", "sums", DEADLOCK, "FLAGS_IN_ONE_PARITY"),
    mutation("words of calls in one parity", "sums", DEADLOCK, "WORDS_IN_ONE_PARITY"),
    mutation("an abort told to no peer", "abort", SOMEONE_STAYS, "TOLD_TO_NO_PEER"),
    mutation(
        "an abort told to no peer, under fairness",
        "abort",
        NEVER_ENDS,
        *("TOLD_TO_NO_PEER", "TOLD"),
        liveness=True,
    ),
    mutation("an abort word that names no call", "abort", WRONG_CALL, "ABORT_WITHOUT_EPOCH"),
    mutation("an abort word before its record", "abort", NO_RECORD, "WORD_BEFORE_RECORD"),
    mutation("an abort word without its release", "abort", NO_RECORD, "RAISE_RELAXED"),
    mutation(
        "a later failure that replaces an earlier one",
        "abort",
        NOT_EARLIEST,
        *("LATER_FAILURE_REPLACES", "FAILURES=2"),
    ),
    mutation(
        "a failure that an earlier one cannot replace",
        "abort",
        NOT_EARLIEST,
        *("FIRST_FAILURE_STAYS", "FAILURES=2"),
    ),
    mutation(
        "an abort word raised by a store",
        "abort",
        NOT_EARLIEST,
        *("RAISED_BY_STORE", "FAILURES=2"),
    ),
    mutation(
        "two actors that write one record",
        "abort",
        TWO_RECORDS,
        *("NOT_CLAIMED", "FAILURES=2", "ACTORS=2"),
    ),
    mutation("no deadline where a rank dies", "abort", SOMEONE_STAYS, "NO_DEADLINE", "DEATHS=1"),
    mutation("a failure that nobody puts", "abort", SOMEONE_STAYS, "PUT_BY_NOBODY", *NODES),
    mutation("a record behind its word", "abort", NO_RECORD, "PUTS_UNORDERED", *NODES),
    mutation(
        "a record put by the sender and by the host",
        "abort",
        TWO_RECORDS,
        *("PUT_NOT_CLAIMED", *NODES, "WITH_HOST"),
    ),
    Check("sweeps without fairness", "exchange", (*THREE_CALLS, "SWEEPS"), True, False, NEVER_ENDS),
]


def missing() -> str:
    """The program that is missing here, and how to get it; "" where all are there."""
    if shutil.which("spin") is None:
        return "needs spin: apt-get install spin"
    if shutil.which("cc") is None:
        return "needs a C compiler: apt-get install gcc"
    return ""


def output_of(command: Iterable[str | Path], folder: Path) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{done.args} in {folder}:\n{output[-4000:]}")
    return output


def number(pattern: str, output: str) -> int:
    found = re.search(pattern, output)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what spin printed:\n{output[-4000:]}")
    return int(found[1])


def check(one: Check) -> Checked:
    """Translates, compiles and runs one check."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        macros = [f"-D{macro}" for macro in one.macros]
        output_of(["spin", "-a", *macros, FOLDER / f"{one.model}.pml"], folder)
        # Where there are few states, as where a mutation is found, the compiler takes longest.
        level = 2 if one.states > 1_000_000 else 1 if one.states > 90_000 or one.liveness else 0
        options = [f"-O{level}", "-w"]
        # NFAIR: room for the marks of up to 24 processes.
        options += ["-DNFAIR=3"] if one.liveness else ["-DSAFETY"]
        output_of(["cc", *options, "pan.c", "-o", "pan"], folder)
        arguments = ["-m100000", "-w20"]
        if one.liveness:
            arguments += ["-a", "-f"] if one.fair else ["-a"]
        began = time.monotonic()
        output = output_of(["./pan", *arguments], folder)
        seconds = time.monotonic() - began
    reported = re.search(r"pan:1: (.*?) \(at depth", output)
    cut = ("not completed", "max search depth", "Bit statespace", "Hash-Compact", "aborted")
    return Checked(
        name=one.name,
        states=number(r"(\d+) states, stored", output),
        transitions=number(r"(\d+) transitions", output),
        errors=number(r"errors: (\d+)", output),
        seconds=seconds,
        violation=reported[1] if reported else "",
        complete="Full statespace search" in output and not any(word in output for word in cut),
    )


def is_reported(one: Check, checked: Checked) -> bool:
    """Whether a search has ended with the violation that the check expects."""
    pattern = ".*".join(map(re.escape, one.violation.split("...")))
    return checked.errors == 1 and re.fullmatch(pattern, checked.violation) is not None


def as_expected(one: Check, checked: Checked) -> bool:
    """Whether a world holds in all of its states, or a mutation breaks it as it should."""
    if one.violation:
        return is_reported(one, checked)
    return checked.errors == 0 and checked.complete and checked.states >= one.states


def check_all(checks: Iterable[Check]) -> dict[str, concurrent.futures.Future[Checked]]:
    """Starts checks beside each other, one a core; by name, what each will have found."""
    pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    started = {one.name: pool.submit(check, one) for one in checks}
    pool.shutdown(wait=False)
    return started


def main(
    large: Annotated[
        bool, typer.Option(help="The worlds that take minutes and gigabytes.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes the figures to this file.")
    ] = None,
) -> None:
    """Checks the models, and what must not hold."""
    checks = LARGE_WORLDS if large else [*WORLDS, *MUTATIONS]
    results = check_all(checks)
    rows = []
    for one in checks:
        found = results[one.name].result()
        good = as_expected(one, found)
        print(
            f"{'' if good else 'NOT AS EXPECTED '}{one.model}: {one.name}: {found.states} states, "
            f"{found.transitions} transitions, {found.seconds:.1f} s, "
            f"{found.violation or 'no error'}"
        )
        rows.append(
            {
                "model": one.model,
                "macros": one.macros,
                "expected": one.violation,
                "as_expected": good,
                **dataclasses.asdict(found),
            }
        )
    if json_file is not None:
        document = {
            "benchmark": "model",
            "command": provenance.command("tests.model.check"),
            "commit": provenance.commit(),
            "machine": machine.describe(),
            "spin": output_of(["spin", "-V"], FOLDER).strip(),
            "checks": rows,
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
