# SPDX-License-Identifier: Apache-2.0
"""Layers with known weights and calls with known routing, for the tests of the layer.

Holds no test. Weights are drawn for all experts at once, so that the float64 reference sees what
the ranks of a world hold in parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moeos import MoEConfig, MoELayer, Placement, Workspace, World
from moeos.call import call_checks
from moeos.call.call_checks import Expected
from moeos.checkpoints.state_names import state_name
from moeos.config import reference
from moeos.config.element_formats import (
    TOKEN_GROUP,
    WeightFormat,
    dequantize,
    quantize_matrix,
    quantize_rows,
)
from moeos.partition.policies import Layout, Reduce
from moeos.partition.slicing import Output, Parallel, Slicing

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""The largest relative Frobenius error of one rank's output of one call."""

NEAR_TIE = 1e-6
"""Tokens whose routing margin is below this may be routed otherwise in fp32."""

_SIZES: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "experts": 8,
    "top_k": 2,
    "dtype": torch.float32,
    "max_tokens": 128,
}


def config(**changes: Any) -> MoEConfig:
    """A small float32 layer, with `changes`."""
    return MoEConfig(**(_SIZES | changes))


@dataclasses.dataclass(frozen=True)
class Call:
    """One rank's arguments in one call; `ids` and `weights` are the caller's routing, or None. Ids
    without weights are weighed by the gate. `x_scale`: x is codes, and these are their scales.
    """

    x: Tensor
    ids: Tensor | None = None
    weights: Tensor | None = None
    x_scale: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The call of what the function makes of each tensor that is given."""
        return Call(*(None if part is None else function(part) for part in vars(self).values()))

    def first(self, tokens: int) -> Call:
        """The call with its first tokens alone."""
        return self.each(lambda part: part[:tokens])

    def __call__(self, layer: MoELayer) -> Tensor:
        weigh = self.ids is not None and self.weights is None
        y: Tensor = layer(
            self.x,
            topk_ids=self.ids,
            topk_weights=self.weights,
            weigh=weigh,
            x_scale=self.x_scale,
        )
        return y


@dataclasses.dataclass(frozen=True)
class Weights:
    """All experts' parameters, in the layer's dtype, or in its format."""

    cfg: MoEConfig
    gate: Tensor
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    selection_bias: Tensor | None
    router_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_gate: Tensor | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w1_scale_2: Tensor | None = None
    w2_scale_2: Tensor | None = None
    shared_w1_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    shared_w1_scale_2: Tensor | None = None
    shared_w2_scale_2: Tensor | None = None

    def of_rank(self, rank: int, ranks: int, placement: Placement | None = None) -> Weights:
        """The router's parameters, the shared experts', and those of one rank's experts."""
        own = self.cfg.experts_of(rank, ranks)
        mine: Any = slice(own.start, own.stop)
        if placement is not None:
            mine = list(placement.ranks[rank])
        return dataclasses.replace(
            self,
            w1=self.w1[mine],
            w2=self.w2[mine],
            b1=None if self.b1 is None else self.b1[mine],
            b2=None if self.b2 is None else self.b2[mine],
            **{name: None if part is None else part[mine] for name, part in self.scales().items()},
        )

    def of_slice(self, slicing: Slicing, rank: int, ranks: int) -> Weights:
        """One rank's slices of its experts, and of the shared ones; b2 where the rank adds it."""
        cut = slicing.cut(self.cfg)
        expected = [
            {wanted.name: wanted.shape for wanted in expected_of(cfg) if wanted is not None}
            for cfg in (self.cfg, cut)
        ]
        mine: dict[str, Any] = {}
        for name, whole in expected[0].items():
            halves = self.cfg.halves if name.removeprefix("shared_")[1] == "1" else 1
            part = slicing.part(getattr(self, name), whole, expected[1][name], halves, rank)
            mine[name] = part.contiguous()
        if self.b2 is not None and not slicing.adds_bias(rank):
            mine["b2"] = torch.zeros_like(self.b2)
        every = dataclasses.replace(self, cfg=cut, **mine)
        return every.of_rank(slicing.holder(rank), slicing.holders(ranks))

    def scales(self) -> dict[str, Tensor | None]:
        """Of w1 and w2 that are codes."""
        names = ("w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2")
        return {name: getattr(self, name) for name in names}

    def shared_scales(self) -> dict[str, Tensor | None]:
        """The same of the shared experts."""
        return {f"shared_{name}": getattr(self, f"shared_{name}") for name in self.scales()}

    def numbers(self, name: str) -> Tensor:
        """What w1 or w2 means, or shared_w1 or shared_w2."""
        codes: Tensor = getattr(self, name)
        scale, scale_2 = getattr(self, f"{name}_scale"), getattr(self, f"{name}_scale_2")
        if scale is None:
            return codes
        assert self.cfg.weight_format is not None
        halves = self.cfg.halves if name.endswith("w1") else 1
        return dequantize(codes, scale, scale_2, self.cfg.weight_format, halves)

    def layer(
        self,
        world: World,
        workspace: Workspace | None = None,
        placement: Placement | None = None,
        parallel: Parallel = "expert",
        output: Output = "replicated",
        tensor_ranks: int | None = None,
        layout: Layout = "auto",
        reduce: Reduce = "auto",
    ) -> MoELayer:
        """A layer of `world` with this rank's part of the weights, frozen: most tests are of calls
        that keep nothing for a backward. Collective.
        """
        layer = MoELayer(
            *(self.cfg, world, workspace),
            placement=placement,
            parallel=parallel,
            output=output,
            tensor_ranks=tensor_ranks,
            layout=layout,
            reduce=reduce,
        )
        whole = placement is not None or parallel != "expert"
        mine = self if whole else self.of_rank(world.rank, world.size)
        parts = {
            "gate.weight": mine.gate,
            "gate.selection_bias": mine.selection_bias,
            "gate.bias": mine.router_bias,
            "gate.expert_scale": mine.expert_scale,
            "w1": mine.w1,
            "w2": mine.w2,
            "b1": mine.b1,
            "b2": mine.b2,
            **self._shared(),
            **self.shared_scales(),
            **mine.scales(),
        }
        named = {state_name(self.cfg, name): part for name, part in parts.items()}
        layer.load_state_dict({name: part for name, part in named.items() if part is not None})
        return layer.requires_grad_(False)

    def expected(self, call: Call) -> Tensor:
        """What the float64 reference makes of a call."""
        return reference.moe(
            call.x,
            self.gate,
            self.numbers("w1"),
            self.numbers("w2"),
            self.cfg,
            call.ids,
            call.weights,
            b1=self.b1,
            b2=self.b2,
            selection_bias=self.selection_bias,
            x_scale=call.x_scale,
            **self._rules(),
            **self._shared_numbers(),
        )

    def _shared(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("shared_w1", "shared_w2", "shared_gate")}

    def _shared_numbers(self) -> dict[str, Tensor | None]:
        matrices = ("shared_w1", "shared_w2") if self.cfg.shared_experts else ()
        return self._shared() | {name: self.numbers(name) for name in matrices}

    def _rules(self) -> dict[str, Tensor | None]:
        return {"router_bias": self.router_bias, "expert_scale": self.expert_scale}

    def routed(self, call: Call) -> reference.Routing:
        """How the float64 reference routes a call's tokens."""
        return reference.route(call.x, self.gate, self.cfg, self.selection_bias, **self._rules())

    def routing(self, call: Call) -> Tensor:
        """The experts [S, k] of a call's tokens, without the pairs that are dropped (then -1)."""
        ids = call.ids
        if ids is None:
            ids = self.routed(call).ids
        return ids.masked_fill(reference.dropped(ids, self.cfg), -1)

    def drops(self, call: Call) -> int:
        """How many pairs of a call exceed their expert's capacity."""
        ids = call.ids
        if ids is None:
            ids = self.routed(call).ids
        return int(reference.dropped(ids, self.cfg).sum())

    def margin_in_errors(self, x: Tensor) -> Tensor:
        """`reference.margin_in_errors` of tokens."""
        return reference.margin_in_errors(
            x, self.gate, self.cfg, self.selection_bias, **self._rules()
        )

    def sure(self, call: Call) -> Tensor:
        """Which tokens [S] of a call fp32 and float64 must route alike."""
        if call.ids is not None:
            return torch.ones(len(call.x), dtype=torch.bool)
        if self.cfg.router_dtype is not None:
            return self.margin_in_errors(call.x) > 1
        return self.routed(call).margin >= NEAR_TIE


