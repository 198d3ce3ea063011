# SPDX-License-Identifier: Apache-2.0
"""Each failure that the runtime records becomes one sentence, which names what to look at."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from moeos._runtime import Failure, FailureKind
from moeos.config.records import dtype_of
from moeos.engines import calls
from moeos.engines.failure import exception_of
from moeos.partition.sharding import Group
from moeos.system.errors import NumericalError, PeerTimeout

NONE = 0xFFFFFFFF


def failure(
    kind: FailureKind,
    *,
    peer: int = NONE,
    chunk: int = NONE,
    expected: int = 0,
    seen: int = 0,
    identity: int = 0,
) -> Failure:
    """A record of call 7 by rank 2."""
    record = numpy.zeros(1, dtype_of("Failure"))
    record[["kind", "actor", "rank", "peer", "expert"]] = (kind, 3, 2, peer, NONE)
    record[["chunk", "epoch", "identity"]] = (chunk, 7, identity)
    record[["expected", "seen"]] = (expected, seen % (1 << 64))
    return Failure(record.tobytes())


@pytest.mark.parametrize("value", [8, -2, 1 << 40, -(1 << 63)])
def test_an_id_that_is_no_expert_is_named_with_token_slot_and_value(value: int) -> None:
    error = exception_of(
        failure(FailureKind.ID_NO_EXPERT, chunk=131, expected=1, seen=value), rank=0
    )
    assert type(error) is ValueError
    assert f"topk_ids[131, 1] is {value}, neither an expert" in str(error)
    assert "on rank 2 in call 7" in str(error)
    assert "reset()" in str(error)


def test_a_repeated_id_is_named_with_token_slot_and_value() -> None:
    error = exception_of(failure(FailureKind.ID_REPEATED, chunk=5, expected=3, seen=6), rank=2)
    assert type(error) is ValueError
    assert "topk_ids[5, 3] is 6, which is in that row before" in str(error)


@pytest.mark.parametrize("value", [-1, 65])
def test_a_wrong_number_of_tokens_is_named_with_what_is_allowed(value: int) -> None:
    error = exception_of(failure(FailureKind.TOKEN_COUNT_WRONG, expected=64, seen=value), rank=1)
    assert type(error) is ValueError
    assert f"tokens is {value}, which is not from 0 to 64, the rows of x, on rank 2" in str(error)


def test_an_actor_that_answers_nothing_is_named_with_its_warp_and_what_it_does() -> None:
    error = exception_of(failure(FailureKind.ACTOR_SILENT, chunk=4, seen=4), rank=1)
    assert type(error) is PeerTimeout
    for words in ("rank 2", "call 7", "warp 4 of its own OS block", "watches results return"):
        assert words in str(error)
    assert "restart its process" in str(error)


def test_logits_that_are_not_finite_name_the_token_and_where_to_look() -> None:
    error = exception_of(failure(FailureKind.LOGITS_NOT_FINITE, chunk=17), rank=1)
    assert type(error) is NumericalError
    where = ("that row of x, in gate.weight (", "more than 65504) and in gate.selection_bias; ")
    for words in ("token 17 on rank 2", "call 7", *where):
        assert words in str(error)


def test_ranks_that_call_different_layers_are_told_both_by_name() -> None:
    differs = failure(
        FailureKind.CALL_DIFFERS, peer=5, expected=calls.identity(4), seen=calls.identity(9, 3)
    )
    said = str(exception_of(differs, 2, calls.identity(4), {9: "model.layers.9.mlp"}))
    assert "rank 2 calls layer 4, and rank 5 at the same time layer 9 (model.layers.9.mlp)" in said
    assert "layer 9 (model.layers.9.mlp) in 3 pieces" in said
    assert "reset()" in said


def test_ranks_that_go_forward_and_backward_are_told_so() -> None:
    back = calls.identity(4, backward=True)
    differs = failure(FailureKind.CALL_DIFFERS, peer=5, expected=calls.identity(4), seen=back)
    said = str(exception_of(differs, 2, calls.identity(4), {4: "mlp"}))
    assert "different directions: rank 2 calls layer 4 (mlp), and rank 5 at the same time" in said
    assert "the backward of layer 4 (mlp). All ranks must" in said


@pytest.mark.parametrize(
    ("derives", "of", "words"),
    [
        (5, 0, "the backward of call 5 of layer 4 (mlp)"),
        (517, 517, "the backward of call 517 of layer 4 (mlp)"),
        (0, 517, "the backward of call 5 (modulo 256) of layer 4 (mlp)"),
        (0, 0, "the backward of layer 4 (mlp)"),
    ],
)
@pytest.mark.parametrize("kind", [FailureKind.COUNTS_LATE, FailureKind.SUMS_LATE])
def test_a_backward_that_a_rank_has_not_made_is_named_with_its_call(
    kind: FailureKind, derives: int, of: int, words: str
) -> None:
    back = calls.identity(4, backward=True, of=of)
    error = exception_of(
        failure(kind, peer=5, identity=back), 2, back, {4: "mlp"}, None, None, derives
    )
    assert type(error) is PeerTimeout
    assert f"it has not made call 7, {words} (if its loss leaves that call's output" in str(error)
    ahead = failure(kind, peer=5, identity=calls.identity(4))
    assert "backward" not in str(exception_of(ahead, 2, calls.identity(4), {4: "mlp"}))


def test_a_rank_that_goes_forward_where_this_one_derives_a_call_is_told_which() -> None:
    back = calls.identity(4, backward=True)
    differs = failure(FailureKind.CALL_DIFFERS, peer=5, expected=back, seen=calls.identity(4))
    said = str(exception_of(differs, 2, back, derives=6))
    assert "rank 2 calls the backward of call 6 of layer 4, and rank 5 at the same time" in said


def test_a_failure_of_another_layers_call_says_whose_it_was() -> None:
    record = failure(FailureKind.LOGITS_NOT_FINITE, identity=calls.identity(4))
    own, other, unknown = (
        str(exception_of(record, 2, n)) for n in (*map(calls.identity, (4, 5)), 0)
    )
    assert own == unknown
    assert other == f"a call of layer 4, in the same workspace, has failed: {own}"


def test_backwards_of_two_calls_that_kept_rows_are_told_apart_by_name() -> None:
    one, other = (calls.identity(5000, 3, backward=True, of=of) for of in (255, 512))
    assert calls.is_backward(one)
    assert (calls.one_of(one), calls.one_of(other), calls.one_of(calls.identity(4))) == (
        255,
        0,
        None,
    )
    assert len({one, other, calls.identity(5000, 3, backward=True)}) == 3
    differs = failure(FailureKind.CALL_DIFFERS, peer=5, expected=one, seen=other)
    said = str(exception_of(differs, 2, one))
    assert "different calls' backwards: rank 2 calls the backward of call 255 (modulo 256)" in said
    assert "rank 5 at the same time the backward of call 0 (modulo 256)" in said
    record = failure(FailureKind.LOGITS_NOT_FINITE, identity=one)
    assert "has failed" not in str(exception_of(record, 2, calls.identity(5000)))
    assert "has failed" in str(exception_of(record, 2, calls.identity(5001)))


def test_every_call_of_every_layer_has_an_identity_of_its_own() -> None:
    found = {
        calls.identity(layer, pieces, backward=backward)
        for layer in (0, 1, 4095, 200_000)
        for pieces in (1, 2, calls.MAX_PIECES)
        for backward in (False, True)
    }
    assert len(found) == 24
    assert all(0 < number < 1 << 32 for number in found)
    assert {calls.layer_of(number) for number in found} == {0, 1, 4095, 200_000}


def test_ranks_are_named_by_the_jobs_numbers_where_these_are_others() -> None:
    late = failure(FailureKind.COUNTS_LATE, peer=0)
    plain = str(exception_of(late, rank=2))
    assert str(exception_of(late, rank=2, group=Group("", (0, 1, 2)))) == plain
    said = str(exception_of(late, rank=2, group=Group("", (0, 5, 9))))
    assert (
        said == f"{plain}; rank 2 of the world is rank 9 of the job, rank 0 of the world is rank 0"
    )
    nobody = failure(FailureKind.TASKS_LATE)
    assert str(exception_of(nobody, rank=2, group=Group("", (0, 5, 9)))).endswith(
        "is rank 9 of the job"
    )


@pytest.mark.parametrize("read", [None, lambda word: word % 64, lambda word: None])
def test_ranks_whose_inputs_differ_are_told_both_numbers_of_tokens(read: Any) -> None:
    record = failure(FailureKind.INPUTS_DIFFER, peer=5, expected=640 + 20, seen=1280 + 23)
    said = str(exception_of(record, 2, tokens_in=read))
    known = read is not None and read(1) is not None
    assert (": 23 tokens on rank 5, and 20 on rank 2. All ranks" in said) == known
