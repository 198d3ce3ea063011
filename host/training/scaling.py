# SPDX-License-Identifier: Apache-2.0
"""The scaling of losses in float16, for ranks of which each holds its own experts.

It knows PyTorch's scaler and the ranks of a world, and nothing of how a layer computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moeos import agreement
from moeos.experts import device_of
from moeos.training.gradients import over_ranks
from moeos.world import World


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step together.

    An infinity or a NaN in the gradients of one rank's experts is on that rank alone. With the
    scaler of PyTorch it alone skips its step, and what all ranks hold differs from then on.
    `unscale_`, and `step` where it is not called before, are collective: all ranks must make them
    for the same optimizers, in the same order.

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
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if getattr(parameter, "main_grad", None) is not None:
                    raise RuntimeError(
                        f"rank {self._world.rank}: group {number} of the optimizer has a parameter "
                        f"{list(parameter.shape)} with a main_grad, which a GradScaler does not "
                        "unscale: train in bfloat16, or without main_grad"
                    )
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *arguments, **named)
        device = device_of(self._world)
        mine = torch.zeros((), dtype=torch.float64, device=device)
        for flag in found.values():
            mine = torch.maximum(mine, flag.to(device, torch.float64).amax())
        of_all = over_ranks(self._world, mine, math.inf)
        for flag in found.values():
            flag.copy_(of_all)
        return found
