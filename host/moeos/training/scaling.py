# SPDX-License-Identifier: Apache-2.0
"""The scaling of losses in float16, for ranks of which each holds its own experts.

This file must not depend on how a layer computes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeos.layer.experts import device_of
from moeos.partition import sharding
from moeos.system.errors import PeerTimeout
from moeos.system.held_signals import HeldSignals
from moeos.training.gradient_norms import over_ranks
from moeos.world import agreement, interruption
from moeos.world.world import World, require_world

_WHAT = "GradScaler.unscale_"


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step together.

    An infinity or a NaN in the gradients of one rank's experts is on that rank alone. With the
    scaler of PyTorch it alone skips its step, and what all ranks hold differs from then on.
    `unscale_`, and `step` where it is not called before, are collective: all ranks must make them
    for the same optimizers, in the same order. An optimizer may have DTensors, such as those of
    `fully_shard`, as well as plain experts. A rank whose optimizer has no gradient does as the
    others.

    What a signal's handler raises during `unscale_` comes out where no rank has unscaled a
    gradient, or where all have: then PyTorch refuses to do it again. Where none has, it may be
    called again after `world.reset()` on all ranks.

    Args:
        device, settings: as of `torch.amp.GradScaler`.
        world: of the layers.

    Raises:
        PeerTimeout: as `get_total_norm`.
        RuntimeError: a parameter has a `main_grad`, or what `torch.amp.GradScaler` raises; where
            only another rank has such an error, `ValueError` names it.
    """

    def __init__(self, device: str = "cuda", *, world: World, **settings: Any) -> None:
        require_world(world)
        super().__init__(device, **settings)
        self._world = world
        self._scaling: _Scaling | None = None  # of the call of unscale_ that is under way

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See `torch.amp.GradScaler.unscale_`. Collective."""
        unscale = super().unscale_
        if self._world.size == 1:
            unscale(optimizer)
            return
        held = HeldSignals()

        def on_all() -> None:
            with contextlib.ExitStack() as ends:
                self._scaling = _Scaling(held, ends)
                try:
                    unscale(optimizer)
                finally:
                    self._scaling = None

        interruption.told(self._world.aside, _WHAT, on_all, held)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, *others: Any
    ) -> dict[torch.device, Tensor]:
        # All of PyTorch's searches for infinities end here.
        def unscale(by: Tensor) -> dict[torch.device, Tensor]:
            found: dict[torch.device, Tensor] = {}
            for its in self._kinds(optimizer):
                for place, flag in (
                    super(GradScaler, self)._unscale_grads_(its, by, *others).items()
                ):
                    found[place] = torch.maximum(found[place], flag) if place in found else flag
            return found

        world = self._world
        if world.size == 1:
            return unscale(inv_scale)

        # Looked for first, and scaled when all ranks know: what is interrupted changes no gradient.
        def look() -> dict[torch.device, Tensor]:
            return self._found(lambda: unscale(torch.ones_like(inv_scale)))

        if self._scaling is None:  # the optimizer scales them itself
            return interruption.told(world.aside, "GradScaler.step", look)
        found = look()
        # After the last exchange signals are held until PyTorch has noted that gradients are
        # unscaled: else some ranks might have unscaled and others not, or they might do it again.
        held = self._scaling.ends.enter_context(self._scaling.held)
        world.gate.run(lambda: self._require_on_all(held))
        unscale(inv_scale)
        return found

    def _require_on_all(self, held: HeldSignals) -> None:
        """Raises, on all ranks, if one has been interrupted. Collective."""
        control = self._world.aside
        if not all(control.allgather(held.raised is None, _WHAT)):
            raise PeerTimeout(
                f"rank {self._world.rank} of {self._world.size}: nothing was unscaled, for a rank "
                "was interrupted. All ranks may call world.reset() and go on"
            )
        # A rank that comes after the others gave up gets their error instead of this barrier.
        control.barrier(_WHAT)

    def _found(self, look: Callable[[], dict[torch.device, Tensor]]) -> dict[torch.device, Tensor]:
        """Whether any rank has found an infinity, by devices, of which there is one at least: a
        rank without gradients steps, or skips its step, as the others do. Collective.
        """
        found: dict[torch.device, Tensor] = {}
        error: Exception | None = None
        try:
            found = look()
        except (RuntimeError, ValueError) as raised:
            error = raised
        world, device = self._world, device_of(self._world)
        world.gate.run(
            lambda: agreement.require_on_all(
                world, error, "the gradients of a GradScaler", world.aside
            )
        )
        mine = torch.zeros((), dtype=torch.float64, device=device)
        for flag in found.values():
            mine = torch.maximum(mine, flag.to(device, torch.float64).amax())
        of_all = over_ranks(world, mine, math.inf)
        if not found:
            found = {mine.device: torch.zeros((), dtype=torch.float32, device=device)}
        for flag in found.values():
            flag.copy_(of_all)
        return found

    def _kinds(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """What PyTorch's scaler takes at once, as optimizers: no DTensors together with other
        tensors.
        """
        kinds: dict[Any, list[Tensor]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if getattr(parameter, "main_grad", None) is not None:
                    raise RuntimeError(
                        f"rank {self._world.rank}: group {number} of the optimizer has a parameter "
                        f"{list(parameter.shape)} with a main_grad, which a GradScaler does not "
                        "unscale: train in bfloat16, or without main_grad"
                    )
                whole: Any = parameter
                cut = sharding.is_dtensor(parameter)
                kind = (whole.device_mesh, whole.placements) if cut else None
                kinds.setdefault(kind, []).append(parameter)
        return [_Parameters([{"params": parameters}]) for parameters in kinds.values()]


class _Scaling(NamedTuple):
    """A call of `unscale_`: the signals that it holds from some point on, and what ends with it."""

    held: HeldSignals
    ends: contextlib.ExitStack


class _Parameters(NamedTuple):
    """The part of an optimizer that PyTorch's scaler reads."""

    param_groups: list[dict[str, list[Tensor]]]
