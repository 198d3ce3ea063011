# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients over ranks of which each holds its own experts.

A norm over one rank's parameters would count its experts only, and ranks would clip by different
factors. Here experts count once over the ranks of a world, and what all ranks hold counts once.
This file must not depend on how a layer computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeos.layer import wrappers
from moeos.layer.experts import device_of
from moeos.partition import sharding
from moeos.world import interruption
from moeos.world.world import World

_APART_FROM_ZERO = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""


def get_total_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    world: World,
    experts: Iterable[Tensor] = (),
) -> Tensor:
    """The norm of all gradients of a model whose experts lie on the ranks of `world`. Collective.

    A parameter's gradient is its `main_grad` where it has one, else its `grad`.

    Gradients of experts count on each rank, and all others once: they must be equal on all ranks,
    so sum or average them over the ranks first, as data parallelism does. DTensors, such as those
    of `fully_shard`, count as what they are whole.

    On GPUs, with a world of a process group, the sum over ranks is made on the device, and no host
    waits: a rank that does not come ends it by the group's timeout. Elsewhere numbers go through
    the host, which waits until the world's deadline.

    Args:
        parameters: the model's. A parameter without a gradient counts as zeros, so ranks may differ
            in which have one.
        norm_type: p, above 0; math.inf is the greatest magnitude.
        world: of the layers.
        experts: those of `parameters` that hold this rank's experts and belong to no `MoELayer`,
            such as weights that are passed to `Experts`. The experts of layers are known.

    Returns:
        float32, 0-d, on the device of the world's tensors; the same on all ranks.

    Raises:
        TypeError: `parameters` or `experts` holds something else than tensors, or `experts` is one.
        ValueError: p is not above 0. Or a parameter is an expert of a layer of another world, or of
            one with replicas of experts. Or `experts` has what is not among `parameters`. Or these
            have what is neither a parameter nor has a gradient.
        PeerTimeout: a rank did not make the call before the world's deadline, where hosts wait.
    """
    return interruption.told(
        world.aside, "get_total_norm", lambda: _total_norm(parameters, norm_type, world, experts)
    )


def _total_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float, world: World, experts: Iterable[Tensor]
) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be above 0")
    given = distinct(parameters)
    ours = ids_of_experts(given, world, experts)
    device = device_of(world)
    own: list[Tensor] = []
    others: dict[Any, list[Tensor]] = {}  # by their meshes; None of plain tensors
    for parameter in given:
        grad = gradient_of(parameter)
        if grad is None:
            continue
        if id(parameter) in ours:
            own.append(grad)
        else:
            mesh = grad.device_mesh if sharding.is_dtensor(grad) else None  # type: ignore[attr-defined]
            others.setdefault(mesh, []).append(grad)
    with torch.no_grad():
        total = over_ranks(world, _powers(own, norm_type, device), norm_type)
        for mesh, grads in others.items():
            if mesh is None:
                part = _powers(grads, norm_type, device)
            else:
                norm: Any = torch.nn.utils.get_total_norm(grads, norm_type)
                part = _powers([norm.full_tensor()], norm_type, device)
            total = _added(total, part, norm_type)
        return (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).float()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    world: World,
    experts: Iterable[Tensor] = (),
) -> Tensor:
    """Scales gradients, in place, so that their norm over all ranks is at most `max_norm`; the norm
    that they had. Collective.

    As `torch.nn.utils.clip_grad_norm_`, but that `get_total_norm` of this module says what the norm
    is: so all ranks scale by the same factor.

    Args:
        parameters, norm_type, world, experts: as of `get_total_norm`.
        max_norm: what the norm may be.
        error_if_nonfinite: whether a norm that is not finite raises; the host then waits for it.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set; on all ranks, and
            nothing is scaled.
        TypeError, ValueError, PeerTimeout: as `get_total_norm`.
    """
    given = distinct(parameters)
    total = get_total_norm(given, norm_type, world=world, experts=experts)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(total)}; look for the step that made it so, or "
            "pass error_if_nonfinite=False and skip the step"
        )
    factor = (max_norm / (total + _APART_FROM_ZERO)).clamp(max=1.0)
    with torch.no_grad():
        for parameter in given:
            grad: Any = gradient_of(parameter)
            if grad is not None:
                # PyTorch multiplies no lists of DTensors and others. What lies here shares memory.
                local = grad.to_local() if sharding.is_dtensor(grad) else grad
                local.mul_(factor.to(local.device))
    return total


