# SPDX-License-Identifier: Apache-2.0
"""Weights as a caller's tensors may hold them: where gate rows and up rows lie, and whether a row
belongs to an input.

Holds no test. `Weights` are always plain, so that the reference knows of no layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from moeos import MoEConfig
from moeos.config import reference
from moeos.config.config import GateUp
from tests.layers import Weights

LAYOUTS: tuple[tuple[GateUp, bool], ...] = tuple(
    (gate_up, transposed)
    for gate_up in get_args(GateUp)
    for transposed in (False, True)
    if transposed or gate_up != "concatenated"
)
"""`gate_up` and `transposed` of a config, without the plain layout's."""


LAST_BITS = 5e-4
"""The largest relative error between two ways to compute the same activations."""


def assert_same(cfg: MoEConfig, y: Tensor, of_plain: Tensor, what: str = "") -> None:
    """Asserts that a layer with a layout gives the bits of the plain one: sums have the same order.

    Where gates and ups are columns in turn, a GPU's thread has other hidden units than it has of
    the plain layout, and two of its activations share a division: their last bits may differ.
    """
    if cfg.gate_up == "interleaved" and cfg.transposed:
        assert reference.relative_error(y, of_plain.double()) <= LAST_BITS, what
    else:
        assert torch.equal(y, of_plain), what


def with_layout(weights: Weights, gate_up: GateUp, transposed: bool) -> Weights:
    """`weights`, for kernels that read them in another layout."""
    cfg = dataclasses.replace(weights.cfg, gate_up=gate_up, transposed=transposed)
    return dataclasses.replace(weights, cfg=cfg)


def in_layout(weights: Weights) -> dict[str, Tensor | None]:
    """The tensors of a call of `moeos.Experts` that its config's layout moves."""
    cfg = weights.cfg
    w1, w3 = weights.w1, None
    if cfg.gate_up == "separate":
        w1, w3 = w1.chunk(2, 1)
    moved = {
        "w1": interleave(cfg, w1),
        "w2": weights.w2,
        "w3": w3,
        "b1": interleave(cfg, weights.b1),
        "w1_scale": interleave(cfg, weights.w1_scale),
    }
    for name in ("w1", "w2", "w3"):
        tensor = moved[name]
        if tensor is not None:
            moved[name] = (tensor.mT if cfg.transposed else tensor).contiguous()
    return moved


def interleave(cfg: MoEConfig, rows: Tensor | None) -> Tensor | None:
    """[X, 2I, ...] of gate rows, then up rows: by turns, where the config says so."""
    if rows is None or cfg.gate_up != "interleaved":
        return rows
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)


def plain_of(cfg: MoEConfig, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `in_layout` was given: of weights, or of their gradients."""
    found = dict(moved)
    if cfg.transposed:
        for name in ("w1", "w2", "w3"):
            if name in found:
                found[name] = found[name].mT.contiguous()
    if cfg.gate_up == "separate":
        found["w1"] = torch.cat([found["w1"], found.pop("w3")], 1)
    elif cfg.gate_up == "interleaved":
        for name in ("w1", "b1"):
            if name in found:
                found[name] = torch.cat([found[name][:, 0::2], found[name][:, 1::2]], 1)
    return found
