# SPDX-License-Identifier: Apache-2.0
"""A call that can be differentiated: `torch.autograd.Function` around two calls of an engine.

Forward keeps the caller's tensors, the routing and what `MoEConfig.save` says: the backward call
sends x and the gradient of the output to the experts again. The engine computes the expert-parallel
part; the gate's weights and the shared experts, which each rank has, are differentiated here by
PyTorch. Where ranks with slices of experts have the same tokens, each makes its part of the
gradients of tokens, and the engine's call adds them up: so they are equal on these ranks. This file
must not depend on modules, heaps or how ranks communicate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moeos.call import call_checks, custom_op, main_grads
from moeos.config.activations import Curve
from moeos.config.config import MoEConfig
from moeos.engines.base import CallTensors, Engine, GradientTensors, Recording
from moeos.system import tensor_memory
from moeos.system.dynamo import hidden

X, _WEIGHTS, _OWN = 1, 2, 3
PLACE = {name: _OWN + number for number, name in enumerate(call_checks.OWN)}
"""Indices into the inputs of `_Call.forward`: how, x, the caller's weights, the call's own tensors.
"""


DERIVED = ("x", "topk_weights", *call_checks.WEIGHTS, *call_checks.ROUTER, *call_checks.SHARED)
"""What a backward has gradients of: the first inputs of `_Call.forward` from X on. Formats have
none."""


_SUMS = torch.float32
"""The dtype of gradients of parameters before they are rounded."""


class How(NamedTuple):
    """A call, but for the tensors that may have a gradient; see `CallTensors`. `with_main`: which
    of its own have a `main_grad`, as `main_grads.found` has found; `turned`: its matrices have rows
    and columns exchanged, as of `moeos.Experts`.
    """

    engine: Engine
    cfg: MoEConfig
    ids: Tensor | None
    tokens: Tensor | None
    any_ids: bool
    pieces: int
    with_main: tuple[str, ...] = ()
    turned: bool = False


class Kept(NamedTuple):
    """What a call leaves for its backward in addition to its own tensors, and the gradient of its
    output; see `GradientTensors`. `dtype_of_weights`: of the caller's; None: the gate weighed.
    """

    x: Tensor
    d_out: Tensor
    ids: Tensor
    used: Tensor
    tokens: int
    saved: Tensor
    dtype_of_weights: torch.dtype | None
    of: int


class _OfSlice(NamedTuple):
    """What this rank's slice adds to sums over slices; see `GradientTensors`."""

    d_x_added: Tensor | None
    d_shared: Tensor | None


_NOTHING_OF_SLICE = _OfSlice(None, None)


def no_backward(engine: Engine) -> str | None:
    """The case in which a call has no backward, in words that follow "has no backward"; None where
    it has one.
    """
    why = engine.no_backward()
    if why is None and custom_op.is_transformed():
        return " in transforms of torch.func and in traces, but for autograd alone"
    return why


@hidden
def call(how: How, x: Tensor, weights: Tensor | None, own: Sequence[Tensor | None]) -> Tensor:
    """The output of a call of rows x, recorded by autograd. `weights`: of `how.ids`; None: the gate
    weighs.
    """
    y: Tensor = _Call.apply(how, x, weights, *own)  # type: ignore[no-untyped-call]
    return y


def record(how: How, x: Tensor, weights: Tensor | None, own: Sequence[Any]) -> tuple[Tensor, Any]:
    """The output of a call, and its `Recording`; autograd records nothing."""
    out = torch.empty_like(x)
    named = dict(zip(call_checks.OWN, own, strict=True))
    recording = how.engine.record(
        CallTensors(
            x=x,
            out=out,
            gate=named["gate.weight"],
            selection_bias=named["gate.selection_bias"],
            topk_ids=how.ids,
            topk_weights=weights,
            w1=named["w1"],
            b1=named["b1"],
            w2=named["w2"],
            b2=named["b2"],
            w3=named["w3"],
            tokens=how.tokens,
            any_ids=how.any_ids,
            pieces=how.pieces,
            router_bias=named["gate.bias"],
            expert_scale=named["gate.expert_scale"],
            shared_w1=named["shared_w1"],
            shared_w2=named["shared_w2"],
            shared_gate=named["shared_gate"],
        )
    )
    return out, recording


