# SPDX-License-Identifier: Apache-2.0
"""Layers that the tests of the GPU share, and how they are run there.

Holds no test. Each case is a kernel of its own, so there are few, and together they cover the
options; `compile_cases` makes all of them at once.

Tokens that the gate routes are drawn so that fp32 cannot route them otherwise than float64: see
`draw_routed_call`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moeos import MoEConfig, Placement, World
from moeos.compile import kernel_shape
from moeos.compile.jit import compile_kernel
from moeos.compile.kernel_shape import KernelShape
from moeos.config import reference
from moeos.engines.base import CallStats, CallTensors
from moeos.engines.cuda.engine import CAPABILITY, CudaEngine
from moeos.partition.slicing import WHOLE, Slicing
from moeos.world import virtual
from tests.layers import Call, Weights, config, draw_call, draw_given_call
from tests.weight_layouts import in_layout

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""The largest relative Frobenius error of one rank's output of one call."""

DEADLINE = 10.0
STARTED = 580.0
"""Seconds in which a started program ends, the compilation of its kernels included."""
"""Seconds, of every world."""

# Calls of a few dozen rows take each token once to a rank, as those of thousands do otherwise. Not
# in a fixture: kernels are compiled by other processes, which import this file alone. Where no GPU
# runs them, other files' kernels, compiled by the process that collects this one, are as ever.
if torch.cuda.is_available():
    kernel_shape.ONCE_BYTES, kernel_shape.DEDUP_TOKENS = 8 << 10, 1
    kernel_shape.HOPPER_BLOCKS = 1  # few of their chunks bring all of their rows

_WIDER = 16
_FALSE_ALARM = 1e-9
_REDRAWS = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, how many virtual ranks run it, and how many of them make a node.

    `faults`: its kernel is the one that does what fault plans say. `placement`: where experts lie,
    unless in order.
    """

    ranks: int
    cfg: MoEConfig
    ranks_per_node: int | None = None
    faults: bool = False
    placement: Placement | None = None


def _case(ranks: int, **changes: object) -> Case:
    sizes = {"hidden": 256, "intermediate": 256, "experts": 16, "top_k": 4, "max_tokens": 300}
    return Case(ranks, config(**{"dtype": torch.bfloat16, **sizes, **changes}))


LARGE_EXPERTS = {"hidden": 3072, "intermediate": 2048, "top_k": 2, "max_tokens": 700}
"""Sizes of a layer whose experts are large (`sizes.LARGE_EXPERT`); with two experts a rank, every
source sends full tiles to each."""

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
    "swiglu-2-ranks-parts-that-overlap": _case(2, hidden=328, intermediate=200, bias=True),
    "gelu-1-rank-halves": _case(
        1, activation="gelu", hidden=1000, intermediate=1416, experts=2, top_k=2
    ),
    "large-experts-2-ranks": _case(2, experts=4, **LARGE_EXPERTS),
    "swiglu-3-ranks-uneven": _case(3, bias=True),
    "gelu-8-ranks-three-without-experts": _case(8, activation="gelu", experts=9),
    "silu-8-ranks-capacity": _case(
        8,
        activation="silu",
        dtype=torch.float16,
        capacity_factor=0.6,
        row_map="ragged",
        renormalize=False,
    ),
    "swiglu-2-ranks-fp32-router": _case(2, experts=72, top_k=5, router_dtype=torch.float32),
    "swiglu-2-ranks-groups-best": _case(
        2,
        experts=160,
        top_k=6,
        expert_groups=8,
        top_groups=3,
        group_score="max",
        renormalize=False,
        routed_scaling=16.0,
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
    "gelu-2-ranks-300-experts": _case(
        2, activation="gelu", dtype=torch.float16, experts=300, top_k=9
    ),
    "swiglu-1-rank-512-experts-fp32-router": _case(
        1, experts=512, top_k=10, hidden=2048, router_dtype=torch.float32
    ),
    "swiglu-4-ranks-1024-experts-top-32-groups": _case(
        4,
        experts=1024,
        top_k=32,
        expert_groups=8,
        top_groups=4,
        scoring="sigmoid",
        selection_bias=True,
        routed_scaling=2.5,
    ),
}
REMOTE_CASES = {
    "swiglu-4-nodes": dataclasses.replace(CASES["swiglu-4-ranks"], ranks_per_node=1),
    "swiglu-2-nodes-of-2": dataclasses.replace(CASES["swiglu-4-ranks"], ranks_per_node=2),
    "gelu_tanh-4-nodes-capacity": dataclasses.replace(
        CASES["gelu_tanh-4-ranks-capacity"], ranks_per_node=1
    ),
    # A window has room for 128 rows, and a cell for 1200.
    "long-rows-2-nodes-of-4": dataclasses.replace(_case(8, hidden=4096), ranks_per_node=4),
}
"""Some peers are remote: each of these has the kernel of its own transport."""
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


def compile_cases(cases: Iterable[Case], blocks: int, *, gradients: bool = False) -> None:
    """Puts the kernels of cases into the cache, each compiled by a process of its own: those of
    forward calls and, where asked for, those of gradients.
    """
    waiting: list[tuple[Case, bool, bool]] = []
    for case in cases:
        saves = case.cfg.save == "preactivation"
        waiting.append((case, False, False))
        if gradients:
            waiting.append((case, True, saves))
        if gradients and saves:
            waiting.append((case, False, True))
    workers = min(len(waiting), len(os.sched_getaffinity(0)))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for made in [
            pool.submit(compile_case, one, blocks, back, saves) for one, back, saves in waiting
        ]:
            made.result()


def compile_case(case: Case, blocks: int, gradients: bool = False, saves: bool = False) -> None:
    """Puts a kernel of a case into the cache, for a GPU of so many blocks; see `KernelShape`."""
    compile_kernel(dataclasses.replace(shape_of(case, blocks), gradients=gradients, saves=saves))


def shape_of(case: Case, blocks: int) -> KernelShape:
    """What a case's kernel is compiled for, for a GPU of so many blocks."""
    return KernelShape(
        cfg=case.cfg,
        world_size=case.ranks,
        processors=blocks // case.ranks - 1,
        virtual_ranks=case.ranks,
        transport="none" if case.ranks_per_node is None else "mapped",
        faults=case.faults,
        places=0 if case.placement is None else case.placement.most,
    )


