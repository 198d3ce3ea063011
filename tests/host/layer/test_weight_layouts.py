# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights lie as a caller has them, on the twin: `gate_up` and `transposed`.

What is right is computed here, in float64, from weights that lie in the plain way. Whatever the
layout, bits are those of that way, too, and each gradient lies as its parameter does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeos import Experts, MoEConfig, TwinOptions, World
from moeos.config.config import GateUp
from moeos.config.element_formats import dequantize, quantize_matrix
from moeos.engines.base import CallTensors, GradientTensors
from moeos.engines.twin.engine import TwinEngine
from moeos.partition.slicing import slicing_of
from moeos.world import virtual
from tests.layers import config
from tests.nightly import all_but, in_turn
from tests.processes import ROOT

Tensors = dict[str, Tensor]
Routing = Literal["spread", "one expert"]


class Layout(NamedTuple):
    """Two fields of a config."""

    gate_up: GateUp
    transposed: bool

    def __str__(self) -> str:
        return f"{self.gate_up}-transposed" if self.transposed else self.gate_up


PLAIN = Layout("concatenated", False)
LAYOUTS = [
    Layout("concatenated", True),
    Layout("interleaved", False),
    Layout("interleaved", True),
    Layout("separate", False),
    Layout("separate", True),
]
ACTIVATIONS = ["swiglu", "swigluoai", "geglu_tanh", "gelu"]
DTYPES = [torch.float32, torch.bfloat16]
SAVES = ["nothing", "preactivation"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
"""The largest relative Frobenius error of an output, or of a gradient."""
BASE = config(hidden=72, intermediate=40, experts=5, max_tokens=48)
ONE_PROCESSOR = TwinOptions(processors=1)


def may_lie(cfg: MoEConfig, layout: Layout) -> bool:
    """Without a gate there are no two kinds of rows."""
    return cfg.gated or layout.gate_up == "concatenated"


def drawn(cfg: MoEConfig) -> Tensors:
    """The weights of all experts, in the plain way."""
    generator = torch.Generator().manual_seed(cfg.hidden)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(cfg.dtype)

    found = {
        "w1": draw(cfg.experts, cfg.w1_rows, cfg.hidden, size=cfg.hidden**-0.5),
        "w2": draw(cfg.experts, cfg.hidden, cfg.intermediate, size=cfg.intermediate**-0.5),
    }
    if cfg.bias:
        found |= {"b1": draw(cfg.experts, cfg.w1_rows), "b2": draw(cfg.experts, cfg.hidden)}
    return found


def laid(plain: Tensors, layout: Layout, gated: bool = True) -> Tensors:
    """The numbers of `plain` as a caller with that layout has them."""
    found = dict(plain)
    if layout.gate_up == "interleaved":
        for name in {"w1", "b1", "w1_scale"} & found.keys():
            gates, ups = found[name].chunk(2, 1)
            found[name] = torch.stack([gates, ups], 2).flatten(1, 2)
    if layout.gate_up == "separate":
        found["w1"], found["w3"] = found["w1"].chunk(2, 1)
    if layout.transposed:
        found |= {n: found[n].transpose(1, 2) for n in {"w1", "w2", "w3"} & found.keys()}
    as_it_lies = torch.contiguous_format
    return {name: tensor.clone(memory_format=as_it_lies) for name, tensor in found.items()}


def as_plain(found: Tensors, layout: Layout) -> Tensors:
    """The other way round."""
    found = dict(found)
    if layout.transposed:
        found |= {n: found[n].transpose(1, 2) for n in {"w1", "w2", "w3"} & found.keys()}
    if layout.gate_up == "separate":
        found["w1"] = torch.cat([found["w1"], found.pop("w3")], 1)
    if layout.gate_up == "interleaved":
        for name in {"w1", "b1"} & found.keys():
            found[name] = torch.cat([found[name][:, 0::2], found[name][:, 1::2]], 1)
    return found


class Call(NamedTuple):
    """One rank's, and the gradient of its output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    d_out: Tensor


def call_of(cfg: MoEConfig, tokens: int, seed: int, routing: Routing = "spread") -> Call:
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.rand(tokens, cfg.experts, generator=generator).topk(cfg.top_k).indices
    if routing == "one expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = cfg.experts - 1
    return Call(
        torch.randn(tokens, cfg.hidden, generator=generator).to(cfg.dtype),
        ids,
        torch.rand(tokens, cfg.top_k, generator=generator) + 0.1,
        torch.randn(tokens, cfg.hidden, generator=generator).to(cfg.dtype),
    )


def activated(name: str, h: Tensor) -> Tensor:
    if name == "gelu":
        return functional.gelu(h)
    gate, up = h.chunk(2, -1)
    if name == "swiglu":
        return functional.silu(gate) * up
    if name == "geglu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    assert name == "swigluoai"
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def expected_of(cfg: MoEConfig, plain: Tensors, calls: Sequence[Call]) -> list[Tensors]:
    """In float64, what each rank gets of its call, and the weights' gradients of all calls."""
    weights = {name: one.double().requires_grad_() for name, one in plain.items()}
    none = torch.zeros(cfg.experts, 1, dtype=torch.float64)
    found = []
    for call in calls:
        x = call.x.double().requires_grad_()
        used = call.weights.double().requires_grad_()
        y = torch.zeros_like(x)
        for slot, expert in itertools.product(range(cfg.top_k), range(cfg.experts)):
            mine = call.ids[:, slot] == expert
            h = x[mine] @ weights["w1"][expert].T + weights.get("b1", none)[expert]
            out = activated(cfg.activation, h) @ weights["w2"][expert].T
            out = (out + weights.get("b2", none)[expert]) * used[mine, slot, None]
            y = y.index_add(0, mine.nonzero().flatten(), out)
        y.backward(call.d_out.double())
        assert x.grad is not None
        assert used.grad is not None
        found.append({"y": y.detach(), "x": x.grad, "topk_weights": used.grad})
    of_weights = {name: one.grad for name, one in weights.items() if one.grad is not None}
    assert of_weights.keys() == weights.keys()
    return [one | of_weights for one in found]


class How(NamedTuple):
    """How calls are made; what comes out of them does not depend on it."""

    compiled: bool = False
    pieces: int = 1
    main: torch.dtype | None = None
    main_lies: torch.memory_format = torch.preserve_format
    turned: bool = False
    wanted: tuple[str, ...] | None = None
    parallel: str = "expert"
    tensor_ranks: int | None = None


EAGER = How()


def turned(own: Tensors, how: How) -> Tensors:
    """Each matrix with rows and columns exchanged, where calls are made so."""
    matrices = {"w1", "w2", "w3"} if how.turned else set()
    return own | {name: own[name].transpose(1, 2) for name in matrices & own.keys()}


def found_of(
    cfg: MoEConfig, layout: Layout, calls: Sequence[Call], how: How = EAGER
) -> list[Tensors]:
    """By rank, its output and its gradients, those of its weights in the plain way."""
    whole = drawn(cfg)
    cfg = dataclasses.replace(cfg, gate_up=layout.gate_up, transposed=layout.transposed)
    slicing = slicing_of(how.parallel, "replicated", len(calls), how.tensor_ranks)

    def mine(rank: int) -> Tensors:
        own = cfg.experts_of(slicing.holder(rank), slicing.holders(len(calls)))
        found = {name: one[own.start : own.stop] for name, one in whole.items()}
        if slicing.cuts:
            each, first = cfg.intermediate // slicing.slices, slicing.slice_of(rank)
            units = slice(first * each, (first + 1) * each)
            for name in {"w1", "b1"} & found.keys():
                halves = found[name].unflatten(1, (cfg.halves, -1))
                found[name] = halves[:, :, units].flatten(1, 2)
            found["w2"] = found["w2"][..., units]
        return found

    def rank_main(world: World) -> Tensors:
        options = {} if how.parallel == "expert" else {"parallel": how.parallel}
        if how.tensor_ranks is not None:
            options["tensor_ranks"] = how.tensor_ranks  # type: ignore[assignment]
        experts = Experts(cfg, world, **options)  # type: ignore[arg-type]
        own = turned(laid(mine(world.rank), layout), how)
        for name, tensor in own.items():
            tensor.requires_grad_(how.wanted is None or name in how.wanted)
            if how.main is not None:
                tensor.main_grad = torch.ones_like(  # type: ignore[attr-defined]
                    tensor, dtype=how.main, memory_format=how.main_lies
                )
        before = {name: one.detach().clone() for name, one in own.items()}
        call = calls[world.rank]
        x, used = call.x.clone().requires_grad_(), call.weights.clone().requires_grad_()

        def called(x: Tensor, used: Tensor, own: Tensors) -> Tensor:
            return experts(x, call.ids, used, pieces=how.pieces, turned=how.turned, **own)

        run: Callable[..., Tensor] = called
        if how.compiled:
            torch._dynamo.reset()  # which allows one function few graphs
            run = torch.compile(called, fullgraph=True, backend="aot_eager")
        y = run(x, used, own)
        y.backward(call.d_out)
        assert x.grad is not None
        assert used.grad is not None
        with torch.no_grad():
            assert torch.equal(run(x, used, own), y), "who trains gets what others get"
        gradients = {}
        for name, tensor in own.items():
            gradient = tensor.grad if how.main is None else tensor.main_grad  # type: ignore[attr-defined]
            assert torch.equal(tensor, before[name])
            if not tensor.requires_grad:
                assert gradient is None
                continue
            assert gradient.shape == tensor.shape
            if how.main_lies == torch.preserve_format:
                assert gradient.stride() == tensor.stride()
            assert gradient.dtype == (how.main or tensor.dtype)
            gradients[name] = gradient - (0 if how.main is None else 1)
        if how.wanted is None:
            gradients = as_plain(turned(gradients, how), layout)
        return {"y": y.detach(), "x": x.grad, "topk_weights": used.grad, **gradients}

    return virtual.run(rank_main, len(calls), twin=ONE_PROCESSOR)


@functools.cache
def calls_of(cfg: MoEConfig, rows: tuple[int, ...], routing: Routing = "spread") -> list[Call]:
    return [call_of(cfg, tokens, seed, routing) for seed, tokens in enumerate(rows)]


@functools.cache
def plain_of(cfg: MoEConfig, rows: tuple[int, ...], how: How, routing: Routing) -> list[Tensors]:
    return found_of(cfg, PLAIN, calls_of(cfg, rows, routing), how)


@functools.cache
def right_of(cfg: MoEConfig, rows: tuple[int, ...], routing: Routing) -> list[Tensors]:
    return expected_of(cfg, drawn(cfg), calls_of(cfg, rows, routing))


def assert_close(found: Tensor, right: Tensor, dtype: torch.dtype, what: str) -> None:
    error = (found.double() - right).norm() / right.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype], f"{what} is off by {error}"


