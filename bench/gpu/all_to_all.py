# SPDX-License-Identifier: Apache-2.0
"""The baseline on GPUs: the layer with NCCL's all-to-all and torch._grouped_mm, in stock PyTorch.

It is what moeos is measured against, so it is written to be as fast as separate kernels allow:
    * pairs are sorted by expert with keys of as few bits as do, and counted by a search in them;
    * the counts are exchanged once and copied to the host once, where split sizes are needed; while
      the host waits, the GPU gathers the rows to be sent and computes what only needs counts;
    * received rows are brought into expert order and back by permutations that follow from the
      counts, with no second sort, computed while the rows are still on their way;
    * for many tokens SwiGLU and the weighted sum are fused by torch.compile; for few the sum is an
      embedding bag, since then the host's time for a call counts;
    * rows travel between buffers that are kept from call to call;
    * with one rank nothing is exchanged, and the host waits for nothing.
On the twin it is the same layer over gloo. Here is too what both layers are given, and by how much
their outputs may differ. Must not depend on how anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import moeos
from moeos.config import reference
from moeos.config.config import MoEConfig

FEW_TOKENS = 512
"""Up to this many tokens nothing is compiled."""

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 3e-3}
"""The largest difference between the two layers' results, by dtype; two of bfloat16 are each within
8e-3 of the exact one."""
NEAR_TIE = 4e-6
"""Tokens whose experts are no more certain than this may be routed otherwise in fp32."""

AllToAll = Callable[..., Any]
"""A function with the arguments of `torch.distributed.all_to_all_single`."""


def fp32_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x [S, H] · gate [E, H]ᵀ in fp32, as the layer's router has them, from 16-bit operands."""
    if gate.dtype != x.dtype or not x.is_cuda:
        return x.float() @ gate.float().t()
    return torch.mm(x, gate.t(), out_dtype=torch.float32)