def blocks() -> int:
    """Multiprocessors of the GPU."""
    return torch.cuda.get_device_properties().multi_processor_count


def on_gpu(weights: Weights) -> Weights:
    """The same weights in the GPU's memory."""
    moved = {
        field.name: value.cuda()
        for field in dataclasses.fields(weights)
        if isinstance(value := getattr(weights, field.name), Tensor)
    }
    return dataclasses.replace(weights, **moved)


def draw_weights_on_gpu(cfg: MoEConfig, seed: int = 0) -> Weights:
    """Random weights with rows of norm about 1, drawn on the GPU, for layers of real sizes.

    Equal on GPUs of one kind.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = cfg.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="cuda")
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(cfg.router_rows, device="cuda").uniform_(low, high, generator=generator)

    shared, width = cfg.shared_experts, cfg.shared_intermediate
    return Weights(
        cfg=cfg,
        gate=draw(cfg.router_rows, cfg.hidden, dtype=cfg.gate_dtype),
        w1=draw(cfg.experts, cfg.w1_rows, cfg.hidden),
        w2=draw(cfg.experts, cfg.hidden, cfg.intermediate),
        b1=draw(cfg.experts, cfg.w1_rows) if cfg.bias else None,
        b2=draw(cfg.experts, cfg.hidden) if cfg.bias else None,
        selection_bias=uniform(-0.2, 0.2) if cfg.selection_bias else None,
        router_bias=uniform(-1.0, 1.0) if cfg.router_bias else None,
        expert_scale=uniform(0.5, 2.0) if cfg.expert_scale else None,
        shared_w1=draw(shared, cfg.shared_w1_rows, cfg.hidden) if shared else None,
        shared_w2=draw(shared, cfg.hidden, width) if shared else None,
        shared_gate=draw(cfg.hidden) if cfg.shared_gate else None,
    )


def call_on_gpu(call: Call) -> Call:
    """The same call with its tensors in the GPU's memory."""
    return call.each(Tensor.cuda)


