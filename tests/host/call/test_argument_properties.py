# SPDX-License-Identifier: Apache-2.0
"""Random calls of a layer and of experts, with arguments as users have them: each is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeos import Experts, World
from moeos.world import virtual
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights

pytestmark = pytest.mark.usefixtures("poisoned_output")

CFG = config(max_tokens=24, bias=True)
WEIGHTS = draw_weights(CFG)
CALLS = 4

ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "gaps": lambda x: torch.stack([x, x + 1], dim=1)[:, 0],
    "from an odd place": lambda x: (
        torch.cat([x[:1, :1].flatten(), x.flatten()])[1:].view(x.shape) if len(x) else x
    ),
}


@st.composite
def plans(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What all ranks do in each call, and what each does in its own way."""
    ranks = draw(st.sampled_from([1, 1, 2, 4]))

    def of_rank(pieces: int, by_experts: bool) -> dict[str, Any]:
        rows = draw(st.one_of(st.just(0), st.integers(0, pieces * CFG.max_tokens)))
        return {
            "rows": rows,
            "sequences": draw(
                st.sampled_from([n for n in (0, 1, 2, 5) if n == 0 or rows % n == 0])
            ),
            "arranged": draw(st.sampled_from([*ARRANGED])),
            "given": by_experts or draw(st.booleans()),
            "ids": draw(st.sampled_from([torch.int32, torch.int64])),
            "weights": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
            "routing": draw(st.sampled_from(["as it is", "transposed", "gaps"])),
            "with_out": draw(st.booleans()),
            "count": draw(st.sampled_from([None, None, 0, rows, rows // 2])),
        }

    calls = []
    for _ in range(CALLS):
        pieces, by_experts = draw(st.integers(1, 3)), draw(st.booleans())
        each = [of_rank(pieces, by_experts) for _ in range(ranks)]
        calls.append({"pieces": pieces, "by_experts": by_experts, "each": each})
    return calls


OUTSIDERS = torch.tensor([-1, -7, CFG.experts, 1 << 20])


def strange(ids: Tensor) -> Tensor:
    """The same with other numbers of unused slots."""
    fill = OUTSIDERS[torch.arange(ids.numel()).view_as(ids) % len(OUTSIDERS)]
    return torch.where(ids < 0, fill, ids)


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(plans(), st.integers(0, 1 << 16))
def test_any_arguments_of_a_call_are_right(plan: list[dict[str, Any]], seed: int) -> None:
    def made(world: World, layer: Any, experts: Experts, number: int) -> None:
        common = plan[number]
        mine = common["each"][world.rank]
        rows, count = mine["rows"], mine["count"]
        own_seed = seed + 100 * world.rank + number
        call = (draw_given_call if mine["given"] else draw_call)(CFG, rows, own_seed)
        if call.weights is not None:
            call = dataclasses.replace(call, weights=call.weights.to(mine["weights"]))
        x = ARRANGED[mine["arranged"]](call.x)
        if mine["sequences"]:
            x = x.reshape(mine["sequences"], -1, CFG.hidden) if rows else x.view(0, 3, CFG.hidden)
        how: dict[str, Any] = {"pieces": common["pieces"]}
        if mine["with_out"]:
            how["out"] = torch.full(x.shape, torch.nan)
        if count is not None:
            how["tokens"] = torch.tensor([count], dtype=torch.int32)
        if call.ids is None:
            y = layer(x, **how)
        else:
            assert call.weights is not None
            ids = strange(call.ids) if common["by_experts"] else call.ids
            arrange = ARRANGED[mine["routing"]]
            routing = arrange(ids.to(mine["ids"])), arrange(call.weights)
            if common["by_experts"]:
                own = (layer.w1, layer.w2, layer.b1, layer.b2)
                y = experts(x, *routing, *own, **how)
            else:
                y = layer(x, *routing, **how)
        assert y.shape == x.shape
        assert not mine["with_out"] or y is how["out"]
        y, tokens = y.reshape(rows, CFG.hidden), rows if count is None else count
        parts = (call.x, call.ids, call.weights)
        some = Call(*(None if part is None else part[:tokens] for part in parts))  # type: ignore[arg-type]
        assert_matches(WEIGHTS, some, y[:tokens], f"rank {world.rank}, call {number}")
        assert not y[tokens:].any()

    def rank_main(world: World) -> None:
        layer, experts = WEIGHTS.layer(world), Experts(CFG, world)
        for number in range(CALLS):
            made(world, layer, experts, number)

    virtual.run(rank_main, ranks=len(plan[0]["each"]))
