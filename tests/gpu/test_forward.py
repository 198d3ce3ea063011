# SPDX-License-Identifier: Apache-2.0
"""The kernel computes what the float64 reference says, with virtual ranks on one GPU.

Goes through `CudaEngine` alone: no module, no launcher.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moeos import World
from moeos.config import reference
from moeos.system.errors import NumericalError
from moeos.world import virtual
from tests.gpu.cases import (
    BY_RANKS,
    CASES,
    DEADLINE,
    TOLERANCE,
    Case,
    RankLayer,
    assert_all_match,
    assert_matches,
    blocks,
    draw_calls,
    draw_routed_call,
    on_gpu,
    run_calls,
    shape_of,
    why_not,
)
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    deduplicated_rows,
    draw_given_call,
    draw_weights,
)

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
all_rank_counts = pytest.mark.parametrize(
    "case", [CASES[name] for name in BY_RANKS.values()], ids=[f"{n}-ranks" for n in BY_RANKS]
)


@functools.cache
def weights_of(case: Case) -> Weights:
    """A case's weights, on the GPU."""
    return on_gpu(draw_weights(case.cfg))


def seed_of(rank: int, call: int) -> int:
    """Of the tokens of a call."""
    return 1000 * rank + call


def draw(case: Case, tokens: Callable[[int, int], int], count: int = 3) -> list[list[Call]]:
    """Calls [rank][call] with `tokens(rank, call)` tokens, routed by the gate."""
    weights = weights_of(case)
    return draw_calls(
        case,
        lambda rank, call: draw_routed_call(weights, tokens(rank, call), seed_of(rank, call)),
        count,
    )


def draw_given(
    case: Case,
    tokens: Callable[[int, int], int],
    count: int = 3,
    preference: Tensor | None = None,
    unused: float = 0.1,
) -> list[list[Call]]:
    """Calls [rank][call] with the caller's routing; see `draw_given_call`."""
    return draw_calls(
        case,
        lambda rank, call: draw_given_call(
            case.cfg, tokens(rank, call), seed_of(rank, call), preference, unused
        ),
        count,
    )


def varied(case: Case) -> Callable[[int, int], int]:
    """Token counts among which are none, one, a tile and the most."""
    counts = (case.cfg.max_tokens, 37, 0, 1, 128, 129, 250, 8)
    return lambda rank, call: counts[(3 * rank + call) % len(counts)]


@all_cases
def test_outputs_are_those_of_the_reference(case: Case) -> None:
    weights = weights_of(case)
    calls = draw(case, varied(case), count=8)
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)


@all_cases
def test_routing_given_by_the_caller_with_unused_slots(case: Case) -> None:
    weights = weights_of(case)
    calls = draw_given(case, varied(case), unused=0.3)
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)


@all_cases
def test_skewed_routing(case: Case) -> None:
    weights = weights_of(case)
    tokens = varied(case)
    preferences = [make(case.cfg.experts, max(2, case.ranks)) for make in PREFERENCES.values()]
    calls = draw_calls(
        case,
        lambda rank, call: draw_given_call(
            case.cfg, tokens(rank, call), seed_of(rank, call), preferences[call]
        ),
        count=len(preferences),
    )
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.cfg.dtype == torch.bfloat16],
    ids=[name for name, case in CASES.items() if case.cfg.dtype == torch.bfloat16],
)
def test_the_twin_computes_the_same_from_the_same_bits(case: Case) -> None:
    weights = weights_of(case)
    calls = draw(case, varied(case))
    outputs, _ = run_calls(case, weights, calls)
    of_cpu = draw_weights(case.cfg)

    def rank_main(world: World) -> list[Tensor]:
        layer = of_cpu.layer(world)
        return [layer(call.x.cpu()) for call in calls[world.rank]]

    for ys, of_twin in zip(outputs, virtual.run(rank_main, ranks=case.ranks), strict=True):
        for y, expected in zip(ys, of_twin, strict=True):
            assert reference.relative_error(y, expected) <= TOLERANCE[case.cfg.dtype]