def expected_of(cfg: MoEConfig) -> list[Expected | None]:
    """All tensors of a layer's experts, and of shared ones."""
    return [
        *call_checks.expected_weights(cfg, cfg.experts),
        *call_checks.expected_scales(cfg, cfg.experts),
        *call_checks.expected_shared(cfg),
        *call_checks.expected_shared_scales(cfg),
    ]


def draw_weights(cfg: MoEConfig, seed: int = 0, preference: Tensor | None = None) -> Weights:
    """Random weights with rows of norm about 1.

    `preference` [E] is added to the logits of tokens whose first element is 1, as `draw_call` makes
    them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = cfg.dtype) -> Tensor:
        normal = torch.randn(shape, dtype=torch.float64, generator=generator)
        return (normal / math.sqrt(shape[-1])).to(dtype)

    gate = draw(cfg.router_rows, cfg.hidden, dtype=cfg.gate_dtype)
    if preference is not None:
        gate[: cfg.experts, 0] = preference.to(cfg.gate_dtype)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(cfg.router_rows).uniform_(low, high, generator=generator)

    bias = uniform(-0.2, 0.2) if cfg.selection_bias else None
    shared, width = cfg.shared_experts, cfg.shared_intermediate
    form, halves = cfg.weight_format, cfg.halves
    w1, w1_scale, w1_scale_2 = _in_format(draw(cfg.experts, cfg.w1_rows, cfg.hidden), form, halves)
    w2, w2_scale, w2_scale_2 = _in_format(draw(cfg.experts, cfg.hidden, cfg.intermediate), form, 1)
    drawn = Weights(
        cfg=cfg,
        gate=gate,
        w1=w1,
        w2=w2,
        b1=draw(cfg.experts, cfg.w1_rows) if cfg.bias else None,
        b2=draw(cfg.experts, cfg.hidden) if cfg.bias else None,
        selection_bias=bias,
        router_bias=uniform(-1.0, 1.0) if cfg.router_bias else None,
        expert_scale=uniform(0.5, 2.0) if cfg.expert_scale else None,
        shared_w1=draw(shared, cfg.shared_w1_rows, cfg.hidden) if shared else None,
        shared_w2=draw(shared, cfg.hidden, width) if shared else None,
        shared_gate=draw(cfg.hidden) if cfg.shared_gate else None,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_scale_2=w1_scale_2,
        w2_scale_2=w2_scale_2,
    )
    return drawn if cfg.shared_weight_format is None else _with_shared_codes(drawn)


def _with_shared_codes(drawn: Weights) -> Weights:
    changes: dict[str, Tensor | None] = {}
    for name, halves in (("shared_w1", drawn.cfg.halves), ("shared_w2", 1)):
        parts = _in_format(getattr(drawn, name), drawn.cfg.shared_weight_format, halves)
        changes |= zip((name, f"{name}_scale", f"{name}_scale_2"), parts, strict=True)
    return dataclasses.replace(drawn, **changes)


def _in_format(
    numbers: Tensor, form: WeightFormat | None, halves: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes and scales of matrices in a format; themselves without one."""
    return (numbers, None, None) if form is None else quantize_matrix(numbers, form, halves)


