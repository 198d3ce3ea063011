# SPDX-License-Identifier: Apache-2.0
"""What a layer on a GPU has for calls of gradients: a kernel of its own, its arguments, and the
launch after it that makes the gradients of weights; and what it has for forward calls that save
rows for these.

Must not depend on ranks, nor on the order of launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeos import _runtime
from moeos.compile.kernel_shape import KernelShape
from moeos.engines.base import GradientTensors
from moeos.engines.cuda.backward_arguments import GradientPacker, SavingPacker
from moeos.engines.cuda.kernel import LaunchArguments, LoadedKernel


class CudaSaving:
    """One layer's forward calls on one rank that save rows.

    Attributes:
        arguments, launch, kernel: as those of `CudaHoldings`.
    """

    def __init__(
        self, shape: KernelShape, arguments: SavingPacker, kernel: LoadedKernel | None
    ) -> None:
        self.arguments = arguments
        self.kernel = kernel
        self.launch = LaunchArguments.of_ranks(arguments.record, shape.virtual_ranks)


class CudaGradients:
    """One layer's calls of gradients on one rank.

    Args:
        of_weights: the kernel of the launch after a call.

    Attributes:
        shape: what its kernel is compiled for.
        arguments, launch, kernel: as those of `CudaHoldings`.
    """

    def __init__(
        self,
        shape: KernelShape,
        arguments: GradientPacker,
        kernel: LoadedKernel | None,
        of_weights: LoadedKernel,
    ) -> None:
        self.shape = shape
        self.arguments = arguments
        self.kernel = kernel
        self.launch = LaunchArguments.of_ranks(arguments.record, shape.virtual_ranks)
        self._of_weights = of_weights
        self._own = LaunchArguments(arguments.record)  # for this rank alone

    def make_weights(self, stream: int) -> None:
        """Launches what makes the gradients of weights, after the call that was packed last."""
        self._of_weights.launch(stream, self._own)

    def unload(self) -> None:
        """Gives the kernel of weights back. No launch of it runs."""
        self._of_weights.unload()


_OF_WEIGHTS = ("d_w1", "d_b1", "d_w2", "d_b2", "d_w3")


def wants_weights(piece: GradientTensors) -> bool:
    """Whether any gradients of weights are wanted."""
    return any(getattr(piece, name) is not None for name in _OF_WEIGHTS)


def with_own_weights(piece: GradientTensors) -> GradientTensors:
    """`piece` with memory of its own for gradients of weights, in the dtype in which a launch
    writes them.
    """
    dtype = piece.x.dtype
    own: dict[str, Any] = {name: _empty_like(getattr(piece, name), dtype) for name in _OF_WEIGHTS}
    return piece._replace(**own)


def _empty_like(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if total is None else torch.empty_like(total, dtype=dtype)


def add_weights(tensors: GradientTensors, piece: GradientTensors) -> None:
    """Adds a piece's gradients of weights to those of the call."""
    for name in _OF_WEIGHTS:
        total = getattr(tensors, name)
        if total is not None:
            total += getattr(piece, name)


def routing_in(
    tables: Tensor,
    offsets: dict[str, int],
    rows: int,
    slots: int,
    *,
    pairs: int = 1,
    zero_experts: bool,
    expert_at: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Copies of the routing that the last call of a shape has left in its tables.

    `pairs`: of a slot, with the slices of its expert. `zero_experts`: whether a pair without a
    place may have one of these, which the tables name where another pair's row would lie.
    `expert_at`: int32, of each place its expert; None: a place has its expert's number.
    """

    def of_call(name: str, dtype: torch.dtype) -> Tensor:
        begin = offsets[name]
        end = begin + rows * slots * pairs * dtype.itemsize
        return tables[begin:end].view(dtype).view(rows, slots, pairs)[:, :, 0]

    places, weights = of_call("pair_expert", torch.int32), of_call("pair_weight", torch.float32)
    ids = places
    if expert_at is not None:
        # The tables may say anything about tokens that a call does not have.
        ids = expert_at[places.clamp(0, len(expert_at) - 1)]
    if zero_experts or expert_at is not None:
        unplaced = of_call("pair_row", torch.int32) if zero_experts else -1
        ids = torch.where(places >= 0, ids, unplaced)
    return ids.clone() if ids is places else ids, weights.clone()


def sizes_agree(forward: _runtime.Sizes, gradients: _runtime.Sizes) -> bool:
    """Whether both kinds of calls may note what they do in the same records."""
    return forward.records_bytes == gradients.records_bytes