class RankLayer:
    """One rank's engine with its part of weights that are on the GPU."""

    def __init__(self, weights: Weights, world: World, slicing: Slicing = WHOLE) -> None:
        own = weights.cfg.experts_of(world.rank, world.size)
        mine = slice(own.start, own.stop)
        self._weights = weights
        self._world = world
        parts = {"b2": weights.b2, **weights.scales(), **in_layout(weights)}
        self._parts = {name: None if part is None else part[mine] for name, part in parts.items()}
        self.engine = CudaEngine(weights.cfg, world, world.workspace.shared, slicing=slicing)

    def __call__(self, call: Call, tokens: Tensor | None = None) -> Tensor:
        """The output of a call whose tensors are on the GPU; whatever is not written is NaN.

        `tokens`: as of `MoELayer.forward`.
        """
        out = torch.full_like(call.x, torch.nan)
        tensors = CallTensors(
            x=call.x,
            out=out,
            gate=self._weights.gate,
            selection_bias=self._weights.selection_bias,
            router_bias=self._weights.router_bias,
            expert_scale=self._weights.expert_scale,
            topk_ids=call.ids,
            topk_weights=call.weights,
            tokens=tokens,
            **self._parts,
        )
        self.engine.forward(tensors)
        return out

    def poison(self) -> None:
        """Fills all rows of the heap's cells, and all rows between the GEMMs, with NaN. Collective.

        A call that used a row of the call before would have it in its output.
        """
        buffers = self.engine._shared.buffers(self.engine._mine)
        torch.cuda.synchronize()
        self._world.control.barrier()  # no rank is in a call
        buffers.heap[buffers.place.rows_at :].fill_(0xFF)  # a NaN of either type
        buffers.between.fill_(0xFF)
        torch.cuda.synchronize()
        self._world.control.barrier()


def run_calls(
    case: Case, weights: Weights, calls: Sequence[Sequence[Call]], *, poison: bool = False
) -> tuple[list[list[Tensor]], list[CallStats]]:
    """Makes the calls [rank][call]; the outputs, and each rank's last stats.

    Back to back, or, with `poison`, after each rank's rows have been filled with NaN.
    """

    def rank_main(world: World) -> tuple[list[Tensor], CallStats]:
        layer = RankLayer(weights, world)
        outputs = []
        for call in calls[world.rank]:
            if poison:
                layer.poison()
            outputs.append(layer(call))
        layer.engine.check()
        return outputs, layer.engine.stats()

    results = virtual.run(
        rank_main,
        ranks=case.ranks,
        backend="cuda",
        deadline=DEADLINE,
        ranks_per_node=case.ranks_per_node,
    )
    return [outputs for outputs, _ in results], [stats for _, stats in results]


def draw_calls(case: Case, draw: Callable[[int, int], Call], count: int) -> list[list[Call]]:
    """Calls [rank][call] on the GPU, from `draw(rank, call)`."""
    return [[call_on_gpu(draw(rank, call)) for call in range(count)] for rank in range(case.ranks)]


def draw_routed_call(weights: Weights, tokens: int, seed: int) -> Call:
    """Tokens whose experts the gate chooses, the same ones in fp32 as in float64.

    Near ties are drawn again, so every token can be compared, and a capacity drops the same pairs.
    """
    cfg = weights.cfg
    x = draw_call(cfg, tokens, seed).x.to(weights.gate.device)
    ties = near_ties(weights, x)
    for again in range(1, _REDRAWS + 1):
        if not ties.any():
            return Call(x)
        x[ties] = draw_call(cfg, int(ties.sum()), seed + 1_000_003 * again).x.to(x.device)
        ties = near_ties(weights, x)
    raise AssertionError(f"{int(ties.sum())} tokens are near ties, drawn {_REDRAWS} times")


