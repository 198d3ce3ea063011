# SPDX-License-Identifier: Apache-2.0
"""Weights in every layout that `MoEConfig.gate_up` and `transposed` name. Holds no test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeos import MoEConfig

LAYOUTS = [
    (gate_up, transposed)
    for transposed in (False, True)
    for gate_up in ("concatenated", "interleaved", "separate")
]
"""gate_up and transposed."""


def interleaved(rows: Tensor) -> Tensor:
    """[X, 2I, ...] gate rows, then up rows -> gate row 0, up row 0, gate row 1 and so on."""
    gates, ups = rows.chunk(2, dim=1)
    both = rows.clone()
    both[:, 0::2], both[:, 1::2] = gates, ups
    return both


def laid_out(cfg: MoEConfig, plain: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """A call's tensors, by name, in the layout of a config: of w1, w2, b1 and scales that are [X,
    2I, ...] with gate rows, then up rows, and an element for every input.
    """
    found = dict(plain)
    w1, w2 = plain["w1"], plain["w2"]
    assert w1 is not None
    assert w2 is not None
    rows = w1.shape[1]
    if cfg.gate_up == "interleaved":
        for name in ("w1", "b1", "w1_scale"):
            one = plain.get(name)
            if one is not None and one.shape[1] == rows:
                found[name] = interleaved(one)
    elif cfg.gate_up == "separate":
        found["w1"], found["w3"] = (half.contiguous() for half in w1.chunk(2, dim=1))
    if cfg.transposed:
        for name in ("w1", "w2", "w3"):
            one = found.get(name)
            if one is not None:
                found[name] = one.transpose(1, 2).contiguous()
    return found


def plain_of(cfg: MoEConfig, laid: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `laid_out`."""
    found = dict(laid)
    if cfg.transposed:
        for name in ("w1", "w2", "w3"):
            if name in found:
                found[name] = found[name].transpose(1, 2).contiguous()
    if cfg.gate_up == "separate":
        found["w1"] = torch.cat([found["w1"], found.pop("w3")], dim=1)
    elif cfg.gate_up == "interleaved":
        for name in ("w1", "b1"):
            if name in found:
                found[name] = torch.cat([found[name][:, 0::2], found[name][:, 1::2]], dim=1)
    return found