def pair_experts(weights: Weights, seed: int = 0) -> Weights:
    """The same weights with routers of experts 2i and 2i + 1 that differ by some 1e-5 of them.

    An odd top_k then divides a pair of each token, by a margin that 16 bits or TF32 lose and fp32
    keeps. Its experts compute different things, so a wrong choice is a large error.
    """
    generator = torch.Generator().manual_seed(seed)
    gate = weights.gate.cpu().clone()
    change = torch.randn(gate[::2].shape, generator=generator) * 1e-5
    gate[1::2] = (gate[::2].double() * (1 + change.double())).to(gate.dtype)
    return dataclasses.replace(weights, gate=gate.to(weights.gate.device))


def telling_experts(weights: Weights) -> Weights:
    """The same router with experts whose outputs tell which were chosen: see `chosen`.

    The layer's activation must be "identity", and H at least E.
    """
    cfg = weights.cfg
    assert cfg.activation == "identity"
    assert cfg.hidden >= cfg.experts
    w1, w2 = torch.zeros_like(weights.w1), torch.zeros_like(weights.w2)
    w1[:, 0, 0] = 1.0  # the first element of a token, which `draw_call` makes 1
    every = torch.arange(cfg.experts, device=w2.device)
    w2[every, every, 0] = 1.0
    return dataclasses.replace(weights, w1=w1, w2=w2)


def chosen(cfg: MoEConfig, y: Tensor) -> Tensor:
    """Which experts a token was sent to: bool [S, E], of an output of `telling_experts`."""
    return y[:, : cfg.experts] != 0


def routed_by_reference(weights: Weights, call: Call) -> Tensor:
    """The same by the float64 reference."""
    ids = weights.routed(call).ids
    none = torch.zeros(len(ids), weights.cfg.experts, dtype=torch.bool, device=ids.device)
    return none.scatter(1, ids, True)


def deduplicated_rows(ids: Tensor, experts: range, first_rows: int) -> int:
    """Rows that cross to a rank with these experts, if its first `first_rows` rows do and behind
    them the first of each token. `ids` [S, k]: where the tokens go, all of them with a row there.
    """
    seen: set[int] = set()
    crossed = row = 0
    for expert in experts:
        for token in (ids == expert).any(dim=1).nonzero().flatten().tolist():
            crossed += row < first_rows or token not in seen
            seen.add(token)
            row += 1
    return crossed


