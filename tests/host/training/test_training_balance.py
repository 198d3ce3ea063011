# SPDX-License-Identifier: Apache-2.0
"""Counts of experts, losses that balance them and the rule of a bias, each against its formula."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import (
    load_balancing_loss_func as of_transformers,
)

from moeos import World, training
from tests.process_group import ranks_of_torch

BATCH, LENGTH, EXPERTS, K = 3, 7, 6, 2


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    """The last sequence has one token, and the second one all but two."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, -2:] = 0
    mask[2, 1:] = 0
    return mask


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_are_counted_but_for_unused_slots_and_padding(dtype: torch.dtype) -> None:
    ids = torch.tensor([[[0, 2], [2, -1]], [[3, 4], [-7, 2]]], dtype=dtype)
    found = training.tokens_per_expert(ids, 4)
    assert found.dtype == torch.int64
    assert found.tolist() == [1, 0, 3, 1]
    for mask in (torch.tensor([[True, False], [True, True]]), torch.tensor([[1, 0], [1, 1]])):
        assert training.tokens_per_expert(ids, 4, mask).tolist() == [1, 0, 2, 1]
    assert training.tokens_per_expert(ids[:0], 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_loss_of_a_model_is_that_of_transformers(masked: bool, layers: int) -> None:
    logits = tuple(
        drawn(BATCH * LENGTH, EXPERTS, seed=seed, dtype=torch.float32) for seed in range(layers)
    )
    mask = padding() if masked else None
    wanted = of_transformers(logits, EXPERTS, K, mask)
    found = training.load_balancing_loss_func(logits, EXPERTS, K, mask)
    torch.testing.assert_close(found, wanted)
    if layers == 1:
        one = training.load_balancing_loss_func(logits[0], EXPERTS, K, mask)
        torch.testing.assert_close(one, wanted)


def test_the_loss_of_a_model_is_float32_whatever_the_default_dtype_is() -> None:
    logits = drawn(BATCH * LENGTH, EXPERTS, dtype=torch.float32)
    wanted = training.load_balancing_loss_func(logits, EXPERTS, K)
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = training.load_balancing_loss_func(logits, EXPERTS, K)
        finally:
            torch.set_default_dtype(before)
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)


def test_the_loss_of_a_model_has_transformers_derivative() -> None:
    theirs, ours = (drawn(20, EXPERTS, dtype=torch.float32).requires_grad_() for _ in range(2))
    of_transformers((theirs,), EXPERTS, K).backward()
    training.load_balancing_loss_func(ours, EXPERTS, K).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_equal_experts_are_the_least_loss() -> None:
    logits = torch.full((EXPERTS, EXPERTS), -40.0).fill_diagonal_(40.0)
    ids = logits.argmax(dim=1, keepdim=True)
    counts = training.tokens_per_expert(ids, EXPERTS)
    probs = logits.softmax(dim=1)
    of_megatron = training.switch_load_balancing_loss_func(probs, counts, EXPERTS, 1, EXPERTS, 0.5)
    torch.testing.assert_close(of_megatron, torch.tensor(0.5))
    torch.testing.assert_close(
        training.load_balancing_loss_func(logits, EXPERTS, 1), torch.tensor(1.0)
    )
    of_sequence = training.sequence_load_balancing_loss_func(probs[None], ids[None], 1, 0.5)
    torch.testing.assert_close(of_sequence, torch.tensor(0.5))


def test_switchs_loss_is_its_formula_and_the_sum_of_ranks_that_of_all() -> None:
    probs = drawn(20, EXPERTS).softmax(dim=1)
    ids = probs.topk(K).indices
    counts = [int((ids == expert).sum()) for expert in range(EXPERTS)]
    wanted = 0.01 * EXPERTS / K
    wanted *= sum(n / 20 * float(probs[:, e].mean()) for e, n in enumerate(counts))
    given = training.tokens_per_expert(ids, EXPERTS)
    assert given.tolist() == counts

    def of(rows: slice) -> Tensor:
        return training.switch_load_balancing_loss_func(probs[rows], given, 20, K, EXPERTS, 0.01)

    assert float(of(slice(20))) == pytest.approx(wanted, rel=1e-12)
    assert float(of(slice(0, 5)) + of(slice(5, 20))) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_a_sequences_loss_is_deepseeks_formula(masked: bool) -> None:
    scores = drawn(BATCH, LENGTH, EXPERTS).sigmoid()
    ids = scores.topk(K).indices
    ids[0, 0, 1] = -1
    mask = padding() if masked else torch.ones(BATCH, LENGTH, dtype=torch.int64)
    wanted = 0.0
    for sequence in range(BATCH):
        real = [token for token in range(LENGTH) if mask[sequence, token]]
        for expert in range(EXPERTS):
            chosen = sum(expert in ids[sequence, token].tolist() for token in real)
            f = EXPERTS / (K * len(real)) * chosen
            shares = [scores[sequence, t, expert] / scores[sequence, t].sum() for t in real]
            wanted += f * float(sum(shares)) / len(real) / BATCH * 0.003
    found = training.sequence_load_balancing_loss_func(
        scores, ids, K, 0.003, mask if masked else None
    )
    assert float(found) == pytest.approx(wanted, rel=1e-12)


