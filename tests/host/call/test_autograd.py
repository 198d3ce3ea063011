# SPDX-License-Identifier: Apache-2.0
"""A layer's gradients on the twin are those of the float64 reference, whatever its options, its
routing, its ranks and its calls' order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeos import Experts, MoEConfig, PeerTimeout, Placement, TwinOptions, Workspace, World
from moeos.call import rounded_routing
from moeos.call.rounded_routing import GateTensors
from moeos.config import reference
from moeos.config.activations import Activation
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan
from tests.gradients import (
    OF_EXPERTS,
    ONE_PROCESSOR,
    Gradients,
    assert_match,
    drawn,
    expected_of,
    found_of,
    gradients_of,
    kept_bytes,
    leaves_of,
)
from tests.layers import (
    PREFERENCES,
    Call,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn

pytestmark = pytest.mark.usefixtures("poisoned_output")

TOKENS = (77, 0, 128, 5)
"""[rank]"""


def check(
    cfg: MoEConfig,
    *,
    given: bool = False,
    seed: int = 0,
    tokens: Sequence[int] = TOKENS,
    preference: Callable[[int, int], Tensor] | None = None,
    twin: TwinOptions = ONE_PROCESSOR,
    ranks_per_node: int | None = None,
) -> None:
    """A call of each rank against the reference."""
    weights = draw_weights(cfg, seed)
    favoured = None if preference is None else preference(cfg.experts, len(tokens))
    calls = [
        draw_given_call(cfg, count, seed + rank, favoured)
        if given
        else draw_call(cfg, count, seed + rank)
        for rank, count in enumerate(tokens)
    ]
    assert_match(weights, calls, gradients_of(weights, calls, twin, ranks_per_node))


# --- What a layer computes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "dtype"), in_turn(get_args(Activation), [torch.float32, torch.bfloat16]), ids=str
)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check(config(activation=activation, bias=True, dtype=dtype), given=True)


@pytest.mark.parametrize("clamp", ["before", "after"])
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu_tanh"])
def test_a_limit_stops_what_it_clamps(activation: str, clamp: str) -> None:
    check(config(activation=activation, swiglu_limit=0.25, swiglu_clamp=clamp, bias=True))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
def test_what_the_gate_weighs(scoring: str, renormalize: bool) -> None:
    rules = {"router_bias": True, "selection_bias": True, "expert_scale": True}
    check(config(scoring=scoring, renormalize=renormalize, routed_scaling=2.5, **rules))


def test_a_gate_that_weighs_the_callers_experts() -> None:
    cfg = config(routing="ids", scoring="sigmoid", top_k=3)
    weights = draw_weights(cfg)
    calls = [
        dataclasses.replace(draw_given_call(cfg, count, rank, unused=0.4), weights=None)
        for rank, count in enumerate(TOKENS)
    ]
    assert_match(weights, calls, gradients_of(weights, calls))


def test_tokens_that_are_rounded_to_whole_tiles() -> None:
    cfg = config(rounding="NR-f", rounding_tile=8, top_k=3)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, count, rank) for rank, count in enumerate((60, 40))]

    def rank_main(world: World) -> tuple[Gradients, Call]:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        call(layer).backward(drawn(call, world.rank))
        gate = GateTensors(layer.gate.weight, None, None, None)
        ids, _ = rounded_routing.route(cfg, gate, call.x, None, rounds=True)
        return found_of(call, layer), Call(call.x.detach(), ids)

    found, routed = zip(*virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR), strict=True)
    assert_match(weights, routed, found)


def test_a_router_in_fp32_beside_bfloat16() -> None:
    check(config(dtype=torch.bfloat16, router_dtype=torch.float32))


@pytest.mark.parametrize("given", [False, True], ids=["gate", "caller"])
def test_zero_experts(given: bool) -> None:
    check(config(zero_experts=3, top_k=4), given=given)


@pytest.mark.parametrize("given", [False, True], ids=["gate", "caller"])
def test_a_weight_on_the_input(given: bool) -> None:
    rules: dict[str, Any] = {"scoring": "sigmoid", "renormalize": False, "bias": True}
    check(config(apply_router_weight_on_input=True, top_k=1, **rules), given=given)


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "weighed"])
def test_shared_experts(gate: bool) -> None:
    check(config(shared_experts=2, shared_intermediate=40, shared_gate=gate))


@pytest.mark.parametrize("row_map", ["ragged", "capacity"])
def test_a_dropped_pair_has_no_gradient(row_map: str) -> None:
    cfg = config(capacity_factor=0.7, row_map=row_map, top_k=3)
    check(cfg, given=True, preference=PREFERENCES["zipf"])


# --- Ranks, rows and routing --------------------------------------------------------------------


@pytest.mark.parametrize("kind", PREFERENCES)
def test_routing_of_any_kind(kind: str) -> None:
    check(config(top_k=3, bias=True), given=True, preference=PREFERENCES[kind])


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ((64,), {}),
        ((5,), {}),
        ((0,), {}),
        ((128, 3), {}),
        ((0, 0, 9), {"experts": 10}),
        ((33, 20, 1, 7, 12), {"experts": 7, "top_k": 5}),
        ((300, 300), {"max_tokens": 300, "experts": 2, "top_k": 1}),
    ],
    ids=str,
)
def test_ranks_and_tokens(tokens: tuple[int, ...], changes: dict[str, Any]) -> None:
    check(config(**changes), given=True, tokens=tokens)


def test_wide_layers_have_several_parts() -> None:
    check(config(hidden=520, intermediate=272, bias=True), given=True, tokens=(40, 9))
    check(config(hidden=264, intermediate=520, activation="gelu"), given=True, tokens=(40, 9))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_remote_peers(ranks_per_node: int) -> None:
    check(config(top_k=3), given=True, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("row_map", ["ragged", "capacity"])
def test_bits_do_not_depend_on_processors_or_timing(row_map: str) -> None:
    cfg = config(top_k=3, bias=True, row_map=row_map)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, count, rank) for rank, count in enumerate(TOKENS)]
    first = gradients_of(weights, calls)
    for twin in (
        TwinOptions(processors=3),
        TwinOptions(processors=2, split_os=True),
        TwinOptions(processors=2, jitter_us=50.0, jitter_seed=7),
    ):
        for mine, its in zip(first, gradients_of(weights, calls, twin), strict=True):
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[name], its[name]) for name in mine)


# --- Autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_backward_of_several_calls_in_any_order(order: tuple[int, ...]) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [[draw_given_call(cfg, 20 + 9 * i, 5 * rank + i) for i in range(3)] for rank in (0, 1)]

    def rank_main(world: World) -> list[Gradients]:
        layers = [weights.layer(world).requires_grad_() for _ in order]  # of one workspace
        mine = [leaves_of(call) for call in calls[world.rank]]
        outputs = [call(layer) for call, layer in zip(mine, layers, strict=True)]
        for place in order:
            outputs[place].backward(drawn(mine[place], world.rank))
        return [found_of(call, layer) for call, layer in zip(mine, layers, strict=True)]

    found = virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR)
    for place in range(3):
        assert_match(weights, [rank[place] for rank in calls], [rank[place] for rank in found])


def test_calls_of_one_layer_accumulate() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 30, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        d_out = drawn(call, 0)
        call(layer).backward(d_out)
        once = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        (call(layer) + call(layer)).backward(d_out)
        for name, gradient in once.items():
            parameter = layer.get_parameter(name)
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient + gradient + gradient)

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(
    "wanted", ["x", "topk_weights", "w1", "w2", "b1", "b2", "gate.weight", "gate.bias"]
)
def test_each_gradient_alone(wanted: str) -> None:
    cfg = config(bias=True, router_bias=True)
    weights = draw_weights(cfg)
    draw = draw_call if wanted.startswith("gate.") else draw_given_call
    calls = [draw(cfg, count, rank) for rank, count in enumerate((30, 11))]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world)
        call = calls[world.rank]
        tensors = {"x": call.x.clone(), "topk_weights": None, **dict(layer.named_parameters())}
        if call.weights is not None:
            tensors["topk_weights"] = call.weights.clone()
        leaf = tensors[wanted]
        assert leaf is not None
        leaf.requires_grad_()
        assert tensors["x"] is not None
        call = Call(tensors["x"], call.ids, tensors["topk_weights"])
        call(layer).backward(drawn(call, world.rank))
        return found_of(call, layer)

    found = virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR)
    for mine, expected in zip(found, expected_of(weights, calls), strict=True):
        assert list(mine) == [wanted]
        assert reference.relative_error(mine[wanted], expected[wanted]) <= 1e-5


@pytest.mark.parametrize("given", [False, True], ids=["gate", "caller"])
def test_rows_beyond_the_tokens_have_no_gradient(given: bool) -> None:
    cfg = config(shared_experts=1, shared_intermediate=32)
    weights = draw_weights(cfg)
    whole = (draw_given_call if given else draw_call)(cfg, 50, 0)
    taken = Call(*(None if part is None else part[:20] for part in (whole.x, whole.ids)))
    if whole.weights is not None:
        taken = dataclasses.replace(taken, weights=whole.weights[:20])

    def rank_main(world: World) -> tuple[Gradients, Gradients]:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(whole)
        y = layer(call.x, call.ids, call.weights, tokens=torch.tensor(20, dtype=torch.int32))
        y.backward(drawn(call, 0))
        first = found_of(call, layer)
        layer.zero_grad()
        few = leaves_of(taken)
        few(layer).backward(drawn(call, 0)[:20])
        return first, found_of(few, layer)

    ((found, expected),) = virtual.run(rank_main, ranks=1)
    for name in ("x", "topk_weights"):
        if name in found:
            assert not found[name][20:].any()
            found[name] = found[name][:20]
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name


def test_a_call_in_pieces() -> None:
    cfg = config(max_tokens=16)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, count, rank) for rank, count in enumerate((37, 10))]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        y = layer(call.x, call.ids, call.weights, pieces=3)
        y.backward(drawn(call, world.rank))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))


def test_experts_without_weights_of_their_own() -> None:
    cfg = config(bias=True)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, count, rank) for rank, count in enumerate((30, 40))]

    def rank_main(world: World) -> Gradients:
        mine = weights.of_rank(world.rank, world.size)
        own = {name: getattr(mine, name).clone().requires_grad_() for name in OF_EXPERTS}
        call = leaves_of(calls[world.rank])
        y = Experts(cfg, world)(call.x, call.ids, call.weights, **own)  # type: ignore[arg-type]
        y.backward(drawn(call, world.rank))
        assert call.x.grad is not None
        assert call.weights is not None
        assert call.weights.grad is not None
        found = {"x": call.x.grad, "topk_weights": call.weights.grad}
        return found | {name: tensor.grad for name, tensor in own.items()}

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))


def test_a_call_keeps_its_routing_and_no_rows() -> None:
    cfg = config()
    # An id and a weight of each slot.
    assert kept_bytes(draw_weights(cfg), draw_call(cfg, 100, 0)) == 100 * cfg.top_k * 8


@pytest.mark.parametrize("megatron", [False, True], ids=["alone", "megatron"])
@pytest.mark.parametrize(
    ("dtype", "of_main"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_are_added_to_main_grad(
    dtype: torch.dtype, of_main: torch.dtype, megatron: bool
) -> None:
    cfg = config(dtype=dtype, bias=True, shared_experts=1, shared_intermediate=32)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, count, rank) for rank, count in enumerate((30, 12))]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        for parameter in layer.parameters():
            parameter.main_grad = torch.ones(parameter.shape, dtype=of_main)
            if megatron:
                parameter.grad_added_to_main_grad = False
                parameter.zero_out_wgrad = True
        versions = {name: p.main_grad._version for name, p in layer.named_parameters()}
        call(layer).backward(drawn(call, world.rank))
        call(layer).backward(drawn(call, world.rank))
        found: Gradients = {"x": 0.5 * call.x.grad}
        for name, parameter in layer.named_parameters():
            assert parameter.main_grad.dtype == of_main
            assert parameter.main_grad._version > versions[name]
            if megatron:  # whose hooks wait for a gradient, and do not add it
                assert parameter.grad_added_to_main_grad is True
                assert not parameter.grad.any()
            else:
                assert parameter.grad is None
            found[name] = (parameter.main_grad.double() - 1.0) / 2.0
        return found

    found = virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR)
    assert_match(weights, calls, found)


def test_only_what_autograd_asks_for_is_added_to_main_grad() -> None:
    cfg = config(max_tokens=32, bias=True)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_(True)
        x = draw_call(cfg, 20, world.rank).x.requires_grad_(True)
        layer(x).square().sum().backward()
        right = {name: one.grad for name, one in layer.named_parameters()}
        named = dict(layer.named_parameters())
        for parameter in named.values():
            parameter.grad, parameter.main_grad = None, torch.zeros(parameter.shape)

        def loss() -> Tensor:
            return layer(x).square().sum()

        torch.autograd.grad(loss(), [x])
        loss().backward(inputs=[x])
        returned = torch.autograd.grad(loss(), [layer.w1, layer.gate.weight])
        assert torch.equal(returned[0], right["w1"])
        assert torch.equal(returned[1], right["gate.weight"])
        assert all(one.main_grad.count_nonzero() == 0 for one in named.values())
        loss().backward(inputs=[layer.w2])
        for name, parameter in named.items():
            assert parameter.grad is None
            expected = right[name] if name == "w2" else torch.zeros(parameter.shape)
            assert torch.equal(parameter.main_grad, expected), name

    virtual.run(rank_main, ranks=2)


def test_fp32_sums_are_not_rounded_on_their_way_to_main_grad() -> None:
    """A gradient in bfloat16 loses what an fp32 `main_grad` keeps."""
    cfg = config(dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 100, 0)

    def rank_main(world: World) -> tuple[Tensor, Tensor]:
        layer = weights.layer(world).requires_grad_()
        call(layer).backward(drawn(call, 0))
        assert layer.w1.grad is not None
        layer.w1.main_grad = torch.zeros(layer.w1.shape)
        call(layer).backward(drawn(call, 0))
        return layer.w1.grad, layer.w1.main_grad

    ((rounded, kept),) = virtual.run(rank_main, ranks=1)
    assert torch.equal(kept.to(torch.bfloat16), rounded)
    assert not torch.equal(kept, rounded.float())


@pytest.mark.parametrize(
    ("main_grad", "error", "said"),
    [
        (lambda w: torch.zeros(3), ValueError, r"main_grad of w2 has shape \[3\]; it must be"),
        (lambda w: w.detach().double(), TypeError, "dtype torch.float64; it must be torch.float32"),
        (lambda w: w.detach().half(), TypeError, "dtype torch.float16; it must be"),
        (lambda w: w.detach().mT.contiguous().mT, ValueError, "it must be contiguous"),
        (lambda w: w.detach().to("meta"), ValueError, "is on meta; it must be on"),
        (lambda w: w.detach().clone().requires_grad_(), ValueError, "requires a gradient"),
        (lambda w: "main", TypeError, "main_grad of w2 is a str"),
    ],
    ids=["shape", "double", "half", "strides", "device", "gradient", "class"],
)
def test_a_main_grad_that_cannot_be_is_refused_before_anything_is_sent(
    main_grad: Callable[[Tensor], Any], error: type[Exception], said: str
) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    x = draw_call(cfg, 10, 0).x

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        layer.w2.main_grad = main_grad(layer.w2)
        with pytest.raises(error, match=said):
            layer(x)
        layer.w2.main_grad = torch.zeros_like(layer.w2)
        y = layer(x).sum()
        layer.w2.main_grad = main_grad(layer.w2)
        with pytest.raises(error, match=said):
            y.backward()
        del layer.w2.main_grad
        layer(x).sum().backward()  # and no call is missing

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (lambda layer, call: {"w2": layer.w2.data}, "w2 shares memory with w2, so"),
        (lambda layer, call: {"w2": _within(layer.w1, layer.w2)}, "w2 shares memory with w1, so"),
        (lambda layer, call: {"b2": _within(call.x, layer.b2)}, "b2 shares memory with x, so"),
        (
            lambda layer, call: {"b2": _within(_moved(call.weights), layer.b2)},
            "b2 shares memory with topk_weights, so",
        ),
        (
            lambda layer, call: {
                "w1": (whole := torch.zeros_like(layer.w1)),
                "w2": _within(whole, layer.w2),
            },
            "w2 shares memory with main_grad of w1, so",
        ),
    ],
    ids=["itself", "another parameter", "x", "topk_weights", "another main_grad"],
)
def test_a_main_grad_that_is_written_over_something_else_is_refused(
    shares: Callable[[Any, Call], dict[str, Tensor]], said: str
) -> None:
    cfg = config(bias=True)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        call = draw_given_call(cfg, 100, 0)
        for name, main_grad in shares(layer, call).items():
            getattr(layer, name).main_grad = main_grad
        before = {name: one.clone() for name, one in layer.state_dict().items()}
        with pytest.raises(ValueError, match=f"main_grad of {said} .*: keep torch.zeros_like"):
            call(layer)
        assert all(torch.equal(one, before[name]) for name, one in layer.state_dict().items())
        # As the sentence says, also where one buffer holds all.
        parts = (layer.w1, layer.b1, layer.w2, layer.b2)
        buffer = torch.zeros(sum(part.numel() for part in parts))
        for part, room in zip(parts, buffer.split([p.numel() for p in parts]), strict=True):
            part.main_grad = room.view(part.shape)
        call(layer).sum().backward()
        assert all(part.main_grad.any() for part in parts)
        layer.w1.main_grad = layer.w1.data
        with pytest.raises(ValueError, match="main_grad of w1 shares memory with w1, so"):
            call(layer)

    virtual.run(rank_main, ranks=1)


def _moved(tensor: Tensor) -> Tensor:
    """The memory in which it lies now, with room after it."""
    memory = torch.cat([tensor.detach().flatten(), torch.zeros(1024)])
    tensor.data = memory[: tensor.numel()].view(tensor.shape)
    return memory


def _within(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of `like` that begins in that memory."""
    flat = memory.detach().view(-1)[4:]
    assert flat.numel() >= like.numel()
    return flat[: like.numel()].view(like.shape)


