# SPDX-License-Identifier: Apache-2.0
"""What gradients of a call must be: those of the float64 reference. Holds no test."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moeos import MoEConfig, MoELayer, Placement, TwinOptions, World
from moeos.config import reference
from moeos.partition.placement import experts_of
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world import virtual
from tests.layers import Call, Weights
from tests.layers import expected_of as weights_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 4e-3}
"""The largest relative Frobenius error of a gradient."""
FAR_LIMIT = 7.0
"""Of an activation, where what is saved has been rounded: no number is near it. One that is may
come to its other side, and have a gradient or lose its own, which no tolerance tells from a
fault."""

Gradients = dict[str, Tensor]
"""By the name of a parameter, or of an argument of a call."""

_PARAMETERS = {
    "gate.weight": "gate",
    "gate.bias": "router_bias",
    "w1": "w1",
    "w2": "w2",
    "b1": "b1",
    "b2": "b2",
    "shared_w1": "shared_w1",
    "shared_w2": "shared_w2",
    "shared_gate": "shared_gate",
}
"""Of a layer, and what `Weights` call them."""
OF_EXPERTS = ("w1", "w2", "b1", "b2")
ONE_PROCESSOR = TwinOptions(processors=1)


def drawn(call: Call, seed: int) -> Tensor:
    """The gradient of a call's output."""
    generator = torch.Generator().manual_seed(seed + 1000)
    return torch.randn(call.x.shape, generator=generator).to(call.x.dtype)


def leaves_of(call: Call) -> Call:
    """The same call, whose arguments want a gradient."""
    weights = None if call.weights is None else call.weights.clone().requires_grad_()
    return dataclasses.replace(call, x=call.x.clone().requires_grad_(), weights=weights)


def kept_bytes(weights: Weights, call: Call) -> int:
    """What autograd saves of a call of a rank alone, but for arguments and parameters."""
    kept = 0

    def rank_main(world: World) -> None:
        layer, its = weights.layer(world).requires_grad_(), leaves_of(call)
        given = {its.x.data_ptr(), *(p.data_ptr() for p in layer.parameters())}

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += 0 if tensor.data_ptr() in given else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            its(layer)

    virtual.run(rank_main, ranks=1)
    return kept