def test_a_sequence_without_tokens_has_no_loss_and_no_nan() -> None:
    scores = drawn(2, 3, EXPERTS).sigmoid().requires_grad_()
    ids = scores.detach().topk(K).indices
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    found = training.sequence_load_balancing_loss_func(scores, ids, K, 1.0, mask)
    alone = training.sequence_load_balancing_loss_func(scores[:1], ids[:1], K, 1.0)
    torch.testing.assert_close(found, alone / 2)
    found.backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())
    assert not scores.grad[1].any()


def test_the_z_loss_is_its_formula() -> None:
    logits = drawn(BATCH, LENGTH, EXPERTS)
    squares = logits.exp().sum(dim=-1).log() ** 2
    assert float(training.z_loss_func(logits, 0.1)) == pytest.approx(0.1 * float(squares.mean()))
    mask = padding()
    some = float(squares[mask.bool()].mean())
    assert float(training.z_loss_func(logits, 0.1, mask)) == pytest.approx(0.1 * some)
    assert float(training.z_loss_func(logits, 0.1, torch.zeros_like(mask))) == 0.0
    assert float(training.z_loss_func(logits[:0], 0.1)) == 0.0
    large = torch.full((1, EXPERTS), 300.0)  # whose exponentials float32 has not
    assert bool(training.z_loss_func(large, 1.0).isfinite())


