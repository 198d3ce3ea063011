# SPDX-License-Identifier: Apache-2.0
"""What a layer with slices of experts gains over PyTorch and NCCL: tensor parallelism on one node.

    torchrun --nproc-per-node 2 -m moeos.bench.studies.tensor_parallel --out FILE CONFIG ...

Each CONFIG is a layer's TOML file, gated by SiLU and with plain weights; its ranks hold slices. The
baseline is "EE" of the paper on single-node tensor parallelism: tokens are permuted, two grouped
products of PyTorch follow with a compiled activation between, and sums are reduced by NCCL. It is
replayed as a CUDA graph, as the layer is. Both are given the routing. It times and compares;
whether the values are right is the tests' affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import silu

import moeos
from moeos.bench.gpu.in_turn import InTurn
from moeos.bench.studies import options

TOKENS = (8, 128, 4096, 16384)
AGREES = 0.02
"""Relative distance that both may have: each rounds to BF16."""

Call = Callable[[], torch.Tensor]


@torch.compile(dynamic=False)
def _activated(rows: torch.Tensor) -> torch.Tensor:
    gates, ups = rows.chunk(2, dim=-1)
    return silu(gates) * ups


def baseline(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """EE: permute, two grouped products, the weighted sums, NCCL's all-reduce."""
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(len(w1), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = x[order // ids.shape[1]]
    inner = _activated(torch._grouped_mm(rows, w1.transpose(-2, -1), offs=ends))
    sorted_results = torch._grouped_mm(inner, w2.transpose(-2, -1), offs=ends)
    results = torch.empty_like(sorted_results)
    results[order] = sorted_results
    y = (results.view(*ids.shape, -1) * weights[..., None]).sum(1).to(x.dtype)
    if group is not None:
        dist.all_reduce(y, group=group)
    return y


def replayed(call: Call) -> Call:
    """The call as a captured graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


def measure(cfg: moeos.MoEConfig, world: moeos.World, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one layer. Collective."""
    layer = moeos.MoELayer(cfg, world, parallel="tensor")
    experts = moeos.Experts(cfg, world, parallel="tensor")
    w1, w2 = layer.w1.detach(), layer.w2.detach()
    found = []
    for tokens in (count for count in TOKENS if count <= cfg.max_tokens):
        generator = torch.Generator("cuda").manual_seed(tokens)  # equal on all ranks
        x = torch.randn(tokens, cfg.hidden, device="cuda", generator=generator).to(cfg.dtype)
        logits = torch.randn(tokens, cfg.experts, device="cuda", generator=generator)
        weights, ids = logits.softmax(-1).topk(cfg.top_k)
        mine = functools.partial(experts, x, ids, weights, w1, w2)
        theirs = functools.partial(baseline, x, ids, weights, w1, w2, clock.group)
        ways = {"moeos": replayed(mine), "EE": replayed(theirs)}
        outputs = ways["moeos"](), ways["EE"]()
        distance = options.require_equal(f"rank {world.rank}", tokens, *outputs, AGREES)
        times = options.timed(clock, tokens, ways)
        found.append({"tokens": tokens, "distance": distance, "seconds": times})
    return found


if __name__ == "__main__":
    options.run("tensor_parallel", __doc__, measure)
