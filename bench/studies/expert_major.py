# SPDX-License-Identifier: Apache-2.0
"""What the study of tensor parallelism times: the paper's expert-major baseline "EE" in stock
PyTorch, stage by stage, and moeos' experts with the same tokens, weights and routing.

EE: tokens are permuted, two grouped products follow with an activation between, a token's results
are summed, and sums are reduced by torch.distributed. On a GPU the activation and the sum are
compiled, and what is timed is a CUDA graph. Must not depend on documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

import moeos
from bench.gpu.all_to_all import any_length, weighted_sum

Call = Callable[[], Tensor]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tokens with their routing, and a rank's slices of all experts."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def touched(self) -> int:
        """Experts that have tokens."""
        return int(self.ids.unique().numel())


def draw(cfg: moeos.MoEConfig, tokens: int, device: str, seed: int, rank: int) -> Inputs:
    """Inputs of a layer of one slice: tokens and routing are equal on all ranks, as the paper has
    them: experts at random.
    """
    generator = torch.Generator(device).manual_seed(seed + tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=cfg.dtype, device=device)
        return made.normal_(0.0, scale, generator=generator)

    x = normal(tokens, cfg.hidden)
    logits = torch.randn(tokens, cfg.experts, device=device, generator=generator)
    weights, ids = logits.softmax(-1).topk(cfg.top_k)
    generator.manual_seed(seed * 4096 + rank)
    w1 = normal(cfg.experts, cfg.w1_rows, cfg.hidden, scale=cfg.hidden**-0.5)
    w2 = normal(cfg.experts, cfg.hidden, cfg.intermediate, scale=cfg.intermediate**-0.5)
    return Inputs(x, ids.to(torch.int32), weights, w1, w2)


def _gated(rows: Tensor) -> Tensor:
    gates, ups = rows.chunk(2, dim=-1)
    return silu(gates) * ups


_compiled_gated = torch.compile(_gated)
_compiled_sum = torch.compile(weighted_sum)


class ExpertMajor:
    """EE of some inputs, whose stages are calls of their own: each gets the results of the earlier
    ones.
    """

    def __init__(self, inputs: Inputs, group: dist.ProcessGroup | None) -> None:
        self._inputs = inputs
        self._group = group
        self._on_gpu = inputs.x.is_cuda
        order, place, ends = self._align()
        rows = self._permute(order)
        hidden = self._up(rows, ends)
        inner = self._activate(hidden)
        made = self._down(inner, ends)
        self.stages: dict[str, Callable[[], object]] = {
            "align": self._align,
            "permute": lambda: self._permute(order),
            "up/gate": lambda: self._up(rows, ends),
            "act": lambda: self._activate(hidden),
            "down": lambda: self._down(inner, ends),
            "combine": lambda: self._combine(made, place),
        }
        self.products: Callable[[], object] = lambda: (
            self._up(rows, ends),
            self._down(inner, ends),
        )
        self.chain: Call = lambda: self._reduced(self._combine(made, place))

    def partial(self) -> Tensor:
        """This rank's partial sums."""
        order, place, ends = self._align()
        inner = self._activate(self._up(self._permute(order), ends))
        return self._combine(self._down(inner, ends), place)

    def whole(self) -> Tensor:
        """The sums over all ranks."""
        return self._reduced(self.partial())

    def _align(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs by expert; where each token's lie among these; where each expert's end."""
        ids = self._inputs.ids
        chosen = ids.flatten()
        counts = torch.zeros(len(self._inputs.w1), dtype=torch.int32, device=chosen.device)
        counts.scatter_add_(0, chosen.long(), torch.ones_like(chosen))
        order = chosen.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return order, place.view(ids.shape), counts.cumsum(0, dtype=torch.int32)

    def _permute(self, order: Tensor) -> Tensor:
        return self._inputs.x[order // self._inputs.ids.shape[1]]

    def _up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self._inputs.w1.transpose(-2, -1), offs=ends)

    def _down(self, inner: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(inner, self._inputs.w2.transpose(-2, -1), offs=ends)

    def _activate(self, hidden: Tensor) -> Tensor:
        made: Tensor = _compiled_gated(any_length(hidden)) if self._on_gpu else _gated(hidden)
        return made

    def _combine(self, made: Tensor, place: Tensor) -> Tensor:
        weights = self._inputs.weights
        if not self._on_gpu:
            return weighted_sum(made, place, weights)
        y: Tensor = _compiled_sum(*map(any_length, (made, place, weights)))
        return y

    def _reduced(self, y: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(y, group=self._group)
        return y


def moeos_call(experts: moeos.Experts, inputs: Inputs) -> Call:
    """A call of moeos' experts."""
    given = (inputs.x, inputs.ids, inputs.weights, inputs.w1, inputs.w2)
    return lambda: experts(*given)


def replayed(call: Callable[[], Value]) -> Callable[[], Value]:
    """On a GPU the call as a captured graph; what it returns is written again by each replay."""
    if not torch.cuda.is_available():
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's threads query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = call()

    def replay() -> Value:
        graph.replay()
        return y

    return replay