def check(
    cfg: MoEConfig,
    layout: Layout,
    rows: tuple[int, ...],
    how: How = EAGER,
    routing: Routing = "spread",
) -> None:
    """Bits are those of the plain way, and near what float64 has."""
    found = found_of(cfg, layout, calls_of(cfg, rows, routing), how)
    plain = plain_of(cfg, rows, how._replace(compiled=False), routing)
    right = right_of(cfg, rows, routing)
    for rank, (mine, likewise) in enumerate(zip(found, plain, strict=True)):
        assert mine.keys() == likewise.keys()
        for name, one in mine.items():
            assert torch.equal(one, likewise[name]), f"{name} of rank {rank}"
    for rank, expected in enumerate(right):
        for name in ("y", "x", "topk_weights"):
            assert_close(found[rank][name], expected[name], cfg.dtype, f"{name} of rank {rank}")
    for name in drawn(cfg):
        of_all = torch.cat([mine[name] for mine in found])
        assert_close(of_all, right[0][name], cfg.dtype, name)


def cases() -> list[Any]:
    """All combinations; always each layout with each activation, and all else in turn."""
    others = [DTYPES, SAVES, [True, False], [1, 2]]  # dtype, save, bias, pieces
    every = [*itertools.product(LAYOUTS, ACTIVATIONS, *others)]
    every = [case for case in every if may_lie(config(activation=case[1]), case[0])]
    turns = [*itertools.product(*others)]
    pairs = dict.fromkeys(case[:2] for case in every)
    always = [(*pair, *turns[5 * place % len(turns)]) for place, pair in enumerate(pairs)]
    return all_but(always, every)