def near_ties(weights: Weights, x: Tensor) -> Tensor:
    """Which tokens [S] the gate may route otherwise in fp32 than in float64.

    They must be as rare as fp32's error is small: over so short a way the density of margins is
    flat, so among the tokens whose margin is at most `_WIDER` times that error, each is one of them
    with a chance of 1 / `_WIDER`. A number of them that is less likely than `_FALSE_ALARM` is a
    mistake in the bound on the error, or in the margin.
    """
    margin = weights.margin_in_errors(x)
    ties, wide = int((margin <= 1).sum()), int((margin <= _WIDER).sum())
    chance = binomial_tail(wide, ties, 1 / _WIDER)
    assert chance > _FALSE_ALARM, f"{ties} of {len(x)} tokens are near ties, and {wide} are nearly"
    return margin <= 1


def binomial_tail(trials: int, least: int, chance: float) -> float:
    """The probability of at least `least` successes."""
    return sum(
        math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(n + 1)
            - math.lgamma(trials - n + 1)
            + n * math.log(chance)
            + (trials - n) * math.log1p(-chance)
        )
        for n in range(least, trials + 1)
    )


def assert_matches(weights: Weights, call: Call, y: Tensor, what: str) -> None:
    """Asserts that an output is the float64 reference's, but for near ties that the gate routes.

    With a capacity such a token could move others' drops, so then there must be none. Tensors are
    on the GPU.
    """
    cfg = weights.cfg
    sure = torch.ones(len(y), dtype=torch.bool, device=y.device)
    if call.ids is None:
        sure = ~near_ties(weights, call.x)
        assert cfg.capacity_factor is None or sure.all(), f"{what}: draw its tokens otherwise"
    expected = weights.expected(call)[sure]
    error = reference.relative_error(y[sure], expected)
    assert error <= reference.tolerance_of(cfg), f"{what}: relative error {error:.2e}"
    if cfg.result_format is not None:
        # Results beside a tie may become another code, no farther from what was coded.
        plain = dataclasses.replace(weights, cfg=dataclasses.replace(cfg, result_format=None))
        uncoded = plain.expected(call)[sure]
        allowed = reference.relative_error(expected, uncoded) + reference.tolerance_of(plain.cfg)
        error = reference.relative_error(y[sure], uncoded)
        assert error <= allowed, f"{what}: error {error:.2e} beside results that are not coded"


def assert_all_match(
    weights: Weights, calls: Sequence[Sequence[Call]], outputs: Sequence[Sequence[Tensor]]
) -> None:
    """`assert_matches` for calls and outputs by [rank][call]."""
    for rank, (rank_calls, rank_outputs) in enumerate(zip(calls, outputs, strict=True)):
        for number, (call, y) in enumerate(zip(rank_calls, rank_outputs, strict=True)):
            assert_matches(weights, call, y, f"rank {rank}, call {number}")


def given_and_routed(weights: Weights, counts: Sequence[int]) -> Callable[[int], list[Call]]:
    """A rank's calls of so many tokens each: first one that its caller routes, then one that the
    layer does.
    """

    def calls_of(rank: int) -> list[Call]:
        calls = []
        for number, tokens in enumerate(counts):
            seed = 100 * rank + 10 * number
            calls.append(draw_given_call(weights.cfg, tokens, seed))
            calls.append(draw_routed_call(weights, tokens, seed + 1))
        return calls

    return calls_of


def assert_computes(case: Case, weights: Weights, calls_of: Callable[[int], list[Call]]) -> None:
    """The layer's outputs are the reference's, `calls_of` a rank."""

    def rank_main(world: World) -> list[torch.Tensor]:
        layer = weights.layer(world)
        outputs = []
        for call in calls_of(world.rank):
            outputs.append(call_on_gpu(call)(layer))
        layer.check()
        return [y.cpu() for y in outputs]

    found = virtual.run(rank_main, ranks=case.ranks, backend="cuda", deadline=DEADLINE)
    for rank, outputs in enumerate(found):
        for call, y in zip(calls_of(rank), outputs, strict=True):
            assert_matches(weights, call, y, f"rank {rank}, {len(call.x)} tokens")