def found_of(call: Call, layer: MoELayer) -> Gradients:
    """The gradients that a call's arguments and its layer's parameters have."""
    found = {"x": call.x.grad, "topk_weights": None if call.weights is None else call.weights.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def gradients_of(
    weights: Weights,
    calls: Sequence[Call],
    twin: TwinOptions = ONE_PROCESSOR,
    ranks_per_node: int | None = None,
    placement: Placement | None = None,
    slicing: Slicing = WHOLE,
    backend: str = "twin",
) -> list[Gradients]:
    """What the twin makes of one call of each rank, or another backend; on the CPU."""
    device = "cuda" if backend == "cuda" else "cpu"

    def rank_main(world: World) -> Gradients:
        output = {} if slicing.everywhere else {"output": "scattered"}
        layer = weights.layer(world, placement=placement, **slicing.arguments, **output)
        call = leaves_of(calls[world.rank].each(lambda tensor: tensor.to(device)))
        mine = slicing.tokens_of(world.rank, len(call.x))
        d_out = drawn(calls[world.rank], _source(slicing, world.rank))[mine.start : mine.stop]
        call(layer.requires_grad_()).backward(d_out.to(device))
        return {name: one.cpu() for name, one in found_of(call, layer).items()}

    return virtual.run(rank_main, len(calls), backend, twin=twin, ranks_per_node=ranks_per_node)


def expected_of(
    weights: Weights,
    calls: Sequence[Call],
    slicing: Slicing = WHOLE,
    placement: Placement | None = None,
) -> list[Gradients]:
    """The same of the float64 reference: experts have all ranks' tokens, all else a rank's own. The
    calls of ranks with the same tokens are equal.
    """
    ranks = len(calls)
    wholes, parts = (
        {wanted.name: wanted.shape for wanted in weights_of(cfg) if wanted is not None}
        for cfg in (weights.cfg, slicing.cut(weights.cfg))
    )
    every: list[Gradients] = []
    for rank, call in enumerate(calls):
        leaves = {
            name: part.double().requires_grad_()
            for name, own in _PARAMETERS.items()
            if (part := getattr(weights, own)) is not None
        }
        double = {own: leaves.get(name) for name, own in _PARAMETERS.items()}
        leaves["x"] = call.x.double().requires_grad_()
        if call.weights is not None:
            leaves["topk_weights"] = call.weights.double().requires_grad_()
        y = dataclasses.replace(weights, **double).expected(
            Call(leaves["x"], call.ids, leaves.get("topk_weights"))
        )
        if y.requires_grad:  # a call without tokens reads nothing
            y.backward(drawn(call, _source(slicing, rank)).double())
        every.append({name: zeros_if_none(leaf) for name, leaf in leaves.items()})
    result = []
    sources = sorted({_source(slicing, rank) for rank in range(ranks)})
    for rank in range(ranks):
        own = experts_of(weights.cfg, slicing.holder(rank), slicing.holders(ranks), placement)
        of_experts = {}
        for name in OF_EXPERTS:
            if name in every[0]:
                total = torch.stack([every[source][name] for source in sources]).sum(dim=0)
                halves = weights.cfg.halves if name in ("w1", "b1") else 1
                mine = slicing.part(total, wholes[name], parts[name], halves, rank)
                of_experts[name] = mine[list(own)]
        of_shared = {
            name: slicing.part(
                every[rank][name], wholes[name], parts[name], weights.cfg.halves, rank
            )
            for name in ("shared_w1", "shared_w2")
            if name in every[rank]
        }
        result.append(every[rank] | of_experts | of_shared)
    return result


def _source(slicing: Slicing, rank: int) -> int:
    """The first of the ranks that have the same tokens as this one."""
    return rank - slicing.slice_of(rank) if slicing.sums else rank


def zeros_if_none(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def assert_match(
    weights: Weights,
    calls: Sequence[Call],
    found: Sequence[Gradients],
    names: Collection[str] | None = None,
    slicing: Slicing = WHOLE,
    placement: Placement | None = None,
) -> None:
    """`names`: of the gradients that are looked at; None: all."""
    for call in calls:
        assert weights.sure(call).all(), "draw other tokens: fp32 may route one otherwise"
    every = expected_of(weights, calls, slicing, placement)
    for rank, (mine, expected) in enumerate(zip(found, every, strict=True)):
        for name, wanted in expected.items():
            if names is not None and name not in names:
                continue
            if name.startswith("gate.") and calls[rank].weights is not None:
                assert name not in mine  # the caller's routing says nothing of the gate
                continue
            error = reference.relative_error(mine[name], wanted)
            tolerance = TOLERANCE[weights.cfg.dtype]
            if _rounds(weights.cfg) and name.startswith("gate.") and len(calls[rank].x) == 1:
                terms = _terms_of_gate(weights, calls[rank], rank, name)
                tolerance *= max(1.0, terms / float(wanted.norm()))
            assert error <= tolerance, f"rank {rank}, {name}: error {error:.2e}"


def _rounds(cfg: MoEConfig) -> bool:
    """Whether what a call saves has been rounded."""
    if cfg.save == "nothing" or cfg.dtype is torch.float32:
        return False
    assert cfg.swiglu_limit is None or cfg.swiglu_limit >= FAR_LIMIT
    return True


def _terms_of_gate(weights: Weights, call: Call, rank: int, name: str) -> float:
    """The norm of what a gradient of the gate, from one token's choices, is a difference of.

    Scores that add up to 1 take away what the gradients of its weights have in common, and leave
    their roundings. So an error is one of the terms, and the difference may be far smaller. Those
    of many tokens cancel.
    """
    routing = reference.route(
        call.x.double(),
        weights.gate.double(),
        weights.cfg,
        weights.selection_bias,
        router_bias=weights.router_bias,
        expert_scale=weights.expert_scale,
    )
    chosen = dataclasses.replace(
        call, ids=routing.ids, weights=routing.weights.clone().requires_grad_()
    )
    assert chosen.weights is not None
    weights.expected(chosen).backward(drawn(call, rank).double())
    assert chosen.weights.grad is not None
    terms = (routing.weights * chosen.weights.grad).norm()
    return float(terms * call.x.double().norm() if name == "gate.weight" else terms)
