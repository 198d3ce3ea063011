# SPDX-License-Identifier: Apache-2.0
"""Experts compute with the caller's tensors, whose they stay, and hold none."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import moeos
from moeos import ConfigMismatch, Experts, World
from moeos.engines.base import CallTensors
from moeos.engines.twin.engine import TwinEngine
from moeos.world import virtual
from tests.layers import (
    PREFERENCES,
    Call,
    Weights,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import all_but

CFG = config(max_tokens=64, bias=True)
WEIGHTS = draw_weights(CFG)


def tensors_of(weights: Weights, world: World) -> dict[str, Tensor | None]:
    mine = weights.of_rank(world.rank, world.size)
    return {"w1": mine.w1, "w2": mine.w2, "b1": mine.b1, "b2": mine.b2}


def made(experts: Experts, call: Call, weights: dict[str, Any], **options: Any) -> Tensor:
    """The output of a call with routing of its own."""
    assert call.ids is not None
    assert call.weights is not None
    return experts(call.x, call.ids, call.weights, **weights, **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["uniform", "one-expert", "empty-rank"])
def test_the_callers_weights_and_routing_give_what_the_reference_does(
    ranks: int, kind: str
) -> None:
    preference = (
        PREFERENCES[kind](CFG.experts, ranks) if ranks > 1 or kind != "empty-rank" else None
    )
    layers = [WEIGHTS, draw_weights(CFG, 1)]
    rows = (20, 0, 64, 1)

    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        for number, of_layer in enumerate([*layers, *layers]):
            call = draw_given_call(
                CFG, rows[(world.rank + number) % 4], world.rank + 4 * number, preference
            )
            y = made(experts, call, tensors_of(of_layer, world))
            assert_matches(of_layer, call, y, f"rank {world.rank}, call {number}")

    virtual.run(rank_main, ranks=ranks)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("others", [(-1, -2), (CFG.experts, 1 << 20), (-(1 << 31), (1 << 31) - 1)])
def test_an_id_that_is_no_expert_is_an_unused_slot(
    ids: torch.dtype, others: tuple[int, int]
) -> None:
    call = draw_given_call(CFG, 20, 0)
    assert call.ids is not None
    unused = call.ids.clone()
    unused[3, 0] = unused[7, 1] = -1
    unused[9] = -1
    strange = call.ids.clone()
    strange[3, 0], strange[7, 1] = others
    strange[9] = others[0]

    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        weights = tensors_of(WEIGHTS, world)
        y = made(experts, dataclasses.replace(call, ids=strange.to(ids)), weights)
        assert_matches(WEIGHTS, dataclasses.replace(call, ids=unused), y)
        assert not y[9].any()
        repeated = dataclasses.replace(call, ids=torch.full_like(unused, 5))
        with pytest.raises(ValueError, match="may appear only once in a row"):
            made(experts, repeated, weights)

    virtual.run(rank_main, ranks=1)


def test_an_id_beyond_32_bits_is_an_unused_slot() -> None:
    call = draw_given_call(CFG, 4, 0)
    assert call.ids is not None
    ids = call.ids.clone()
    ids[1, 0], ids[2, 0] = (1 << 32) + 1, -(1 << 40)
    unused = call.ids.clone()
    unused[1, 0] = unused[2, 0] = -1

    def rank_main(world: World) -> None:
        y = made(
            Experts(CFG, world), dataclasses.replace(call, ids=ids), tensors_of(WEIGHTS, world)
        )
        assert_matches(WEIGHTS, dataclasses.replace(call, ids=unused), y)

    virtual.run(rank_main, ranks=1)


def test_the_engine_gets_the_callers_tensors_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CallTensors] = []
    forward = TwinEngine.forward

    def noted(engine: TwinEngine, tensors: CallTensors) -> None:
        seen.append(tensors)
        forward(engine, tensors)

    monkeypatch.setattr(TwinEngine, "forward", noted)
    call = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        weights = tensors_of(WEIGHTS, world)
        made(Experts(CFG, world), call, weights)
        [tensors] = seen
        for name, tensor in {**weights, "x": call.x}.items():
            assert tensor is not None
            assert getattr(tensors, name).data_ptr() == tensor.data_ptr()

    virtual.run(rank_main, ranks=1)


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "w1 of half the rows": (
        lambda w: w.update(w1=w["w1"][:, :96]),
        ValueError,
        r"w1 has shape \[8, 96, 64\]; it must be \[8, 192, 64\]",
    ),
    "w1 transposed": (
        lambda w: w.update(w1=w["w1"].transpose(1, 2).contiguous()),
        ValueError,
        r"transposed: keep w1\.transpose\(1, 2\)\.contiguous\(\).*MoEConfig\(transposed=True\)",
    ),
    "w2 transposed in place": (
        lambda w: w.update(w2=torch.zeros(8, 96, 64).transpose(1, 2)),
        ValueError,
        r"w2 has strides \(6144, 1, 64\); it must be contiguous: keep w2\.contiguous\(\), or make "
        r"moeos\.Experts with the other MoEConfig\(transposed=\.\.\.\), .* turned=True",
    ),
    "w2 with gaps": (
        lambda w: w.update(w2=torch.zeros(8, 64, 192)[..., ::2]),
        ValueError,
        r"w2 has strides \(12288, 192, 2\); it must be contiguous: keep w2\.contiguous\(\)$",
    ),
    "w2 of another dtype": (
        lambda w: w.update(w2=w["w2"].double()),
        TypeError,
        r"w2 has dtype torch\.float64; it must be torch\.float32",
    ),
    "w2 on another device": (
        lambda w: w.update(w2=w["w2"].to("meta")),
        ValueError,
        "w2 has no values, as it is on the meta device",
    ),
    "w1 of more experts": (
        lambda w: w.update(w1=w["w1"].repeat(2, 1, 1)),
        ValueError,
        r"w1 has shape \[16, 192, 64\]",
    ),
    "no b1": (lambda w: w.update(b1=None), ValueError, r"b1 is missing; this config has one"),
    "w1 is a list": (lambda w: w.update(w1=[1]), TypeError, "w1 is a list of 1, .* views of one"),
    "no ids": (lambda w: w.update(topk_ids=None), ValueError, "topk_ids is None"),
    "no routing": (
        lambda w: w.update(topk_ids=None, topk_weights=None),
        ValueError,
        "topk_ids is None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_by_name_and_send_nothing(name: str) -> None:
    """The peer waits in its call meanwhile, which ends well once this rank makes it rightly."""
    spoil, error, words = BAD[name]
    cfg = dataclasses.replace(CFG, experts=16)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        experts = Experts(cfg, world)
        call = draw_given_call(cfg, 20, world.rank)
        arguments: dict[str, Any] = {
            "x": call.x,
            "topk_ids": call.ids,
            "topk_weights": call.weights,
        }
        arguments.update(tensors_of(weights, world))
        if world.rank == 1:
            spoiled = dict(arguments)
            spoil(spoiled)
            with pytest.raises(error, match=words):
                experts(**spoiled)
        assert_matches(weights, call, experts(**arguments))

    virtual.run(rank_main, ranks=2)


def test_biases_of_experts_that_have_none_raise() -> None:
    cfg = config(max_tokens=64)
    call = draw_given_call(cfg, 20, 0)

    def rank_main(world: World) -> None:
        weights = tensors_of(draw_weights(cfg), world)
        with pytest.raises(ValueError, match=r"b1 is given, and cfg\.bias is False"):
            made(Experts(cfg, world), call, {**weights, "b1": torch.zeros(8, 192)})

    virtual.run(rank_main, ranks=1)


def test_a_gradient_is_kept_where_gradients_are_on() -> None:
    call = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        weights = tensors_of(WEIGHTS, world)
        assert weights["w1"] is not None
        trained = {**weights, "w1": weights["w1"].clone().requires_grad_()}
        y = made(experts, call, trained)
        assert y.requires_grad
        assert_matches(WEIGHTS, call, y.detach())
        with torch.no_grad():
            y = made(experts, call, trained)
        assert not y.requires_grad
        assert_matches(WEIGHTS, call, y)

    virtual.run(rank_main, ranks=1)


def test_experts_hold_no_tensor_and_a_copy_of_them_is_themselves() -> None:
    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        for copied in (copy.copy(experts), copy.deepcopy({"of a model": experts})["of a model"]):
            assert copied is experts
        with pytest.raises(TypeError, match=r"cannot be pickled.*make it with moeos\.Experts"):
            pickle.dumps(experts)
        assert repr(experts).startswith("Experts(MoEConfig(")

    virtual.run(rank_main, ranks=1)


def test_ranks_that_make_other_things_raise_alike() -> None:
    def rank_main(world: World) -> str:
        with pytest.raises(ConfigMismatch) as error:
            moeos.MoELayer(CFG, world) if world.rank == 0 else Experts(CFG, world)
        return str(error.value)

    messages = virtual.run(rank_main, ranks=2)
    assert len(set(messages)) == 1
    assert "rank 0 makes MoELayer and rank 1 makes Experts" in messages[0]


def test_statistics_and_traces_are_of_the_last_call() -> None:
    def rank_main(world: World) -> None:
        experts = Experts(CFG, world)
        for rows in (20, 3):
            made(experts, draw_given_call(CFG, rows, 0), tensors_of(WEIGHTS, world))
        assert sum(experts.stats()["pairs_sent"]) <= 3 * CFG.top_k
        experts.check()
        assert experts.trace() is not None
        experts.reset()
        call = draw_given_call(CFG, 5, 1)
        assert_matches(WEIGHTS, call, made(experts, call, tensors_of(WEIGHTS, world)))

    virtual.run(rank_main, ranks=2, trace_events=256)


@pytest.mark.parametrize("backend", all_but(["aot_eager"], ["eager", "aot_eager", "inductor"]))
def test_a_model_that_routes_by_itself_is_compiled_without_a_break(backend: str) -> None:
    torch._dynamo.reset()
    call = draw_call(CFG, 20, 0)

    class Block(torch.nn.Module):
        def __init__(self, experts: Experts, weights: Weights) -> None:
            super().__init__()
            self.experts = experts
            self.gate = torch.nn.Parameter(weights.gate, requires_grad=False)
            mine = weights.of_rank(experts.world.rank, experts.world.size)
            self.w1 = torch.nn.Parameter(mine.w1, requires_grad=False)
            self.w2 = torch.nn.Parameter(mine.w2, requires_grad=False)
            self.register_buffer("b1", mine.b1)
            self.register_buffer("b2", mine.b2)

        def forward(self, x: Tensor) -> Tensor:
            best = (x @ self.gate.T).softmax(-1).topk(CFG.top_k)
            factors = best.values / best.values.sum(-1, keepdim=True)
            return self.experts(x, best.indices, factors, self.w1, self.w2, self.b1, self.b2)

    def rank_main(world: World) -> int:
        experts = Experts(CFG, world)
        counter = CompileCounterWithBackend(backend)
        all_weights = [draw_weights(CFG, seed) for seed in range(3)]
        model = torch.nn.Sequential(*(Block(experts, weights) for weights in all_weights))
        for block, weights in zip(model, all_weights, strict=True):
            y = torch.compile(block, fullgraph=True, backend=counter)(call.x)
            assert_matches(weights, call, y)
        frames: int = counter.frame_count
        whole = torch.compile(model, fullgraph=True, backend=backend)
        assert torch.allclose(whole(call.x), model(call.x), atol=1e-6)
        return frames

    assert virtual.run(rank_main, ranks=1) == [1]
