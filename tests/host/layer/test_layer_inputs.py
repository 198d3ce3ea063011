# SPDX-License-Identifier: Apache-2.0
"""Bad arguments raise before anything is sent, say what is allowed, and leave the layer usable."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize, prune

from moeos import ConfigMismatch, Experts, MoELayer, NumericalError, PeerTimeout, World
from moeos.config.config import Routing, Scoring
from moeos.engines import values
from moeos.engines.twin.engine import sizes_of
from moeos.layer.layer import Gate
from moeos.world import virtual
from tests.layers import Call, assert_matches, config, draw_call, draw_given_call, draw_weights
from tests.processes import ForkedRanks

CFG = config(max_tokens=32)
HIDDEN, EXPERTS, TOP_K = CFG.hidden, CFG.experts, CFG.top_k
X = torch.zeros(4, HIDDEN)
WIDE = torch.zeros(4, 2 * HIDDEN)
IDS = torch.tensor([[0, 1], [2, 3], [-1, -1], [7, -1]])
FACTORS = torch.ones(4, TOP_K)
PACKED = torch.zeros(4, TOP_K, dtype=getattr(torch, "float4_e2m1fn_x2", torch.int8))


@dataclasses.dataclass(frozen=True)
class Bad:
    """Arguments, the error that they raise, and what its message must say."""

    arguments: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


def changed_ids(row: int, slot: int, value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[row, slot] = value
    return ids


def count_of(tokens: object) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def given(ids: object = IDS, weights: object = FACTORS, x: torch.Tensor = X) -> dict[str, Any]:
    return {"x": x, "topk_ids": ids, "topk_weights": weights}


BAD = {
    "x is a list": Bad({"x": [[0.0]]}, TypeError, ("x", "list", "torch.Tensor")),
    "x has one dimension": Bad(
        {"x": torch.zeros(HIDDEN)}, ValueError, ("x", f"[{HIDDEN}]", f"[..., {HIDDEN}]", "2-D")
    ),
    "x is too narrow": Bad(
        {"x": torch.zeros(4, HIDDEN - 8)},
        ValueError,
        ("x", f"[4, {HIDDEN - 8}]", f"[..., {HIDDEN}]"),
    ),
    "x of three dimensions is too narrow": Bad(
        {"x": torch.zeros(1, 4, 8)}, ValueError, ("x", "[1, 4, 8]", f"[..., {HIDDEN}]")
    ),
    "x of another dtype": Bad({"x": X.bfloat16()}, TypeError, ("x", "bfloat16", "float32")),
    "x of an integer dtype": Bad({"x": X.int()}, TypeError, ("x", "int32", "float32")),
    "x of a complex dtype": Bad(
        {"x": X.to(torch.complex64)}, TypeError, ("x", "complex64", "float32")
    ),
    "x on another device": Bad({"x": X.to("meta")}, ValueError, ("x", "meta", "cpu")),
    "x is sparse": Bad({"x": X.to_sparse()}, ValueError, ("x", "sparse_coo", "x.to_dense()")),
    "too many tokens": Bad(
        {"x": torch.zeros(33, HIDDEN)}, ValueError, ("x", "33", "max_tokens", "32", "pieces=2")
    ),
    "too many tokens in all dimensions": Bad(
        {"x": torch.zeros(3, 11, HIDDEN)}, ValueError, ("x", "33", "max_tokens", "32")
    ),
    "too many tokens for the pieces": Bad(
        {"x": torch.zeros(65, HIDDEN), "pieces": 2}, ValueError, ("x", "65", "2 * 32", "pieces=3")
    ),
    "no pieces": Bad({"x": X, "pieces": 0}, ValueError, ("pieces is 0", "1 to")),
    "pieces are no integer": Bad({"x": X, "pieces": 2.0}, TypeError, ("pieces is 2.0", "integer")),
    "one piece that is no integer": Bad(
        {"x": X, "pieces": 1.0}, TypeError, ("pieces is 1.0", "integer")
    ),
    "weigh is no bool": Bad(
        given(weights=None) | {"weigh": torch.ones(2)}, TypeError, ("weigh is a Tensor", "True")
    ),
    "out is a list": Bad({"x": X, "out": []}, TypeError, ("out", "list", "torch.Tensor")),
    "out of another shape": Bad(
        {"x": X, "out": torch.zeros(1, 4, HIDDEN)}, ValueError, ("out", f"[1, 4, {HIDDEN}]", "x's")
    ),
    "out of another dtype": Bad(
        {"x": X, "out": X.double()}, TypeError, ("out", "float64", "float32")
    ),
    "out on another device": Bad({"x": X, "out": X.to("meta")}, ValueError, ("out", "meta", "cpu")),
    "out has gaps": Bad(
        {"x": X, "out": torch.zeros(4, 2 * HIDDEN)[:, :HIDDEN]},
        ValueError,
        ("out", "strides", "contiguous"),
    ),
    "out is x": Bad({"x": X, "out": X}, ValueError, ("out shares memory with x",)),
    "out lies in x": Bad(
        {"x": WIDE[:, :HIDDEN], "out": WIDE.view(8, HIDDEN)[3:7]},
        ValueError,
        ("out shares memory with x",),
    ),
    "ids alone": Bad({"x": X, "topk_ids": IDS}, ValueError, ("topk_weights", "None", "weigh=True")),
    "weights alone": Bad(
        {"x": X, "topk_weights": FACTORS}, ValueError, ("topk_ids", "None", "together")
    ),
    "ids are a list": Bad(given(IDS.tolist()), TypeError, ("topk_ids", "list", "torch.Tensor")),
    "weights are a list": Bad(
        given(weights=FACTORS.tolist()), TypeError, ("topk_weights", "list", "torch.Tensor")
    ),
    "ids of another shape": Bad(
        given(IDS[:, :1]), ValueError, ("topk_ids", "[4, 1]", f"[4, {TOP_K}]")
    ),
    "ids of fewer tokens": Bad(given(IDS[:3]), ValueError, ("topk_ids", "[3, 2]", "[4, 2]")),
    "ids in one dimension": Bad(given(IDS.flatten()), ValueError, ("topk_ids", "[8]", "[4, 2]")),
    "weights of another shape": Bad(
        given(weights=torch.ones(4, 3)), ValueError, ("topk_weights", "[4, 3]", "[4, 2]")
    ),
    "ids are not integers": Bad(given(IDS.float()), TypeError, ("topk_ids", "float32", "int64")),
    "ids of a short integer type": Bad(
        given(IDS.to(torch.uint8)), TypeError, ("topk_ids", "uint8", "int32")
    ),
    "weights are integers": Bad(
        given(weights=FACTORS.int()), TypeError, ("topk_weights", "int32", "floating")
    ),
    "weights of several numbers an element": Bad(
        given(weights=PACKED), TypeError, ("topk_weights", str(PACKED.dtype), "floating")
    ),
    "ids on another device": Bad(given(IDS.to("meta")), ValueError, ("topk_ids", "meta", "cpu")),
    "weights on another device": Bad(
        given(weights=FACTORS.to("meta")), ValueError, ("topk_weights", "meta", "cpu")
    ),
    "an id that is no expert": Bad(
        given(changed_ids(1, 1, EXPERTS)), ValueError, ("topk_ids[1, 1]", "is 8", "0 to 7")
    ),
    "an id beyond 32 bits": Bad(
        given(changed_ids(1, 1, 1 << 32)), ValueError, ("topk_ids[1, 1]", str(1 << 32), "0 to 7")
    ),
    "an id below -1": Bad(
        given(changed_ids(3, 0, -2)), ValueError, ("topk_ids[3, 0]", "is -2", "0 to 7")
    ),
    "an id repeated in a row": Bad(
        given(changed_ids(1, 1, 2)), ValueError, ("topk_ids[1]", "[2, 2]", "only once")
    ),
    "tokens is a number": Bad({"x": X, "tokens": 3}, TypeError, ("tokens", "int", "torch.Tensor")),
    "tokens of two elements": Bad(
        {"x": X, "tokens": count_of([1, 2])}, ValueError, ("tokens", "[2]", "[1]")
    ),
    "tokens of two dimensions": Bad(
        {"x": X, "tokens": count_of([[3]])}, ValueError, ("tokens", "[1, 1]", "[1]")
    ),
    "tokens of a batch": Bad(
        {"x": X, "tokens": count_of([[0] * 8] * 5)},
        ValueError,
        ("tokens", "[5, 8]", "[1]", "how many of x's rows"),
    ),
    "tokens of another dtype": Bad(
        {"x": X, "tokens": torch.tensor([3])}, TypeError, ("tokens", "int64", "int32")
    ),
    "tokens on another device": Bad(
        {"x": X, "tokens": count_of([3]).to("meta")}, ValueError, ("tokens", "meta", "cpu")
    ),
    "a negative number of tokens": Bad(
        {"x": X, "tokens": count_of(-1)}, ValueError, ("tokens is -1", "4 rows", "0 to 4")
    ),
    "more tokens than rows": Bad(
        {"x": X, "tokens": count_of([5])}, ValueError, ("tokens is 5", "4 rows", "0 to 4")
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_and_send_nothing(name: str) -> None:
    """The peers wait in their call meanwhile, and it ends well once this rank makes it rightly."""
    bad = BAD[name]
    weights = draw_weights(CFG)
    calls = [draw_call(CFG, 20 + rank, rank) for rank in range(2)]

    def rank_main(world: World) -> tuple[str, torch.Tensor]:
        layer = weights.layer(world)
        message = ""
        if world.rank == 1:
            with pytest.raises(bad.error) as raised:
                layer(**bad.arguments)
            message = str(raised.value)
        return message, calls[world.rank](layer)

    results = virtual.run(rank_main, ranks=2, deadline=10.0)
    for rank, (_, y) in enumerate(results):
        assert_matches(weights, calls[rank], y, f"rank {rank}")
    for word in bad.words:
        assert word in results[1][0], results[1][0]


def test_every_bad_argument_leaves_no_trace_of_the_one_before() -> None:
    weights = draw_weights(CFG)
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> torch.Tensor:
        layer = weights.layer(world)
        for bad in BAD.values():
            with pytest.raises(bad.error):
                layer(**bad.arguments)
        return call(layer)

    assert_matches(weights, call, virtual.run(rank_main, ranks=1)[0])


def test_right_arguments_at_the_limits_are_taken() -> None:
    weights = draw_weights(CFG)
    calls = [
        draw_call(CFG, 32, 0),
        Call(torch.empty(0, HIDDEN)),
        Call(torch.empty(0, HIDDEN), IDS[:0], FACTORS[:0]),
        Call(draw_call(CFG, 40, 0).x[8:]),
        Call(draw_call(CFG, 4, 0).x, IDS, FACTORS),
        Call(draw_call(CFG, 4, 0).x, IDS.fill_diagonal_(-1), FACTORS),
    ]

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls]

    for call, y in zip(calls, virtual.run(rank_main, ranks=1)[0], strict=True):
        assert_matches(weights, call, y)


# --- what the caller does to the layer ----------------------------------------------------------


Change = Callable[[MoELayer], object]

CHANGED_LAYERS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "dtype": (
        lambda layer: setattr(layer.w1, "data", layer.w1.bfloat16()),
        ("w1", "bfloat16", "float32"),
    ),
    "dtype of the same memory": (
        lambda layer: setattr(layer.w1, "data", layer.w1.data.view(torch.int32)),
        ("w1", "int32", "float32"),
    ),
    "another parameter": (
        lambda layer: setattr(layer, "w2", torch.nn.Parameter(torch.zeros(1), False)),
        ("w2", "[1]"),
    ),
    "set_": (lambda layer: layer.w1.set_(torch.zeros(7)), ("w1", "[7]")),
    "strides in place": (lambda layer: layer.w2.transpose_(1, 2), ("w2", "[8, 96, 64]")),
    "device": (lambda layer: layer.to("meta"), ("meta", "cpu")),
    "strides": (
        lambda layer: setattr(
            layer.w2, "data", layer.w2.transpose(1, 2).contiguous().transpose(1, 2)
        ),
        ("w2", "contiguous"),
    ),
    "shape": (
        lambda layer: setattr(layer.w1, "data", torch.zeros(1, 8, HIDDEN)),
        ("w1", f"[1, 8, {HIDDEN}]", f"{2 * CFG.intermediate}"),
    ),
    "gate of another shape": (
        lambda layer: setattr(layer.gate.weight, "data", torch.zeros(EXPERTS - 1, HIDDEN)),
        ("gate.weight", f"[{EXPERTS - 1}, {HIDDEN}]", f"[{EXPERTS}, {HIDDEN}]"),
    ),
    "selection bias of another dtype": (
        lambda layer: setattr(layer.gate, "selection_bias", torch.zeros(EXPERTS).bfloat16()),
        ("selection_bias", "bfloat16", "float32"),
    ),
    "selection bias of another shape": (
        lambda layer: setattr(layer.gate, "selection_bias", torch.zeros(1)),
        ("selection_bias", "[1]", f"[{EXPERTS}]"),
    ),
    "selection bias on another device": (
        lambda layer: setattr(layer.gate, "selection_bias", torch.zeros(EXPERTS, device="meta")),
        ("selection_bias", "meta", "cpu"),
    ),
}


ADDED: dict[str, Change] = {
    "b1": lambda layer: setattr(layer, "b1", parameter(EXPERTS, CFG.w1_rows)),
    "b2": lambda layer: setattr(layer, "b2", parameter(EXPERTS, HIDDEN)),
    "gate.bias": lambda layer: setattr(layer.gate, "bias", parameter(EXPERTS)),
    "gate.selection_bias": lambda layer: setattr(layer.gate, "selection_bias", torch.ones(EXPERTS)),
    "gate.expert_scale": lambda layer: setattr(layer.gate, "expert_scale", torch.ones(EXPERTS)),
    "shared_w1": lambda layer: setattr(layer, "shared_w1", parameter(1, CFG.w1_rows, HIDDEN)),
    "shared_w2": lambda layer: setattr(layer, "shared_w2", parameter(1, HIDDEN, HIDDEN)),
    "shared_gate": lambda layer: setattr(layer, "shared_gate", parameter(HIDDEN)),
    "w1_scale": lambda layer: setattr(layer, "w1_scale", parameter(EXPERTS, CFG.w1_rows)),
    "w2_scale_2": lambda layer: setattr(layer, "w2_scale_2", parameter(EXPERTS, 1)),
}


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape), requires_grad=False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ADDED)
def test_a_tensor_for_which_the_config_has_no_place_is_refused_by_name(
    name: str, compiled: bool
) -> None:
    weights = draw_weights(CFG)
    call = draw_call(CFG, 20, 0)
    fields = {"b1": "bias", "b2": "bias", "gate.bias": "router_bias", "shared_gate": "shared_gate"}
    needed = f"{fields.get(name, name[len('gate.') :])}=True"
    if name in ("shared_w1", "shared_w2"):
        needed = "shared_experts=1, shared_intermediate=..."
    if name.startswith(("w1_", "w2_")):
        needed = "weight_format='nvfp4'" if name.endswith("_2") else "weight_format=..."

    def rank_main(world: World) -> torch.Tensor:
        layer = weights.layer(world)
        layer(X)  # which finds nothing wrong
        ADDED[name](layer)
        with pytest.raises(ValueError, match=rf"^{name} is given, .*MoEConfig\({needed}\)"):
            (torch.compile(layer, backend="eager") if compiled else layer)(X)
        module, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(module), attribute, None)
        return call(layer)

    assert_matches(weights, call, virtual.run(rank_main, ranks=1)[0])


@pytest.mark.parametrize("field", ["router_bias", "selection_bias", "expert_scale"])
def test_a_tensor_of_the_router_that_lies_beside_it_is_refused(field: str) -> None:
    def rank_main(world: World) -> None:
        layer = draw_weights(CFG).layer(world)
        place = field.removeprefix("router_")
        with pytest.raises(ValueError, match=rf"MoEConfig\({field}=True\), and set .*gate.{place}"):
            setattr(layer, field, parameter(EXPERTS))
        with pytest.raises(ValueError, match=f"gate.{place}"):
            layer.register_buffer(field, torch.ones(EXPERTS))

    virtual.run(rank_main, ranks=1)


def test_what_a_layer_was_made_with_cannot_be_set() -> None:
    weights = draw_weights(CFG)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        experts = Experts(CFG, world)
        other = dataclasses.replace(CFG, top_k=1)
        for name, value in (("cfg", other), ("cfg", CFG), ("world", world)):
            with pytest.raises(
                AttributeError, match=rf"^{name} of a MoELayer cannot be set, .*: mak"
            ):
                setattr(layer, name, value)
            with pytest.raises(
                AttributeError, match=rf"^{name} of Experts cannot be set, .*: make"
            ):
                setattr(experts, name, value)
        assert layer.cfg is experts.cfg is CFG
        back = pickle.loads(pickle.dumps(layer)).bind(world)
        copied = copy.deepcopy(layer)
        call = draw_call(CFG, 9, 0)
        for one in (layer, back, copied):
            assert_matches(weights, call, call(one))

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize(
    "change", [lambda layer: delattr(layer, "gate"), lambda layer: setattr(layer, "gate", None)]
)
def test_a_layer_whose_gate_is_taken_away_says_so(change: Change) -> None:
    def rank_main(world: World) -> None:
        layer = draw_weights(CFG).layer(world)
        change(layer)
        with pytest.raises(ValueError, match=r"gate is missing.*set layer\.gate"):
            layer(X)

    virtual.run(rank_main, ranks=1)


class Doubled(torch.nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def unregister(module: torch.nn.Module, name: str) -> None:
    """Puts a tensor where no call looks for it."""
    value = getattr(module, name).detach().clone()
    delattr(module, name)
    setattr(module, name, value)


OTHERWISE: dict[str, tuple[Callable[[torch.nn.Module, str], object], str]] = {
    "parametrised": (
        lambda module, name: parametrize.register_parametrization(module, name, Doubled()),
        r"is parametrised.*remove_parametrizations\({where}, '{tensor}'\)",
    ),
    "pruned": (
        lambda module, name: prune.l1_unstructured(module, name, 0.5),
        r"is pruned.*prune\.remove\({where}, '{tensor}'\)",
    ),
    "normed": (
        torch.nn.utils.spectral_norm,
        r"is what torch.nn.utils.spectral_norm makes.*remove_spectral_norm\({where}, '{tensor}'\)",
    ),
    "weighed": (
        torch.nn.utils.weight_norm,
        r"is what torch.nn.utils.weight_norm makes.*remove_weight_norm\({where}, '{tensor}'\)",
    ),
    "plain": (unregister, r"is a Tensor and no \w+ of its module.*{where}\.\w*.*{tensor}"),
}


TENSORS = ("w1", "w2", "b1", "b2", "shared_w1", "gate.weight", "gate.bias", "gate.selection_bias")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in TENSORS
        for how in OTHERWISE
        if name != "gate.selection_bias" or how in ("parametrised", "plain")  # others: parameters
        if how not in ("normed", "weighed") or name in ("w1", "shared_w1", "gate.weight")
    ],
)
def test_a_tensor_that_is_there_but_no_parameter_is_told_so_with_a_remedy(
    name: str, how: str
) -> None:
    change, words = OTHERWISE[how]
    cfg = dataclasses.replace(
        CFG,
        bias=True,
        router_bias=True,
        selection_bias=True,
        shared_experts=1,
        shared_intermediate=CFG.intermediate,
    )
    inner, _, tensor = name.rpartition(".")

    def rank_main(world: World) -> None:
        layer = MoELayer(cfg, world)
        layer(X)
        module = layer.get_submodule(inner)
        change(module, tensor)
        where = f"layer.{inner}" if inner else "layer"
        said = words.format(where=where, tensor=tensor)
        with pytest.raises(TypeError, match=rf"^{name} {said}"):
            layer(X)
        value = getattr(module, tensor).detach().clone()
        if how == "parametrised":
            parametrize.remove_parametrizations(module, tensor)
        elif how == "pruned":
            prune.remove(module, tensor)
        elif how == "normed":
            torch.nn.utils.remove_spectral_norm(module, tensor)
        elif how == "weighed":
            torch.nn.utils.remove_weight_norm(module, tensor)
        else:
            delattr(module, tensor)
            if tensor == "selection_bias":
                module.register_buffer(tensor, value)
            else:
                setattr(module, tensor, torch.nn.Parameter(value, requires_grad=False))
        with torch.no_grad():
            layer(X)

    virtual.run(rank_main, ranks=1)


class LowRank(torch.nn.Module):
    """An adapter, as PEFT lays it over a parameter [X, R, C] while it is active."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        drawn = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(0.1 * torch.randn(experts, 2, columns, generator=drawn))
        self.b = torch.nn.Parameter(0.1 * torch.randn(experts, rows, 2, generator=drawn))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def test_an_active_adapter_is_refused_with_remedies_that_work() -> None:
    weights = draw_weights(config())
    call = draw_given_call(weights.cfg, 6, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        adapter = LowRank(layer.w1)
        parametrize.register_parametrization(layer, "w1", adapter)
        with pytest.raises(TypeError, match=r"merge_and_unload\(\).*pass layer\.w1 to moeos\.Exp"):
            call(layer)
        experts = Experts(weights.cfg, world)
        y = experts(call.x, call.ids, call.weights, layer.w1, layer.w2)
        y.sum().backward()

        # Apart: the same expert by expert, in float64.
        a, b = (one.detach().double().requires_grad_() for one in (adapter.a, adapter.b))
        w1 = weights.w1.double() + b @ a
        x, w2 = call.x.double(), weights.w2.double()
        wanted = torch.zeros_like(x)
        assert call.ids is not None
        assert call.weights is not None
        for slot in range(weights.cfg.top_k):
            own = call.ids[:, slot].long()
            gate, up = torch.einsum("sh,srh->sr", x, w1[own]).chunk(2, dim=1)
            made = torch.einsum("si,shi->sh", torch.nn.functional.silu(gate) * up, w2[own])
            wanted = wanted + made * call.weights[:, slot : slot + 1].double()
        wanted.sum().backward()
        torch.testing.assert_close(y.detach().double(), wanted.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in ((adapter.a, a), (adapter.b, b)):
            assert ours.grad is not None
            assert bool(ours.grad.any())
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
        parametrize.remove_parametrizations(layer, "w1")  # the adapter is merged
        with torch.no_grad():
            torch.testing.assert_close(call(layer), y.detach(), rtol=1e-5, atol=1e-6)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("routing", ["layer", "caller"])
def test_a_gate_that_is_another_module_is_refused_by_its_class(routing: Routing) -> None:
    class Router(torch.nn.Linear):
        pass

    class Own(Gate):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    cfg = dataclasses.replace(CFG, routing=routing)

    def rank_main(world: World) -> None:
        layer = MoELayer(cfg, world)
        chosen = torch.arange(cfg.top_k).expand(len(X), -1), torch.ones(len(X), cfg.top_k)
        before = layer.gate
        for other in (Router(cfg.hidden, cfg.experts), Own(cfg)):
            layer.gate = other  # type: ignore[assignment]
            with pytest.raises(TypeError, match=rf"gate is a {type(other).__name__}.*topk_ids"):
                layer(X, *chosen)
        layer.gate = before
        layer(X, *chosen)

    virtual.run(rank_main, ranks=1)


def test_a_hook_of_the_gate_never_runs_and_one_of_the_layer_does() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world)
        ran = []
        layer.gate.register_forward_hook(lambda *_: ran.append("gate"))
        layer.register_forward_hook(lambda *_: ran.append("layer"))
        layer(X)
        assert ran == ["layer"]

    virtual.run(rank_main, ranks=1)


def test_a_gate_whose_class_a_tool_extends_still_routes() -> None:
    weights = draw_weights(CFG)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        expected = layer(X)
        layer.gate.__class__ = type("ExtendedGate", (Gate,), {})
        assert torch.equal(layer(X), expected)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("name", CHANGED_LAYERS)
def test_changed_parameters_raise_instead_of_being_read_as_what_they_were(name: str) -> None:
    """In a process of its own: what is wrong here is an address that the twin must not follow."""
    change, words = CHANGED_LAYERS[name]
    cfg = dataclasses.replace(CFG, selection_bias=True)

    def rank_main(world: World) -> str:
        layer = draw_weights(cfg).layer(world)
        layer(X)  # which finds nothing wrong
        change(layer)
        x = X.to(layer.w1.device) if name == "device" else X
        with pytest.raises((TypeError, ValueError)) as raised:
            layer(x)
        return str(raised.value)

    [outcome] = ForkedRanks(lambda _: virtual.run(rank_main, ranks=1), 1).ended()
    assert isinstance(outcome, list), f"the process ended with {outcome!r}"
    for word in words:
        assert word in outcome[0], outcome[0]


def test_a_layer_moved_to_bfloat16_keeps_its_selection_bias_in_float32() -> None:
    """`layer.bfloat16()` does not change a bfloat16 layer, as for every PyTorch module."""
    cfg = dataclasses.replace(CFG, selection_bias=True, dtype=torch.bfloat16)
    weights = draw_weights(cfg)
    call = draw_call(cfg, 32, 0)

    def rank_main(world: World) -> torch.Tensor:
        return call(weights.layer(world).bfloat16())

    assert_matches(weights, call, virtual.run(rank_main, ranks=1)[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_selection_bias_that_is_not_finite_raises(value: float) -> None:
    cfg = dataclasses.replace(CFG, selection_bias=True)

    def rank_main(world: World) -> None:
        layer = draw_weights(cfg).layer(world)
        assert layer.gate.selection_bias is not None
        layer.gate.selection_bias[1:] = value
        with pytest.raises(ValueError, match="selection_bias"):
            layer(X)

    virtual.run(rank_main, ranks=1)


def test_a_selection_bias_that_another_thread_mends_is_looked_at_once() -> None:
    class Mended(torch.Tensor):
        looks = 0

        def isfinite(self) -> torch.Tensor:
            Mended.looks += 1
            return torch.arange(len(self)) != 3 if Mended.looks == 1 else torch.ones(len(self)) > 0

    with pytest.raises(ValueError, match=r"selection_bias\[3\]"):
        values.check_selection_bias(torch.zeros(8).as_subclass(Mended))


# --- autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "topk_weights", "w1", "gate.weight"])
def test_a_gradient_is_not_lost_whichever_call_was_before(name: str) -> None:
    """A call as those before is known by one look, which sees that a gradient is wanted."""
    weights = draw_weights(CFG)
    call = draw_given_call(CFG, 6, 0)
    assert call.weights is not None
    factors = call.weights

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        tensors = {"x": call.x.clone(), "topk_weights": factors.clone()}
        tensors |= dict(layer.named_parameters())
        tensors[name].requires_grad_()
        ids = None if name == "gate.weight" else call.ids
        arguments = (tensors["x"], ids, None if ids is None else tensors["topk_weights"])
        with torch.no_grad():
            plain = layer(*arguments)
        assert not plain.requires_grad
        y = layer(*arguments)
        assert torch.equal(y, plain)
        y.sum().backward()
        assert tensors[name].grad is not None
        tensors[name].requires_grad_(False)
        assert not layer(*arguments).requires_grad

    virtual.run(rank_main, ranks=1)


# --- configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 128},
        {"intermediate": 64},
        {"experts": 16},
        {"top_k": 3},
        {"activation": "gelu"},
        {"dtype": torch.bfloat16},
        {"max_tokens": 33},
        {"scoring": "sigmoid"},
        {"renormalize": False},
        {"capacity_factor": 1.0},
        {"row_map": "capacity"},
        {"routed_scaling": 2.0},
        {"selection_bias": True},
        {"swiglu_limit": 1.0},
        {"bias": True},
        {"hidden": 128, "bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("other", [0, 2])
def test_configs_that_differ_raise_the_same_error_on_all_ranks(
    change: dict[str, Any], other: int
) -> None:
    def rank_main(world: World) -> str:
        cfg = config(**change) if world.rank == other else config()
        with pytest.raises(ConfigMismatch) as raised:
            MoELayer(cfg, world)
        return str(raised.value)

    messages = virtual.run(rank_main, ranks=4)
    assert len(set(messages)) == 1
    for field in change:
        assert field in messages[0]
        value = getattr(config(**change), field)
        assert str(value).removeprefix("torch.") in messages[0]


def test_a_mismatch_leaves_the_world_usable() -> None:
    weights = draw_weights(CFG)
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> torch.Tensor:
        with pytest.raises(ConfigMismatch):
            MoELayer(dataclasses.replace(CFG, max_tokens=100 + world.rank), world)
        return call(weights.layer(world))

    for y in virtual.run(rank_main, ranks=2):
        assert_matches(weights, call, y)


def test_ranks_that_are_remote_to_some_only_raise_the_same_error_on_all_ranks() -> None:
    def rank_main(world: World) -> str:
        world.ranks_per_node = 1 if world.rank == 1 else None
        with pytest.raises(ConfigMismatch, match="rank 1 has some, and rank 0 writes") as raised:
            MoELayer(CFG, world)
        return str(raised.value)

    assert len(set(virtual.run(rank_main, ranks=2))) == 1


def test_a_dtype_that_the_twin_has_not_raises_on_all_ranks() -> None:
    def rank_main(world: World) -> str:
        with pytest.raises(
            ValueError, match=r"dtype is torch.float16.*float32.*bfloat16"
        ) as raised:
            MoELayer(config(dtype=torch.float16), world)
        return str(raised.value)

    said = virtual.run(rank_main, ranks=2)
    assert [text.partition(": ")[0] for text in said] == ["rank 0", "rank 1"]
    assert len({text.partition(": ")[2] for text in said}) == 1


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 1 << 20}, {"max_tokens": 1 << 31}, {"hidden": 1 << 31}],
    ids=str,
)
def test_sizes_beyond_the_words_of_the_runtime_raise_before_any_memory_is_made(
    change: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="at most"):
        sizes_of(config(**change), 4, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 1 << 30}, "hidden is 1073741824; it must be at most 1073741823"),
        ({"hidden": 2**31 - 8}, "hidden is 2147483640; it must be at most 1073741823"),
        ({"intermediate": 1 << 30}, "intermediate is 1073741824; it must be at most 1073741823"),
        (
            {"shared_experts": 4, "shared_intermediate": 1 << 28},
            "shared_intermediate is 268435456; it must be at most 268435455",
        ),
        (
            {"hidden": 1 << 28},
            "parts of a tile is 10485\\d\\d, and at most 1023 fit: lower hidden or",
        ),
        ({"intermediate": 1 << 28}, "parts of a tile is .* lower hidden or intermediate$"),
        (
            {"shared_experts": 8, "shared_intermediate": 1 << 20},
            "parts of a tile of shared experts is .* lower hidden, shared_experts or shared_inter",
        ),
        ({"max_tokens": 32_737}, "blocks of tokens to route is 1024, .* lower max_tokens$"),
    ],
)
def test_a_size_beyond_what_the_runtime_counts_names_what_to_lower(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sizes_of(config(**change), 4, 1)


def test_arguments_of_other_types_than_config_and_world() -> None:
    def rank_main(world: World) -> None:
        with pytest.raises(TypeError, match="cfg is a dict"):
            MoELayer({}, world)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="world is a int"):
            MoELayer(CFG, 4)  # type: ignore[arg-type]

    virtual.run(rank_main, ranks=1)