@pytest.mark.parametrize(
    ("layout", "activation", "dtype", "save", "bias", "pieces"), cases(), ids=str
)
def test_outputs_and_gradients_are_right_and_those_of_the_plain_way(
    layout: Layout, activation: Any, dtype: torch.dtype, save: Any, bias: bool, pieces: int
) -> None:
    cfg = dataclasses.replace(BASE, activation=activation, dtype=dtype, save=save, bias=bias)
    check(cfg, layout, (48 * pieces - 7, 0, 13), How(pieces=pieces))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("experts", "rows", "routing"),
    [
        pytest.param(5, (31,), "spread", id="a rank alone"),
        pytest.param(5, (20, 17, 9), "one expert", id="one expert takes all"),
        pytest.param(2, (20, 17, 9), "spread", id="a rank without experts"),
    ],
)
def test_it_does_not_matter_who_has_which_experts(
    layout: Layout, experts: int, rows: tuple[int, ...], routing: Routing
) -> None:
    check(dataclasses.replace(BASE, experts=experts, bias=True), layout, rows, routing=routing)


@pytest.mark.parametrize(("layout", "dtype"), in_turn(LAYOUTS, DTYPES), ids=str)
def test_bits_are_those_of_the_plain_way_where_matrices_have_several_tiles(
    layout: Layout, dtype: torch.dtype
) -> None:
    """Up rows begin within a tile of columns, and within what a product adds up at once."""
    cfg = dataclasses.replace(BASE, hidden=328, intermediate=200, experts=2, bias=True, dtype=dtype)
    check(cfg, layout, (48,))


