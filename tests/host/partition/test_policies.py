# SPDX-License-Identifier: Apache-2.0
"""How calls of slices are computed: `layout` and `reduce`, on the twin, and what the costs say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeos
from moeos import MoEConfig, MoELayer, World
from moeos.engines.twin.engine import sizes_of
from moeos.partition import policies
from moeos.partition.policies import Policy, Reduce
from moeos.partition.rates import H200
from moeos.partition.slicing import Parallel, Slicing, slicing_of
from moeos.system.errors import ConfigMismatch
from moeos.world import virtual
from tests.gradients import drawn, found_of, leaves_of
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.process_group import ranks_of_torch

SIZES = {"intermediate": 192, "max_tokens": 70, "bias": True}
QWEN = MoEConfig(
    **{"hidden": 4096, "intermediate": 512, "experts": 128, "top_k": 8, "max_tokens": 16384},
    dtype=torch.bfloat16,
)
"""Of a slice, as the issue's bars have it."""


def of_processes(function: Callable[[World], Any], ranks: int) -> list[Any]:
    """What `ranks_of_torch` returns, where tensors are alone or in lists: processes that have ended
    give no memory away, so these are copied as arrays of fp32.
    """

    def array(found: Any) -> Any:
        many = isinstance(found, (list, tuple))
        return [array(one) for one in found] if many else found.float().numpy()

    def tensor(found: Any) -> Any:
        many = isinstance(found, list)
        return [tensor(one) for one in found] if many else torch.from_numpy(found)

    return [tensor(one) for one in ranks_of_torch(lambda world: array(function(world)), ranks)]


def calls_of(cfg: MoEConfig) -> list[Call]:
    drawn = [draw_call(cfg, tokens, tokens) for tokens in (70, 1, 0, 5)]
    return [*drawn, draw_given_call(cfg, 33, 7, unused=0.5)]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"shared_experts": 1, "shared_intermediate": 48, "shared_gate": True}),
        (3, {"dtype": torch.bfloat16}),
    ],
)
def test_sums_that_are_added_up_behind_the_kernel_are_the_reference_s(
    ranks: int, changes: dict[str, Any]
) -> None:
    cfg = config(**(SIZES | changes))
    weights, calls = draw_weights(cfg), calls_of(cfg)

    def run(world: World) -> list[Tensor]:
        after = weights.layer(world, parallel="tensor", reduce="after")
        fused = weights.layer(world, parallel="tensor", reduce="fused")
        outputs = []
        for call in calls:  # both kinds of calls follow each other in one workspace
            given = call.x, call.ids, call.weights
            outputs += [after(*given), fused(*given), after(*given)]
        return outputs

    found = of_processes(run, ranks)
    for number, y in enumerate(found[0]):
        assert all(torch.equal(its[number], y) for its in found)
        assert_matches(weights, calls[number // 3], y.to(cfg.dtype), f"output {number}")
    for number in range(0, len(found[0]), 3):
        assert torch.equal(found[0][number], found[0][number + 2])


def test_groups_of_ranks_add_up_their_own_sums() -> None:
    cfg = config(**SIZES)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 9 + group, group) for group in range(2)]

    def run(world: World) -> Tensor:
        layer = weights.layer(world, parallel="tensor", tensor_ranks=2, reduce="after")
        return layer(calls[world.rank // 2].x)

    for rank, y in enumerate(of_processes(run, 4)):
        assert_matches(weights, calls[rank // 2], y, f"rank {rank}")


def test_a_call_in_pieces_of_fewer_tokens_than_rows_is_added_up_once() -> None:
    cfg = config(**{**SIZES, "max_tokens": 16})
    weights, call = draw_weights(cfg), draw_call(config(**SIZES), 37, 0)
    padded = torch.cat([call.x, torch.full((5, cfg.hidden), torch.nan)])
    count = torch.tensor([37], dtype=torch.int32)

    def run(world: World) -> list[Tensor]:
        layer = weights.layer(world, parallel="tensor", reduce="after")
        out = torch.empty_like(padded)
        y = layer(padded, tokens=count, pieces=3, out=out)
        assert y is out
        assert layer.stats()["row_bytes_by_peer"] == [0, 0]  # the kernel has sent none
        return [y]

    for [y] in of_processes(run, 2):
        assert_matches(weights, call, y[:37])
        assert torch.equal(y[37:], torch.zeros(5, cfg.hidden))


def test_ranks_whose_rows_differ_are_named_before_they_are_added_up() -> None:
    cfg = config(**SIZES)

    def run(world: World) -> str:
        layer = MoELayer(cfg, world, parallel="tensor", reduce="after").requires_grad_(False)
        x = torch.zeros(8 + world.rank, cfg.hidden)
        with pytest.raises(ValueError, match="differ from those on rank") as raised:
            layer(x, tokens=torch.tensor([5], dtype=torch.int32))
        return str(raised.value)

    assert len(ranks_of_torch(run, 2)) == 2


def test_a_rank_that_ends_before_it_adds_up_is_told_of() -> None:
    cfg = config(**SIZES)

    def run(world: World) -> str:
        layer = MoELayer(cfg, world, parallel="tensor", reduce="after").requires_grad_(False)
        x = torch.zeros(3, cfg.hidden)
        layer(x)
        if world.rank == 1:  # its kernel ends well, and then it is gone
            layer.experts.engine._reduction.add_up = lambda *_: None
            layer(x)
            return "gone"
        with pytest.raises(moeos.PeerTimeout, match=r"rank 0: the all-reduce of partial sums"):
            layer(x)
        return "told"

    assert ranks_of_torch(run, 2) == ["told", "gone"]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"layout": "sorted"}, "'token_major' or 'gathered'\n"),
    ({}, {"reduce": "before"}, "it must be 'auto' or 'fused' or 'after'"),
    ({}, {"layout": "token_major", "parallel": "expert"}, "pass parallel='tensor' without tens"),
    (
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"layout": "token_major"},
        "layout is 'token_major', and .* not its row of x as it stands",
    ),
    (
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"layout": "gathered"},
        "not its row of x as it stands",
    ),
    ({}, {"reduce": "after"}, "has not the ranks of this world: call .*init_process_group"),
    ({}, {"reduce": "after", "output": "scattered"}, "Pass output='replicated'"),
    ({}, {"reduce": "fused", "parallel": "expert"}, "pass parallel='tensor'"),
    ({}, {"layout": "gathered", "parallel": "sharded_tokens"}, "pass parallel='expert'"),
]