def ids_of_experts(
    parameters: Iterable[Tensor], world: World, experts: Iterable[Tensor]
) -> set[int]:
    """The ids of `experts` and of the `parameters` that hold this rank's experts.

    Raises `TypeError` and `ValueError` as `get_total_norm` does.
    """
    parameters = list(parameters)
    if isinstance(experts, Tensor):
        raise TypeError("experts is one tensor; it must be a list of tensors: pass [tensor]")
    given = {id(one) for one in parameters}
    ours = set()
    for one in experts:
        _require_tensor(one, "experts")
        if id(one) not in given:
            raise ValueError(
                f"experts has a tensor {list(one.shape)} that is not among parameters: pass the "
                "same objects in both, and not what shares their memory"
            )
        ours.add(id(one))
    held = wrappers.experts_held()
    for parameter in parameters:
        holder = held.get(id(parameter))
        if holder is None:
            continue
        layer = holder.layer
        if layer.experts is not None and layer.world is not world:
            raise ValueError(
                f"{holder.name} is of a layer of {layer.world}, and world is {world}: "
                "pass the world of the layers"
            )
        if layer.experts is not None and layer.experts.slicing.cuts:
            raise ValueError(
                f"{holder.name} is of a layer with slices of experts, of whose gradients some "
                "are on one rank and others on all: sum them up yourself, or train with "
                "parallel='expert'"
            )
        if layer.placement.replicated:
            raise ValueError(
                f"{holder.name} is of a layer with replicas of experts, whose gradients are "
                "parts that nobody has added up: train with a placement that gives each expert "
                "one rank"
            )
        ours.add(id(parameter))
    return ours


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter: its `main_grad` where it has one, else its `grad`."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def distinct(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each of them once. Raises `TypeError` and `ValueError` as `get_total_norm` does."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for one in given:
        _require_tensor(one, "parameters")
        learns = isinstance(one, torch.nn.Parameter) or one.requires_grad
        if not learns and gradient_of(one) is None:
            raise ValueError(
                f"parameters has a tensor {list(one.shape)} that is no parameter and has no "
                "gradient, such as parameter.data or a value of a state dict: gradients are the "
                "parameters' own, so pass model.parameters()"
            )
    return list({id(one): one for one in given}.values())


def _require_tensor(one: object, what: str) -> None:
    if not isinstance(one, Tensor):
        raise TypeError(
            f"{what} has a {type(one).__name__}; it must hold tensors, such as model.parameters()"
        )


def _powers(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of magnitudes to the power of p, or the greatest of them: float64, 0-d."""
    norms = [
        torch.linalg.vector_norm(
            grad, p, dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32
        ).to(device, torch.float64)
        for grad in grads
        if grad.numel() > 0
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.amax() if math.isinf(p) else (stacked**p).sum()


def _added(first: Tensor, second: Tensor, p: float) -> Tensor:
    return torch.maximum(first, second) if math.isinf(p) else first + second


def over_ranks(world: World, mine: Tensor, p: float) -> Tensor:
    """The sum, or the greatest, of what all ranks of the world have. Collective."""
    if world.size == 1:
        return mine
    known = world.group if mine.is_cuda else None
    group = None if known is None else sharding.found_again(known)
    if group is not None:
        dist.all_reduce(mine, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group)
        return mine
    total = torch.zeros_like(mine)
    number = float(mine)
    control = world.aside
    for one in world.gate.run(lambda: control.allgather(number, "the norm of gradients")):
        total = _added(total, torch.full_like(mine, one), p)
    return total