@pytest.mark.parametrize(
    ("layout", "save", "dtype"), in_turn(LAYOUTS, SAVES[::-1], DTYPES), ids=str
)
def test_compiled_calls_are_those_of_the_plain_way(
    layout: Layout, save: Any, dtype: torch.dtype
) -> None:
    cfg = dataclasses.replace(BASE, save=save, dtype=dtype, bias=True)
    check(cfg, layout, (20,), How(compiled=True))


OF_MAIN = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2]
"""The dtype of a layer, and that of a main_grad."""


@pytest.mark.parametrize(
    ("layout", "dtypes", "compiled"), in_turn(LAYOUTS, OF_MAIN, [False, True]), ids=str
)
def test_gradients_are_added_to_a_main_grad_that_lies_as_its_parameter(
    layout: Layout, dtypes: tuple[torch.dtype, torch.dtype], compiled: bool
) -> None:
    dtype, of_main = dtypes
    cfg = dataclasses.replace(BASE, dtype=dtype, bias=True)
    calls, how = calls_of(cfg, (20,)), How(main=of_main, compiled=compiled)
    [found], [plain] = found_of(cfg, layout, calls, how), found_of(cfg, PLAIN, calls, how)
    [right] = right_of(cfg, (20,), "spread")
    for name in drawn(cfg):
        assert torch.equal(found[name], plain[name])
        if of_main == torch.float32:  # else what is added to 1 is rounded
            assert_close(found[name], right[name], torch.bfloat16, name)