@contextlib.contextmanager
def tensors_made_with(dtype: torch.dtype, device: str) -> Iterator[None]:
    """What `torch.zeros` and its like take where nobody says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")],
)
@pytest.mark.parametrize("rounding", [None, "NR-f"])
def test_gradients_are_right_with_any_default_dtype_and_device(
    rounding: str | None, dtype: torch.dtype, device: str
) -> None:
    cfg = config(rounding=rounding)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 77, 0)]  # fewer than a tile: not rounded

    def rank_main(world: World) -> Gradients:
        layer, call = weights.layer(world).requires_grad_(), leaves_of(calls[0])
        d_out, tokens = drawn(call, 0), torch.tensor([77], dtype=torch.int32)
        with tensors_made_with(dtype, device):
            y = layer(call.x, tokens=tokens)
            y.backward(d_out)
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=1))


def test_saved_tensors_come_back_in_memory_of_any_strides() -> None:
    weights = draw_weights(config())
    calls = [draw_call(weights.cfg, 30, 0)]

    def strided(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    def rank_main(world: World) -> Gradients:
        layer, call = weights.layer(world).requires_grad_(), leaves_of(calls[0])
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, strided):
            y = layer(call.x)
        y.backward(drawn(call, 0))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=1))


@pytest.mark.parametrize(
    ("unpack", "is_now"),
    [
        (lambda tensor: tensor.float(), r"torch.int\d+ \[.*\] on cpu is now torch.float32"),
        (lambda tensor: tensor.double(), r"is now torch.float64"),
        (lambda tensor: tensor[:1], r"\[30, .*\] on cpu is now torch.\w+ \[1, "),
        (lambda tensor: tensor.to("meta"), r"on cpu is now .* on meta"),
    ],
    ids=["ids as floats", "double", "short", "meta"],
)
@pytest.mark.parametrize("as_operators", [False, True])
def test_saved_tensors_that_a_hook_returns_as_something_else_are_refused(
    unpack: Callable[[Tensor], Tensor], is_now: str, as_operators: bool
) -> None:
    weights = draw_weights(config())
    through = torch.profiler.profile() if as_operators else contextlib.nullcontext()

    def rank_main(world: World) -> None:
        layer, call = weights.layer(world).requires_grad_(), draw_call(weights.cfg, 30, 0)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack), through:
            y = layer(call.x)
        with pytest.raises(ValueError, match="what a forward call has saved as .*" + is_now):
            y.sum().backward()
        assert layer.w1.grad is None
        assert torch.equal(layer(call.x), y)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_calls_the_layer_again(reentrant: bool) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, count, rank) for rank, count in enumerate((30, 12))]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        checkpoint(layer, call.x, use_reentrant=reentrant).backward(drawn(call, world.rank))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))


def test_a_compiled_model_trains() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 30, 0)]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[0])
        compiled = torch.compile(lambda x: layer(2 * x) * 0.5, backend="aot_eager")
        half = (call.x.detach() * 0.5).requires_grad_()
        compiled(half).backward(2 * drawn(call, 0))
        assert half.grad is not None
        call.x.grad = half.grad * 0.5
        return found_of(call, layer)

    torch._dynamo.reset()
    assert_match(weights, calls, virtual.run(rank_main, ranks=1))


@pytest.mark.filterwarnings("ignore:Input #")  # PyTorch would rather have float64
def test_differences_of_outputs_are_what_gradients_say() -> None:
    cfg = config(hidden=8, intermediate=16, experts=4, bias=True)
    weights = draw_weights(cfg)
    call = leaves_of(draw_given_call(cfg, 5, 0))

    def rank_main(world: World) -> bool:
        layer = weights.layer(world)
        return torch.autograd.gradcheck(
            lambda x, factors: layer(x, call.ids, factors),
            (call.x, call.weights),
            eps=1e-2,
            atol=2e-2,
            rtol=2e-2,
        )

    assert virtual.run(rank_main, ranks=1) == [True]


def test_steps_of_an_optimizer_are_those_of_the_reference() -> None:
    cfg = config(hidden=32, intermediate=48)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 40, rank) for rank in (0, 1)]
    targets = [drawn(call, 7 + rank) for rank, call in enumerate(calls)]

    def rank_main(world: World) -> list[float]:
        layer = weights.layer(world)
        layer.w1.requires_grad_()
        layer.w2.requires_grad_()
        optimizer = torch.optim.SGD([layer.w1, layer.w2], lr=2.0)
        losses = []
        for _ in range(10):
            y = calls[world.rank](layer)
            loss = (y - targets[world.rank]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    found = virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR)
    w1 = weights.w1.double().requires_grad_()
    w2 = weights.w2.double().requires_grad_()
    optimizer = torch.optim.SGD([w1, w2], lr=2.0)
    stock = dataclasses.replace(weights, w1=w1, w2=w2)
    for step in range(10):
        losses = [
            (stock.expected(call) - target.double()).square().mean()
            for call, target in zip(calls, targets, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        for rank, loss in enumerate(losses):
            assert found[rank][step] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize(
    "given",
    [
        lambda gradient: gradient.double(),
        lambda gradient: gradient.mT.contiguous().mT,
        lambda gradient: gradient.to_sparse(),
        lambda gradient: torch._neg_view(-gradient),
        lambda gradient: torch._efficientzerotensor(gradient.shape),
        lambda gradient: torch.full((1, 1), 3.0).expand(gradient.shape),
    ],
    ids=["double", "strides", "sparse", "lazy negative", "lazy zeros", "one number"],
)
@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_the_gradient_of_an_output_may_lie_in_memory_in_any_way(
    given: Callable[[Tensor], Tensor], watched: bool
) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    x = draw_call(cfg, 10, 0).x
    gradient = drawn(draw_call(cfg, 10, 0), 0)
    dense = given(gradient).to_dense() * torch.ones(()) + torch.zeros(())

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        found = []
        for one in (dense.to(x.dtype), given(gradient)):
            leaf = x.clone().requires_grad_()
            with torch.autograd.profiler.profile() if watched else contextlib.nullcontext():
                layer(leaf).backward(one)
            assert leaf.grad is not None
            found.append(leaf.grad)
        assert torch.equal(*found)

    virtual.run(rank_main, ranks=1)


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["nothing", "preactivation"])
def test_calls_whose_rows_are_kept_are_derived_in_one_order_or_not_at_all(save: Any) -> None:
    """Where nothing is kept on other ranks, any order gives the same."""
    cfg = config(save=save)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        first, second = (draw_call(cfg, 20 + 3 * n, 2 * world.rank + n).x for n in range(2))

        def derived(*, turned: bool) -> list[Tensor]:
            xs = [one.clone().requires_grad_() for one in (first, second)]
            ys = [layer(x) for x in xs]
            order = (1, 0) if turned else (0, 1)
            found = {n: torch.autograd.grad(ys[n].square().sum(), xs[n])[0] for n in order}
            return [found[0], found[1]]

        expected = derived(turned=False)
        assert all(map(torch.equal, expected, derived(turned=True)))
        if save == "nothing":
            assert all(map(torch.equal, expected, derived(turned=world.rank == 1)))
            return
        with pytest.raises(
            RuntimeError, match=r"different calls' backwards: .*of call \d+ .*order"
        ):
            derived(turned=world.rank == 1)
        layer.reset()
        assert all(map(torch.equal, expected, derived(turned=False)))

    virtual.run(rank_main, ranks=2)


def test_what_has_no_gradient_is_refused_by_name() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    call = draw_call(cfg, 10, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        x = call.x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="MoELayer has no backward of a call with out"):
            layer(x, out=torch.empty_like(x))
        (d_x,) = torch.autograd.grad(layer(x).sum(), x)
        assert not d_x.requires_grad
        with pytest.raises(RuntimeError, match="create_graph is True"):
            torch.autograd.grad(layer(x).sum(), x, create_graph=True)

    virtual.run(rank_main, ranks=1)


def test_a_subclass_of_a_parameter_is_refused_and_the_remedy_works() -> None:
    class Own(torch.nn.Parameter):
        pass

    class Marked(torch.Tensor):
        pass

    weights = draw_weights(config())
    call = draw_call(weights.cfg, 10, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        w2 = Own(layer.w2.data)
        layer.w2 = w2
        said = r"MoELayer has no backward of a Own, which w2 is, .*: keep a plain torch\.nn\.Par"
        with pytest.raises(RuntimeError, match=said):
            layer(call.x)
        layer.w2 = torch.nn.Parameter(w2.data.as_subclass(torch.Tensor))  # as the error says
        marked = call.x.as_subclass(Marked)
        with pytest.raises(RuntimeError, match=r"of a Marked, which x is, .* plain x\.as_subclass"):
            layer(marked)
        y = layer(marked.as_subclass(torch.Tensor))
        y.sum().backward()
        assert layer.w2.grad is not None

    virtual.run(rank_main, ranks=1)


def test_gradients_are_bitwise_the_same_wherever_experts_lie() -> None:
    cfg = config(experts=6, top_k=2)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 40 - 7 * rank, rank) for rank in range(2)]
    placement = Placement(((4, 0, 2), (1, 5, 3)))
    found, placed = gradients_of(weights, calls), gradients_of(weights, calls, placement=placement)
    for rank in range(2):
        assert torch.equal(found[rank]["x"], placed[rank]["x"])
        assert torch.equal(found[rank]["gate.weight"], placed[rank]["gate.weight"])
    for name in ("w1", "w2"):
        every = torch.cat([gradients[name] for gradients in found])
        assert torch.equal(
            every[list(sum(placement.ranks, ()))], torch.cat([g[name] for g in placed])
        )


def test_experts_on_several_ranks_have_no_backward() -> None:
    cfg = config(experts=4, top_k=2)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world, placement=Placement(((0, 1, 2), (2, 3, 0))))
        call = draw_call(cfg, 10, world.rank)
        with pytest.raises(RuntimeError, match=r"no backward where several ranks hold an expert"):
            layer(call.x.clone().requires_grad_())
        layer(call.x)

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(
    "field",
    [
        {"weight_format": "mxfp4"},
        {"activation_format": "fp8_group128"},
        {"activation_format": "fp8_group128", "result_format": "fp8_group128"},
    ],
    ids=["weights", "activations", "results"],
)
def test_a_layer_of_codes_has_no_backward(field: dict[str, Any]) -> None:
    formats = {"weight_format": "fp8_block128"} | field
    cfg = config(hidden=128, intermediate=128, **formats)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 10, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        with pytest.raises(
            RuntimeError, match=r"MoELayer has no backward of layers with .*_format"
        ):
            layer(call.x.clone().requires_grad_())
        layer(call.x)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_tensors_that_have_changed_since_are_found(compiled: bool) -> None:
    cfg = config(bias=True, router_bias=True, shared_experts=1, shared_intermediate=32)
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        program = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        leaves = dict(layer.named_parameters())
        assert len(leaves) == 8
        for name in (*leaves, "x"):
            x = draw_call(cfg, 10, 0).x
            y = program(x)
            with torch.no_grad():
                leaves.get(name, x).mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    torch._dynamo.reset()
    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("as_operators", [False, True], ids=["", "operators"])
@pytest.mark.parametrize("save", ["nothing", "preactivation"])
def test_a_backward_is_of_the_memory_that_its_forward_has_read(
    save: Any, as_operators: bool
) -> None:
    """Whatever `.data` of a parameter, or of x and the routing, has become since."""
    cfg = config(bias=True, shared_experts=1, shared_intermediate=32, shared_gate=True, save=save)
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 30, 0)]
    through = torch.profiler.profile() if as_operators else contextlib.nullcontext()

    def rank_main(world: World) -> Gradients:
        layer, call = weights.layer(world).requires_grad_(), leaves_of(calls[0])
        d_out = drawn(call, 0)
        with through:
            y = call(layer)
        read = [call.x, call.weights, *layer.parameters()]
        assert len(read) == 2 + 8
        with torch.no_grad():
            for tensor in read:
                assert tensor is not None
                turned = torch.full(tensor.shape[::-1], 3.0)
                tensor.data = turned.permute(*range(tensor.dim())[::-1])
        y.backward(d_out)
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("changed", ["ids", "weights"])
def test_routing_that_has_changed_since_is_found_or_was_copied(
    changed: str, dtype: torch.dtype
) -> None:
    cfg = config()
    weights = draw_weights(cfg)
    call = draw_given_call(cfg, 10, 0)
    assert call.ids is not None
    assert call.weights is not None

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        given = {"ids": call.ids.to(dtype), "weights": call.weights.clone()}
        layer(call.x, *given.values()).sum().backward()
        expected = layer.w1.grad
        layer.zero_grad()
        y = layer(call.x, *given.values()).sum()
        given[changed].zero_()
        if (changed, dtype) == ("ids", torch.int64):  # calls take int32
            y.backward()
            assert torch.equal(layer.w1.grad, expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_backward_behind_a_closed_workspace_says_so(compiled: bool) -> None:
    cfg = config()
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        workspace = Workspace(world)
        layer = weights.layer(world, workspace=workspace).requires_grad_()
        program = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        x = draw_call(cfg, 10, 0).x
        y, other = program(x), weights.layer(world)(x.clone().requires_grad_())
        workspace.close()
        with pytest.raises(RuntimeError, match="the workspace of this layer is closed"):
            y.sum().backward()
        other.sum().backward()  # of the world's own

    torch._dynamo.reset()
    virtual.run(rank_main, ranks=1)


def test_backward_of_memory_that_is_gone_or_of_a_closed_world_says_so() -> None:
    cfg = config()
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        x = draw_call(cfg, 10, 0).x
        y, other = layer(x), layer(x)
        size = layer.w2.untyped_storage().nbytes()
        layer.w2.data.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="w2"):
            y.sum().backward()
        layer.w2.data.untyped_storage().resize_(size)
        world.close()
        with pytest.raises(RuntimeError, match=r"the world .*is closed"):
            other.sum().backward()
        with pytest.raises(RuntimeError, match=r"the world .*is closed"):
            layer(x)

    virtual.run(rank_main, ranks=1)


def test_ranks_that_go_different_ways_are_told_so() -> None:
    cfg = config()
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world).requires_grad_()
        y = layer(draw_call(cfg, 10, 0).x)
        said = r"different directions: .*the backward of (call . of )?layer 0.*backward as forward"
        backward, forward = y.sum().backward, lambda: layer(draw_call(cfg, 10, 0).x)
        with pytest.raises(RuntimeError, match=said):
            (backward if world.rank == 0 else forward)()

    virtual.run(rank_main, ranks=2)


def test_a_rank_that_stands_still_in_backward_is_named() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    plan = FaultPlan(faults=(Fault(kind="stall", rank=1, call=2, stage="product0"),))

    def rank_main(world: World) -> str:
        layer = weights.layer(world).requires_grad_()
        y = layer(draw_call(cfg, 30, world.rank).x)
        with pytest.raises(PeerTimeout) as raised:
            y.sum().backward()
        return str(raised.value)

    said = virtual.run(rank_main, ranks=2, deadline=1.0, faults=plan)
    assert "for rank 1" in said[0]


def test_backward_after_a_reset_is_right() -> None:
    cfg = config()
    weights = draw_weights(cfg)
    calls = [draw_given_call(cfg, 30, rank) for rank in (0, 1)]

    def rank_main(world: World) -> Gradients:
        layer = weights.layer(world).requires_grad_()
        call = leaves_of(calls[world.rank])
        y = call(layer)
        layer.reset()
        y.backward(drawn(call, world.rank))
        return found_of(call, layer)

    assert_match(weights, calls, virtual.run(rank_main, ranks=2, twin=ONE_PROCESSOR))
