# SPDX-License-Identifier: Apache-2.0
"""A compiled layer does what the layer does: in one graph, and once for each call."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moeos import Experts, MoELayer, World
from moeos.call import custom_op
from moeos.engines.base import CallTensors
from moeos.engines.twin.engine import TwinEngine
from moeos.world import virtual
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.nightly import all_but, in_turn

CFG = config(max_tokens=64, bias=True, selection_bias=True)
WEIGHTS = draw_weights(CFG)
TOKENS = torch.tensor([13], dtype=torch.int32)

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """The function as one graph; a graph break is an error."""
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend, **options)
    return made


@pytest.mark.parametrize("backend", all_but(["aot_eager"], ["eager", "aot_eager"]))
def test_a_layer_is_traced_without_a_break_and_computes_the_same(backend: str) -> None:
    given = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        traced = compiled(layer, backend)
        x = draw_call(CFG, 20, 0).x
        assert torch.equal(traced(x), layer(x))
        assert torch.equal(traced(given.x, given.ids, given.weights), given(layer))
        assert torch.equal(traced(x, tokens=TOKENS), layer(x, tokens=TOKENS))

    virtual.run(rank_main, ranks=1)


@backends
def test_one_graph_serves_many_token_counts(backend: str) -> None:
    def rank_main(world: World) -> int:
        layer = WEIGHTS.layer(world)
        counter = CompileCounterWithBackend(backend)
        traced = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for tokens in (20, 3, 64, 37, 5, 8):
            call = draw_call(CFG, tokens, tokens)
            assert torch.equal(traced(call.x), layer(call.x))
        frames: int = counter.frame_count
        return frames

    assert virtual.run(rank_main, ranks=1) == [1]


@pytest.mark.parametrize("backend", all_but(["aot_eager"], ["eager", "aot_eager"]))
def test_layers_amid_other_modules_become_one_graph(backend: str) -> None:
    class Block(torch.nn.Module):
        def __init__(self, layers: list[MoELayer]) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(CFG.hidden)
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(self.norm(x))
            return x

    def rank_main(world: World) -> None:
        block = Block([WEIGHTS.layer(world), draw_weights(CFG, 1).layer(world)])
        x = draw_call(CFG, 20, world.rank).x
        with torch.no_grad():
            assert torch.equal(compiled(block, backend)(x), block(x))

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(("backend", "trains"), in_turn(["eager", "aot_eager"], [False, True]))
def test_every_call_is_made_though_its_output_is_unused_or_that_of_another(
    backend: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that made fewer calls than its peers would leave them waiting."""
    calls: list[int] = []
    forward = TwinEngine.forward

    def counted(engine: TwinEngine, tensors: CallTensors) -> None:
        calls.append(len(tensors.x))
        forward(engine, tensors)

    monkeypatch.setattr(TwinEngine, "forward", counted)
    scale = torch.ones(CFG.hidden, requires_grad=trains)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)

        def program(x: Tensor) -> Tensor:
            layer(x[:7])
            return (layer(x) + layer(x)) * scale

        traced, x = compiled(program, backend), draw_call(CFG, 20, 0).x
        for _ in range(2):
            traced(x)
            assert calls == [7, 20, 20]
            calls.clear()

    virtual.run(rank_main, ranks=1)


def test_a_compiler_that_gave_the_layer_up_does_not_trace_the_engine() -> None:
    """Where a frame raised, Dynamo leaves it alone from then on, and traces what it calls."""

    def rank_main(world: World) -> int:
        layer = WEIGHTS.layer(world)
        call = draw_call(CFG, 20, 0)
        traced = torch.compile(layer, backend="eager")
        with pytest.raises(ValueError, match="x has shape"):
            traced(call.x[:, :16].contiguous())
        torch._dynamo.utils.counters.clear()
        assert_matches(WEIGHTS, call, traced(call.x))
        assert_matches(WEIGHTS, call, traced(call.x, out=torch.empty_like(call.x)))
        return len(torch._dynamo.utils.counters["graph_break"])

    assert virtual.run(rank_main, ranks=1) == [0]


def test_a_change_of_the_weights_in_a_graph_comes_before_the_call_behind_it() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        x = draw_call(CFG, 20, 0).x

        def program(x: Tensor) -> tuple[Tensor, Tensor]:
            before = layer(x)
            layer.w2.zero_()
            return before, layer(x)

        with torch.no_grad():
            expected = layer(x)
            before, after = compiled(program, "aot_eager")(x)
        assert torch.equal(before, expected)
        assert not torch.equal(after, expected)

    virtual.run(rank_main, ranks=1)