def test_a_layer_outlives_its_world_but_cannot_be_called() -> None:
    weights = draw_weights(CFG)
    [layer] = virtual.run(weights.layer, ranks=1)
    with pytest.raises(RuntimeError, match="closed"):
        layer(X)


# --- logits that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True], ids=["direct", "remote"])
@pytest.mark.parametrize(
    ("scoring", "value"),
    [("softmax", math.nan), ("softmax", math.inf), ("softmax", -math.inf), ("sigmoid", math.nan)],
)
def test_logits_that_are_not_finite_name_the_token_on_all_ranks(
    scoring: Scoring, value: float, remote: bool
) -> None:
    cfg = dataclasses.replace(CFG, scoring=scoring)
    weights = draw_weights(cfg)
    calls = [draw_call(cfg, 20 + rank, rank) for rank in range(4)]
    bad = draw_call(cfg, 32, 9)
    bad.x[17, 3] = value

    def rank_main(world: World) -> tuple[str, list[torch.Tensor]]:
        layer = weights.layer(world)
        first = calls[world.rank](layer)
        world.control.barrier()
        with pytest.raises((NumericalError, PeerTimeout)) as raised:
            (bad if world.rank == 2 else calls[world.rank])(layer)
        with pytest.raises(type(raised.value)):
            calls[world.rank](layer)  # nothing works before the reset
        layer.reset()
        again = [calls[world.rank](layer) for _ in range(5)]
        return f"{raised.type.__name__}: {raised.value}", [first, *again]

    nodes = 1 if remote else None
    results = virtual.run(rank_main, ranks=4, deadline=3.0, ranks_per_node=nodes)
    for rank, (message, outputs) in enumerate(results):
        for y in outputs:
            assert_matches(weights, calls[rank], y, f"rank {rank}")
        assert message.startswith("NumericalError"), message
        assert "token 17 on rank 2" in message