@pytest.mark.parametrize(("changes", "arguments", "match"), REFUSED, ids=str)
def test_what_cannot_be_had_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], match: str
) -> None:
    cfg = config(**(SIZES | changes))
    with pytest.raises(ValueError, match=match):
        virtual.run(lambda world: MoELayer(cfg, world, **({"parallel": "tensor"} | arguments)), 2)


def test_ranks_must_agree_on_the_policy() -> None:
    cfg = config(**SIZES)

    def run(world: World) -> None:
        reduce: Reduce = "fused" if world.rank == 1 else "auto"
        MoELayer(cfg, world, parallel="tensor", reduce=reduce)

    with pytest.raises(ConfigMismatch, match="reduce='fused'"):
        virtual.run(run, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_have_the_same_bits_and_read_rows_where_they_say(ranks: int) -> None:
    cfg = config(**{**SIZES, "max_tokens": 4})
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (4, 1, 0)]

    def run(world: World) -> dict[str, list[Tensor]]:
        found = {}
        for layout in ("auto", "gathered", "expert_major", "expert_major_persistent"):
            layer = weights.layer(world, parallel="tensor", layout=layout)
            found[layout] = [layer(call.x) for call in calls]
            sizes = layer.experts.engine._sizes  # of the twin
            copied = [not sizes.reads_in_place(tokens) for tokens in (1, 4)]
            assert copied == [layout.startswith("expert_major")] * 2
            layer(calls[0].x)
            dispatched = layer.stats()["tasks"]["dispatch"]
            assert (dispatched > 0) == copied[0]
        return found

    for found in virtual.run(run, ranks, twin=moeos.TwinOptions(processors=2)):
        for number, call in enumerate(calls):
            y = found["auto"][number]
            assert_matches(weights, call, y)
            assert all(torch.equal(its[number], y) for its in found.values())