def test_bad_arguments_of_a_compiled_layer_raise_what_they_raise_otherwise() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        traced = torch.compile(layer, backend="aot_eager")
        with pytest.raises(ValueError, match="at most max_tokens, 64, are allowed"):
            traced(torch.zeros(65, CFG.hidden))
        with pytest.raises(TypeError, match=r"x has dtype torch\.float64"):
            traced(torch.zeros(4, CFG.hidden, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"topk_ids\[0, 1\] is 8"):
            Call(torch.zeros(1, CFG.hidden), torch.tensor([[0, 8]]), torch.ones(1, 2))(traced)

    virtual.run(rank_main, ranks=1)


def test_the_operator_is_as_its_schema_and_its_fake_say() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        parameters = (layer.w1, layer.b1, layer.w2, layer.b2, None)
        given = draw_given_call(CFG, 20, 0)
        torch.library.opcheck(
            custom_op.forward,
            (
                layer._order,
                layer.experts.key,
                *(given.x, given.ids, given.weights, TOKENS),
                *parameters,
                *(layer.gate.weight, layer.gate.selection_bias, None, None),
                *(None,) * 11,
            ),
            {"pairs": CFG.top_k},
        )

    virtual.run(rank_main, ranks=1)


def test_the_key_and_the_order_are_marked_as_pytorch_marks_what_stays_in_its_place() -> None:
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        for tensor in (layer.experts.key, layer._order):
            for name, value in vars(marked).items():
                assert getattr(tensor, name) == value

    assert vars(marked)
    virtual.run(rank_main, ranks=1)


def test_a_branch_of_cond_runs_a_layer_where_nothing_functionalises_it() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world)
        x = torch.randn(5, CFG.hidden)

        def branch(which: Tensor, x: Tensor) -> Tensor:
            chosen: Tensor = torch.cond(which, lambda x: layer(x), lambda x: 2 * x, (x,))
            return chosen

        def by_if(x: Tensor) -> Tensor:
            return layer(x) if x.isfinite().all() else 2 * x

        with torch.no_grad():
            expected, true = layer(x), torch.tensor(True)
            eager = torch.compile(branch, backend="eager", fullgraph=True)
            assert torch.equal(eager(true, x), expected)
            with pytest.raises(BackendCompilerFailed):
                torch.compile(branch, backend="aot_eager", fullgraph=True)(true, x)
            assert torch.equal(torch.compile(by_if, backend="aot_eager")(x), expected)

    virtual.run(rank_main, ranks=1)


def test_a_graph_that_outlives_its_layer_says_so() -> None:
    def rank_main(world: World) -> tuple[Any, ...]:
        layer = WEIGHTS.layer(world)
        x = draw_call(CFG, 4, 0).x
        parameters = (layer.w1, layer.b1, layer.w2, layer.b2, None)
        gate = (layer.gate.weight, layer.gate.selection_bias, None, None)
        others = (None,) * 11
        return (layer._order, layer.experts.key, x, None, None, None, *parameters, *gate, *others)

    [arguments] = virtual.run(rank_main, ranks=1)
    gc.collect()
    with pytest.raises(RuntimeError, match="the layer of this graph is gone"):
        custom_op.forward(*arguments, pairs=CFG.top_k)


@pytest.mark.parametrize(
    ("backend", "way"),
    all_but(
        [("eager", "one function"), ("aot_eager", "compile"), ("inductor", "torch.compile")],
        itertools.product(
            ["eager", "aot_eager", "inductor"], ["torch.compile", "compile", "one function"]
        ),
    ),
)
def test_sixty_one_layers_share_one_graph(backend: str, way: str) -> None:
    """As many as DeepSeek-V3 has; PyTorch gives up at the ninth graph of one function."""
    layers_of_model = 61
    all_weights = [draw_weights(CFG, seed) for seed in range(layers_of_model)]
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> int:
        counter = CompileCounterWithBackend(backend)
        options: dict[str, Any] = {"fullgraph": True, "backend": counter}
        one = torch.compile(lambda layer, x: layer(x), **options)
        for weights in all_weights:
            layer = weights.layer(world)
            if way == "torch.compile":
                y = torch.compile(layer, **options)(call.x)
            elif way == "compile":
                layer.compile(**options)
                y = layer(call.x)
            else:
                y = one(layer, call.x)
            assert_matches(weights, call, y)
        graphs: int = counter.frame_count
        return graphs

    assert virtual.run(rank_main, ranks=1) == [1]


