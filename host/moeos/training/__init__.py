# SPDX-License-Identifier: Apache-2.0
"""What a trainer needs in addition to the layer: small things in plain PyTorch.

Losses that balance experts, counts and biases, norms and scales of gradients, sums of experts'
gradients over replicas, and the rounding of routing to tiles. None of them makes a call of a layer.

Must not depend on adapters or on the command line.
"""

from moeos.call.rounding import round_tokens
from moeos.training.balance import (
    get_updated_expert_bias,
    load_balancing_loss_func,
    sequence_load_balancing_loss_func,
    switch_load_balancing_loss_func,
    tokens_per_expert,
    z_loss_func,
)
from moeos.training.gradient_norms import clip_grad_norm_, get_total_norm
from moeos.training.replicas import reduce_expert_grads_
from moeos.training.scaling import GradScaler

__all__ = [
    "GradScaler",
    "clip_grad_norm_",
    "get_total_norm",
    "get_updated_expert_bias",
    "load_balancing_loss_func",
    "reduce_expert_grads_",
    "round_tokens",
    "sequence_load_balancing_loss_func",
    "switch_load_balancing_loss_func",
    "tokens_per_expert",
    "z_loss_func",
]