def derive(
    how: How,
    kept: Kept,
    own: Sequence[Any],
    wanted: Sequence[bool],
    main: Mapping[str, Tensor] = MappingProxyType({}),
    unrounded: Collection[str] = (),
) -> dict[int, Tensor]:
    """The gradients of the inputs of `_Call.forward` that are wanted, by their places. Collective.
    `main`: of a call's own tensors what an fp32 sum may be added to in place, and then is found.
    `unrounded`: the experts' tensors whose gradients are returned in fp32.
    """
    cfg, x, tokens, slicing = how.cfg, kept.x, kept.tokens, how.engine.slicing
    found: dict[int, Tensor] = {}
    if slicing.sums and not slicing.everywhere:
        kept = kept._replace(d_out=_gathered(how, kept, own))
    of_slice = _NOTHING_OF_SLICE
    if slicing.sums and cfg.shared_experts > 0:
        of_slice = _slices_of_shared(cfg, kept, own, wanted, found)
    d_x, d_used = _experts(how, kept, own, wanted, main, unrounded, found, of_slice)
    of_x = [d_x]

    def add(function: Callable[..., Tensor], d_made: Tensor, *names: str) -> None:
        inputs = {X: x[:tokens]} | {PLACE[name]: own[PLACE[name] - _OWN] for name in names}
        derived = _derive(function, inputs, wanted, d_made[:tokens])
        if X in derived:
            of_x.append(derived.pop(X))
        found.update(derived)

    if kept.dtype_of_weights is not None:
        found[_WEIGHTS] = d_used.to(kept.dtype_of_weights)
    else:
        gate = ("gate.weight", "gate.bias", "gate.expert_scale")
        add(functools.partial(_weights_of, cfg, kept.ids[:tokens].long()), d_used, *gate)
    if of_slice.d_shared is not None:
        add(_weights_of_shared, of_slice.d_shared, "shared_gate")
    if cfg.shared_experts > 0 and not slicing.sums:
        add(functools.partial(_shared_experts, cfg), kept.d_out, *call_checks.SHARED)
    if wanted[X]:
        found[X] = _added(of_x, tokens)
    return found


def _recorded_as_operator(
    how: How, x: Tensor, weights: Tensor | None, own: Sequence[Any]
) -> tuple[Tensor, Recording]:
    """Calls `record` where dispatch modes must see it."""
    out, ids, used, count, saved = torch.ops.moeos.record(
        *(custom_op.order_on(x.device), custom_op.key_of(how.engine), x),
        *(how.ids, weights, how.tokens, *own),
        slots=how.cfg.slots,
        pairs=how.engine.slicing.routed_pairs(how.cfg),
        main=[],
        saved_rows=how.engine.saved_rows.of_call(x.shape[0], how.pieces),
        saved_columns=how.cfg.w1_rows,
        any_ids=how.any_ids,
        pieces=how.pieces,
    )
    tokens, of = count.tolist()
    return out, Recording(ids, used, tokens, saved, of)