@pytest.mark.parametrize("parallel", ["expert", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_own_rows_are_gathered_in_calls_of_any_number_of_tokens(
    ranks: int, parallel: Parallel
) -> None:
    cfg = config(**{**SIZES, "max_tokens": 300, "dtype": torch.bfloat16})
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (300, 33, 1, 0)]

    def run(world: World) -> dict[str, list[Tensor]]:
        found = {}
        for layout in ("expert_major_persistent", "gathered"):
            layer = weights.layer(world, parallel=parallel, layout=layout)
            sizes = layer.experts.engine._sizes  # of the twin
            assert sizes.gathers_own_rows == (layout == "gathered")
            found[layout] = [layer(call.x) for call in calls]
        return found

    for found in virtual.run(run, ranks, twin=moeos.TwinOptions(processors=2)):
        for call, y, same in zip(calls, *found.values(), strict=True):
            assert_matches(weights, call, y)
            assert torch.equal(y, same)


TOKEN_MAJOR: list[tuple[int, Parallel, dict[str, Any]]] = [
    (1, "expert", {"dtype": torch.bfloat16}),
    (2, "tensor", {"shared_experts": 1, "shared_intermediate": 48, "shared_gate": True}),
    (3, "tensor", {"capacity_factor": 0.5}),
    (4, "tensor", {"dtype": torch.bfloat16, "weight_format": "int4_group32", "bias": False}),
]


@pytest.mark.parametrize(("ranks", "parallel", "changes"), TOKEN_MAJOR)
def test_rows_between_the_products_may_lie_in_the_order_of_tokens(
    ranks: int, parallel: Parallel, changes: dict[str, Any]
) -> None:
    sizes = {**SIZES, "hidden": 64, "intermediate": 384, "max_tokens": 300}
    cfg = config(**(sizes | changes))
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, tokens, tokens) for tokens in (300, 33, 1, 0)]
    calls.append(draw_given_call(cfg, 70, 7, unused=0.5))

    def run(world: World) -> dict[str, list[Tensor]]:
        found = {}
        for layout in ("expert_major_persistent", "token_major"):
            layer = weights.layer(world, parallel=parallel, layout=layout)
            sizes = layer.experts.engine._sizes  # of the twin
            # One row for each pair, and none that pads a tile.
            ordered = layout == "token_major"
            assert sizes.between_by_pairs == ordered
            assert (sizes.intermediate_rows == 300 * cfg.top_k) == ordered
            assert not (ordered and sizes.reads_in_place(1))
            found[layout] = [call(layer) for call in calls]
        return found

    for found in virtual.run(run, ranks, twin=moeos.TwinOptions(processors=2)):
        for call, y, same in zip(calls, *found.values(), strict=True):
            assert_matches(weights, call, y)
            assert torch.equal(y, same)


def test_no_more_tokens_are_read_in_place_than_a_tile_has_words_for() -> None:
    with pytest.raises(ValueError, match="in_place_tokens is 9, and at most 8 fit"):
        sizes_of(config(**SIZES), 1, 1, rows={"in_place_tokens": 9})


def test_rows_by_index_cost_what_was_fitted_and_few_tokens_are_read_in_place() -> None:
    assert Policy().in_place_tokens(QWEN) == 8
    assert policies.gathers(H200, QWEN, 8)
    # What a tile of boxes costs says nothing of rows by index: these cost less here.
    by_index, copied = policies.gathered_rows(H200, QWEN, 8192), policies.copies(H200, QWEN, 8192)
    assert 0.5 * copied < by_index < copied < policies.boxes(H200, QWEN, 8192) / 10
    assert policies.token_major(H200, QWEN, 8192) > by_index  # both products read by index
    wide = dataclasses.replace(QWEN, intermediate=768)
    assert policies.gathered_rows(H200, wide, 8192) > policies.copies(H200, wide, 8192)
    for layout in ("expert_major", "expert_major_persistent"):
        assert Policy(layout).in_place_tokens(QWEN) == 0


def of_whole_experts(intermediate: int, experts: int, tokens: int, **fields: Any) -> MoEConfig:
    sizes = {"hidden": 2048, "top_k": 8, "max_tokens": tokens} | fields
    return MoEConfig(
        intermediate=intermediate, experts=experts, **({"dtype": torch.bfloat16} | sizes)
    )


@pytest.mark.parametrize(
    ("cfg", "gathers"),
    [  # measured on one H200: layers in which it gained, and in which it lost more than 2 %
        (of_whole_experts(512, 256, 2048), True),
        (of_whole_experts(512, 256, 8192), True),
        (of_whole_experts(512, 512, 8192, top_k=10), True),
        (of_whole_experts(768, 128, 2048), True),
        (of_whole_experts(768, 128, 8192), False),
        (of_whole_experts(1024, 128, 2048, hidden=4096), True),
        (of_whole_experts(1024, 128, 8192, hidden=4096), False),
        (of_whole_experts(1024, 64, 2048), False),
        (of_whole_experts(1408, 128, 8192, hidden=4096), False),
        (of_whole_experts(2048, 96, 2048, hidden=7168), False),
        (of_whole_experts(2048, 96, 8192, hidden=7168), False),
        # Nobody has measured these.
        (of_whole_experts(512, 256, 64), False),
        (of_whole_experts(512, 256, 8192, dtype=torch.float32), False),
        (of_whole_experts(512, 256, 8192, weight_format="mxfp4"), False),
        (of_whole_experts(512, 256, 8192, top_k=1, apply_router_weight_on_input=True), False),
    ],
    ids=str,
)
def test_a_rank_alone_gathers_rows_where_that_was_faster(cfg: MoEConfig, gathers: bool) -> None:
    for parallel in ("expert", "tensor"):
        assert slicing_of(parallel, "replicated", 1).sizes(cfg, 1)["gathers_rows"] == gathers
        copies = slicing_of(parallel, "replicated", 1, layout="expert_major_persistent")
        assert copies.sizes(cfg, 1)["gathers_rows"] == 0
        forced = slicing_of(parallel, "replicated", 1, layout="gathered")
        assert forced.sizes(cfg, 1)["gathers_rows"] == 1