def weighted_sum(results: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """results [n, H] at place [S, k], times weights [S, k], added over k: [S, H]."""
    y = results[place[:, 0]].float() * weights[:, :1]
    for j in range(1, weights.shape[1]):
        y = y + results[place[:, j]].float() * weights[:, j : j + 1]
    return y.to(results.dtype)


def _swiglu(hidden: Tensor) -> Tensor:
    """[n, 2I] -> [n, I]."""
    gate, up = hidden.chunk(2, dim=1)
    return functional.silu(gate) * up


def any_length(tensor: Tensor) -> Tensor:
    """The tensor, for whose first size nothing is compiled anew."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


@dataclasses.dataclass(frozen=True)
class Received:
    """What the experts of one rank computed in a call.

    Attributes:
        rows: [n, H], sorted by expert.
        inner: [n, I], the input of the second GEMM.
        ends: int32 [X], where each expert's rows end.
        counts: int64 [P, X], rows of each source and expert.
        sent: pairs that this rank sent to each rank, itself included.
    """

    rows: Tensor
    inner: Tensor
    ends: Tensor
    counts: Tensor
    sent: list[int]


class AllToAllLayer:
    """One rank's part of the layer. Collective over the process group, in each call.

    Args:
        cfg: the layer; dropless, without biases, and without a SwiGLU limit.
        gate: [E, H].
        selection_bias: fp32 [E] exactly if `cfg.selection_bias`.
        w1: [X, 2I or I, H], this rank's experts.
        w2: [X, H, I].
        group: of the ranks; None where there is one.
        all_to_all: exchanges rows, and before them their counts.

    Raises:
        ValueError: `cfg` has what this layer lacks.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        gate: Tensor,
        selection_bias: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        group: dist.ProcessGroup | None,
        all_to_all: AllToAll = dist.all_to_all_single,
    ) -> None:
        if cfg.bias or cfg.capacity_factor is not None or cfg.swiglu_limit is not None:
            raise ValueError("the baseline has no biases, no capacity and no SwiGLU limit")
        if cfg.shared_experts > 0:
            raise ValueError("the baseline has no shared experts")
        lacks = cfg.router_bias or cfg.expert_scale or cfg.apply_router_weight_on_input
        if lacks or cfg.zero_experts > 0 or cfg.scoring not in ("softmax", "sigmoid"):
            raise ValueError(
                "the baseline's router has no biases on logits, no scales of experts, no weight on "
                "the input, no zero experts, and scores by softmax or sigmoid"
            )
        self._cfg = cfg
        self._gate = gate
        self._bias = selection_bias
        self._w1 = w1.transpose(1, 2)
        self._w2 = w2.transpose(1, 2)
        self._group = group
        self._all_to_all = all_to_all
        self.stretch: Callable[[Callable[[], Tensor]], Tensor] = lambda work: work()
        """Computes the experts; a study may have it take longer."""
        self._ranks = 1 if group is None else dist.get_world_size(group)
        pairs = cfg.max_tokens * cfg.top_k
        local = len(w1)
        most = self._ranks * cfg.max_tokens * min(cfg.top_k, local)

        def rows(count: int) -> Tensor:
            return torch.empty((count, cfg.hidden), dtype=cfg.dtype, device=gate.device)

        self._sent = rows(pairs)
        self._range = torch.arange(max(pairs, most), device=gate.device)
        self._key = torch.uint8 if cfg.experts <= 256 else torch.int16
        self._experts = torch.arange(cfg.experts, dtype=self._key, device=gate.device)
        self._bounds = torch.zeros(cfg.experts + 1, dtype=torch.int64, device=gate.device)
        self._place = torch.empty(pairs, dtype=torch.int64, device=gate.device)
        if group is not None:
            self._arrived = rows(most)
            self._sorted = rows(most)
            self._counts = torch.empty(cfg.experts, dtype=torch.int64, device=gate.device)
            self._host_counts = torch.empty(
                (2, self._ranks, local), dtype=torch.int64, pin_memory=gate.is_cuda
            )
        self.last: Received | None = None
        """The results of the last call's experts."""

    # The compiler takes seconds to be imported, and few tokens do without it.
    @functools.cached_property
    def _weighted_sum(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return torch.compile(weighted_sum)

    @functools.cached_property
    def _swiglu(self) -> Callable[[Tensor], Tensor]:
        return torch.compile(_swiglu)

    @torch.no_grad()
    def __call__(
        self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """[S, H] -> [S, H]. `ids` and `weights` [S, k] replace the routing together."""
        cfg = self._cfg
        if ids is None or weights is None:
            ids, weights = self.route(x)
        pairs = ids.numel()
        ordered, order = ids.flatten().to(self._key).sort()
        ends = torch.searchsorted(ordered, self._experts, right=True, out=self._bounds[1:])
        counts = self._bounds.diff()
        if self._group is None:
            rows = torch.index_select(x, 0, order // cfg.top_k, out=self._sent[:pairs])
            place = self._place[:pairs].scatter_(0, order, self._range[:pairs])
            results = self._compute(rows, ends.int(), counts.view(1, -1), [pairs])
        else:
            results, place = self._exchange(x, order, counts)
        if len(x) == 0:
            return torch.empty_like(x)
        place = place.view(-1, cfg.top_k)
        y: Tensor
        if len(x) > FEW_TOKENS:
            y = self._weighted_sum(*map(any_length, (results, place, weights)))
        else:
            scale = weights.to(cfg.dtype)
            y = functional.embedding_bag(place, results, mode="sum", per_sample_weights=scale)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int64 [S, k] and fp32 weights [S, k] by the gate."""
        cfg = self._cfg
        logits = fp32_logits(x, self._gate)
        plain = cfg.scoring == "softmax" and self._bias is None and cfg.expert_groups == 1
        if plain and cfg.renormalize:  # the softmax over all, renormalised, is that over the k
            best, ids = logits.topk(cfg.top_k, dim=1, sorted=False)
            weights = best.softmax(dim=1)
        else:
            scores = logits.softmax(dim=1) if cfg.scoring == "softmax" else logits.sigmoid()
            selection = scores if self._bias is None else scores + self._bias
            ids = self._limit_groups(selection).topk(cfg.top_k, dim=1, sorted=False).indices
            weights = scores.gather(1, ids)
            if cfg.renormalize:
                weights = weights / weights.sum(dim=1, keepdim=True)
        return ids, weights if cfg.routed_scaling == 1 else weights * cfg.routed_scaling

    def _limit_groups(self, selection: Tensor) -> Tensor:
        """The scores with −inf outside each token's best groups."""
        cfg = self._cfg
        if cfg.expert_groups == 1:
            return selection
        groups: Tensor = selection.unflatten(1, (cfg.expert_groups, -1))
        counted = 1 if cfg.group_score == "max" else min(2, groups.shape[2])
        best = groups.topk(counted, dim=2).values.sum(dim=2).topk(cfg.top_groups, dim=1).indices
        others = torch.ones(groups.shape[:2], dtype=torch.bool, device=selection.device)
        others.scatter_(1, best, False)
        return groups.masked_fill(others.unsqueeze(2), -math.inf).flatten(1)

    def _exchange(self, x: Tensor, order: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The results of this rank's pairs, sorted by expert, and the place of each pair there."""
        pairs, ranks = len(order), self._ranks
        self._all_to_all(self._counts, counts, group=self._group)
        both = torch.stack((counts, self._counts)).view_as(self._host_counts)
        self._host_counts.copy_(both, non_blocking=True)
        copied = None
        if x.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        rows = torch.index_select(x, 0, order // self._cfg.top_k, out=self._sent[:pairs])
        place = self._place[:pairs].scatter_(0, order, self._range[:pairs])

        # Rows arrive by source and then by expert, and are computed by expert and then by source.
        by_source = self._counts
        by_expert = by_source.view(ranks, -1).t().reshape(-1)
        ends_by_expert = by_expert.cumsum(0)
        start = (by_source.cumsum(0) - by_source).view(ranks, -1)
        target = (ends_by_expert - by_expert).view(-1, ranks).t()
        shift = start - target
        shift_by_source, shift_by_expert = shift.reshape(-1), shift.t().reshape(-1)
        ends = ends_by_expert.view(-1, ranks)[:, -1].int()
        if copied is not None:
            copied.synchronize()
        sent, received = self._host_counts.sum(dim=2).tolist()
        count = sum(received)
        arrived = self._arrived[:count]
        work = self._all_to_all(arrived, rows, received, sent, group=self._group, async_op=True)
        numbers = self._range[:count]
        there = numbers + shift_by_expert.repeat_interleave(by_expert, output_size=count)
        back = numbers - shift_by_source.repeat_interleave(by_source, output_size=count)
        work.wait()

        rows = torch.index_select(arrived, 0, there, out=self._sorted[:count])
        results = self._compute(rows, ends, by_source.view(ranks, -1), sent)
        torch.index_select(results, 0, back, out=arrived)
        returned = self._sent[:pairs]
        self._all_to_all(returned, arrived, sent, received, group=self._group)
        return returned, place

    def _compute(self, rows: Tensor, ends: Tensor, counts: Tensor, sent: list[int]) -> Tensor:
        return self.stretch(lambda: self._experts_of(rows, ends, counts, sent))

    def _experts_of(self, rows: Tensor, ends: Tensor, counts: Tensor, sent: list[int]) -> Tensor:
        """The experts' outputs [n, H] of rows that are sorted by expert."""
        cfg = self._cfg
        if len(rows) == 0:
            inner = rows.new_empty(0, cfg.intermediate)
            self.last = Received(rows, inner, ends, counts, sent)
            return rows
        inner = self._activate(torch._grouped_mm(rows, self._w1, offs=ends))
        self.last = Received(rows, inner, ends, counts, sent)
        return torch._grouped_mm(inner, self._w2, offs=ends)

    def _activate(self, hidden: Tensor) -> Tensor:
        match self._cfg.activation:
            case "swiglu":
                if len(hidden) > FEW_TOKENS * self._cfg.top_k:
                    return self._swiglu(any_length(hidden))
                gate, up = hidden.chunk(2, dim=1)
                return functional.silu(gate).mul_(up)
            case "gelu":
                return functional.gelu(hidden)
            case "gelu_tanh":
                return functional.gelu(hidden, approximate="tanh")
            case "silu":
                return functional.silu(hidden)
            case "relu":
                return functional.relu(hidden)
            case "identity":
                return hidden
            case other:
                raise ValueError(f"activation is {other!r}; the baseline does not compute it")

    def grouped_gemms(self) -> None:
        """The two GEMMs of the last call alone, on the same rows; nothing where there were none."""
        last = self.last
        if last is not None and len(last.rows) > 0:
            torch._grouped_mm(last.rows, self._w1, offs=last.ends)
            torch._grouped_mm(last.inner, self._w2, offs=last.ends)


def beside(
    layer: moeos.MoELayer,
    group: dist.ProcessGroup | None,
    all_to_all: AllToAll = dist.all_to_all_single,
) -> AllToAllLayer:
    """The all-to-all layer with the weights of one of moeos."""
    gate = layer.gate
    weights = (gate.weight, gate.selection_bias, layer.w1, layer.w2)
    return AllToAllLayer(layer.cfg, *weights, group, all_to_all)


def tokens_of(world: moeos.World, cfg: MoEConfig, tokens: int, seed: int) -> Tensor:
    """x [tokens, H] of this rank, where its layers compute: normal, with variance 1."""
    generator = torch.Generator().manual_seed(seed * 4096 + world.rank)
    x = torch.randn(tokens, cfg.hidden, generator=generator).to(cfg.dtype)
    return x.cuda() if world.backend == "cuda" else x


def compare(
    layer: moeos.MoELayer, x: Tensor, ids: Tensor | None, y: Tensor, expected: Tensor
) -> tuple[float, int]:
    """The relative error of this rank's output, and how many tokens are too near a tie for it."""
    if ids is None and len(x) > 0:
        gate = layer.gate
        margin = reference.route(x, gate.weight, layer.cfg, **gate.rules()).margin
        certain = margin > NEAR_TIE
        y, expected = y[certain], expected[certain]
    return reference.relative_error(y, expected), len(x) - len(y)


def require_alike(
    world: moeos.World, layer: moeos.MoELayer, baseline: AllToAllLayer, x: Tensor
) -> float:
    """The relative difference of the two layers' results for x, of the worst rank. Collective.

    Raises `RuntimeError` if it is too large, and what a call of moeos raises.
    """
    y = layer(x)
    layer.check()
    error, _ = compare(layer, x, None, y, baseline(x))
    worst: float = max(world.control.allgather(error, "the layers' difference"))
    if not worst <= LARGEST_ERROR[layer.cfg.dtype]:
        raise RuntimeError(
            f"moeos and the layer that it is compared with differ: relative error {worst:.1e}"
        )
    return worst