def _derived_as_operator(
    how: How,
    kept: Kept,
    own: Sequence[Any],
    wanted: Sequence[bool],
    main: Mapping[str, Tensor],
    unrounded: Collection[str],
) -> dict[int, Tensor]:
    """Calls `derive` where dispatch modes must see it. Adds nothing to the tensors in `main`."""
    in_fp32 = {*unrounded, *(name for name, one in main.items() if one.dtype == torch.float32)}
    given = kept.dtype_of_weights is not None  # then the gate has no part in it
    asked = [
        one and not (given and name in call_checks.ROUTER)
        for name, one in zip(DERIVED, wanted[X:], strict=False)
    ]
    *derived, _ = torch.ops.moeos.backward(
        *(custom_op.key_of(how.engine), kept.x, kept.d_out, kept.ids, kept.used),
        torch.tensor([kept.tokens, kept.of], dtype=torch.int64, device="cpu"),
        *(kept.saved, own, None),
        wanted=asked,
        pairs=how.engine.slicing.routed_pairs(how.cfg),
        dtype_of_weights=kept.dtype_of_weights,
        pieces=how.pieces,
        unrounded=[name in in_fp32 for name in DERIVED],
    )
    places = range(X, X + len(DERIVED))
    return {place: one for place, one, its in zip(places, derived, asked, strict=True) if its}


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, x: Tensor, weights: Tensor | None, *own: Tensor) -> Tensor:
        # Checked before anything is sent, and again in backward, as saved tensors may be copies.
        ctx.with_main = {name: own[PLACE[name] - _OWN] for name in how.with_main}
        # Autograd counts only tensors.
        tensors = [n for n, one in enumerate((how, x, weights, *own)) if isinstance(one, Tensor)]
        ctx.edges = {name: tensors.index(PLACE[name]) for name in how.with_main}
        if how.turned:
            own = call_checks.turned(own)  # type: ignore[assignment]
        recorded = _recorded_as_operator if custom_op.modes_watch() else record
        out, recording = recorded(how, x, weights, own)
        ctx.how, ctx.tokens, ctx.of = how, recording.tokens, recording.of
        ctx.dtype_of_weights = None if weights is None else weights.dtype
        keep(ctx, recording.topk_ids, recording.topk_weights, recording.saved, x, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        wanted = ctx.needs_input_grad
        main = {
            name: main_grad
            for name, main_grad in main_grads.found(ctx.with_main).items()
            if main_grads.asked(ctx.next_functions[ctx.edges[name]][0])
        }
        ids, used, saved, x, *own = kept_by(ctx)
        d_out = received(d_outs[0])
        kept = Kept(x, d_out, ids, used, ctx.tokens, saved, ctx.dtype_of_weights, ctx.of)
        derived = _derived_as_operator if custom_op.modes_watch() else derive
        lying = {name: _turned(ctx.how, name, one) for name, one in main.items()}
        in_place = {name: one for name, one in lying.items() if one.is_contiguous()}
        unrounded = [n for n, one in lying.items() if n not in in_place and one.dtype == _SUMS]
        found: dict[int, Tensor | None] = {
            **derived(ctx.how, kept, own, wanted, in_place, unrounded)
        }
        for name, place in PLACE.items():
            gradient = found.get(place)  # the gate has none where the caller routes
            if gradient is None:
                continue
            if name not in main:
                found[place] = _turned(ctx.how, name, gradient)
            else:
                if gradient is not lying[name]:
                    lying[name].add_(gradient)
                found[place] = main_grads.added(ctx.with_main[name], main[name])
        return tuple(found.get(place) for place in range(len(wanted)))


def _turned(how: How, name: str, tensor: Tensor) -> Tensor:
    """Converts a tensor between the engine's layout and the caller's, in either direction."""
    return tensor.transpose(1, 2) if how.turned and name in call_checks.MATRICES else tensor


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves a call's tensors for its backward, with what they are.

    Each is saved as an alias, which keeps its memory when `.data` of the caller's tensor becomes
    another tensor's, and has its version. What a compiler traces is left to the compiler.
    """
    ctx.forms = [None if one is None else _form(one) for one in tensors]
    plain = call_checks.PLAIN
    ctx.save_for_backward(
        *(one if one is None or type(one) not in plain else one.detach() for one in tensors)
    )


def kept_by(ctx: Any) -> list[Any]:
    """The saved tensors, each in memory as an engine reads it.

    Raises `ValueError` for one that is not what it was, as a saved-tensor hook may return it.
    """
    found = list(ctx.saved_tensors)
    for number, (one, form) in enumerate(zip(found, ctx.forms, strict=True)):
        if one is None:
            continue
        if _form(one) != form:
            was, now = (
                f"{dtype} {list(shape)} on {device}" for shape, dtype, device in (form, _form(one))
            )
            raise ValueError(
                f"what a forward call has saved as {was} is now {now}: return from saved-tensor "
                "hooks what was packed"
            )
        if not one.is_contiguous():
            found[number] = one.contiguous()
    return found


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def received(d_out: Tensor) -> Tensor:
    """The gradient of an output as an engine reads it. Autograd ensures its shape, dtype and
    device, but it may be sparse, or a lazy negative of its memory.

    Raises `RuntimeError` for a batch of gradients.
    """
    # PyTorch names the key of only one of its two classes of batches; both keys contain this word.
    if "Batched" in repr(torch._C._dispatch_keys(d_out)):
        raise RuntimeError(
            "the backward of a MoELayer takes one gradient of its output, and this is a batch of "
            "them (is_grads_batched=True, vectorize=True, or a backward in torch.func.vmap): a "
            "backward is one for all ranks, so call it for each of them in turn, with "
            "retain_graph=True, or pass vectorize=False"
        )
    if d_out.layout != torch.strided:
        d_out = d_out.to_dense()
    return tensor_memory.without_laziness(d_out).contiguous()


def check_first_derivative() -> None:
    """Raises `RuntimeError` in a backward that autograd records."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the backward of a MoELayer has no gradient of its own, and create_graph is True: "
            "leave it away, or derive by finite differences"
        )