def test_a_rank_with_peers_copies_unless_it_is_told_to_gather() -> None:
    cfg = of_whole_experts(512, 256, 8192)
    assert slicing_of("expert", "replicated", 2).sizes(cfg, 2)["gathers_rows"] == 0
    for slicing in (slicing_of("tensor", "replicated", 2), slicing_of("expert", "replicated", 2)):
        assert slicing.sizes(cfg, slicing.holders(2))["gathers_rows"] == 0
    forced = slicing_of("tensor", "replicated", 2, layout="gathered")
    assert forced.sizes(cfg, 1)["gathers_rows"] == 1


def test_a_layer_that_gathers_by_the_costs_has_the_bits_of_copies() -> None:
    sizes = {"hidden": 512, "intermediate": 32, "experts": 4, "max_tokens": 8192}
    cfg = config(**{"top_k": 2, "dtype": torch.bfloat16, **sizes})
    weights, call = draw_weights(cfg), draw_call(cfg, 300, 0)

    def run(world: World) -> list[dict[str, Tensor]]:
        found = []
        for layout, gathers in (("auto", True), ("expert_major_persistent", False)):
            layer, its = weights.layer(world, layout=layout).requires_grad_(), leaves_of(call)
            assert layer.experts.engine._sizes.gathers_own_rows == gathers  # of the twin
            y = its(layer)
            y.backward(drawn(call, 0))
            found.append({"y": y.detach(), **found_of(its, layer)})
        return found

    [[one, other]] = virtual.run(run, 1, twin=moeos.TwinOptions(processors=1))
    assert_matches(weights, call, one["y"])
    assert set(one) == set(other) >= {"x", "w1", "w2"}
    for name, found in one.items():
        assert torch.equal(found, other[name]), name


def test_the_kernel_adds_up_where_links_can_be_hidden_and_nccl_where_they_cannot() -> None:
    for tokens in (1, 8, 128, 4096, 16384):
        for ranks in (2, 4, 8):
            assert not policies.reduces_after(H200, QWEN, tokens, ranks)
    # Of 8 ranks NCCL has the higher rate. So it wins where there is nothing to hide sums behind.
    thin = dataclasses.replace(QWEN, intermediate=8, top_k=1, experts=8)
    assert policies.reduces_after(H200, thin, 16384, 8)
    assert not policies.reduces_after(H200, thin, 8, 8)
    assert not policies.reduces_after(H200, thin, 16384, 2)


def test_sums_end_with_the_products_or_with_the_links() -> None:
    compute = policies.products(H200, QWEN, 16384)
    router = 2 * 16384 * 128 * 4096 / H200.bf16_flops
    assert policies.fused(H200, QWEN, 16384, 1) == compute + router
    both = policies.fused(H200, QWEN, 16384, 8) - router
    links = 2 * 16384 * 7 / 8 * 8192 / H200.link_bytes
    assert max(compute, links) < both < compute + links
    # As the formula's maximum is over u, no share of the tokens ends later.
    shares = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    ends = compute * shares + (1 - shares**8) * links
    assert both == pytest.approx(float(ends.max()), rel=1e-6)


@pytest.mark.parametrize(
    ("reduce", "left"), [("auto", {16384}), ("fused", set()), ("after", {8, 16384})]
)
def test_a_call_leaves_its_sums_as_the_policy_says(reduce: Reduce, left: set[int]) -> None:
    thin = dataclasses.replace(QWEN, intermediate=8, top_k=1, experts=8)
    slicing = slicing_of("tensor", "replicated", 8, reduce=reduce)
    found = {rows for rows in (8, 16384) if slicing.leaves_partials(thin, rows, counted=False)}
    assert found == left
    assert slicing.may_leave_partials(thin) == bool(left)
    # Hosts may pass unlike numbers of rows where the device knows the tokens.
    assert slicing.leaves_partials(thin, 16384, counted=True) == (reduce == "after")
    assert not Slicing(8, everywhere=False).leaves_partials(thin, 16384, counted=False)
    assert not Slicing().may_leave_partials(thin)


def test_a_layer_whose_sums_the_costs_would_leave_computes_without_torch_s_ranks() -> None:
    cfg = config(**{**SIZES, "max_tokens": 12})
    weights, call = draw_weights(cfg), draw_call(cfg, 12, 0)

    def run(world: World) -> Tensor:
        return weights.layer(world, parallel="tensor")(call.x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeos.partition.slicing.reduces_after", lambda *_: True)
        for y in virtual.run(run, 2):
            assert_matches(weights, call, y)
        for y in of_processes(run, 2):
            assert_matches(weights, call, y)
