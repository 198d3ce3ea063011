# SPDX-License-Identifier: Apache-2.0
"""Runs tests of the adapters in processes where a stand-in takes a library's place.

The libraries themselves are not installed beside moeos. `fakes/` has what the adapters touch. Where
a library is installed, the same tests run with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeos import MoEConfig
from moeos.config import reference
from moeos.config.element_formats import dequantize, quantize_matrix
from tests.host.world.test_groups import in_processes

FAKES = Path(__file__).parent / "fakes"


def on_ranks(function: Callable[[int], Any], ranks: int, seconds: float = 120.0) -> list[Any]:
    """What `function(rank)` returns in processes with a gloo group and the stand-ins.

    Raises the lowest rank's error, if there is one.
    """

    def live(rank: int) -> Any:
        sys.path.append(str(FAKES))  # behind what is installed
        return function(rank)

    outcomes = in_processes(live, ranks, seconds)
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            raise AssertionError(f"rank {rank} died without a word")
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def in_fork(function: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it returns, or the error that it raises, in a child of this process."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(seconds))  # ends it
            try:
                outcome = function()
            except Exception as error:
                outcome = error
            os.write(sender, pickle.dumps(outcome))
            status = 0
        finally:
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver, "rb") as told:
        outcome = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return pickle.loads(outcome)


class Tensors:
    """All experts' weights and tokens with their routing, drawn alike on every rank."""

    def __init__(self, cfg: MoEConfig, seed: int = 0) -> None:
        self.cfg = cfg
        self.generator = torch.Generator().manual_seed(seed)
        self.w1 = self.draw(cfg.experts, cfg.w1_rows, cfg.hidden) / cfg.hidden**0.5
        self.w2 = self.draw(cfg.experts, cfg.hidden, cfg.intermediate) / cfg.intermediate**0.5
        self.b1 = self.draw(cfg.experts, cfg.w1_rows) if cfg.bias else None
        self.b2 = self.draw(cfg.experts, cfg.hidden) if cfg.bias else None
        self.codes: dict[str, tuple[Tensor, Tensor]] = {}
        """With a format those of w1 and w2 and their scales; w1 and w2 are what they stand for."""
        if cfg.weight_format is not None:
            for name, halves in (("w1", cfg.halves), ("w2", 1)):
                numbers = getattr(self, name)
                codes, scale, scale_2 = quantize_matrix(numbers, cfg.weight_format, halves)
                self.codes[name] = codes, scale
                numbers = dequantize(codes, scale, scale_2, cfg.weight_format, halves)
                setattr(self, name, numbers)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.cfg.dtype)

    def routing(self, rows: int) -> tuple[Tensor, Tensor]:
        """int32 ids [rows, k] and fp32 weights that sum up to 1."""
        scores = torch.rand(rows, self.cfg.experts, generator=self.generator)
        ids = scores.topk(self.cfg.top_k, dim=1).indices.to(torch.int32)
        weights = torch.rand(rows, self.cfg.top_k, generator=self.generator) + 0.1
        return ids, weights / weights.sum(1, keepdim=True)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the float64 reference makes of tokens."""
        gate = torch.zeros(self.cfg.experts, self.cfg.hidden)
        return reference.moe(
            x, gate, self.w1, self.w2, self.cfg, ids, weights, b1=self.b1, b2=self.b2
        )

    def error(self, y: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> float:
        """Of y, relative to the tolerance: at most 1 is right."""
        assert y.dtype == x.dtype
        expected = self.expected(x, ids, weights)
        assert y.shape == expected.shape
        if y.numel() == 0:
            return 0.0
        difference = (y.double() - expected).norm() / expected.norm()
        return float(difference) / reference.tolerance_of(self.cfg)


def slice_of(cfg: MoEConfig, name: str, tensor: Tensor, number: int, slices: int) -> Tensor:
    """What a server's loader gives a rank of a parameter of all experts: rows of w13, of gate and
    of up, and columns of w2. A matrix's one scale is whole; the first rank alone has biases of w2.
    """
    if tensor.dim() == 2 and tensor.shape[1] <= 2:
        return tensor
    if name == "w2_bias":
        return tensor if number == 0 else torch.zeros_like(tensor)
    bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    dim, halves = (1, cfg.halves) if name.startswith("w13") else (2, 1)
    parts = [half.chunk(slices, dim)[number] for half in bits.chunk(halves, dim)]
    return torch.cat(parts, dim).view(tensor.dtype)
