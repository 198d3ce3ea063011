# SPDX-License-Identifier: Apache-2.0
"""How much each stage of a traced call does, and how fast: FLOPs of products, bytes of rows and of
weights.

This file must not depend on what waited for what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moeos.cli.estimate import expert_bytes_by_name
from moeos.cli.timeline import weights
from moeos.cli.timeline.call import COURIERS, DISPATCH, PRODUCT0, PRODUCT1, CallTrace, kind_name
from moeos.cli.timeline.summary import Stage
from moeos.cli.timeline.weights import Weights
from moeos.config.activations import FORMULAS
from moeos.config.config import MoEConfig
from moeos.config.limits import DTYPES
from moeos.config.sizes import returned_bytes, sent_bytes
from moeos.partition.rates import H200
from moeos.partition.slicing import WHOLE, Slicing, slicing_of

CACHE_BYTES = 40_000_000
"""The cache that weights are replayed through: the part of an H200's L2 that rows leave to them."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


@dataclasses.dataclass(frozen=True)
class Amount:
    """What all ranks do in a stage.

    Attributes:
        total: FLOPs or bytes.
        unit: "FLOP" or "B".
        rate: of a rank, a second, from the stage's first claim to its last end; None if it has no
            part.
        share: of what an H200 can do, in that unit; None if it has no rate.
    """

    total: int
    unit: str
    rate: float | None
    share: float | None

    def text(self) -> str:
        """The total with its unit."""
        return scaled(self.total, self.unit)

    def rate_text(self) -> str:
        """The rate with its unit."""
        return "-" if self.rate is None else f"{scaled(self.rate, self.unit)}/s"

    def share_text(self) -> str:
        """The share in percent."""
        return "-" if self.share is None else f"{100 * self.share:.1f} %"


def work_of(
    call: CallTrace, stages: Sequence[Stage], about: Mapping[str, Any]
) -> dict[str, Amount]:
    """The amount of each stage: the router's and the GEMMs' FLOPs, against the dense rate of such
    products; the rows that Dispatch and Replicate copy and that Combine reads, in bytes, against
    the memory's. Rows that only pad a tile do not count. Where experts are sliced, each rank does
    its part of them for all tokens, and Combine reads partial sums and sums, too.

    Without what is copied where parts are missing; empty where `about` does not say what ran.
    """
    cfg = _config_of(about, len(call.ranks))
    if cfg is None:
        return {}
    rows = sum(int(trace.received.sum()) for trace in call.ranks)
    row_bytes = cfg.hidden * cfg.dtype.itemsize
    by_gate = about["routing"] == "uniform"
    tokens = about["tokens"] * len(call.ranks)
    n, shared = cfg.shared_experts, int(cfg.shared_experts > 0)
    first = n * cfg.shared_w1_rows + cfg.shared_gate

    def products(of_row: int, of_token: int) -> tuple[int, str, float]:
        experts, others = (
            2 * count * elements * cfg.hidden
            for count, elements in ((rows, of_row), (tokens, of_token))
        )
        seconds = experts / H200.expert_flops(cfg) + others / H200.bf16_flops
        total = experts + others
        return total, "FLOP", total / seconds if total > 0 else H200.bf16_flops

    found = {
        "route": (2 * tokens * cfg.experts * cfg.hidden * by_gate, "FLOP", H200.bf16_flops),
        "product0": products(cfg.w1_rows, first),
        "product1": products(cfg.intermediate, n * cfg.shared_intermediate),
        "combine": (
            rows * returned_bytes(cfg)
            + (tokens * shared + _sums_read(about, len(call.ranks))) * row_bytes,
            "B",
            H200.memory_bytes,
        ),
    }
    if call.planned_up_front:
        for kind in COURIERS:
            copied = int(call.parts["carried"][call.parts["kind"] == kind].sum())
            found[kind_name(kind)] = (copied * sent_bytes(cfg), "B", H200.memory_bytes)
    return {
        stage.kind: _amount(*found[stage.kind], stage, len(call.ranks))
        for stage in stages
        if stage.kind in found
    }