def losses_of(logits: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Each loss with a mask, of logits [BATCH, LENGTH, EXPERTS] with padding, or with none."""
    sizes = logits.shape[:2]
    ids = torch.where(logits.isnan(), 0.0, logits).detach().topk(K).indices
    scores = logits.sigmoid()
    every = None if mask is None else mask.view(sizes)
    return {
        "z": training.z_loss_func(logits, 0.5, every),
        "model": training.load_balancing_loss_func(logits.flatten(0, 1), EXPERTS, K, every),
        "sequence": training.sequence_load_balancing_loss_func(scores, ids, K, 0.5, every),
    }


@pytest.mark.parametrize("held", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("loss", ["z", "model", "sequence"])
def test_what_padding_holds_enters_no_loss_and_no_gradient(loss: str, held: float) -> None:
    mask = padding()
    logits = drawn(BATCH, LENGTH, EXPERTS)
    full = torch.where(mask.bool().unsqueeze(-1), logits, held).requires_grad_()
    found = losses_of(full, mask)[loss]
    [gradient] = torch.autograd.grad(found, full)

    # Apart: the tokens alone, and each sequence by itself where the loss tells them apart.
    alone = logits.clone().requires_grad_()
    if loss == "sequence":
        parts = [alone[n][mask[n].bool()][None] for n in range(BATCH)]
        wanted = sum(losses_of(part, None)[loss] for part in parts) / BATCH
    else:
        wanted = losses_of(alone[mask.bool()][None], None)[loss]
    assert isinstance(wanted, Tensor)
    [of_wanted] = torch.autograd.grad(wanted, alone)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)
    if loss == "sequence" and held != held:  # the sigmoid of NaN, which is the caller's
        gradient = torch.where(mask.bool().unsqueeze(-1), gradient, 0.0)
    torch.testing.assert_close(gradient, of_wanted, rtol=1e-12, atol=1e-18)
    assert not gradient[~mask.bool()].any()


def test_scores_of_padding_get_a_gradient_of_zero_whatever_they_are() -> None:
    mask = padding()
    scores = drawn(BATCH, LENGTH, EXPERTS).sigmoid()
    ids = scores.topk(K).indices
    scores[~mask.bool()] = float("nan")
    scores.requires_grad_()
    training.sequence_load_balancing_loss_func(scores, ids, K, 1.0, mask).backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())
    assert not scores.grad[~mask.bool()].any()
    assert bool(scores.grad[mask.bool()].any())


def test_a_token_that_has_no_scores_has_no_share_and_no_gradient() -> None:
    scores = torch.zeros(1, 2, EXPERTS)
    scores[0, 0] = 0.5
    scores.requires_grad_()
    ids = torch.tensor([[[0, 1], [2, 3]]])
    found = training.sequence_load_balancing_loss_func(scores, ids, 1, 64.0)
    # Four pairs of 2 tokens, k = 1; shares 1 / 6 of the one token, and none of the other.
    assert found.item() == pytest.approx(64.0 * 4 * (EXPERTS / 2) * (1 / EXPERTS / 2))
    found.backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("below", [1.0, 1e-3, 1e-6], ids=str)
def test_shares_of_scores_that_no_normal_number_is_as_small_as(
    dtype: torch.dtype, below: float
) -> None:
    """All tokens have equal scores, so each expert's share is 1 / E whatever these are."""
    least = torch.finfo(dtype).tiny
    probs = torch.full((2, LENGTH, EXPERTS), least * below / EXPERTS, dtype=dtype)
    probs.requires_grad_()
    ids = torch.arange(K).expand(2, LENGTH, K)
    loss = training.sequence_load_balancing_loss_func(probs, ids, K, 0.5)
    assert probs.detach().sum(-1).max() <= least * 1.001
    assert loss.item() == pytest.approx(0.5, rel=1e-6)
    [gradient] = torch.autograd.grad(loss, probs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("low", [float("-inf"), -1e9, float("nan")], ids=str)
def test_a_mask_that_is_added_to_scores_is_refused_and_the_remedy_works(low: float) -> None:
    added = torch.where(padding() == 0, low, 0.0)
    ids = torch.randint(EXPERTS, (BATCH, LENGTH, K), generator=torch.Generator().manual_seed(0))
    logits = drawn(BATCH, LENGTH, EXPERTS)

    flat, scores = logits.flatten(0, 1), logits.softmax(-1)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda mask: training.tokens_per_expert(ids, EXPERTS, mask),
        lambda mask: training.load_balancing_loss_func(flat, EXPERTS, K, mask),
        lambda mask: training.sequence_load_balancing_loss_func(scores, ids, K, 1.0, mask),
        lambda mask: training.z_loss_func(logits, 1.0, mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"mask has negative .* pass (attention_)?mask == 0$"):
            call(added)
        for mask in (added == 0, padding().bool(), 0.5 * padding()):
            assert torch.equal(call(mask), call(padding()))


@pytest.mark.parametrize("how", ["no tokens", "all are padding"])
def test_a_mean_over_nothing_is_zero_and_so_is_its_gradient(how: str) -> None:
    length = 0 if how == "no tokens" else LENGTH
    logits = drawn(BATCH, length, EXPERTS).requires_grad_()
    mask = torch.zeros(BATCH, length) if length else None
    found = losses_of(logits, mask)
    probs = logits.flatten(0, 1).softmax(dim=1) * (length == 0)
    none = torch.zeros(EXPERTS, dtype=torch.int64)
    for name, total in (("int", 0), ("tensor", torch.tensor(0)), ("float", torch.tensor(0.0))):
        found[f"switch, {name}"] = training.switch_load_balancing_loss_func(
            probs, none, total, K, EXPERTS, 0.5
        )
    nothing = drawn(0, 4, EXPERTS).requires_grad_()
    no_ids = torch.empty(0, 4, K, dtype=torch.int64)
    of_none = training.sequence_load_balancing_loss_func(nothing, no_ids, K, 0.5)
    assert of_none.item() == 0.0
    of_none.backward()  # type: ignore[no-untyped-call]
    for name, loss in found.items():
        assert loss.item() == 0.0, name
        [gradient] = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(logits)), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_bias_moves_towards_the_mean_by_the_rate(dtype: torch.dtype) -> None:
    counts = torch.tensor([4, 1, 3, 4], dtype=dtype)
    bias = torch.tensor([0.5, -0.5, 0.0, 1.0])
    found = training.get_updated_expert_bias(counts, bias, 0.125)
    assert found.tolist() == [0.375, -0.375, 0.0, 0.875]
    assert bias.tolist() == [0.5, -0.5, 0.0, 1.0]
    layers = training.get_updated_expert_bias(
        torch.stack([counts, counts.flip(0)]), torch.zeros(2, 4), 1.0
    )
    assert layers.tolist() == [[-1, 1, 0, -1], [-1, 0, 1, -1]]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.int8, 127),
        (torch.uint8, 255),
        (torch.int16, 32767),
        (torch.int32, 34_000_000),
        (torch.bfloat16, 2.0**120),
        (torch.float16, 65504.0),
        (torch.float32, 16_777_216.0),
    ],
    ids=str,
)
def test_counts_of_a_narrow_dtype_add_up(dtype: torch.dtype, most: float) -> None:
    """128 experts, of which one has all that its dtype holds and the others have half of it."""
    counts = torch.full((128,), most / 2, dtype=torch.float64).to(dtype)
    counts[0] = most
    numbers = [int(one) for one in counts.tolist()]
    mean = Fraction(sum(numbers), len(numbers))
    right = [(one < mean) - (one > mean) for one in numbers]
    assert {*right} == {-1, 1}
    found = training.get_updated_expert_bias(counts, torch.zeros(128), 1.0)
    assert found.tolist() == right
    assert found.dtype == torch.float32
    assert [int(one) for one in counts.tolist()] == numbers


