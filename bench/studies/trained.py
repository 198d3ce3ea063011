# SPDX-License-Identifier: Apache-2.0
"""The experts whose training is compared: moeos, by what it saves, and torch._grouped_mm.

Each has the same tokens, routing and weights. Here is how a forward call and its gradients are had
of each, and what they keep and take. Must not depend on suites, nor on how they are timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import moeos
from moeos.config.config import Save

GROUPED = "grouped_mm"
"""The name of PyTorch's."""

SAVES: tuple[Save, ...] = ("nothing", "preactivation")
"""The tensors that moeos may save of a call; the names of its contestants."""

Forward = Callable[[], Tensor]
Gradients = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of all contestants.

    Attributes:
        x: [S, H], with a gradient as all but ids and d_out.
        ids: int64 [S, k], different ones of a token.
        weights: fp32 [S, k].
        w1: [E, 2I or I, H].
        w2: [E, H, I].
        d_out: [S, H], the gradient of the output.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor
    d_out: Tensor

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The inputs of a gradient."""
        return self.x, self.weights, self.w1, self.w2


def draw(cfg: moeos.MoEConfig, tokens: int, device: str, seed: int) -> Inputs:
    """Normal tokens, a softmax's weights, and experts that are chosen evenly."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = cfg.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(0, scale, generator=generator)

    chosen = normal(tokens, cfg.experts, dtype=torch.float32).topk(cfg.top_k, dim=1)
    experts, hidden, inner = cfg.experts, cfg.hidden, cfg.intermediate
    return Inputs(
        x=normal(tokens, hidden).requires_grad_(),
        ids=chosen.indices.contiguous(),
        weights=chosen.values.softmax(dim=1).requires_grad_(),
        w1=normal(experts, cfg.w1_rows, hidden, scale=hidden**-0.5).requires_grad_(),
        w2=normal(experts, hidden, inner, scale=inner**-0.5).requires_grad_(),
        d_out=normal(tokens, hidden),
    )


def _swiglu(hidden: Tensor) -> Tensor:
    gates, ups = hidden.chunk(2, dim=1)
    return functional.silu(gates) * ups


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "silu": functional.silu,
    "relu": functional.relu,
}
"""Activations that papers train with, [n, 2I or I] -> [n, I]."""


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, activation: str = "swiglu"
) -> Tensor:
    """[S, H] -> [S, H] by torch._grouped_mm, of which autograd knows the gradients: the weighted
    sum of each token's experts of one rank, without biases.

    Args:
        x: [S, H].
        ids: [S, k] of all experts, which are this rank's.
        weights: [S, k].
        w1: [E, 2I or I, H].
        w2: [E, H, I].
        activation: of `ACTIVATIONS`.
    """
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=len(w1)).cumsum(0).to(torch.int32)
    tokens = order // ids.shape[1]
    hidden = torch._grouped_mm(x[tokens], w1.transpose(1, 2), offs=ends)
    inner = ACTIVATIONS[activation](hidden)
    made = torch._grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    terms = made * weights.flatten()[order].to(made.dtype).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, terms)


def grouped_forward(cfg: moeos.MoEConfig, inputs: Inputs) -> Forward:
    """PyTorch's forward call."""
    i = inputs
    return lambda: grouped_experts(i.x, i.ids, i.weights, i.w1, i.w2, cfg.activation)


def moeos_forward(
    cfg: moeos.MoEConfig, world: moeos.World, save: Save
) -> Callable[[Inputs], Forward]:
    """moeos' forward call, of inputs, by experts that are made here; in as many pieces as it takes.

    Raises `ValueError` for a layer that the machine does not have.
    """
    experts = moeos.Experts(dataclasses.replace(cfg, save=save), world)

    def of(inputs: Inputs) -> Forward:
        i = inputs
        pieces = -(-len(i.x) // cfg.max_tokens)
        return lambda: experts(i.x, i.ids, i.weights, i.w1, i.w2, pieces=pieces)

    return of


def gradients(y: Tensor, inputs: Inputs) -> Gradients:
    """The gradients of `Inputs.wanted`. The graph is retained, so this can be called again."""
    return torch.autograd.grad(y, inputs.wanted, inputs.d_out, retain_graph=True)


def saved_bytes(forward: Forward, inputs: Inputs) -> int:
    """What autograd keeps of a call in addition to its inputs, by hooks of saved tensors."""
    given = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.wanted, inputs.ids)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()  # held, or another tensor may come to lie where one was
    del y
    return sum(kept.values())


def peak_bytes(forward: Forward, inputs: Inputs) -> int | None:
    """What a forward call and its gradients, these included, take of PyTorch's memory at most; None
    on the twin.
    """
    if not inputs.x.is_cuda:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(forward(), inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def distance(made: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative distance of a tensor from what is expected; NaN if any is."""
    pairs = zip(made, expected, strict=True)
    return float(torch.tensor([_distance(one, other) for one, other in pairs]).max())


def _distance(one: Tensor, other: Tensor) -> float:
    # Tensors are compared in parts: all experts' weights in float32 may exceed a GPU's memory.
    off, size = torch.zeros(2, dtype=torch.float64, device=one.device)
    for a, b in zip(one.split(_rows(one)), other.split(_rows(one)), strict=True):
        off += (a.float() - b.float()).square().sum()
        size += b.float().square().sum()
    return float((off / size.clamp_min(1e-60)).sqrt())


def _rows(tensor: Tensor) -> int:
    """Rows of a part of a tensor: 64 million elements, or one row."""
    return max(1, (1 << 26) // max(1, tensor[0].numel()))


def describe(cfg: moeos.MoEConfig) -> dict[str, Any]:
    """What of a layer its results say."""
    return {
        "hidden": cfg.hidden,
        "intermediate": cfg.intermediate,
        "experts": cfg.experts,
        "top_k": cfg.top_k,
        "activation": cfg.activation,
        "gated": cfg.gated,
        "dtype": str(cfg.dtype).removeprefix("torch."),
    }


def forward_flops(cfg: moeos.MoEConfig, tokens: int) -> int:
    """FLOPs of the experts' products of a forward call; its gradients have twice as many."""
    matrices = 3 if cfg.gated else 2
    return 2 * matrices * tokens * cfg.top_k * cfg.hidden * cfg.intermediate
