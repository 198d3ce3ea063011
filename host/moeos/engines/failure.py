# SPDX-License-Identifier: Apache-2.0
"""Turns a failure of the device OS into an exception with a sentence for its reader.

The runtime records a failure as numbers (`runtime/memory/records.def`). Must not depend on engines,
nor on how the record got here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from moeos._runtime import Failure, FailureKind
from moeos.engines import calls
from moeos.partition.sharding import Group
from moeos.system.errors import NumericalError, PeerTimeout, in_job


def exception_of(
    failure: Failure,
    rank: int,
    identity: int = 0,
    names: Mapping[int, str] | None = None,
    group: Group | None = None,
    tokens_in: Callable[[int], int | None] | None = None,
    derives: int = 0,
) -> Exception:
    """The exception to raise on `rank` for a failure whose kind is not NONE.

    `identity`: of the call that raises it (`moeos.engines.calls`), or 0; `names`: of layers that
    have one; `group`: of the world, with the ranks' numbers in the job; `tokens_in`: the number of
    tokens in a word that ranks with slices compare (`inputs_of` of runtime/memory/slices.hpp);
    `derives`: the call of which this rank's part in the failed one is the backward, or 0.

    `PeerTimeout` for whatever was late or aborted, `NumericalError` for logits that are not finite,
    `ValueError` for other input that cannot be followed, and `RuntimeError` where the protocol
    itself was broken: a defect of moeos, or memory that other code overwrote.
    """
    names = names or {}
    job = () if group is None else group.ranks
    if failure.kind == FailureKind.CALL_DIFFERS:
        return RuntimeError(
            different_calls(
                *(failure.rank, failure.expected, failure.peer, failure.seen, names),
                {rank: derives},
            )
            + ". All ranks may call reset() and go on"
            + in_job((failure.rank, failure.peer), job)
        )
    back = ""
    if calls.is_backward(failure.identity):
        back = calls.describe(failure.identity, names, derives)
    error = _error_of(failure, rank, _tokens_of_both(failure, tokens_in), back)
    error = type(error)(f"{error}{in_job((failure.rank, failure.peer), job)}")
    of_another = not calls.may_be_of_one_layer(failure.identity, identity)
    if 0 in (failure.identity, identity) or not of_another:
        return error
    failed = calls.describe(failure.identity, names)
    return type(error)(f"a call of {failed}, in the same workspace, has failed: {error}")


def may_go_on(kind: int) -> bool:
    """Whether a rank that is alone may go on after a failure of this kind: not if a host gave up,
    and not if the protocol's state is damaged.
    """
    return kind not in _LASTING


def different_calls(
    rank: int,
    identity: int,
    other: int,
    its: int,
    names: Mapping[int, str],
    derive: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """The sentence for two ranks that make different calls at the same time, by identities.
    `derive`: by rank, the call whose backward it calls, as far as that is known.
    """
    what = "numbers of pieces"
    if calls.is_backward(identity) != calls.is_backward(its):
        what = "directions"
    elif calls.one_of(identity) != calls.one_of(its):
        what = "calls' backwards"
    if not calls.may_be_of_one_layer(identity, its):
        what = "layers"
    ours, theirs = (
        calls.describe(number, names, derive.get(who, 0))
        for who, number in ((rank, identity), (other, its))
    )
    return (
        f"the ranks call different {what}: rank {rank} calls {ours}, "
        f"and rank {other} at the same time {theirs}. All ranks must call the "
        "layers of a workspace in the same order, in as many pieces, and backward as forward; and "
        "derive the calls of a layer in the same order"
    )


def _tokens_of_both(f: Failure, tokens_in: Callable[[int], int | None] | None) -> str:
    """The numbers of tokens of two ranks whose inputs differ, where they are known."""
    if f.kind != FailureKind.INPUTS_DIFFER or tokens_in is None:
        return ""
    ours, theirs = tokens_in(f.expected), tokens_in(f.seen)
    if ours is None or theirs is None:
        return ""
    return f": {theirs} tokens on rank {f.peer}, and {ours} on rank {f.rank}"


def _error_of(f: Failure, rank: int, tokens: str = "", back: str = "") -> Exception:
    who = f"rank {f.rank}" + ("" if f.rank == rank else f" (said by it to rank {rank})")
    waited = f"{f.waited_ns / 1e9:.1f} s in call {f.epoch}"
    owed = _owed(f, back)
    if owed is not None:
        return PeerTimeout(
            f"{who} waited {waited} for rank {f.peer}, which owes {owed}. "
            f"Look at what rank {f.peer} is doing; then all ranks may call reset()"
        )
    if f.kind == FailureKind.TASKS_LATE:
        return PeerTimeout(
            f"{who} waited {waited} for its own processors: {f.seen} of {f.expected} received rows "
            "are done. Raise the deadline if this machine is that slow"
        )
    if f.kind == FailureKind.OS_SILENT:
        return PeerTimeout(
            f"a processor of {who} saw no sweep of its scheduler for {waited}. "
            "Raise the deadline if this machine has too few cores for its threads"
        )
    if f.kind == FailureKind.ACTOR_SILENT:
        return PeerTimeout(
            f"the scheduler of {who} waited {waited} for warp {f.chunk} of its own OS block, which "
            f"{_OS_ACTORS.get(f.seen, 'does something else')} and answers nothing: it stands still "
            f"in the middle of a step. Look at rank {f.rank}: a debugger, or a network that takes "
            "no puts. If its kernel does not end by itself, restart its process"
        )
    if f.kind == FailureKind.HOST_ABORT:
        return PeerTimeout(
            f"rank {f.rank} gave up, and with it the layer's call on rank {rank}. Look for the "
            f"error of rank {f.rank}; then all ranks may call reset(), or, where its world has "
            "ended, make a world and its layers again"
        )
    if f.kind == FailureKind.INTERRUPTED:
        return PeerTimeout(
            f"rank {f.rank} was interrupted by a signal in call {f.epoch}, and with it the layer's "
            f"call on rank {rank}. All ranks may call reset() and go on"
        )
    if f.kind == FailureKind.LOGITS_NOT_FINITE:
        return NumericalError(
            f"the router's logits of token {f.chunk} on rank {f.rank} are not finite in call "
            f"{f.epoch}: look for NaN or infinity in that row of x, in gate.weight (of a float16 "
            "layer on the GPU: for more than 65504) and in gate.selection_bias; "
            "then all ranks may call reset()"
        )
    wrong = _wrong_input(f)
    if wrong is not None:
        return ValueError(
            f"{wrong} on rank {f.rank} in call {f.epoch}{tokens}. All ranks may call reset() and "
            "go on"
        )
    if f.kind == FailureKind.CALLS_AT_ONCE:
        return RuntimeError(
            f"two calls of one workspace ran at the same time on rank {f.rank}: order them on one "
            "stream, or by events. What they have returned is not to be used; all ranks may call "
            "reset() and go on"
        )
    if f.kind == FailureKind.EPOCHS_SPENT:
        return RuntimeError(
            f"the layer of rank {rank} has made 2^32 - 2 calls, as many as its words can tell "
            "apart: all ranks must call reset()"
        )
    return RuntimeError(
        f"{who}, call {f.epoch}: {_broken(f)}. The protocol's state is damaged: stop all ranks"
    )


_LASTING = (
    FailureKind.NONE,
    FailureKind.HOST_ABORT,
    FailureKind.COUNT_TOO_LARGE,
    FailureKind.RETURNS_TOO_MANY,
    FailureKind.OVERFLOW,
    FailureKind.COUNT_DAMAGED,
    FailureKind.FLAG_DAMAGED,
    FailureKind.WORD_DAMAGED,
    FailureKind.TASK_DAMAGED,
    FailureKind.ORIGIN_DAMAGED,
)

_OS_ACTORS = {
    1: "reads row counts",
    2: "lists the chunks that have landed",
    3: "watches rows arrive",
    4: "watches results return",
    5: "tells remote peers what has landed",
    6: "watches sums of slices",
}
"""In the order of an inquiry (`runtime/actors/os.hpp`); all returns subscribers are 4."""


def _owed(f: Failure, back: str) -> str | None:
    """The sentence for what a late peer has not delivered; None for other failures. `back`: words
    for the call where it is a backward.
    """
    missing = f"it has not made call {f.epoch}"
    if back:
        missing += (
            f", {back} (if its loss leaves that call's output out, add 0 * output.sum() to it)"
        )
    if f.kind == FailureKind.COUNTS_LATE:
        late = "counted its rows" if back else "finished routing"
        return f"its row count for local expert {f.expert}: {missing}, or not {late}"
    if f.kind == FailureKind.ROWS_LATE:
        return (
            f"rows from chunk {f.chunk} on: it announced {f.expected} rows and at least {f.seen} "
            "have arrived"
        )
    if f.kind == FailureKind.RETURNS_LATE:
        return f"results of chunk {f.chunk}: {f.seen} of {f.expected} rows have come back"
    if f.kind == FailureKind.SUMS_LATE:
        tokens = f"tokens {f.chunk} to {f.expected - 1}"
        return (
            f"word of its call: {missing}",
            f"its partial sums of {tokens}, for which rank {f.rank} adds them up",
            f"the sums of {tokens}, which it adds up",
        )[f.seen]
    if f.kind == FailureKind.ECHO_LATE:
        return (
            f"word of {f.seen} rows that were put to it over the network, where {f.expected} may "
            "be under way"
        )
    return None


def _wrong_input(f: Failure) -> str | None:
    """The sentence for a wrong value in the caller's GPU memory; None for other failures."""
    value = f.seen - (1 << 64) if f.seen >> 63 else f.seen  # it was a signed number
    if f.kind == FailureKind.ID_NO_EXPERT:
        return f"topk_ids[{f.chunk}, {f.expected}] is {value}, neither an expert nor -1 (unused),"
    if f.kind == FailureKind.ID_REPEATED:
        return (
            f"topk_ids[{f.chunk}, {f.expected}] is {value}, which is in that row before (an expert "
            "may appear only once in a row),"
        )
    if f.kind == FailureKind.INPUTS_DIFFER:
        of_output = ", the gradient of the output" if calls.is_backward(f.identity) else ""
        return (
            f"x{of_output}, the routing or the number of tokens of rank {f.peer} differ from those"
        )
    if f.kind == FailureKind.TOKEN_COUNT_WRONG:
        return f"tokens is {value}, which is not from 0 to {f.expected}, the rows of x,"
    return None


