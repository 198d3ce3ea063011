# SPDX-License-Identifier: Apache-2.0
"""Checks a layer's outputs against the float64 reference.

Each rank checks its own tokens, with the weights of all experts, which the ranks share. This file
must not depend on where tokens come from or on what is reported.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moeos.call import call_checks
from moeos.cli.workload import Batch
from moeos.config import reference
from moeos.layer.layer import MoELayer
from moeos.layer.quantization import numbers_of

_MAX_FLOPS = 4e10  # of one rank's reference: seconds on one core
_MAX_BYTES = 1 << 28  # of one rank's float64 rows
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one rank's check.

    Attributes:
        errors: for each call the relative Frobenius error of the checked tokens' outputs.
        checked: tokens whose output was compared.
        near_ties: tokens left out because their experts are not certain in float32; see
            `reference.margin_in_errors`.
        tokens: of all calls.
    """

    errors: list[float]
    checked: int
    near_ties: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The checked tokens of one call: x, out [n, H], ids int64 and weights float64 [n, k], all in
    this machine's memory, where the reference computes.
    """

    x: Tensor
    out: Tensor
    ids: Tensor
    weights: Tensor


class Checker:
    """Keeps inputs and outputs of a run's calls, and compares them when the run is over.

    All tokens are checked where that takes seconds; else evenly spaced ones of each call.
    """

    def __init__(self, layer: MoELayer, calls: int) -> None:
        cfg = layer.cfg
        flops = 2 * cfg.top_k * (cfg.w1_rows + cfg.intermediate) * cfg.hidden
        of_each = cfg.shared_w1_rows + cfg.shared_intermediate
        flops += 2 * cfg.shared_experts * of_each * cfg.hidden
        row_bytes = 8 * max(2 * cfg.hidden, cfg.w1_rows, cfg.shared_w1_rows)
        self._layer = layer
        self._gate = layer.gate.weight.cpu()
        self._rules = {
            name: None if tensor is None else tensor.detach().cpu()
            for name, tensor in layer.gate.rules().items()
        }
        self._shared = {name: _shared_numbers(layer, name) for name in call_checks.SHARED}
        self._per_call = max(1, int(min(_MAX_FLOPS / flops, _MAX_BYTES / row_bytes)) // calls)
        self._samples: list[_Sample] = []
        self._tokens = 0
        self._near_ties = 0

    def keep(self, batch: Batch, out: Tensor) -> None:
        """Notes one call: its arguments, in this machine's memory, and its output [S, H].

        Drops are decided here, among all tokens of the call. A near tie may also decide whose pair
        is dropped, which is not allowed for.
        """
        cfg = self._layer.cfg
        certain = torch.ones(len(batch.x), dtype=torch.bool)
        if batch.topk_ids is None or batch.topk_weights is None:
            gate, rules = self._gate, self._rules
            ids, weights, _ = reference.route(batch.x, gate, cfg, **rules)
            certain = reference.margin_in_errors(batch.x, gate, cfg, **rules) > 1
        else:
            ids, weights = batch.topk_ids, batch.topk_weights.double()
        ids = ids.masked_fill(reference.dropped(ids, cfg), -1)
        rows = certain.nonzero().flatten()
        if len(rows) > self._per_call:
            spread = torch.linspace(0, len(rows) - 1, self._per_call, dtype=torch.float64)
            rows = rows[spread.round().long()]
        self._tokens += len(batch.x)
        self._near_ties += int((~certain).sum())
        self._samples.append(_Sample(batch.x[rows], out.cpu()[rows], ids[rows], weights[rows]))

    def compare(self) -> CheckResult:
        """The errors of all calls that were kept. Collective: ranks share their weights."""
        weights = share_weights(self._layer)
        shared = {name: weights.get(name, own) for name, own in self._shared.items()}
        samples = self._samples
        cfg = dataclasses.replace(self._layer.cfg, capacity_factor=None, row_map=None)  # see keep
        expected = reference.moe(
            torch.cat([sample.x for sample in samples]),
            self._gate,
            weights["w1"],
            weights["w2"],
            cfg,
            torch.cat([sample.ids for sample in samples]),
            torch.cat([sample.weights for sample in samples]),
            b1=weights.get("b1"),
            b2=weights.get("b2"),
            **self._rules,
            **shared,
        ).split([len(sample.x) for sample in samples])
        errors = [
            reference.relative_error(sample.out, rows)
            for sample, rows in zip(samples, expected, strict=True)
        ]
        checked = sum(len(sample.x) for sample in samples)
        return CheckResult(errors, checked, self._near_ties, self._tokens)


def share_weights(layer: MoELayer) -> dict[str, Tensor]:
    """The weights of all experts, in the layer's dtype: w1 and w2, b1 and b2 where it has them, and
    shared_w1 and shared_w2 where they are cut. Quantized weights are dequantized. Where an
    activation format multiplies codes by codes, nothing rounds the weights to that dtype: they are
    float32.

    Collective. Each rank copies its own weights into rank 0's part of a new heap in this machine's
    memory, so all ranks read one copy. The heap is gone when the world is closed.
    """
    world = layer.world
    cfg = layer.cfg
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (cfg.experts, cfg.w1_rows, cfg.hidden),
        "w2": (cfg.experts, cfg.hidden, cfg.intermediate),
    }
    if cfg.bias:
        shapes |= {"b1": (cfg.experts, cfg.w1_rows), "b2": (cfg.experts, cfg.hidden)}
    if layer.experts is not None and layer.experts.slicing.sums and cfg.shared_experts > 0:
        count, inner = cfg.shared_experts, cfg.shared_intermediate
        shapes["shared_w1"] = (count, cfg.shared_w1_rows, cfg.hidden)
        shapes["shared_w2"] = (count, cfg.hidden, inner)
    numbers = cfg.dtype if cfg.activation_format is None else torch.float32
    dtypes = {name: cfg.dtype if name in ("b1", "b2") else numbers for name in shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    heap = world.allocate_heap(sum(size + _ALIGNMENT for size in sizes.values()))
    address = heap.addresses[0]
    every: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        memory = (ctypes.c_byte * sizes[name]).from_address(address)
        experts = torch.frombuffer(memory, dtype=dtypes[name]).view(shape)
        _write_own(layer, name, experts)
        every[name] = experts
        address += -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
    world.control.barrier()
    return every


def _write_own(layer: MoELayer, name: str, every: Tensor) -> None:
    """Copies this rank's part of a tensor, dequantized, into the tensor of all experts."""
    assert layer.experts is not None  # `Checker` has one of a world
    slicing, world = layer.experts.slicing, layer.world
    own: Sequence[int] = range(len(every))  # shared experts, which all ranks have
    if name not in call_checks.SHARED:
        own = layer.placement.experts_of(world.rank)
    for local, expert in enumerate(own):
        mine = _numbers(layer, name, local).unsqueeze(0)
        slicing.write_part(mine, every[expert : expert + 1], layer._halves(name), world.rank)


def _numbers(layer: MoELayer, name: str, expert: int) -> Tensor:
    """The dequantized tensor called `name` of one of this rank's experts."""
    weight: Tensor = getattr(layer, name).detach()
    of_shared = name in call_checks.SHARED
    format_name = layer.cfg.shared_weight_format if of_shared else layer.cfg.weight_format
    if format_name is None or name in ("b1", "b2"):
        return weight[expert]
    return numbers_of(layer, name, slice(expert, expert + 1))[0]


def _shared_numbers(layer: MoELayer, name: str) -> Tensor | None:
    """What the shared experts have under a name, in numbers, in this machine's memory."""
    tensor: Tensor | None = getattr(layer, name)
    if tensor is None:
        return None
    if layer.cfg.shared_weight_format is None or name == "shared_gate":
        return tensor.detach().cpu()
    return numbers_of(layer, name, slice(None)).cpu()