def _experts(
    how: How,
    kept: Kept,
    own: Sequence[Tensor],
    wanted: Sequence[bool],
    main: Mapping[str, Tensor],
    unrounded: Collection[str],
    found: dict[int, Tensor],
    of_slice: _OfSlice,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weights of its experts, as the engine makes them; those of its
    experts' parameters go into `found`, if they are wanted. Collective.
    """
    x, used = kept.x, kept.used
    named = dict(zip(call_checks.WEIGHTS, own, strict=False))
    sums = {
        name: how.engine.room_for_sums(tensor, how.pieces, main.get(name))
        for name, tensor in named.items()
        if wanted[PLACE[name]]
    }
    d_x, d_used = torch.empty_like(x), torch.empty_like(used, dtype=torch.float32)
    how.engine.backward(
        GradientTensors(
            x=x,
            d_out=kept.d_out,
            topk_ids=kept.ids,
            topk_weights=used,
            w1=named["w1"],
            b1=named["b1"],
            w2=named["w2"],
            b2=named["b2"],
            w3=named["w3"],
            tokens=kept.tokens,
            pieces=how.pieces,
            saved=kept.saved,
            of=kept.of,
            d_x=d_x,
            d_topk_weights=d_used,
            d_w1=sums.get("w1"),
            d_b1=sums.get("b1"),
            d_w2=sums.get("w2"),
            d_b2=sums.get("b2"),
            d_w3=sums.get("w3"),
            **of_slice._asdict(),
        )
    )
    found.update(
        (PLACE[name], total if name in main else total.to(_dtype_of(name, x, unrounded)))
        for name, total in sums.items()
    )
    return d_x, d_used


def _gathered(how: How, kept: Kept, own: Sequence[Tensor]) -> Tensor:
    """The gradients of all tokens' outputs, where each rank holds those of its own tokens, and
    zeros. A gradient call adds them up, with tokens that have chosen no expert. Collective.
    """
    of_none = kept._replace(
        d_out=torch.zeros_like(kept.x),
        ids=torch.full_like(kept.ids, -1),
        used=torch.zeros_like(kept.used),
    )
    nothing_else = (False,) * (_OWN + len(own))
    brought = _OfSlice(kept.d_out.float(), None)
    return _experts(how, of_none, own, nothing_else, {}, (), {}, brought)[0]


def _slices_of_shared(
    cfg: MoEConfig,
    kept: Kept,
    own: Sequence[Tensor],
    wanted: Sequence[bool],
    found: dict[int, Tensor],
) -> _OfSlice:
    """What this rank's slices of the shared experts add to gradients of tokens; those of their
    parameters go into `found`, if they are wanted. Sums need it, whatever is wanted on this rank.
    """
    tokens = kept.tokens
    x, d_out = kept.x[:tokens], kept.d_out[:tokens].double()
    w1, w2, gate = (own[PLACE[name] - _OWN] for name in call_checks.SHARED)
    mlps = functools.partial(_shared_mlps, cfg)
    d_shared, d_made = None, d_out
    if gate is not None:
        made = mlps(x.double(), w1.double(), w2.double())
        d_shared = (d_out * made).sum(dim=1).float()
        d_made = d_out * _weights_of_shared(x.double(), gate.double()).unsqueeze(1)
    inputs = {X: x, PLACE["shared_w1"]: w1, PLACE["shared_w2"]: w2}
    derived = _derive(mlps, inputs, [place == X or one for place, one in enumerate(wanted)], d_made)
    d_x = derived.pop(X).float().contiguous()  # an engine reads it by address
    found.update(derived)
    return _OfSlice(d_x, d_shared)


def _dtype_of(name: str, x: Tensor, unrounded: Collection[str]) -> torch.dtype:
    return torch.float32 if name in unrounded else x.dtype


def _derive(
    function: Callable[..., Tensor],
    inputs: Mapping[int, Tensor | None],
    wanted: Sequence[bool],
    d_made: Tensor,
) -> dict[int, Tensor]:
    """The gradients of inputs of a function in float64, by their places, where they are wanted."""
    leaves = {
        place: None if one is None else one.detach().double().requires_grad_(wanted[place])
        for place, one in inputs.items()
    }
    asked = [place for place, leaf in leaves.items() if leaf is not None and leaf.requires_grad]
    if not asked:
        return {}
    # Differentiate a scalar: for a tensor with a given gradient, PyTorch would import sympy here.
    with torch.enable_grad():
        total = torch.dot(function(*leaves.values()).flatten(), d_made.double().flatten())
    derived = torch.autograd.grad(total, [leaves[place] for place in asked])  # type: ignore[arg-type]
    dtypes = {place: inputs[place].dtype for place in asked if place != X}  # type: ignore[union-attr]
    return {
        place: one.to(dtypes.get(place, one.dtype))
        for place, one in zip(asked, derived, strict=True)
    }


def _added(of_x: Sequence[Tensor], tokens: int) -> Tensor:
    """The sum of gradients of x, of which all but the first are of its tokens alone, rounded once
    more."""
    first, *others = of_x
    if not others:
        return first
    total = first.double()
    for other in others:
        total[:tokens] += other
    return total.to(first.dtype)


def _weights_of(
    cfg: MoEConfig,
    ids: Tensor,
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """The weights of experts ids [S, k], as the gate has them; 0 in an unused slot."""
    logits = x @ gate.T
    if bias is not None:
        logits = logits + bias
    used, some = ids >= 0, ids.clamp_min(0)
    if cfg.renormalize:
        # Weights come from logarithms, as all scores of a token may be too small; a token may have
        # no expert.
        chosen = _log_scores(cfg.scoring, logits).gather(1, some)
        unused = ~used & used.any(dim=1, keepdim=True)
        weights = chosen.masked_fill(unused, -math.inf).softmax(dim=1)
    else:
        weights = _scores(cfg.scoring, logits).gather(1, some)
    weights = weights.masked_fill(~used, 0.0) * cfg.routed_scaling
    return weights if scale is None else weights * scale[some]


def _scores(scoring: str, logits: Tensor) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(dim=1)
    return logits.sigmoid() if scoring == "sigmoid" else _log_scores(scoring, logits).exp()


def _log_scores(scoring: str, logits: Tensor) -> Tensor:
    """Up to a number that all scores of a token have in common."""
    if scoring == "softmax":
        return logits
    if scoring == "sigmoid":
        return functional.logsigmoid(logits)
    low = -40.0  # below, log(1 + exp(l)) is exp(l)
    above = functional.softplus(logits.clamp_min(low), threshold=40.0).log()
    return 0.5 * torch.where(logits < low, logits, above)


def _shared_experts(
    cfg: MoEConfig, x: Tensor, w1: Tensor, w2: Tensor, gate: Tensor | None
) -> Tensor:
    """What the shared experts add to the output of x."""
    made = _shared_mlps(cfg, x, w1, w2)
    return made if gate is None else made * _weights_of_shared(x, gate).unsqueeze(1)


def _shared_mlps(cfg: MoEConfig, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    for first, second in zip(w1, w2, strict=True):
        made = made + _activate(cfg, x @ first.T) @ second.T
    return made


def _weights_of_shared(x: Tensor, gate: Tensor) -> Tensor:
    return (x @ gate).sigmoid()


def _activate(cfg: MoEConfig, values: Tensor) -> Tensor:
    curve, alpha = _CURVES[cfg.formula.curve], cfg.resolved_swiglu_alpha
    if not cfg.gated:
        return curve(values, alpha)
    limit = math.inf if cfg.resolved_swiglu_limit is None else cfg.resolved_swiglu_limit
    gate, up = values.chunk(2, dim=1)
    if cfg.swiglu_clamp == "after":
        factor = curve(gate, alpha).clamp(max=limit)
    else:
        factor = curve(gate.clamp(max=limit), alpha)
    return factor * (up.clamp(-limit, limit) + cfg.formula.up_offset)


_CURVES: Mapping[Curve, Callable[[Tensor, float], Tensor]] = {
    "swish": lambda z, alpha: z * (alpha * z).sigmoid(),
    "gelu": lambda z, _: functional.gelu(z),
    "gelu_tanh": lambda z, _: functional.gelu(z, approximate="tanh"),
    "relu": lambda z, _: functional.relu(z),
    "relu2": lambda z, _: functional.relu(z).square(),
    "identity": lambda z, _: z,
}
