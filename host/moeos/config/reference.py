# SPDX-License-Identifier: Apache-2.0
"""The layer in float64 and plain PyTorch: what moeos computes, written to be read.

Everything that runs a Mixture-of-Experts layer is checked against this file, so it must not depend
on engines or ranks: it sees the tokens of one rank and the weights of all experts. It runs on the
device of its arguments, and can be differentiated where no activation format rounds.

Letters: S tokens, k experts of a token, H hidden, I intermediate, E experts in all. A *pair* is
one (token, j) with j < k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moeos.config.activations import Curve
from moeos.config.config import MoEConfig
from moeos.config.element_formats import (
    HIDDEN_GROUP,
    RESULT_GROUP,
    TOKEN_GROUP,
    ActivationFormat,
    dequantize_rows,
    quantize_rows,
)

_FP32_ROUTER_ERROR = 0.5e-6
"""The largest error of an fp32 router's logit or score, relative to a token's largest one."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""The largest relative error of a correct layer whose rows are numbers, by its dtype."""
_CODED_TOLERANCE = 1e-2
"""The tolerance where rows are quantized: a number near a tie between two codes may become either,
by the rounding of fp32. The error of float32 layers is 1e-3 then, and 1e-6 otherwise."""
_CODED_RESULT_TOLERANCE = 3e-2
"""The tolerance where results are quantized, too. The numbers that become codes err by up to
`_CODED_TOLERANCE`, and codes are 9 % of a number apart. So one in ten may become its neighbour."""


class Routing(NamedTuple):
    """Which experts each token goes to, and with what weight.

    Attributes:
        ids: int64 [S, k], the experts of each token, the highest selection score first.
        weights: float64 [S, k], what multiplies the output of each.
        margin: float64 [S], how far the selection is from a tie. If every selection score of the
            token changes by less than half of it, the same experts are chosen; a computation in
            float32 may choose others where the margin is no larger than its rounding error
            (scores are at most 1, so about 1e-6). Small where scores are saturated, however far
            apart the logits are. Infinite where there is nothing to choose.
    """

    ids: Tensor
    weights: Tensor
    margin: Tensor