def to_peers_of(
    call: CallTrace, stages: Sequence[Stage], about: Mapping[str, Any]
) -> dict[str, Amount]:
    """Rows that Dispatch sends to other ranks, and results that Product1 returns to them, in bytes,
    against a link's rate; where experts are sliced, the sums that Combine sends. Without the
    rows where parts are missing; empty for one rank, and where `about` does not say what ran.
    """
    ranks = len(call.ranks)
    cfg = _config_of(about, ranks)
    if cfg is None or ranks == 1:
        return {}
    received = [trace.received.sum(axis=1) for trace in call.ranks]
    rows = {"product1": sum(int(of.sum() - of[rank]) for rank, of in enumerate(received))}
    slicing = _slicing_of(about, ranks)
    if _adds_up(slicing):
        sent = [slicing.sums_sent(rank, ranks, about["tokens"]) for rank in range(ranks)]
        rows["combine"] = sum(map(sum, sent))
    if slicing.sums and slicing.holders(ranks) == 1:
        del rows["product1"]
    elif call.planned_up_front:
        parts = call.parts
        there = (parts["kind"] == DISPATCH) & (parts["peer"] != parts["rank"])
        rows["dispatch"] = int(parts["carried"][there].sum())
    row_bytes = {
        "dispatch": sent_bytes(cfg),
        "product1": returned_bytes(cfg),
        "combine": cfg.hidden * cfg.dtype.itemsize,
    }
    return {
        stage.kind: _amount(
            rows[stage.kind] * row_bytes[stage.kind],
            "B",
            H200.link_bytes,
            stage,
            len(call.ranks),
        )
        for stage in stages
        if stage.kind in rows
    }


def weights_of(call: CallTrace, about: Mapping[str, Any]) -> dict[str, Weights]:
    """What each GEMM asks of the experts' weights, see `weights.replay`.

    Empty where `about` does not say what ran, or parts are missing.
    """
    cfg = _config_of(about, len(call.ranks))
    if cfg is None or not call.planned_up_front:
        return {}
    of_each = expert_bytes_by_name(cfg)
    sums = {
        kind: sum(size for name, size in of_each.items() if name.startswith(matrix))
        for kind, matrix in ((PRODUCT0, "w1"), (PRODUCT1, "w2"))
    }
    return weights.replay(call, sums, CACHE_BYTES)


def _slicing_of(about: Mapping[str, Any], ranks: int) -> Slicing:
    """The slicing of a trace; traces from before experts were sliced do not name it."""
    given: dict[str, Any] = {**WHOLE.arguments, "tensor_ranks": None, **about}
    names = ("tensor_ranks", "layout", "reduce")
    return slicing_of(given["parallel"], "replicated", ranks, *(given[name] for name in names))


def _adds_up(slicing: Slicing) -> bool:
    """Whether the kernel adds up slices: what adds up after the kernel leaves no part."""
    return slicing.sums and slicing.policy.reduce != "after"


def _sums_read(about: Mapping[str, Any], ranks: int) -> int:
    """Rows of partial sums that all owners add up, and of sums that all others copy."""
    slicing = _slicing_of(about, ranks)
    of_group = about["tokens"] * (2 * slicing.slices - 1)
    return slicing.holders(ranks) * of_group if _adds_up(slicing) else 0


def _config_of(about: Mapping[str, Any], ranks: int) -> MoEConfig | None:
    """The config that each of `ranks` ranks computes: of one slice where experts are sliced."""
    if not {"config", "tokens", "routing"} <= about.keys():
        return None
    fields = dict(about["config"])
    for name in ("dtype", "router_dtype"):
        if fields.get(name) is not None:
            fields[name] = DTYPES[fields[name]]
    # The document also has numbers that the activation implies, which a config may not accept.
    formula = FORMULAS[fields["activation"]]
    for name, own in (("swiglu_alpha", formula.alpha), ("swiglu_limit", formula.limit)):
        if fields.get(name) == own:
            fields[name] = None
    return _slicing_of(about, ranks).cut(MoEConfig(**fields))


def _amount(total: int, unit: str, limit: float, stage: Stage, ranks: int) -> Amount:
    rate = None
    if stage.first_claimed is not None and stage.last_visible is not None:
        seconds = (stage.last_visible - stage.first_claimed) / 1e9
        rate = total / ranks / seconds if seconds > 0 else None
    return Amount(total, unit, rate, None if rate is None else rate / limit)


def scaled(number: float, unit: str) -> str:
    """A number with its unit and the prefix that makes it short."""
    prefix = 0
    while number >= 1000 and prefix + 1 < len(_PREFIXES):
        number /= 1000
        prefix += 1
    return f"{number:.3g} {_PREFIXES[prefix]}{unit}"