def _broken(f: Failure) -> str:
    if f.kind == FailureKind.COUNT_TOO_LARGE:
        return f"rank {f.peer} announced {f.seen} rows where at most {f.expected} fit"
    if f.kind == FailureKind.RETURNS_TOO_MANY:
        return f"rank {f.peer} returned {f.seen} rows of chunk {f.chunk}, which has {f.expected}"
    if f.kind == FailureKind.OVERFLOW:
        return f"a queue of {f.expected} slots was asked for slot {f.seen}"
    if f.kind == FailureKind.COUNT_DAMAGED:
        return (
            f"rank {f.peer}'s row count for local expert {f.expert} is {f.seen:#x}, which nobody "
            "writes"
        )
    if f.kind == FailureKind.FLAG_DAMAGED:
        return (
            f"the arrival flag of rank {f.peer}'s chunk {f.chunk} names call {f.seen}, which "
            "nobody has made"
        )
    if f.kind == FailureKind.WORD_DAMAGED:
        return f"slot {f.chunk} of a queue holds {f.seen:#x}, which nobody writes"
    if f.kind == FailureKind.TASK_DAMAGED:
        return f"task descriptor {f.chunk} is not what was written"
    if f.kind == FailureKind.ORIGIN_DAMAGED:
        return (
            f"where a row of rank {f.peer}'s chunk {f.chunk} comes from is {f.seen:#x}, which "
            "nobody writes"
        )
    return f"failure kind {f.kind}"