@pytest.mark.parametrize(
    ("main_lies", "compiled", "layout", "dtypes"),
    in_turn(
        [torch.preserve_format, torch.contiguous_format],
        [False, True],
        [PLAIN, *LAYOUTS[:4]],
        OF_MAIN,
    ),
    ids=str,
)
def test_a_parameter_that_lies_turned_has_its_gradient_in_main_grad(
    main_lies: torch.memory_format,
    compiled: bool,
    layout: Layout,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """Whether main_grad lies as the parameter does or is contiguous."""
    dtype, of_main = dtypes
    cfg = dataclasses.replace(BASE, dtype=dtype, bias=True)
    how = How(main=of_main, main_lies=main_lies, turned=True, compiled=compiled)
    calls = calls_of(cfg, (20,))
    [found], [plain] = found_of(cfg, layout, calls, how), plain_of(cfg, (20,), EAGER, "spread")
    [as_declared] = found_of(cfg, PLAIN, calls, How(main=of_main))
    [right] = right_of(cfg, (20,), "spread")
    assert torch.equal(found["y"], plain["y"])
    for name in drawn(cfg):
        if of_main == torch.float32:
            assert_close(found[name], right[name], dtype, name)
        else:
            # main_grad begins at 1. The gradient is rounded to main_grad's dtype, then added, and
            # each sum is rounded: three times half a unit in the last place of 8 bits.
            rounded = 2**-8 * (2 + 3 * right[name].abs())
            assert ((found[name] - as_declared[name]).abs() <= rounded).all(), name


@pytest.mark.parametrize("layout", [PLAIN, *LAYOUTS], ids=str)
def test_a_turned_parameter_without_main_grad_has_a_gradient_that_lies_as_it_does(
    layout: Layout,
) -> None:
    check(BASE, layout, (20, 17), How(turned=True))


def test_the_example_of_the_page_computes_what_it_says() -> None:
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    code = page.split("## Weights as they lie")[1].split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(compile(code, "docs/embedding.md", "exec"), found)
    x, gate, up, down = (found[name].double() for name in ("x", "gate", "up", "down"))
    right = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(found["ids"], found["weights"], strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            hidden = functional.silu(x[token] @ gate[expert]) * (x[token] @ up[expert])
            right[token] += weight.double() * (hidden @ down[expert])
    assert_close(found["y"], right, torch.float32, "y")


def test_a_turned_parameter_tells_megatron_that_its_gradient_was_added() -> None:
    def rank_main(world: World) -> None:
        own = {name: one.mT.contiguous().mT for name, one in drawn(BASE).items()}
        for one in own.values():
            one.requires_grad_()
            one.main_grad = torch.zeros_like(one)  # type: ignore[attr-defined]
            one.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            one.zero_out_wgrad = True  # type: ignore[attr-defined]
        call = call_of(BASE, 20, 0)
        lying = {name: one.mT for name, one in own.items()}
        assert all(one.is_contiguous() for one in lying.values())
        experts = Experts(dataclasses.replace(BASE, transposed=True), world)
        y = experts(call.x, call.ids, call.weights, **own, turned=True)
        returned = torch.autograd.grad(y, [*own.values()], call.d_out, retain_graph=True)
        assert not any(one.main_grad.any() for one in own.values())  # type: ignore[attr-defined]
        y.backward(call.d_out)
        for one, gradient in zip(own.values(), returned, strict=True):
            assert torch.equal(one.main_grad, gradient)  # type: ignore[attr-defined]
            assert one.grad_added_to_main_grad is True  # type: ignore[attr-defined]
            assert one.grad is not None
            assert not one.grad.any()
            assert one.grad.stride() == one.stride()

    virtual.run(rank_main, 1, twin=ONE_PROCESSOR)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wanted", [("w1",), ("w3",), ("w2",), ("b1",)], ids=str)
def test_gate_rows_alone_may_want_a_gradient_or_up_rows(
    transposed: bool, wanted: tuple[str, ...]
) -> None:
    layout, cfg = Layout("separate", transposed), dataclasses.replace(BASE, bias=True)
    calls = calls_of(cfg, (20,))
    [found] = found_of(cfg, layout, calls, How(wanted=wanted))
    [plain] = plain_of(cfg, (20,), EAGER, "spread")
    of_parameters = {name: plain[name] for name in drawn(cfg)}
    [name] = wanted
    assert torch.equal(found[name], laid(of_parameters, layout)[name])
    assert found.keys() & {"w1", "w2", "w3", "b1", "b2"} == {name}
    assert torch.equal(found["x"], plain["x"])


@pytest.mark.parametrize(("layout", "dtype"), in_turn([PLAIN, *LAYOUTS], DTYPES), ids=str)
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        pytest.param(2, How(parallel="tensor"), id="tensor"),
        pytest.param(4, How(parallel="tensor", tensor_ranks=2), id="tensor-2-of-4"),
        pytest.param(2, How(parallel="sharded_tokens"), id="sharded_tokens"),
    ],
)
def test_slices_of_experts_lie_as_experts_do(
    layout: Layout, dtype: torch.dtype, ranks: int, how: How
) -> None:
    """A slice has the gate rows and the up rows of some units: interleaved, some of the pairs."""
    cfg = dataclasses.replace(BASE, intermediate=48, experts=4, bias=True, dtype=dtype)
    alike = how.parallel == "tensor"
    groups = ranks // (how.tensor_ranks or ranks)
    distinct = calls_of(cfg, (21, 12)[:groups] if alike else (21, 12))
    calls = [distinct[rank * groups // ranks] for rank in range(ranks)] if alike else distinct
    found, plain = found_of(cfg, layout, calls, how), found_of(cfg, PLAIN, calls, how)
    for mine, likewise in zip(found, plain, strict=True):
        assert mine.keys() == likewise.keys()
        assert all(torch.equal(one, likewise[name]) for name, one in mine.items())
    right = expected_of(cfg, drawn(cfg), distinct)
    for rank, mine in enumerate(found):
        expected = right[rank * groups // ranks if alike else rank]
        for name in ("y", "x"):
            assert_close(mine[name], expected[name], dtype, f"{name} of rank {rank}")
    slices = how.tensor_ranks or ranks
    for name in ("w1", "w2"):
        dim, halves = (1, 2) if name == "w1" else (2, 1)
        of_groups = []
        for first in range(0, ranks, slices):
            parts = [found[first + n][name].unflatten(dim, (halves, -1)) for n in range(slices)]
            of_groups.append(torch.cat(parts, dim + 1).flatten(dim, dim + 1))
        assert_close(torch.cat(of_groups), right[0][name], dtype, name)


CODED = ["mxfp4", "nvfp4", "int4_group32", "fp8_channel", "fp8_tensor"]


@pytest.mark.parametrize("weight_format", CODED)
@pytest.mark.parametrize(
    ("activation_format", "dtype", "ranks"),
    [(None, torch.float32, 3), (None, torch.bfloat16, 1), ("fp8_group128", torch.bfloat16, 3)],
    ids=str,
)
def test_interleaved_codes_are_read_where_they_lie(
    weight_format: Any, activation_format: Any, dtype: torch.dtype, ranks: int
) -> None:
    odd = activation_format is None and "fp8" in weight_format
    cfg = dataclasses.replace(
        BASE,
        hidden=80 if odd else 128,
        intermediate=48 if odd else 64,
        dtype=dtype,
        bias=True,
        weight_format=weight_format,
        activation_format=activation_format,
    )
    numbers = drawn(dataclasses.replace(cfg, weight_format=None, activation_format=None))
    whole, means = dict(numbers), dict(numbers)
    for name, halves in (("w1", 2), ("w2", 1)):
        of_form = quantize_matrix(numbers[name], weight_format, halves)
        whole |= {
            f"{name}{end}": one
            for end, one in zip(("", "_scale", "_scale_2"), of_form, strict=True)
            if one is not None
        }
        means[name] = dequantize(*of_form, weight_format, halves)
    calls = calls_of(cfg, (33, 0, 14)[:ranks])

    def outputs(gate_up: GateUp) -> list[Tensor]:
        its = dataclasses.replace(cfg, gate_up=gate_up)

        def rank_main(world: World) -> Tensor:
            own = its.experts_of(world.rank, world.size)
            mine = {name: one[own.start : own.stop] for name, one in whole.items()}
            # Scales of whole matrices are gate, up in any case.
            apart = {"w1_scale": mine.pop("w1_scale")} if weight_format == "fp8_tensor" else {}
            mine = laid(mine, Layout(gate_up, False)) | apart
            call = calls[world.rank]
            return Experts(its, world)(call.x, call.ids, call.weights, **mine)

        return virtual.run(rank_main, ranks, twin=ONE_PROCESSOR)

    found, plain = outputs("interleaved"), outputs("concatenated")
    assert all(map(torch.equal, found, plain))
    for y, expected in zip(found, expected_of(cfg, means, calls), strict=True):
        error = (y.double() - expected["y"]).norm() / expected["y"].norm().clamp(min=1e-30)
        assert error <= (TOLERANCE[dtype] if activation_format is None else 0.05)


def test_an_engine_gets_the_callers_tensors_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CallTensors | GradientTensors] = []
    record, backward = TwinEngine.record, TwinEngine.backward

    def recorded(engine: TwinEngine, tensors: CallTensors) -> Any:
        seen.append(tensors)
        return record(engine, tensors)

    def derived(engine: TwinEngine, tensors: GradientTensors) -> None:
        seen.append(tensors)
        backward(engine, tensors)

    monkeypatch.setattr(TwinEngine, "record", recorded)
    monkeypatch.setattr(TwinEngine, "backward", derived)
    for layout in LAYOUTS:
        cfg = dataclasses.replace(BASE, gate_up=layout.gate_up, transposed=layout.transposed)
        own = {name: one.requires_grad_() for name, one in laid(drawn(BASE), layout).items()}

        def rank_main(world: World, cfg: MoEConfig = cfg, own: Tensors = own) -> None:
            call = call_of(cfg, 9, 0)
            Experts(cfg, world)(call.x, call.ids, call.weights, **own).sum().backward()

        virtual.run(rank_main, 1)
        for tensors in seen:
            for name, tensor in own.items():
                given = getattr(tensors, name)
                assert (given.data_ptr(), given.stride()) == (tensor.data_ptr(), tensor.stride())
        assert len(seen) == 2
        seen.clear()
