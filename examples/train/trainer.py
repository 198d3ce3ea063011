# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer on the language model, by one process or by the ranks of a world.

Ranks split the sequences of a step. Gradients of what each rank has whole are added up here; those
of experts are of all ranks' tokens already. This file must not depend on texts, files or how layers
compute.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from examples.train.model import LanguageModel
from moeos import training
from moeos.world.world import World

LEARNING_RATE = 1e-3
"""Rounding may give a token another expert than in stock PyTorch. At 3e-3 losses that parted so
were 2e-2 apart 150 steps later.
"""
WARM_UP = 20
"""Steps in which the rate of learning grows to its full size."""
MOST_NORM = 1.0
"""The norm to which gradients are clipped."""


class Trainer:
    """A model and its optimizer.

    Args:
        model: whose parameters learn.
        world: of the model's layers, whose process group is torch.distributed's default one; None
            where one process has all experts.
    """

    def __init__(self, model: LanguageModel, world: World | None) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._world = world
        self._replicated = model.replicated()

    def step(self, number: int, pieces: Tensor, symbols: int) -> float:
        """The mean loss over all ranks, before the step. Collective.

        Args:
            number: of the step, from 0 on: the optimizer's rate depends on it.
            pieces: of this rank, int64 [sequences, LENGTH + 1].
            symbols: that all ranks together predict.
        """
        self.optimizer.zero_grad()
        device = next(self.model.parameters()).device
        pieces = pieces.to(device)
        logits = self.model(pieces[:, :-1])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), pieces[:, 1:].flatten(), reduction="sum"
        )
        (loss / symbols).backward()
        mean = self._add_over_ranks(loss.detach() / symbols)
        if self._world is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MOST_NORM)
        else:
            training.clip_grad_norm_(self.model.parameters(), MOST_NORM, world=self._world)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARM_UP)
        self.optimizer.step()
        return float(mean)

    def _add_over_ranks(self, loss: Tensor) -> Tensor:
        """Adds up what all ranks have of the loss and of the gradients of replicated parameters."""
        if self._world is None or self._world.size == 1:
            return loss
        gradients = [one.grad for one in self._replicated if one.grad is not None]
        every = torch.cat([loss.reshape(1), *(one.float().flatten() for one in gradients)])
        dist.all_reduce(every)
        sizes = [1, *(one.numel() for one in gradients)]
        mean, *sums = every.split(sizes)
        for gradient, summed in zip(gradients, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))
        total: Tensor = mean.squeeze(0)
        return total