def test_counts_of_a_narrow_dtype_add_up_over_ranks() -> None:
    def rank_main(world: World) -> list[float]:
        counts = torch.tensor([100, 0, 50], dtype=torch.int8)
        found = training.get_updated_expert_bias(counts, torch.zeros(3), 1.0, dist.group.WORLD)
        return found.tolist()

    assert ranks_of_torch(rank_main, 2) == [[-1.0, 1.0, 0.0]] * 2


def test_a_bias_may_be_of_all_ranks_counts() -> None:
    def rank_main(world: World) -> list[float]:
        counts = torch.tensor([[5, 0, 4], [0, 5, 1]])[world.rank]
        group = dist.group.WORLD
        found = training.get_updated_expert_bias(counts, torch.zeros(3), 1.0, group)
        assert int(counts.sum()) in (9, 6)  # the caller's counts stay as they are
        return found.tolist()

    assert ranks_of_torch(rank_main, 2) == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: training.tokens_per_expert(torch.ones(2, 2), 4), "topk_ids have dtype"),
        (lambda: training.tokens_per_expert(torch.ones(2, 2).long(), 0), "num_experts is 0"),
        (
            lambda: training.tokens_per_expert(torch.ones(2, 2).long(), 4, torch.ones(3)),
            r"mask is \[3\]; it must be \[2\]",
        ),
        (lambda: training.load_balancing_loss_func((), 4), "gate_logits is empty"),
        *(
            (
                functools.partial(training.load_balancing_loss_func, logits, 4),
                "None; it must have the logits of each layer: .*output_router_logits=True",
            )
            for logits in (None, (None,))
        ),
        (
            lambda: training.tokens_per_expert(torch.tensor(3), 4),
            r"topk_ids is \[\]; it must be \[..., k\]",
        ),
        (lambda: training.z_loss_func(torch.tensor(3.0), 1.0), r"logits is \[\]; it must be"),
        (
            lambda: training.load_balancing_loss_func(torch.ones(2, 3), 4),
            r"gate_logits is \[2, 3\]; it must be \[2, 4\]",
        ),
        (
            lambda: training.load_balancing_loss_func(torch.ones(2, 4), 4, 2, torch.ones(3)),
            r"attention_mask is \[3\]; it must be \[2\]",
        ),
        (
            lambda: training.switch_load_balancing_loss_func(
                torch.ones(2, 4), torch.ones(3), 2, 1, 4, 1.0
            ),
            r"tokens_per_expert is \[3\]; it must be \[4\]",
        ),
        (
            lambda: training.sequence_load_balancing_loss_func(
                torch.ones(2, 4), torch.ones(2, 1).long(), 1, 1.0
            ),
            r"probs is \[2, 4\]; it must be \[B, L, E\]",
        ),
        (
            lambda: training.sequence_load_balancing_loss_func(
                torch.ones(2, 3, 4), torch.ones(2, 1).long(), 1, 1.0
            ),
            r"topk_ids is \[2, 1\]; it must be \[2, 3, any\]",
        ),
        (
            lambda: training.sequence_load_balancing_loss_func(
                torch.ones(2, 3, 4), torch.ones(2, 3).long(), 1, 1.0
            ),
            r"topk_ids is \[2, 3\]; it must be \[2, 3, any\]",
        ),
        (
            lambda: training.z_loss_func(torch.ones(2, 4), 1.0, torch.ones(4)),
            r"mask is \[4\]; it must be \[2\]",
        ),
        (
            lambda: training.get_updated_expert_bias(torch.ones(4), torch.ones(3), 1.0),
            r"expert_bias is \[3\]; it must be \[4\]",
        ),
        *(
            (
                functools.partial(
                    training.get_updated_expert_bias, torch.ones(4).to(dtype), torch.ones(4), 1.0
                ),
                f"tokens_per_expert has dtype {dtype}; it must be an integer",
            )
            for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn)
        ),
        (
            lambda: training.get_updated_expert_bias(torch.ones(4), torch.ones(4).long(), 1.0),
            "expert_bias has dtype torch.int64; it must be floating point",
        ),
    ],
)
def test_what_is_wrong_is_named(call: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        call()