def draw_call(cfg: MoEConfig, tokens: int, seed: int) -> Call:
    """Tokens that the layer's gate routes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cfg.hidden, generator=generator)
    x[:, 0] = 1.0
    return Call(x.to(cfg.dtype))


def draw_given_call(
    cfg: MoEConfig, tokens: int, seed: int, preference: Tensor | None = None, unused: float = 0.1
) -> Call:
    """Tokens with the caller's routing: distinct experts of each token, more often those that
    `preference` [E] (logarithms, -inf for never) favours, weights of both signs, and a share of
    unused slots; where fewer than k experts are possible the other slots are unused as well."""
    generator = torch.Generator().manual_seed(seed)
    call = draw_call(cfg, tokens, seed)
    if preference is None:
        preference = torch.zeros(cfg.router_rows)
    elif cfg.zero_experts > 0:
        preference = torch.cat((preference, torch.zeros(cfg.zero_experts)))
    uniform = torch.rand(tokens, cfg.router_rows, generator=generator).clamp(1e-9, 1 - 1e-7)
    best = (preference - (-uniform.log()).log()).topk(cfg.top_k, dim=1)  # Gumbel's trick
    skipped = torch.rand(tokens, cfg.top_k, generator=generator) < unused
    ids = best.indices.masked_fill(skipped | best.values.isinf(), -1)
    return Call(call.x, ids, torch.randn(tokens, cfg.top_k, generator=generator))


FAR_BELOW = {"selection_bias": True, "top_k": 3}
"""What `draw_far_below` asks of a config, beside 8 experts."""


def draw_far_below(cfg: MoEConfig, tokens: int, seed: int = 0) -> tuple[Weights, Call]:
    """A layer and a call in which all chosen scores of half of the tokens are too small for fp32.

    Experts 4 to 7 have logits far below the others'. A bias chooses them, or, where cfg.routing is
    "ids", the caller.
    """
    drawn = draw_weights(cfg, seed)
    gate = drawn.gate.clone()
    gate[:, 0] = torch.tensor([120.0, 60, 0, -60, -120, -121, -122, -123])
    bias = torch.tensor([0.0] * 4 + [9.0, 8.0, 7.0, 6.0])
    weights = dataclasses.replace(drawn, gate=gate, selection_bias=bias)
    if cfg.routing == "layer":
        return weights, draw_call(cfg, tokens, seed + 1)
    favoured = torch.tensor([-math.inf] * 4 + [0.0] * 4)
    given = draw_given_call(cfg, tokens, seed + 1, favoured, unused=0.3)
    return weights, dataclasses.replace(given, weights=None)


PREFERENCES: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": lambda experts, ranks: torch.zeros(experts),
    "zipf": lambda experts, ranks: -1.2 * torch.arange(1, experts + 1).log(),
    "one-expert": lambda experts, ranks: torch.zeros(experts).index_fill(
        0, torch.tensor([experts // 2]), 4.0
    ),
    "empty-rank": lambda experts, ranks: torch.zeros(experts).index_fill(
        0, torch.arange(experts // ranks), -math.inf
    ),
    "idle-experts": lambda experts, ranks: torch.zeros(experts).index_fill(
        0, torch.arange(0, experts, 2), -math.inf
    ),
}
"""Kinds of routing: name -> (E, P) -> logarithm of each expert's popularity."""


def coded_call(call: Call) -> Call:
    """The same tokens, quantised by the caller."""
    x, x_scale = quantize_rows(call.x, TOKEN_GROUP)
    return dataclasses.replace(call, x=x, x_scale=x_scale)


def assert_matches(weights: Weights, call: Call, y: Tensor, what: str = "") -> None:
    """Asserts that an output is the reference's, but for tokens that fp32 may route otherwise.

    With a capacity such a token could move others' drops, so then there must be none.
    """
    cfg = weights.cfg
    assert y.dtype == cfg.dtype
    assert y.shape == call.x.shape
    sure = weights.sure(call)
    allowed = 0 if cfg.capacity_factor is not None else max(1, len(sure) // 100)
    near_ties = int((~sure).sum())
    assert near_ties <= allowed, f"{what}: {near_ties} of {len(sure)} tokens are near ties"
    expected = weights.expected(call)
    error = reference.relative_error(y[sure], expected[sure])
    # The twin's numbers between GEMMs are so near that results next to no tie become other codes.
    tolerance = reference.tolerance_of(dataclasses.replace(cfg, result_format=None))
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_all_match(
    weights: Weights, calls: Sequence[Sequence[Call]], outputs: Sequence[Sequence[Tensor]]
) -> None:
    """`assert_matches` for calls and outputs by [rank][call]."""
    for rank, (rank_calls, rank_outputs) in enumerate(zip(calls, outputs, strict=True)):
        for number, (call, y) in enumerate(zip(rank_calls, rank_outputs, strict=True)):
            assert_matches(weights, call, y, f"rank {rank}, call {number}")