@all_rank_counts
def test_a_token_whose_slots_are_all_unused_gets_zeros(case: Case) -> None:
    weights = weights_of(case)
    calls = draw_given(case, lambda rank, call: 140)
    for rank_calls in calls:
        for call in rank_calls:
            assert call.ids is not None
            call.ids[::3] = -1
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)
    assert all(not y[::3].any() for rank_outputs in outputs for y in rank_outputs)


@all_rank_counts
def test_a_call_of_all_ranks_without_tokens(case: Case) -> None:
    calls = draw(case, lambda rank, call: 0)
    outputs, stats = run_calls(case, weights_of(case), calls)
    assert all(list(y.shape) == [0, case.cfg.hidden] for ys in outputs for y in ys)
    assert all(sum(of_rank.pairs_sent) == 0 for of_rank in stats)


@all_rank_counts
def test_a_call_with_one_token_in_all(case: Case) -> None:
    weights = weights_of(case)
    calls = draw(case, lambda rank, call: int(rank == call % case.ranks), count=case.ranks)
    outputs, _ = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)


@all_rank_counts
def test_one_expert_that_takes_every_token(case: Case) -> None:
    weights = weights_of(case)
    only = torch.full((case.cfg.experts,), -torch.inf)
    only[case.cfg.experts // 2] = 0.0
    calls = draw_given(case, lambda rank, call: case.cfg.max_tokens - call, 3, only, unused=0.0)
    outputs, stats = run_calls(case, weights, calls, poison=True)
    assert_all_match(weights, calls, outputs)
    received = sorted(rows for of_rank in stats for rows in of_rank.expert_pairs)
    assert received[-1] == case.ranks * (case.cfg.max_tokens - 2)
    assert not any(received[:-1])


@all_rank_counts
def test_200_calls_whose_token_counts_change_every_time(case: Case) -> None:
    weights = weights_of(case)
    drawn = random.Random(7)
    counts = [[drawn.randint(0, case.cfg.max_tokens) for _ in range(200)] for _ in range(8)]
    calls = draw(case, lambda rank, call: counts[rank][call], count=200)
    outputs, _ = run_calls(case, weights, calls)
    for rank in range(case.ranks):
        for number in range(0, 200, 19):
            assert_matches(weights, calls[rank][number], outputs[rank][number], f"call {number}")
    assert not any(y.isnan().any() for rank_outputs in outputs for y in rank_outputs)


@all_rank_counts
def test_100_calls_of_the_same_tokens_are_bitwise_equal(case: Case) -> None:
    weights = weights_of(case)
    [calls] = zip(*draw(case, lambda rank, call: 300 - 41 * rank, count=1), strict=True)
    outputs, _ = run_calls(case, weights, [[call] * 100 for call in calls])
    for call, rank_outputs in zip(calls, outputs, strict=True):
        assert_matches(weights, call, rank_outputs[0], "the first call")
        assert all(torch.equal(y, rank_outputs[0]) for y in rank_outputs[1:])


@all_rank_counts
def test_an_output_does_not_depend_on_the_tokens_beside_it(case: Case) -> None:
    """Few tokens are computed in narrow tiles, many in wide ones: to the same bits."""
    weights = weights_of(case)
    many = draw(case, lambda rank, call: case.cfg.max_tokens, count=1)
    few = [[Call(call.x[:tokens].clone()) for tokens in (1, 9, 40)] for [call] in many]
    all_outputs, _ = run_calls(case, weights, many)
    outputs, _ = run_calls(case, weights, few, poison=True)
    assert_all_match(weights, few, outputs)
    for [of_all], ys in zip(all_outputs, outputs, strict=True):
        assert all(torch.equal(of_all[: len(y)], y) for y in ys)


@all_cases
def test_stats_count_the_pairs_that_the_routing_makes(case: Case) -> None:
    weights = weights_of(case)
    calls = draw(case, varied(case))
    _, stats = run_calls(case, weights, calls)
    held = [case.cfg.experts_of(rank, case.ranks) for rank in range(case.ranks)]
    sizes = shape_of(case, blocks()).sizes
    chosen = []
    for rank, of_rank in enumerate(stats):
        call = calls[rank][-1]
        ids = weights.routing(call).cpu()
        pairs = torch.bincount(ids[ids >= 0], minlength=case.cfg.experts)
        for peer, sent in enumerate(of_rank.pairs_sent):
            crossing = deduplicated_rows(ids, held[peer], sizes.dedup_after * sizes.chunk_rows)
            once = peer != rank and sizes.deduplicates(sent)
            assert of_rank.rows_sent[peer] == (crossing if once else sent)
        chosen.append(pairs)
        assert of_rank.tokens == len(call.x)
        assert of_rank.pairs_sent == [int(pairs[own.start : own.stop].sum()) for own in held]
        assert of_rank.drops == weights.drops(call)
    for rank, of_rank in enumerate(stats):
        mine = torch.stack(chosen)[:, held[rank].start : held[rank].stop]
        assert of_rank.pairs_received == mine.sum(dim=1).tolist()
        assert of_rank.expert_pairs == mine.sum(dim=0).tolist()
        assert of_rank.tasks["product1"] > 0 or not mine.any()


@all_rank_counts
def test_logits_that_are_not_finite_raise_on_all_ranks_until_reset(case: Case) -> None:
    weights = weights_of(case)
    good = draw(case, lambda rank, call: 200, count=1)
    bad = draw(case, lambda rank, call: 200, count=1)
    culprit = case.ranks - 1
    bad[culprit][0].x[131, 5] = torch.nan

    def rank_main(world: World) -> tuple[str, Tensor]:
        layer = RankLayer(weights, world)
        layer(bad[world.rank][0])
        with pytest.raises(NumericalError) as raised:
            layer.engine.check()
        world.reset()
        y = layer(good[world.rank][0])
        layer.engine.check()
        return str(raised.value), y

    results = virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
    for message, _ in results:
        assert f"token 131 on rank {culprit}" in message
    assert_all_match(weights, good, [[y] for _, y in results])


def test_a_call_that_follows_a_failed_one_fails_as_well() -> None:
    case = CASES["swiglu-4-ranks"]
    weights = weights_of(case)
    calls = draw(case, lambda rank, call: 200, count=2)
    calls[0][0].x[0] = torch.inf

    def rank_main(world: World) -> None:
        layer = RankLayer(weights, world)

        def two_calls_and_a_check() -> None:
            for call in calls[world.rank]:  # the second raises if the first has ended by then
                layer(call)
            layer.engine.check()

        with pytest.raises(NumericalError):
            two_calls_and_a_check()

    virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)


