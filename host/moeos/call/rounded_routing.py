# SPDX-License-Identifier: Apache-2.0
"""How a layer with `MoEConfig.rounding` routes: in PyTorch, before its call.

The rules are those of the kernel's router, in float32; token rounding follows where the layer
trains. This file must not depend on modules, engines or ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moeos.call.rounding import round_tokens
from moeos.call.selection import topk
from moeos.config.config import MoEConfig
from moeos.system.errors import NumericalError


class GateTensors(NamedTuple):
    """The tensors of a layer's gate, as of `moeos.layer.layer.Gate`."""

    weight: Tensor
    selection_bias: Tensor | None
    bias: Tensor | None
    expert_scale: Tensor | None


def route(
    cfg: MoEConfig, gate: GateTensors, rows: Tensor, tokens: Tensor | None, *, rounds: bool
) -> tuple[Tensor, Tensor]:
    """int32 ids and float32 weights, both [rows, `cfg.slots`], of rows [rows, H].

    Each `cfg.max_tokens` rows, a call of their own, are rounded by themselves. `tokens`: as of
    `MoELayer.forward`; `rounds`: False leaves each token its k best experts.

    Raises `NumericalError` where logits are not finite, for tensors that the host can read.
    """
    counted = None
    if tokens is not None:
        counted = torch.arange(len(rows), device=rows.device) < tokens.reshape(())
        # These rows may hold NaN, whose product with a gradient of 0 is NaN.
        rows = torch.where(counted.unsqueeze(1), rows, 0.0)
    logits = rows.float() @ gate.weight.float().T
    if gate.bias is not None:
        logits = logits + gate.bias
    scores = _scores(cfg, logits)
    by = scores.detach()
    if gate.selection_bias is not None:
        by = by + gate.selection_bias
    _require_finite(logits if gate.selection_bias is None else by, counted)
    # Scores round away differences between logits.
    ids = topk(logits.detach() if gate.selection_bias is None else by, cfg.top_k).indices
    if cfg.rounding is not None and rounds:
        parts = [
            round_tokens(
                by[first : first + cfg.max_tokens],
                ids[first : first + cfg.max_tokens],
                cfg.rounding,
                cfg.rounding_tile,
                slots=cfg.slots,
                tokens=None if tokens is None else tokens - first,
                summed=scores.detach()[first : first + cfg.max_tokens],
            )
            for first in range(0, len(rows), cfg.max_tokens)
        ]
        ids = torch.cat(parts) if parts else ids.new_empty(0, cfg.slots)
    else:
        ids = functional.pad(ids, (0, cfg.slots - cfg.top_k), value=-1)
    return ids.int(), _weights(cfg, logits, scores, ids, gate.expert_scale)


def _scores(cfg: MoEConfig, logits: Tensor) -> Tensor:
    if cfg.scoring == "softmax":
        return logits.softmax(dim=1)
    if cfg.scoring == "sigmoid":
        return logits.sigmoid()
    # A root has no derivative at 0.
    return functional.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def _weights(
    cfg: MoEConfig, logits: Tensor, scores: Tensor, ids: Tensor, expert_scale: Tensor | None
) -> Tensor:
    used, some = ids >= 0, ids.clamp_min(0)
    weights = scores.gather(1, some)
    if cfg.renormalize:
        if cfg.scoring == "softmax":  # the sum of whose scores may be too small for float32
            weights = logits.gather(1, some)
        elif cfg.scoring == "sigmoid":
            weights = functional.logsigmoid(logits).gather(1, some)
        else:
            weights = weights.log()
        any_used = used.any(dim=1, keepdim=True)
        weights = weights.masked_fill(~used & any_used, -math.inf).softmax(dim=1)
    weights = weights * used * cfg.routed_scaling
    return weights if expert_scale is None else weights * expert_scale[some]


def _require_finite(numbers: Tensor, counted: Tensor | None) -> None:
    if numbers.device.type != "cpu" or torch.compiler.is_compiling():
        return
    finite = numbers.isfinite().all(dim=1)
    if counted is not None:
        finite = finite | ~counted
    if not finite.all():
        token = int(finite.logical_not().nonzero()[0])
        raise NumericalError(
            f"the router's logits of token {token} are not finite: look for NaN or infinity in "
            "that row of x, in gate.weight and in gate.selection_bias"
        )
