# SPDX-License-Identifier: Apache-2.0
"""How many tokens experts get, and what makes them equal: losses, and a bias of the router.

Names and formulas are those of transformers and Megatron-Core. Nothing here waits for a GPU. This
file must not depend on layers, configs or worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from moeos.call import call_checks
from moeos.call.selection import topk as best
from moeos.world.process_groups import membership

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def tokens_per_expert(topk_ids: Tensor, num_experts: int, mask: Tensor | None = None) -> Tensor:
    """How many tokens chose each expert: int64 [E], on the device of `topk_ids`.

    It stays on the device, so no host waits for it. `MoELayer.stats` has `expert_pairs`, what the
    experts of a rank got from all ranks, and waits for the call.

    Args:
        topk_ids: int32 or int64 [..., k]. What is no expert, such as -1, counts nowhere.
        num_experts: E.
        mask: [...]: a token counts where it is true, or another number than 0. None: all count.
            A mask that is added to scores has the opposite meaning.

    Raises:
        TypeError: ids are no integers.
        ValueError: `num_experts` is below 1, or the mask has another shape; on the CPU also where a
            floating point mask has negative numbers or NaN, as one that is added to scores has.
            Elsewhere the check would wait for the device. This holds for all masks below.
    """
    if topk_ids.dim() == 0:
        raise ValueError("topk_ids is []; it must be [..., k]")
    if mask is None:
        mask = torch.ones(topk_ids.shape[:-1], dtype=torch.bool, device=topk_ids.device)
    mask = _mask("mask", mask, topk_ids.shape[:-1])
    whole = topk_ids.reshape(1, -1, topk_ids.shape[-1])
    return _counts(whole, num_experts, mask.reshape(1, -1))[0]


def load_balancing_loss_func(
    gate_logits: Tensor | Sequence[Tensor],
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Switch's auxiliary loss over the layers of a model, as transformers' function of this name.

    E times the sum over experts of n_e / N * p_e / N: n_e pairs chose expert e, p_e is the sum of
    its probabilities, and N counts the tokens of all layers (Fedus et al., arXiv:2101.03961,
    equations 4 to 6). It is not divided by k: equal experts give k. The result is without a
    coefficient. What padding holds enters neither the loss nor its gradient, NaN included.

    Args:
        gate_logits: [N, E] of one layer, or a sequence of one a layer: `router_logits` of the
            output of a model that was called with output_router_logits=True.
        num_experts: E.
        top_k: k. The best k logits are chosen, of equal ones the lower expert.
        attention_mask: [batch, length], 0 or false where a token is padding, as a tokenizer makes
            it; N is batch * length.

    Returns:
        float32, 0-d; of float64 logits float64. 0 where no token counts.

    Raises:
        ValueError: there are no layers, or a shape does not fit.
    """
    layers = [gate_logits] if isinstance(gate_logits, Tensor) else list(gate_logits or ())
    if gate_logits is None or any(logits is None for logits in layers):
        raise TypeError(
            "gate_logits is or has None; it must have the logits of each layer: call the model "
            "with output_router_logits=True"
        )
    if not layers:
        raise ValueError("gate_logits is empty; it must have the logits of one layer or more")
    device = layers[0].device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    sums = torch.zeros(num_experts, dtype=torch.float32, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    for logits in layers:
        _require("gate_logits", logits, (len(logits), num_experts))
        mask = torch.ones(len(logits), dtype=torch.bool, device=device)
        if attention_mask is not None:
            mask = _mask("attention_mask", attention_mask.flatten().to(device), mask.shape)
        held = _cleared(logits.to(device), mask)
        counts = counts + tokens_per_expert(best(held, top_k).indices, num_experts, mask)
        sums = sums + (_wide(held).softmax(dim=-1) * mask.unsqueeze(1)).sum(dim=0)
        tokens = tokens + mask.sum()
    tokens = tokens.clamp_min(1)
    return (counts.to(sums.dtype) / tokens * (sums / tokens)).sum() * num_experts


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> Tensor:
    """Switch's auxiliary loss of one layer, as Megatron-Core's function of this name.

    c * E / (k * N^2) * sum over e of n_e * p_e, with n_e tokens of expert e and p_e the sum of its
    probabilities: equal experts give c. For the balance of all ranks pass their summed
    `tokens_per_expert` and `total_num_tokens`; the sum of the ranks' losses is then that of all
    tokens.

    Args:
        probs: [N, E], with zeros for tokens that do not count. Where padding may hold NaN, clear
            its logits (`torch.where`) before the softmax, whose gradient would be NaN.
        tokens_per_expert: [E].
        total_num_tokens: N of those tokens that `tokens_per_expert` counts.
        topk: k.
        num_experts: E.
        moe_aux_loss_coeff: c.

    Returns:
        float32, 0-d; of float64 probabilities float64. 0 where no token counts.

    Raises:
        ValueError: a shape does not fit.
    """
    _require("probs", probs, (len(probs), num_experts))
    _require("tokens_per_expert", tokens_per_expert, (num_experts,))
    sums = _wide(probs).sum(dim=0)
    chosen = tokens_per_expert.to(sums.dtype)
    if isinstance(total_num_tokens, Tensor):
        tokens: int | Tensor = total_num_tokens.clamp_min(1)
    else:
        tokens = max(total_num_tokens, 1)
    scale = num_experts * moe_aux_loss_coeff / topk
    return (sums / tokens * (chosen / tokens)).sum() * scale


def sequence_load_balancing_loss_func(
    probs: Tensor,
    topk_ids: Tensor,
    topk: int,
    moe_aux_loss_coeff: float,
    mask: Tensor | None = None,
) -> Tensor:
    """DeepSeek-V3's loss of each sequence by itself, and the mean over the sequences.

    A sequence of T tokens has the loss c * sum over e of f_e * p_e, where f_e is E / (k * T) times
    the tokens that chose e, and p_e the mean share that e has of a token's scores
    (arXiv:2412.19437, equations 17 to 20). Equal experts give c.

    Args:
        probs: [B, L, E]: scores, not negative. They are divided by their sum over E, which changes
            nothing for a softmax. Where the sum is less than the least normal number of the dtype,
            the gradient is that of a division by this number. Where padding may hold NaN, clear its
            logits (`torch.where`) before the softmax, whose gradient would be NaN.
        topk_ids: int32 or int64 [B, L, any]; -1 is an unused slot.
        topk: k.
        moe_aux_loss_coeff: c.
        mask: [B, L], 0 or false where a token is padding: what it holds enters neither the loss nor
            its gradient, NaN included. A sequence without tokens has a loss of 0, and counts in the
            mean.

    Returns:
        float32, 0-d; float64 for float64 scores. 0 where there are no sequences.

    Raises:
        TypeError: ids are no integers.
        ValueError: a shape does not fit.
    """
    if probs.dim() != 3:
        raise ValueError(f"probs is {list(probs.shape)}; it must be [B, L, E]")
    sequences, length, experts = probs.shape
    if topk_ids.dim() != 3 or topk_ids.shape[:2] != probs.shape[:2]:
        raise ValueError(
            f"topk_ids is {list(topk_ids.shape)}; it must be [{sequences}, {length}, any]"
        )
    if mask is None:
        mask = torch.ones(sequences, length, dtype=torch.bool, device=probs.device)
    mask = _mask("mask", mask, probs.shape[:2])
    wide = _wide(_cleared(probs, mask))
    sums = wide.sum(dim=-1, keepdim=True)
    some = sums > 0  # a token whose scores are all 0 has no shares, and no gradient of them
    least = torch.finfo(wide.dtype).tiny
    divisors = torch.where(some, sums, 1.0)
    shares = wide / divisors.clamp_min(least)  # whose gradient is finite
    shares = shares + (wide / divisors - shares).detach()
    counts = _counts(topk_ids, experts, mask).to(wide.dtype)
    tokens = mask.sum(dim=1, keepdim=True).clamp_min(1)
    products = counts * (experts / topk) / tokens * (shares.sum(dim=1) / tokens)
    return products.sum() / max(sequences, 1) * moe_aux_loss_coeff


def z_loss_func(logits: Tensor, z_loss_coeff: float, mask: Tensor | None = None) -> Tensor:
    """The router's z-loss: c times the mean of logsumexp(logits)^2 over tokens.

    It keeps logits small (ST-MoE, arXiv:2202.08906, equation 5). The name is Megatron-Core's.

    Args:
        logits: [..., E].
        z_loss_coeff: c.
        mask: [...], 0 or false where a token is padding: what it holds enters neither the loss nor
            its gradient, NaN included.

    Returns:
        float32, 0-d; of float64 logits float64. 0 where no token counts.

    Raises:
        ValueError: the mask has another shape.
    """
    if logits.dim() == 0:
        raise ValueError("logits is []; it must be [..., E]")
    if mask is None:
        mask = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    mask = _mask("mask", mask, logits.shape[:-1])
    squares = _wide(_cleared(logits, mask)).logsumexp(dim=-1).square()
    return (squares * mask).sum() / mask.sum().clamp_min(1) * z_loss_coeff


def get_updated_expert_bias(
    tokens_per_expert: Tensor,
    expert_bias: Tensor,
    expert_bias_update_rate: float,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """The selection bias of the next step, by DeepSeek-V3's rule without an auxiliary loss.

    An expert with more tokens than the mean loses the rate, one with fewer gains it, and one with
    the mean keeps its bias (arXiv:2408.15664, algorithm 1). The name is Megatron-Core's. Write the
    result with `layer.gate.selection_bias.copy_(...)`: the next call reads it, and so does the next
    replay of a CUDA graph.

    Args:
        tokens_per_expert: [..., E], integer or floating point, of all tokens since the last update.
            Sums are made in 64 bits.
        expert_bias: [..., E], floating point.
        expert_bias_update_rate: what is added or taken.
        group: its ranks' counts are summed first, on the device; collective over it. A DeviceMesh
            of one dimension will do. None: the counts are those of all ranks already.

    Returns:
        as `expert_bias`, a new tensor.

    Raises:
        TypeError: the counts are bool, complex or of 8 bits and floating point, or the bias is not
            floating point.
        ValueError: the shapes differ.
    """
    _require("expert_bias", expert_bias, tuple(tokens_per_expert.shape))
    kind = tokens_per_expert.dtype
    eight_bits = kind.is_floating_point and kind.itemsize == 1
    if kind == torch.bool or eight_bits or kind.is_complex:
        raise TypeError(
            f"tokens_per_expert has dtype {kind}; it must be an integer or a floating point one "
            "that counts: pass what moeos.training.tokens_per_expert returns"
        )
    if not expert_bias.is_floating_point():
        raise TypeError(
            f"expert_bias has dtype {expert_bias.dtype}; it must be floating point, as the rate "
            "is added to it: pass expert_bias.float()"
        )
    with torch.no_grad():
        # Sums of all experts and ranks need not fit into the dtype of one expert's count.
        wide = torch.float64 if kind.is_floating_point else torch.int64
        counts = tokens_per_expert.to(wide, copy=group is not None)
        if group is not None:
            dist.all_reduce(counts, group=membership(group).group)
        # Whole numbers: a mean would be rounded.
        missing = counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1]
        return expert_bias + missing.sign().to(expert_bias.dtype) * expert_bias_update_rate


def _counts(topk_ids: Tensor, num_experts: int, mask: Tensor) -> Tensor:
    """How many tokens chose each expert: int64 [B, E], of ids [B, L, k] and a mask [B, L]."""
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"topk_ids have dtype {topk_ids.dtype}; it must be torch.int32 or torch.int64"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; it must be at least 1")
    ids = topk_ids.long()
    counts = (ids >= 0) & (ids < num_experts) & mask.unsqueeze(-1)
    place = torch.where(counts, ids, num_experts).flatten(1)
    # bincount would wait: it has to know the greatest id.
    found = torch.zeros(len(ids), num_experts + 1, dtype=torch.int64, device=ids.device)
    return found.scatter_add(1, place, torch.ones_like(place))[:, :num_experts]


def _wide(numbers: Tensor) -> Tensor:
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def _cleared(numbers: Tensor, mask: Tensor) -> Tensor:
    """Zeros in place of what padding holds, and a gradient of exactly 0 there: a product with the
    mask would keep a NaN in both."""
    return torch.where(mask.unsqueeze(-1), numbers, 0.0)


def _mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    _require(name, mask, tuple(shape))
    looks = mask.is_floating_point() and mask.device.type == "cpu" and not is_compiling()
    if looks and not call_checks.is_fake(mask) and not bool((mask >= 0).all()):
        raise ValueError(
            f"{name} has negative numbers or NaN; it must be 0 or false where a token is padding: "
            f"of one that is added to scores pass {name} == 0"
        )
    return mask.bool()


def _require(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; it must be {list(shape)}")