def test_ranks_on_streams_of_their_own_see_their_own_inputs_and_outputs() -> None:
    case = CASES["swiglu-4-ranks"]
    weights = weights_of(case)
    calls = draw(case, lambda rank, call: 300)

    def rank_main(world: World) -> list[Tensor]:
        layer = RankLayer(weights, world)
        outputs = []
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for call in calls[world.rank]:
                late = torch.zeros_like(call.x)
                torch.cuda._sleep(2_000_000 * world.rank)
                late.copy_(call.x)
                outputs.append(layer(Call(late)) + 0)
        layer.engine.check()
        return outputs

    outputs = virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
    assert_all_match(weights, calls, outputs)


def test_an_address_that_tensor_maps_cannot_have_is_refused() -> None:
    case = CASES["swiglu-1-rank"]
    weights = weights_of(case)

    def rank_main(world: World) -> None:
        layer = RankLayer(weights, world)
        flat = torch.zeros(8 * case.cfg.hidden + 4, dtype=case.cfg.dtype, device="cuda")
        with pytest.raises(ValueError, match=r"x lies at address .* multiple of 16"):
            layer(Call(flat[4:].view(8, case.cfg.hidden)))

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)


def test_a_tensor_that_is_not_on_the_gpu_is_refused() -> None:
    case = CASES["swiglu-1-rank"]
    weights = weights_of(case)

    def rank_main(world: World) -> None:
        layer = RankLayer(weights, world)
        with pytest.raises(ValueError, match="x is on cpu; it must be on cuda:0"):
            layer(Call(torch.zeros((8, case.cfg.hidden), dtype=case.cfg.dtype)))

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=DEADLINE)