@pytest.mark.parametrize(
    ("backend", "layers"),
    all_but(
        [("aot_eager", 12)],
        [("aot_eager", 12), *((one, 61) for one in ("eager", "aot_eager", "inductor"))],
    ),
)
def test_a_model_of_many_layers_is_one_graph_in_which_each_uses_its_own_weights(
    backend: str, layers: int
) -> None:
    """Of more layers than graphs that torch.compile would make of one function, which are 8."""
    all_weights = [draw_weights(CFG, seed) for seed in range(layers)]
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> int:
        model = torch.nn.ModuleList(weights.layer(world) for weights in all_weights)
        counter = CompileCounterWithBackend(backend)
        program = torch.compile(
            lambda x: [layer(x) for layer in model], fullgraph=True, backend=counter
        )
        for _ in range(2):
            for weights, y in zip(all_weights, program(call.x), strict=True):
                assert_matches(weights, call, y)
        graphs: int = counter.frame_count
        return graphs

    assert virtual.run(rank_main, ranks=1) == [1]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_and_its_copies_run_as_long_as_the_layer_lives(strict: bool) -> None:
    x = draw_call(CFG, 20, 0).x

    def rank_main(world: World) -> Callable[[Tensor], Tensor]:
        layer = WEIGHTS.layer(world)
        program = torch.export.export(layer, (x,), strict=strict)
        stored = io.BytesIO()
        torch.export.save(program, stored)
        stored.seek(0)
        programs = (
            program,
            program.run_decompositions(),
            copy.deepcopy(program),
            torch.export.load(stored),
        )
        for one in programs:
            assert torch.equal(one.module()(x), layer(x))
        return programs[-1].module()

    [outliving] = virtual.run(rank_main, ranks=1)
    gc.collect()
    with pytest.raises(RuntimeError, match="the layer of this graph is gone"):
        outliving(x)


@pytest.mark.parametrize("concrete", [False, True])
def test_symbolic_trace_and_script_say_what_to_use_in_their_place(concrete: bool) -> None:
    rest: dict[str, Any] = dict.fromkeys(("topk_ids", "topk_weights", "tokens", "out"))
    values = {**rest, "pieces": 1, "weigh": False} if concrete else None

    def rank_main(world: World) -> None:
        layer = draw_weights(config()).layer(world)
        with pytest.raises(TypeError, match=r"torch\.export or torch\.compile.*is_leaf_module"):
            torch.fx.symbolic_trace(layer, concrete_args=values)
        with pytest.raises(RuntimeError, match=r"torch\.jit\.script: use torch\.compile"):
            torch.jit.script(layer)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("what", ["a layer", "a model", "a layer that trains", "Experts"])
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_onnx_is_refused_with_what_works_in_its_place(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        call = draw_given_call(CFG, 6, 0)
        module: nn.Module = layer
        if what == "a layer that trains":
            layer.requires_grad_()
        elif what == "a model":
            module = nn.Sequential(nn.Linear(CFG.hidden, CFG.hidden), layer)
        elif what == "Experts":
            module = OwnRouting(Experts(CFG, world), layer, call)
        refused = pytest.raises(Exception, match=r"ONNX.*torch\.export\.exp.*'batched_mm'")
        with refused:
            torch.onnx.export(module, (call.x,), io.BytesIO(), dynamo=False)
        exported = torch.export.export(module, (call.x,)).module()  # what works
        assert torch.equal(exported(call.x), module(call.x))
        monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        for strict in (False, True):  # as torch.onnx does it by default
            with refused:
                torch.export.export(module, (call.x,), strict=strict)

    virtual.run(rank_main, ranks=1)


class OwnRouting(nn.Module):
    """A module whose experts' weights are its own."""

    def __init__(self, experts: Experts, layer: MoELayer, call: Call) -> None:
        super().__init__()
        self.experts = experts
        self.ids, self.weights = call.ids, call.weights
        self.w1, self.w2 = layer.w1, layer.w2
        self.b1, self.b2 = layer.b1, layer.b2

    def forward(self, x: Tensor) -> Tensor:
        own = (self.w1, self.w2, self.b1, self.b2)
        return self.experts(x, self.ids, self.weights, *own)


def test_a_compiled_checkpoint_saves_what_a_layer_returns_or_lies_around_what_is_compiled() -> None:
    def policy(_: object, operator: object, *__: object, **___: object) -> CheckpointPolicy:
        is_a_call = operator == torch.ops.moeos.forward.default
        return CheckpointPolicy.MUST_SAVE if is_a_call else CheckpointPolicy.PREFER_RECOMPUTE

    def rank_main(world: World) -> None:
        layer, linear = WEIGHTS.layer(world), nn.Linear(CFG.hidden, CFG.hidden)
        x = draw_call(CFG, 20, 0).x
        compile_it = functools.partial(torch.compile, backend="aot_eager_decomp_partition")

        def block(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = layer(x)
            return (y * torch.sin(linear(x))).sum()

        def checkpointed(block: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
            return functools.partial(checkpoint, block, use_reentrant=False, **options)

        saving = functools.partial(create_selective_checkpoint_contexts, policy)
        block(x).backward()
        wanted, linear.weight.grad = linear.weight.grad, None
        for works in (
            checkpointed(compile_it(block)),
            compile_it(checkpointed(block, context_fn=saving)),
        ):
            works(x).backward()
            assert torch.equal(linear.weight.grad, wanted)
            linear.weight.grad = None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            compile_it(checkpointed(block))(x).backward()

    virtual.run(rank_main, ranks=1)
