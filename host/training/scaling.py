# SPDX-License-Identifier: Apache-2.0
"""The scaling of losses in float16, for ranks of which each holds its own experts.

It knows PyTorch's scaler and the ranks of a world, and nothing of how a layer computes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeos import agreement, interruption, sharding
from moeos.experts import device_of
from moeos.training.gradients import over_ranks
from moeos.world import World


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step together.

    An infinity or a NaN in the gradients of one rank's experts is on that rank alone. With the
    scaler of PyTorch it alone skips its step, and what all ranks hold differs from then on.
    `unscale_`, and `step` where it is not called before, are collective: all ranks must make them
    for the same optimizers, in the same order. An optimizer may have DTensors, such as those of
    `fully_shard`, beside plain experts.

    Args:
        device, settings: as of `torch.amp.GradScaler`.
        world: of the layers.

    Raises:
        PeerTimeout: as `get_total_norm`.
    """

    def __init__(self, device: str = "cuda", *, world: World, **settings: Any) -> None:
        agreement.require_world(world)
        super().__init__(device, **settings)
        self._world = world

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any
    ) -> dict[torch.device, Tensor]:
        # All ways of PyTorch's to look for infinities end here.
        return interruption.told(
            self._world.control,
            "GradScaler.unscale_",
            lambda: self._unscale_together(optimizer, *arguments, **named),
        )

    def _unscale_together(
        self, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any
    ) -> dict[torch.device, Tensor]:
        kinds: dict[Any, list[Tensor]] = {}  # PyTorch takes no DTensors beside others
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if getattr(parameter, "main_grad", None) is not None:
                    raise RuntimeError(
                        f"rank {self._world.rank}: group {number} of the optimizer has a parameter "
                        f"{list(parameter.shape)} with a main_grad, which a GradScaler does not "
                        "unscale: train in bfloat16, or without main_grad"
                    )
                whole: Any = parameter
                kind = (
                    (whole.device_mesh, whole.placements)
                    if sharding.is_dtensor(parameter)
                    else None
                )
                kinds.setdefault(kind, []).append(parameter)
        found: dict[torch.device, Tensor] = {}
        for parameters in kinds.values():
            its: Any = _Parameters([{"params": parameters}])
            for place, flag in super()._unscale_grads_(its, *arguments, **named).items():
                found[place] = torch.maximum(found[place], flag) if place in found else flag
        device = device_of(self._world)
        mine = torch.zeros((), dtype=torch.float64, device=device)
        for flag in found.values():
            mine = torch.maximum(mine, flag.to(device, torch.float64).amax())
        of_all = over_ranks(self._world, mine, math.inf)
        for flag in found.values():
            flag.copy_(of_all)
        return found


class _Parameters(NamedTuple):
    """What PyTorch's scaler reads of an optimizer."""

    param_groups: list[dict[str, list[Tensor]]]
