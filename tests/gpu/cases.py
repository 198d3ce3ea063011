"""Layers that the tests of the GPU share, and how they are run there.

Holds no test. Each case is a kernel of its own, so there are few, and together they cover the
options; `compile_cases` makes all of them at once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from moeos import MoEConfig, World, reference
from moeos.engines.base import CallTensors
from moeos.engines.cuda import CAPABILITY, CudaEngine
from moeos.jit import KernelShape, compile_kernel
from tests.layers import Call, Weights, config

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""The largest relative Frobenius error of one rank's output of one call."""
NEAR_TIE = 4e-6
"""Tokens whose routing margin is below this may be routed otherwise in fp32."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and how many virtual ranks run it."""

    ranks: int
    cfg: MoEConfig


def _case(ranks: int, **changes: object) -> Case:
    sizes = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4, "max_tokens": 300}
    return Case(ranks, config(**{"dtype": torch.bfloat16, **sizes, **changes}))


CASES = {
    "swiglu-1-rank": _case(1, bias=True),
    "gelu-2-ranks-groups": _case(
        2,
        activation="gelu",
        dtype=torch.float16,
        experts=64,
        top_k=6,
        scoring="sigmoid",
        expert_groups=4,
        top_groups=2,
        selection_bias=True,
        routed_scaling=2.5,
        bias=True,
    ),
    "identity-2-ranks": _case(2, activation="identity", dtype=torch.float16, top_k=1),
    "swiglu-4-ranks": _case(4),
    "gelu_tanh-4-ranks-capacity": _case(
        4, activation="gelu_tanh", capacity_factor=1.0, row_map="capacity", bias=True
    ),
    "relu-4-ranks-odd-sizes": _case(
        4, activation="relu", hidden=200, intermediate=136, experts=12, top_k=3, bias=True
    ),
    "silu-8-ranks-capacity": _case(
        8,
        activation="silu",
        dtype=torch.float16,
        capacity_factor=0.6,
        row_map="ragged",
        renormalize=False,
    ),
    "swiglu-8-ranks-groups": _case(
        8,
        experts=256,
        top_k=8,
        expert_groups=8,
        top_groups=4,
        scoring="sigmoid",
        selection_bias=True,
        swiglu_limit=0.5,
        bias=True,
    ),
}
BY_RANKS = {
    1: "swiglu-1-rank",
    2: "gelu-2-ranks-groups",
    4: "swiglu-4-ranks",
    8: "swiglu-8-ranks-groups",
}
"""A dropless case for each number of virtual ranks."""


def why_not() -> str:
    """Why the tests of the GPU cannot run here; "" where they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability}; kernels are made for {CAPABILITY}"
    return ""


def compile_cases(blocks: int) -> None:
    """Puts the kernels of all cases into the cache, each compiled by a process of its own."""
    workers = min(len(CASES), len(os.sched_getaffinity(0)))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for made in [pool.submit(compile_case, name, blocks) for name in CASES]:
            made.result()


def compile_case(name: str, blocks: int) -> None:
    """Puts a case's kernel into the cache, for a GPU of so many blocks."""
    case = CASES[name]
    compile_kernel(
        KernelShape(
            cfg=case.cfg,
            world_size=case.ranks,
            processors=blocks // case.ranks - 1,
            virtual_ranks=case.ranks,
        )
    )


def on_gpu(weights: Weights) -> Weights:
    """The same weights in the GPU's memory."""
    moved = {
        field.name: value.cuda()
        for field in dataclasses.fields(weights)
        if isinstance(value := getattr(weights, field.name), Tensor)
    }
    return dataclasses.replace(weights, **moved)


class RankLayer:
    """One rank's engine with its part of weights that are on the GPU."""

    def __init__(self, weights: Weights, world: World) -> None:
        local = weights.cfg.experts_per_rank(world.size)
        mine = slice(world.rank * local, (world.rank + 1) * local)
        self._weights = weights
        self._parts = {
            name: None if part is None else part[mine]
            for name in ("w1", "w2", "b1", "b2")
            for part in [getattr(weights, name)]
        }
        self.engine = CudaEngine(weights.cfg, world)

    def __call__(self, call: Call) -> Tensor:
        """The output of a call whose tensors are on the GPU; whatever is not written is NaN."""
        out = torch.full_like(call.x, torch.nan)
        tensors = CallTensors(
            x=call.x,
            out=out,
            gate=self._weights.gate,
            selection_bias=self._weights.selection_bias,
            topk_ids=call.ids,
            topk_weights=call.weights,
            **self._parts,
        )
        self.engine.forward(tensors)
        return out


def call_on_gpu(call: Call) -> Call:
    """The same call with its tensors in the GPU's memory."""
    return Call(*(None if part is None else part.cuda() for part in vars(call).values()))


def assert_matches(weights: Weights, call: Call, y: Tensor, what: str) -> None:
    """Asserts that an output is the float64 reference's, but for tokens near a tie.

    With a capacity such a token could move others' drops, so then there must be none. Tensors are
    on the GPU.
    """
    cfg = weights.cfg
    if call.ids is None:
        routed = reference.route(call.x, weights.gate, cfg, weights.selection_bias)
        sure = routed.margin >= NEAR_TIE
    else:
        sure = torch.ones(len(call.x), dtype=torch.bool, device=call.x.device)
    near_ties = int((~sure).sum())
    allowed = 0 if cfg.capacity_factor is not None else max(1, len(sure) // 100)
    assert near_ties <= allowed, f"{what}: {near_ties} of {len(sure)} tokens are near ties"
    error = reference.relative_error(y[sure], weights.expected(call)[sure])
    assert error <= TOLERANCE[cfg.dtype], f"{what}: relative error {error:.2e}"


def assert_all_match(
    weights: Weights, calls: Sequence[Sequence[Call]], outputs: Sequence[Sequence[Tensor]]
) -> None:
    """`assert_matches` for calls and outputs by [rank][call]."""
    for rank, (rank_calls, rank_outputs) in enumerate(zip(calls, outputs, strict=True)):
        for number, (call, y) in enumerate(zip(rank_calls, rank_outputs, strict=True)):
            assert_matches(weights, call, y, f"rank {rank}, call {number}")