def route(
    x: Tensor,
    gate_weight: Tensor,
    cfg: MoEConfig,
    selection_bias: Tensor | None = None,
    *,
    router_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> Routing:
    """Choose and weigh the experts of each token.

    The scores are the softmax, the sigmoid or the root of the softplus of the logits
    x · gate_weightᵀ + router_bias. Experts are chosen by their selection score, which is score +
    selection_bias: the best k, from the best `top_groups` groups only if there are groups
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); the lower of equal experts, or groups, wins. A
    group's score is that of its best expert or, with `group_score="top2_sum"`, the sum of its two
    best. Scores that are equal only because float64 rounds them, as sigmoids near 1 are, are
    compared as they were before. The experts' weights
    are the scores without the bias, divided by their sum if `renormalize` is set (FlashDMoE, eq.
    5.1 and 5.2), times `routed_scaling` and the expert's scale. Zero experts are chosen and weighed
    as all others are.

    Args:
        x: [S, H], any floating dtype.
        gate_weight: [R, H], R = `cfg.router_rows`.
        cfg: the layer.
        selection_bias, router_bias, expert_scale: [R]; given exactly if the config has them.

    Raises:
        ValueError: a shape does not fit `cfg`, `selection_bias` is missing or unexpected, or a
            token's logits are not finite.
    """
    _check_shape("x", x, (len(x), cfg.hidden))
    rows = (cfg.router_rows,)
    _check_shape("gate_weight", gate_weight, (*rows, cfg.hidden))
    _check_optional("selection_bias", selection_bias, cfg.selection_bias, rows)
    _check_optional("router_bias", router_bias, cfg.router_bias, rows)
    _check_optional("expert_scale", expert_scale, cfg.expert_scale, rows)

    logits = _logits(x, gate_weight, cfg, router_bias)
    selection = _selection(logits.detach(), cfg, selection_bias)
    by = _Keys(logits.detach()) if _chooses_by_logit(cfg) else selection
    ids, margin = _choose(by, selection, cfg)

    return Routing(ids, _weigh(logits, ids, cfg, expert_scale), margin)


def weigh(
    x: Tensor,
    gate_weight: Tensor,
    topk_ids: Tensor,
    cfg: MoEConfig,
    *,
    router_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> Tensor:
    """The weights float64 [S, k] that the gate gives to experts topk_ids [S, k] of the caller's; 0
    in an unused slot (-1). Other arguments and errors are those of `route`.
    """
    logits = _logits(x, gate_weight, cfg, router_bias)
    return _weigh(logits, topk_ids.long(), cfg, expert_scale)


def _logits(x: Tensor, gate_weight: Tensor, cfg: MoEConfig, router_bias: Tensor | None) -> Tensor:
    """float64 [S, R]. Raises `ValueError` where they are not finite."""
    logits = x.double() @ gate_weight.double().T
    if router_bias is not None:
        logits = logits + router_bias.double()
    finite = logits.isfinite().all(dim=1)
    if not finite.all():
        token = int(finite.logical_not().nonzero()[0])
        raise ValueError(f"the logits of token {token} are not finite")
    return logits


def _weigh(logits: Tensor, ids: Tensor, cfg: MoEConfig, expert_scale: Tensor | None) -> Tensor:
    used, some = ids >= 0, ids.clamp_min(0)
    if cfg.renormalize:
        # By logarithms, since all k scores may be too small for float64.
        chosen = _LOG_SCORES[cfg.scoring](logits).gather(1, some)
        any_used = used.any(dim=1, keepdim=True)
        weights = chosen.masked_fill(~used & any_used, -math.inf).softmax(dim=1) * used
    else:
        weights = _SCORES[cfg.scoring](logits).gather(1, some) * used
    weights = weights * cfg.routed_scaling
    return weights if expert_scale is None else weights * expert_scale.double()[some]


def margin_in_errors(
    x: Tensor,
    gate_weight: Tensor,
    cfg: MoEConfig,
    selection_bias: Tensor | None = None,
    *,
    router_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> Tensor:
    """How far each token is from being routed otherwise in fp32: float64 [S].

    In units of what the layer can err: a token above 1 has the experts that `route` says, one at or
    below 1 may have others. Experts are chosen by logits, or by selection scores where there is a
    bias or groups whose score is a sum; scores move less than logits (softmax by a half, sigmoid by
    a quarter of it, sqrtsoftplus by a third), and have an error of their own. What a margin must
    exceed:

    * With an fp32 router: 1e-6 of the token's largest logit, in magnitude; and, where scores
      decide, 1e-6 of its largest selection score in addition.
    * Otherwise: twice the error of logits that are summed as tensor cores do it, 16 products at a
      time into an fp32 sum that is truncated: an addition loses at most 2^-23 of the sum, which
      stays within 4 standard deviations of a sum of such products with random signs. Scores err by
      at most 2^-20 of the token's largest, or of 1, themselves.

    Arguments and errors are those of `route`.
    """
    route(  # raises what is wrong
        x,
        gate_weight,
        cfg,
        selection_bias,
        router_bias=router_bias,
        expert_scale=expert_scale,
    )
    gate = gate_weight.double()
    products = x.double() @ gate.T
    logits = products if router_bias is None else products + router_bias.double()
    selection = _selection(logits, cfg, selection_bias)
    if cfg.router_dtype is None:
        deviation = (x.double().square() @ gate.square().T).amax(dim=1).sqrt()
        logit_error = math.ceil(cfg.hidden / 16) * 2.0**-23 * 4 * deviation
        score_error = 2.0**-20 * selection.high.abs().amax(dim=1).clamp_min(1.0)
    else:
        # A bias is added to products as fp32 has them.
        largest = torch.maximum(products.abs(), logits.abs()).amax(dim=1)
        logit_error = _FP32_ROUTER_ERROR * largest
        score_error = _FP32_ROUTER_ERROR * selection.high.abs().amax(dim=1)
    if _chooses_by_logit(cfg):
        selection, error = _Keys(logits), logit_error
    else:
        error = _STEEPEST[cfg.scoring] * logit_error + score_error
    _, margin = _choose(selection, selection, cfg)
    # Not above 0 for tokens of zeros, all of whose experts are tied.
    return margin / (2 * error).clamp_min(2.0**-149)


def moe(
    x: Tensor,
    gate_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    cfg: MoEConfig,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    selection_bias: Tensor | None = None,
    router_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """The output of the layer for the tokens of one rank.

    Token i becomes the sum over its k experts e of
    weight(i, e) · (w2[e] · activation(w1[e] · x[i] + b1[e]) + b2[e]),
    without the pairs that `dropped` names; the weights of the other pairs stay as they are. With
    `apply_router_weight_on_input` the weight multiplies x[i] instead. A zero expert's pair adds
    weight · x[i]. Shared experts n add the sum over them of shared_w2[n] · activation(shared_w1[n]
    · x[i]), times the sigmoid of x[i] · shared_gate where there is one, whatever the routing.

    With `activation_format` x, and the rows between GEMM0 and GEMM1, are quantized by
    `moeos.config.element_formats.quantize_rows` in fp32, and dequantized. The router, shared and
    zero experts read x as it is. With `result_format` an expert's result is quantized likewise
    before it is weighed.

    Args:
        x: [S, H], any floating dtype.
        gate_weight: [R, H]; not read if `topk_weights` is given.
        w1: [E, 2I, H] with the I gate rows first and then the I up rows if `cfg.gated`, else
            [E, I, H].
        w2: [E, H, I].
        cfg: the layer.
        topk_ids: integers [S, k], with rounding [S, `cfg.slots`], used as they are. -1 is an unused
            slot; None: the gate chooses, and nothing is rounded.
        topk_weights: as topk_ids, used as they are; None: the gate weighs.
        b1: [E, 2I] or [E, I]; given exactly if `cfg.bias` is set.
        b2: [E, H]; as b1.
        selection_bias, router_bias, expert_scale: as of `route`.
        shared_w1: [n, 2Is, H] or [n, Is, H], as w1; given exactly if `cfg.shared_experts` is not 0.
        shared_w2: [n, H, Is]; as shared_w1.
        shared_gate: [H]; given exactly if `cfg.shared_gate` is set.
        x_scale: fp32 [S, H / 128]: x is codes, which are not rounded again. None: x is numbers.

    Returns:
        float64 [S, H].

    Raises:
        ValueError: a shape does not fit `cfg`, an argument is missing or unexpected, an id is not
            an expert, or logits are not finite.
    """
    pairs = (len(x), cfg.slots)
    _check_shape("x", x, (len(x), cfg.hidden))
    if x_scale is not None:
        if cfg.activation_format is None:
            raise ValueError("x_scale must be None for this config")
        _check_shape("x_scale", x_scale, (len(x), cfg.hidden // TOKEN_GROUP))
        x = dequantize_rows(x, x_scale)
    _check_shape("w1", w1, (cfg.experts, cfg.w1_rows, cfg.hidden))
    _check_shape("w2", w2, (cfg.experts, cfg.hidden, cfg.intermediate))
    _check_optional("b1", b1, cfg.bias, (cfg.experts, cfg.w1_rows))
    _check_optional("b2", b2, cfg.bias, (cfg.experts, cfg.hidden))
    shared = cfg.shared_experts
    _check_optional("shared_w1", shared_w1, shared > 0, (shared, cfg.shared_w1_rows, cfg.hidden))
    _check_optional(
        "shared_w2", shared_w2, shared > 0, (shared, cfg.hidden, cfg.shared_intermediate)
    )
    _check_optional("shared_gate", shared_gate, cfg.shared_gate, (cfg.hidden,))
    if topk_ids is None and topk_weights is None:
        if cfg.routing != "layer":
            raise ValueError(f"topk_ids is None, and routing is {cfg.routing!r}: the caller routes")
        topk_ids, topk_weights, _ = route(
            x,
            gate_weight,
            cfg,
            selection_bias,
            router_bias=router_bias,
            expert_scale=expert_scale,
        )
        pairs = (len(x), cfg.top_k)
    if topk_ids is None:
        raise ValueError("topk_weights is given without topk_ids, whose weights they are")
    _check_shape("topk_ids", topk_ids, pairs)
    wrong = (topk_ids < -1) | (topk_ids >= cfg.router_rows)
    if wrong.any():
        found = int(topk_ids[wrong][0])
        most = cfg.router_rows
        raise ValueError(f"topk_ids holds {found}; it must be an expert below {most}, or -1")
    if topk_weights is None:
        if cfg.routing == "caller":
            raise ValueError("topk_weights is None, and routing is 'caller': the caller weighs")
        topk_weights = weigh(
            x, gate_weight, topk_ids, cfg, router_bias=router_bias, expert_scale=expert_scale
        )
    _check_shape("topk_weights", topk_weights, pairs)

    x, topk_weights = x.double(), topk_weights.double()
    of_zero = topk_weights.masked_fill(topk_ids < cfg.experts, 0.0).sum(dim=1, keepdim=True)
    kept = ~dropped(topk_ids, cfg)
    coded = cfg.activation_format
    y = of_zero * x if cfg.zero_experts > 0 else torch.zeros_like(x)
    for expert in range(cfg.experts):
        token, j = (kept & (topk_ids == expert)).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        weight = topk_weights[token, j, None]
        rows = x[token] if x_scale is not None else _as_sent(x[token], coded, TOKEN_GROUP)
        if cfg.apply_router_weight_on_input:
            rows = weight * rows
        rows = rows @ w1[expert].double().T
        if b1 is not None:
            rows = rows + b1[expert].double()
        rows = _as_sent(activate(rows, cfg), coded, HIDDEN_GROUP) @ w2[expert].double().T
        if b2 is not None:
            rows = rows + b2[expert].double()
        rows = _as_sent(rows, cfg.result_format, RESULT_GROUP)
        y = y.index_add(0, token, rows if cfg.apply_router_weight_on_input else weight * rows)
    if shared_w1 is None or shared_w2 is None:
        return y
    of_shared = torch.zeros_like(x)
    for first, second in zip(shared_w1.double(), shared_w2.double(), strict=True):
        of_shared = of_shared + activate(x @ first.T, cfg) @ second.T
    if shared_gate is not None:
        of_shared = of_shared * (x @ shared_gate.double()).sigmoid().unsqueeze(1)
    return y + of_shared


def dropped(ids: Tensor, cfg: MoEConfig) -> Tensor:
    """Which pairs exceed their expert's capacity: bool [S, k].

    An expert takes the first `cfg.capacity(S)` of its pairs, counted by token and then by j. An
    unused slot (-1) takes no place and is never dropped. Nothing is dropped without a capacity
    factor.

    Args:
        ids: integers [S, k], the experts of the tokens of one rank.
        cfg: the layer.
    """
    capacity = cfg.capacity(len(ids))
    result = torch.zeros_like(ids, dtype=torch.bool)
    if capacity is None:
        return result
    for expert in range(cfg.experts):
        chosen = ids == expert
        position = chosen.flatten().cumsum(0).view_as(ids) - 1
        result |= chosen & (position >= capacity)
    return result


def tolerance_of(cfg: MoEConfig) -> float:
    """The largest relative error of a correct layer: see `relative_error`."""
    if cfg.result_format is not None:
        return _CODED_RESULT_TOLERANCE
    return TOLERANCE[cfg.dtype] if cfg.activation_format is None else _CODED_TOLERANCE


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖, Frobenius norms in float64.

    0 if both are zero or empty; infinite if only `expected` is zero, and wherever the quotient is
    not a number (a NaN or an infinity in either).

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual is {list(actual.shape)} and expected {list(expected.shape)}")
    reference = expected.detach().double()
    difference = actual.detach().to(reference.device).double() - reference
    if not difference.any():
        return 0.0
    norm = float(reference.norm())
    error = float(difference.norm()) / norm if norm > 0.0 else math.inf
    return math.inf if math.isnan(error) else error


def activate(rows: Tensor, cfg: MoEConfig) -> Tensor:
    """[n, w1_rows] -> [n, I], in the dtype of `rows`: the rows between GEMM0 and GEMM1."""
    curve, limit = _CURVES[cfg.formula.curve], cfg.resolved_swiglu_limit
    alpha = cfg.resolved_swiglu_alpha
    if not cfg.gated:
        return curve(rows, alpha)
    gate, up = rows.chunk(2, dim=1)
    if limit is None:
        gate = curve(gate, alpha)
    elif cfg.swiglu_clamp == "before":
        gate, up = curve(gate.clamp(max=limit), alpha), up.clamp(-limit, limit)
    else:
        gate, up = curve(gate, alpha).clamp(max=limit), up.clamp(-limit, limit)
    return gate * (up + cfg.formula.up_offset)


def _as_sent(rows: Tensor, form: ActivationFormat | None, group: int) -> Tensor:
    """Rows [n, columns], quantized and dequantized; the rows themselves without a format."""
    if form is None:
        return rows
    return dequantize_rows(*quantize_rows(rows, group))


_CURVES: Mapping[Curve, Callable[[Tensor, float], Tensor]] = {
    "swish": lambda z, alpha: z * (alpha * z).sigmoid(),
    "gelu": lambda z, alpha: functional.gelu(z),
    "gelu_tanh": lambda z, alpha: functional.gelu(z, approximate="tanh"),
    "relu": lambda z, alpha: functional.relu(z),
    "relu2": lambda z, alpha: functional.relu(z).square(),
    "identity": lambda z, alpha: z,
}


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    """sqrt(log(1 + exp(logits))), as exact as float64 is: below -40 the logarithm is exp(logits) to
    1e-18, whose root does not underflow where it does.
    """
    above = torch.logaddexp(logits.clamp_min(-40.0), torch.zeros_like(logits)).sqrt()
    return torch.where(logits < -40.0, (0.5 * logits.clamp_max(0.0)).exp(), above)


def _log_sqrtsoftplus(logits: Tensor) -> Tensor:
    """0.5 log(log(1 + exp(logits))), as `_sqrtsoftplus`."""
    above = torch.logaddexp(logits.clamp_min(-40.0), torch.zeros_like(logits)).log()
    return 0.5 * torch.where(logits < -40.0, logits, above)


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrtsoftplus": _sqrtsoftplus,
}
_LOG_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits,
    "sigmoid": functional.logsigmoid,
    "sqrtsoftplus": _log_sqrtsoftplus,
}
"""Logarithms of scores, up to a number that all of a token's have in common."""
_STEEPEST: Mapping[str, float] = {"softmax": 0.5, "sigmoid": 0.25, "sqrtsoftplus": 1 / 3}
"""How much a score moves with its logit, at most; sqrtsoftplus by 0.3195 near 1."""


class _Keys(NamedTuple):
    """Numbers that are compared: by `high`, then by `low`, then by `last`; all [..., n] or absent.

    A number is high + low, exactly: `low` is what float64 loses where it makes `high` of the two.
    """

    high: Tensor
    low: Tensor | None = None
    last: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> _Keys:
        others = (None if part is None else function(part) for part in (self.low, self.last))
        return _Keys(function(self.high), *others)

    def at(self, indices: Tensor) -> _Keys:
        """The numbers at `indices` along the last dimension."""
        return self.map(lambda part: part.gather(-1, indices))

    def order(self) -> Tensor:
        """Indices along the last dimension, the highest number first; equal numbers by index."""
        indices = torch.arange(self.high.shape[-1], device=self.high.device).expand_as(self.high)
        for part in reversed(self):  # stable sorts: what is sorted by last matters most
            if part is not None:
                sorting = part.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
                indices = indices.gather(-1, sorting.indices)
        return indices

    def gap(self, first: Tensor, second: Tensor) -> Tensor:
        """By how much the numbers at `first` exceed those at `second`; never below zero."""
        more, less = self.at(first), self.at(second)
        gap = more.high - less.high
        if more.low is not None and less.low is not None:
            gap = gap + (more.low - less.low)
        return gap.clamp_min(0.0)


def _exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as float64 rounds it, and what that loses (Knuth's TwoSum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _selection(logits: Tensor, cfg: MoEConfig, selection_bias: Tensor | None) -> _Keys:
    """Selection scores [S, E], which differ wherever logits do.

    Scores near 1 are distinguished by their distance to 1. Scores too small for float64 are zero;
    their logits distinguish them from each other and from true zeros.
    """
    if cfg.scoring == "sqrtsoftplus":
        high = _sqrtsoftplus(logits)  # a root rounds less than its argument; logits break ties
        low = torch.zeros_like(high)
        if selection_bias is not None:
            high, low = _exact_sum(high, selection_bias.detach().double())
        return _Keys(high, low, logits)
    if cfg.scoring == "sigmoid":
        near_one = logits > 0
        smaller = (-logits.abs()).sigmoid()  # the smaller of score and 1 - score
    else:
        scores = logits.softmax(dim=1)
        near_one = scores > 0.5  # one of a token at most
        others = (scores * ~near_one).sum(dim=1, keepdim=True)
        smaller = torch.where(near_one, others, scores)
    smaller = torch.where(smaller < torch.finfo(torch.float64).tiny, 0.0, smaller)
    high, low = _exact_sum(near_one.double(), torch.where(near_one, -smaller, smaller))
    if selection_bias is not None:
        high, lost = _exact_sum(high, selection_bias.detach().double())
        high, low = _exact_sum(high, lost + low)
    underflows = (smaller == 0) & ~near_one
    return _Keys(high, low, torch.where(underflows, logits, -math.inf))


def _chooses_by_logit(cfg: MoEConfig) -> bool:
    """Whether the order of logits is that of all that is compared: scores rise with them."""
    return not cfg.selection_bias and (cfg.expert_groups == 1 or cfg.group_score == "max")


def _choose(by: _Keys, margins_of: _Keys, cfg: MoEConfig) -> tuple[Tensor, Tensor]:
    """Experts [S, k] with the highest of `by` [S, E] in the best groups, and how far [S] what
    `margins_of` [S, E] has is from another choice.
    """
    size = cfg.router_rows // cfg.expert_groups
    counted = min(2, size) if cfg.group_score == "top2_sum" else 1
    groups, group_margin = _best(
        _scores_of_groups(by, size, counted),
        _scores_of_groups(margins_of, size, counted),
        cfg.top_groups,
    )
    open_groups = torch.zeros(
        len(groups), cfg.expert_groups, dtype=torch.bool, device=groups.device
    )
    is_open = open_groups.scatter(1, groups, True).repeat_interleave(size, dim=1)
    order = by.order()
    # The sort is stable: equal experts, and experts of groups that are not open, keep their order.
    candidates = is_open.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, candidates)[:, : cfg.top_groups * size]
    margin = _gap_after(order, margins_of, cfg.top_k)
    return order[:, : cfg.top_k], torch.minimum(margin, group_margin / counted)


def _scores_of_groups(experts: _Keys, size: int, counted: int) -> _Keys:
    """[S, E] -> [S, groups]: the sum of each group's `counted` best; a group's score moves by as
    much as that many of its experts' scores.
    """
    groups = experts.map(lambda part: part.unflatten(1, (-1, size)))
    best = groups.order()
    first = groups.at(best[:, :, :1]).map(_only)
    if counted == 1:
        return first
    second = groups.at(best[:, :, 1:2]).map(_only)
    high, lost = _exact_sum(first.high, second.high)
    if first.low is not None and second.low is not None:
        lost = lost + first.low + second.low
    return _Keys(*_exact_sum(high, lost), first.last)


def _only(part: Tensor) -> Tensor:
    return part.squeeze(2)


def _best(by: _Keys, margins_of: _Keys, count: int) -> tuple[Tensor, Tensor]:
    """Columns [S, count] of the highest of each row, and the gap [S] to the next."""
    order = by.order()
    return order[:, :count], _gap_after(order, margins_of, count)


def _gap_after(order: Tensor, numbers: _Keys, count: int) -> Tensor:
    """The gap [S] between the last of the first `count` columns of `order` and the next."""
    if count == order.shape[1]:
        return torch.full_like(numbers.high[:, 0], math.inf)
    return numbers.gap(order[:, count - 1 : count], order[:, count : count + 1]).squeeze(1)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; it must be {list(shape)}")


def _check_optional(name: str, tensor: Tensor | None, wanted: bool, shape: tuple[int, ...]) -> None:
    if (tensor is not None) != wanted:
        expected = "given" if wanted else "None"
        raise ValueError(f"{name} must be {expected} for this config")
    if tensor is not None:
        _check_shape(name, tensor, shape)