def test_a_gate_that_is_not_finite_names_a_token() -> None:
    weights = draw_weights(CFG)
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        layer.gate.weight[5, 5] = math.nan
        with pytest.raises(NumericalError, match=r"token 0 on rank [01]"):
            call(layer)
        with torch.no_grad():
            layer.gate.weight.copy_(weights.gate)
        layer.reset()
        assert_matches(weights, call, call(layer))

    virtual.run(rank_main, ranks=2)


def test_logits_that_are_not_finite_do_not_matter_to_given_routing() -> None:
    weights = draw_weights(CFG)
    weights.gate.fill_(math.nan)
    call = draw_given_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        assert_matches(weights, call, call(weights.layer(world)))

    virtual.run(rank_main, ranks=2)


def test_a_bad_token_does_not_spoil_a_slower_rank_s_call_before_it() -> None:
    """Rank 0 has nothing to do in the first call and is in the second while rank 1 still computes:
    every rank must get its error in the same call, or they would disagree on what comes next."""
    cfg = config(hidden=512, intermediate=512, max_tokens=1024)
    weights = draw_weights(cfg)
    local = torch.tensor([[6, 7]]).expand(1024, -1)  # rank 1's own experts

    def rank_main(world: World) -> list[str]:
        layer = weights.layer(world)
        tokens = 1024 if world.rank == 1 else 0
        first = Call(torch.randn(tokens, 512), local[:tokens], torch.ones(tokens, 2))
        second = Call(torch.full((1, 512), math.nan if world.rank == 0 else 1.0))
        outcomes = []
        for call in (first, second):
            try:
                call(layer)
                outcomes.append("done")
            except NumericalError as error:
                outcomes.append(str(error))
                break
        return outcomes

    for outcomes in virtual.run(rank_main, ranks=2):
        assert len(outcomes) == 2, outcomes
        assert outcomes[0] == "done"
        assert "token 0 on rank 0 are not finite in call 2" in outcomes[1]


def test_a_parameter_that_is_taken_away_is_named_and_one_that_is_added_is_no_concern() -> None:
    cfg = config()
    weights = draw_weights(cfg)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        layer.register_buffer("steps", torch.zeros(1))
        assert layer(torch.randn(4, cfg.hidden).to(cfg.dtype)).shape == (4, cfg.hidden)
        layer.w2 = None
        with pytest.raises(ValueError, match="w2 is missing"):
            layer(torch.randn(4, cfg.hidden).to(cfg.dtype))

    virtual.run(rank_main, ranks=1)
