# SPDX-License-Identifier: Apache-2.0
"""What a layer on a GPU has for calls of gradients: a kernel of its own, its arguments, and the
launch behind it that makes the gradients of weights.

It knows bytes and kernels, and nothing of ranks or of the order of launches.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from moeos import _runtime, jit
from moeos.config import MoEConfig
from moeos.engines.base import GradientTensors
from moeos.engines.cuda_gradient_arguments import GRADIENT_RECORD_BYTES, GradientPacker
from moeos.engines.cuda_kernel import Launch, LoadedKernel
from moeos.jit import Kernel
from moeos.kernel_shape import KernelShape
from moeos.sizes import routed_alone


def why_none(cfg: MoEConfig, *, placed: bool, remote: bool) -> str | None:
    """What of a layer has no gradients on the GPU yet, in words that follow "has no backward"."""
    rest = "on the GPU, but on the twin alone (moeos.init(backend='twin'))"
    if cfg.zero_experts > 0:
        return f" of layers with zero_experts {rest}"
    if cfg.apply_router_weight_on_input:
        return f" of layers with apply_router_weight_on_input {rest}"
    if placed:
        return f" of layers with a placement {rest}"
    if remote:
        return f" where a peer is not reached by direct stores {rest}"
    return None


class CudaGradients:
    """One layer's calls of gradients on one rank.

    Attributes:
        shape: what its kernel is compiled for.
        arguments, launch, kernel: as those of `CudaHoldings`.
    """

    def __init__(
        self,
        shape: KernelShape,
        kernel: Kernel,
        rank: int,
        deadline: float,
        host_failure: int,
        records: Tensor,
        blocks: int,
    ) -> None:
        if kernel.report.argument_bytes != GRADIENT_RECORD_BYTES:
            raise RuntimeError(
                f"the kernel of gradients takes {kernel.report.argument_bytes} bytes of arguments "
                f"for each rank and the host packs {GRADIENT_RECORD_BYTES}: the installation mixes "
                "versions"
            )
        cfg = routed_alone(shape.cfg)
        self.shape = shape
        self.kernel: LoadedKernel | None = None
        self.arguments = GradientPacker(
            cfg, shape.sizes, rank, deadline, host_failure, records, blocks
        )
        record = self.arguments.record
        together = shape.virtual_ranks > 1
        self.launch = Launch(numpy.tile(record, shape.virtual_ranks) if together else record)
        self._of_weights = LoadedKernel(
            kernel, blocks, False, name=jit.WEIGHT_GRADIENTS, cooperative=False
        )
        self._own = Launch(record)  # of this rank alone

    def make_weights(self, stream: int) -> None:
        """Launches what makes the gradients of weights, behind the call that was packed last."""
        self._of_weights.launch(stream, self._own)

    def unload(self) -> None:
        """Gives the kernel of weights back. No launch of it runs."""
        self._of_weights.unload()


_OF_WEIGHTS = ("d_w1", "d_b1", "d_w2", "d_b2")


def with_own_weights(piece: GradientTensors) -> GradientTensors:
    """The same with memory of its own for gradients of weights, in the dtype in which a launch
    writes them.
    """
    dtype = piece.x.dtype
    return piece._replace(
        d_w1=_empty_like(piece.d_w1, dtype),
        d_b1=_empty_like(piece.d_b1, dtype),
        d_w2=_empty_like(piece.d_w2, dtype),
        d_b2=_empty_like(piece.d_b2, dtype),
    )


def _empty_like(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if total is None else torch.empty_like(total, dtype=dtype)


def add_weights(tensors: GradientTensors, piece: GradientTensors) -> None:
    """Adds a piece's gradients of weights to those of the call."""
    for name in _OF_WEIGHTS:
        total = getattr(tensors, name)
        if total is not None:
            total += getattr(piece, name)


def routing_in(
    tables: Tensor, offsets: dict[str, int], rows: int, slots: int
) -> tuple[Tensor, Tensor]:
    """Copies of the routing that the last call of a shape has left in its tables."""
    found = []
    for name, dtype in (("pair_expert", torch.int32), ("pair_weight", torch.float32)):
        begin = offsets[name]
        of_call = tables[begin : begin + rows * slots * dtype.itemsize]
        found.append(of_call.view(dtype).view(rows, slots).clone())
    return found[0], found[1]


def sizes_agree(forward: _runtime.Sizes, gradients: _runtime.Sizes) -> bool:
    """Whether both kinds of calls may note what they do in the same records."""
    return forward.records_bytes == gradients.records_bytes
