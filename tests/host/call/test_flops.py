# SPDX-License-Identifier: Apache-2.0
"""What the flop counter of PyTorch says of a layer: what it says of a stock one of these sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from moeos import Experts, MoEConfig, MoELayer, World
from moeos.world import virtual

TOKENS, HIDDEN, INTERMEDIATE, SHARED, EXPERTS, K = 10, 64, 32, 24, 4, 2
CFG = MoEConfig(
    hidden=HIDDEN,
    intermediate=INTERMEDIATE,
    experts=EXPERTS,
    top_k=K,
    dtype=torch.float32,
    shared_experts=1,
    shared_intermediate=SHARED,
    shared_gate=True,
)
PLAIN = MoEConfig(
    hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS, top_k=K, dtype=torch.float32
)
PAIR = 2 * 3 * HIDDEN * INTERMEDIATE
"""FLOPs of one token with one expert, in a forward."""


def counted(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def rows(learned: bool = False, tokens: int = TOKENS) -> Tensor:
    drawn = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    return drawn.requires_grad_(learned)


def stock() -> nn.Module:
    """Qwen2-MoE's layer, whose experts are products of PyTorch, one after the other."""
    block = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            shared_expert_intermediate_size=SHARED,
            num_experts=EXPERTS,
            num_experts_per_tok=K,
            experts_implementation="eager",
        )
    ).requires_grad_(False)
    with torch.no_grad():
        for one in block.parameters():
            one.normal_(generator=torch.Generator().manual_seed(0))
    return block


def step(layer: nn.Module, learned: bool) -> None:
    x = rows(learned)
    y = layer(x[None] if isinstance(layer, Qwen2MoeSparseMoeBlock) else x)
    if y.requires_grad:
        y.sum().backward()


@pytest.mark.parametrize("frozen", ["everything", "the weights", "x", "the gate", "nothing"])
def test_a_step_counts_what_the_stock_layer_counts(frozen: str) -> None:
    block = stock()

    def rank_main(world: World) -> int:
        layer = MoELayer(CFG, world)
        for module in (block, layer):
            module.requires_grad_(frozen not in ("everything", "the weights"))
            if frozen == "the gate":
                module.gate.weight.requires_grad_(False)
        return counted(lambda: step(layer, frozen not in ("everything", "x")))

    [found] = virtual.run(rank_main, ranks=1)
    assert found == counted(lambda: step(block, frozen not in ("everything", "x"))) > 0


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_layer_counts_among_other_modules_eager_and_compiled(backend: Any) -> None:
    def rank_main(world: World) -> tuple[int, Any]:
        layer = MoELayer(PLAIN, world)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer)
        if backend is not None:
            model.compile(backend=backend)
            model(rows()).sum().backward()
        with FlopCounterMode(display=False) as counter:
            model(rows()).sum().backward()
        return counter.get_total_flops(), counter.get_flop_counts()

    [(found, by_module)] = virtual.run(rank_main, ranks=1)
    linear = 2 * TOKENS * HIDDEN * HIDDEN
    of_layer = 2 * TOKENS * HIDDEN * EXPERTS + TOKENS * K * PAIR
    assert found == 2 * linear + 3 * of_layer  # the input is no leaf, so Linear has one less
    if backend is None:
        assert sum(by_module["Sequential.1"].values()) == 3 * of_layer


def test_calls_of_each_way_count() -> None:
    experts = TOKENS * K * PAIR
    gate = 2 * TOKENS * HIDDEN * EXPERTS

    def rank_main(world: World) -> dict[str, int]:
        layer, held = MoELayer(PLAIN, world).requires_grad_(False), Experts(PLAIN, world)
        x, ids = rows(), torch.tensor([[0, 1]] * TOKENS, dtype=torch.int32)
        weights, out = torch.full((TOKENS, K), 0.5), torch.empty(TOKENS, HIDDEN)
        found = {
            "with ids": counted(lambda: layer(x, ids, weights)),
            "with out": counted(lambda: layer(x, out=out)),
            "of no tokens": counted(lambda: layer(x[:0])),
            "Experts": counted(lambda: held(x, ids, weights, layer.w1, layer.w2)),
        }
        layer.requires_grad_()
        trained = layer(rows(learned=True)).sum()
        found["a backward alone"] = counted(trained.backward)
        return found

    [found] = virtual.run(rank_main, ranks=1)
    assert found == {
        "with ids": experts,
        "with out": gate + experts,
        "of no tokens": 0,
        "Experts": experts,
        "a backward alone": 2 * (gate + experts),
    }


def test_a_main_grad_changes_no_count_and_no_gradient() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(PLAIN, world)
        for one in layer.parameters():
            one.data.normal_(generator=torch.Generator().manual_seed(0))
            one.main_grad = torch.zeros_like(one)  # type: ignore[attr-defined]
        layer(rows(learned=True)).sum().backward()
        wanted = [one.main_grad.clone() for one in layer.parameters()]  # type: ignore[attr-defined]
        for one in layer.parameters():
            one.main_grad.zero_()  # type: ignore[attr-defined]
        found = counted(lambda: step(layer, learned=True))
        assert found == 3 * (2 * TOKENS * HIDDEN * EXPERTS + TOKENS * K * PAIR)
        for one, its in zip(layer.parameters(), wanted, strict=True):
            assert bool(its.any())
            torch.testing.assert_close(one.main_grad, its)  # type: ignore[attr-defined]

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("parallel", ["expert", "tensor", "sharded_tokens"])
def test_the_ranks_counts_add_up_to_that_of_all_their_tokens(parallel: Any) -> None:
    def rank_main(world: World) -> int:
        layer = MoELayer(PLAIN, world, parallel=parallel)
        return counted(lambda: layer(rows()))

    every = virtual.run(rank_main, ranks=2)
    tokens = TOKENS if parallel == "tensor" else 2 * TOKENS
    # Each rank's gate scores all tokens that the rank has.
    assert sum(every) == 2 * (2 * TOKENS * HIDDEN * EXPERTS) + tokens * K * PAIR


@pytest.mark.parametrize("weight_format", ["fp8_block128", "mxfp4", "nvfp4"])
def test_codes_count_as_the_numbers_that_they_stand_for(weight_format: Any) -> None:
    cfg = MoEConfig(
        hidden=128, intermediate=128, experts=EXPERTS, top_k=K, weight_format=weight_format
    )

    def rank_main(world: World) -> int:
        layer = MoELayer(cfg, world)
        return counted(lambda: layer(torch.zeros(TOKENS, 128, dtype=cfg.dtype)))

    [found] = virtual.run(rank_main, ranks=1)
    assert found == 2 * TOKENS * 128 * EXPERTS + 2 * TOKENS * K * 3 * 128 * 128


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved", "separate"])
def test_every_layout_of_the_weights_counts_the_same(gate_up: Any, transposed: bool) -> None:
    cfg = dataclasses.replace(PLAIN, gate_up=gate_up, transposed=transposed)
    shapes = {"w1": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    if gate_up == "separate":
        shapes |= {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN)}

    def rank_main(world: World) -> None:
        experts = Experts(cfg, world)
        own = {
            name: torch.randn(EXPERTS, *(shape[::-1] if transposed else shape), requires_grad=True)
            for name, shape in shapes.items()
        }
        ids = torch.arange(K).expand(TOKENS, K).contiguous()
        x = rows(learned=True)
        call = functools.partial(experts, x, ids, torch.rand(TOKENS, K), **own)
        assert counted(call) == TOKENS * K * PAIR
        assert counted(lambda: call().sum().backward()) == 3 * TOKENS * K * PAIR

    virtual.run(rank_main, ranks=1)
