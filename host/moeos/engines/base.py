# SPDX-License-Identifier: Apache-2.0
"""What a layer asks of the machine that it runs on.

Must not depend on modules, checkpoints or launchers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from moeos.config.config import MoEConfig
from moeos.engines.counters import CallStats
from moeos.engines.saved_rows import SavedRows
from moeos.partition.placement import Placement
from moeos.partition.slicing import WHOLE, Slicing
from moeos.system import tensor_memory
from moeos.world.tracing import RankTrace
from moeos.world.world import SharedMemory, World


class CallTensors(NamedTuple):
    """The tensors of one call, of checked shapes and dtypes; contiguous and in the layer's dtype
    unless said.

    x [rows, H] and out [rows, H], which share no memory: a call may keep sums in out while it reads
    x; gate [R, H] of cfg.gate_dtype, or None if routing is given; selection_bias, router_bias and
    expert_scale fp32 [R], or None; shared_w1 [n, 2Is or Is, H], shared_w2 [n, H, Is] and
    shared_gate [H], or None; topk_ids int32 or int64 [rows, k] and topk_weights of any floating
    point type [rows, k], of any strides, or None: without weights the gate weighs these ids, and
    without either it chooses, too; w1, w2, b1, b2 and w3, or None, as
    `call_checks.expected_weights` has them; with cfg.weight_format w1 and w2 are its codes, and
    w1_scale, w2_scale, w1_scale_2 and w2_scale_2 its scales, or None, as
    `moeos.config.element_formats` has them, and with cfg.shared_weight_format the shared experts'
    likewise; x_scale, or None: with one x is e4m3 codes, and x_scale [rows, H / 128] theirs, fp32
    or bytes that are exponents (E8M0);
    tokens int32 [1] or [], S, or None: S is the number of rows; any_ids: an id that is no expert is
    an unused slot, else -1 alone is one and others end the call; pieces: the number of collective
    calls that it is cut into, equal on all ranks, each of `max_tokens` rows until there are no
    more (`moeos.engines.pieces`). Values are not checked: the machine that can look at them does.
    """

    x: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor | None
    selection_bias: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    tokens: torch.Tensor | None = None
    any_ids: bool = False
    pieces: int = 1
    router_bias: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None
    shared_w1: torch.Tensor | None = None
    shared_w2: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_scale_2: torch.Tensor | None = None
    w2_scale_2: torch.Tensor | None = None
    shared_w1_scale: torch.Tensor | None = None
    shared_w2_scale: torch.Tensor | None = None
    shared_w1_scale_2: torch.Tensor | None = None
    shared_w2_scale_2: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    w3: torch.Tensor | None = None


class GradientTensors(NamedTuple):
    """The tensors of one call of gradients: their addresses are used, so all are contiguous.

    x [rows, H] and d_out, the gradient of the output, in the layer's dtype; topk_ids int32
    [rows, k] and topk_weights fp32 [rows, k], as the forward call had them (-1 is an unused slot);
    w1, b1, w2, b2 and w3 as in `CallTensors`; tokens and pieces, the numbers; saved and of, as of
    `Recording`. What is written: d_x, as x; d_topk_weights fp32 [rows, k]; and d_w1, d_b1, d_w2,
    d_b2 and d_w3, each as its parameter and of `Engine.room_for_sums`, or None.

    Where slices are summed (`Slicing.sums`), d_out is of all tokens, and two more are fp32, or
    None: d_x_added [tokens, H], which is added to this slice's part of d_x; and d_shared [tokens],
    this slice's gradients of the shared experts' weights, over which their sums are written.
    """

    x: torch.Tensor
    d_out: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    tokens: int
    pieces: int
    saved: torch.Tensor
    d_x: torch.Tensor
    d_topk_weights: torch.Tensor
    d_w1: torch.Tensor | None
    d_b1: torch.Tensor | None
    d_w2: torch.Tensor | None
    d_b2: torch.Tensor | None
    of: int = 0
    d_x_added: torch.Tensor | None = None
    d_shared: torch.Tensor | None = None
    w3: torch.Tensor | None = None
    d_w3: torch.Tensor | None = None


class Recording(NamedTuple):
    """What backward needs of a forward call: its ids int32 [rows, k], their weights fp32, its
    number of tokens, and results of its GEMM0: saved [`Engine.saved_rows`, 2I or I] in the layer's
    dtype. `of`: the call's number, which is the same on all ranks.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    tokens: int
    saved: torch.Tensor
    of: int


_OF_THE_GATE = {
    "gate": "gate.weight",
    "selection_bias": "gate.selection_bias",
    "router_bias": "gate.bias",
    "expert_scale": "gate.expert_scale",
}
"""What errors call these fields."""


def require_memory(tensors: CallTensors | GradientTensors, *fields: str) -> None:
    """Raises `ValueError` for a tensor of these fields, by default all, that has not all of its
    memory. A storage can be cut while shape and strides stay, so that no other check sees it.
    """
    for field in fields or tensors._fields:
        tensor = getattr(tensors, field)
        if isinstance(tensor, torch.Tensor):
            tensor_memory.require_memory(_OF_THE_GATE.get(field, field), tensor)


class Engine(Protocol):
    """One layer on one rank. Collective to make."""

    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        shared: SharedMemory,
        placement: Placement | None = None,
        slicing: Slicing = WHOLE,
    ) -> None:
        """`placement`: where experts lie; None: in order. `slicing`: `cfg` is that of one slice."""

    @property
    def number(self) -> int:
        """The layer's number, in the order in which the layers of its world are made."""

    @property
    def cfg(self) -> MoEConfig:
        """The layer's config, of one slice where experts are cut."""

    @staticmethod
    def check_supported(cfg: MoEConfig) -> None:
        """Raises `ValueError` for a layer that this machine's kernels do not have."""

    def check_weighs(self) -> None:
        """Raises `ValueError` where this machine's gate cannot weigh a caller's ids."""

    def require_open(self) -> None:
        """Raises `RuntimeError` where no call can be made: the world is closed, or a parent's."""

    @property
    def slicing(self) -> Slicing:
        """How the layer's experts are cut."""

    def no_backward(self) -> str | None:
        """Why calls have no backward, in words after "has no backward"; None where they have it."""

    @property
    def saved_rows(self) -> SavedRows:
        """How many rows of GEMM0's results `record` keeps."""

    def record(self, tensors: CallTensors) -> Recording:
        """Runs a call as `forward` does; returns what `backward` needs. The first `record` is a
        collective of its own: it makes room for calls of gradients.
        """

    def room_for_sums(
        self, parameter: torch.Tensor, pieces: int, main_grad: torch.Tensor | None
    ) -> torch.Tensor:
        """The tensor for the gradient of an experts' parameter, in a call of `pieces` pieces:
        `main_grad` where the engine adds to it, or memory of the engine's.
        """

    def backward(self, tensors: GradientTensors) -> None:
        """Runs one call of gradients, as `forward` runs one. Collective: of the same forward call
        on all ranks.
        """

    def forward(self, tensors: CallTensors) -> None:
        """Runs one call, in its pieces: writes the S first rows of out, and zeros into the others.

        Raises what `moeos.engines.failure.exception_of` says when the call does not end well: here,
        or, where a call only begins, in a later call or in `check`.
        """

    def place(self, placement: Placement) -> None:
        """Sets where experts lie in the calls from now on, in as many places of each rank. The
        engine was made with a placement and has no running call; the caller is in the workspace's
        gate.
        """

    def check(self) -> None:
        """Waits for the calls so far and raises what has gone wrong in them."""

    def stats(self) -> CallStats:
        """The counters of the last call."""

    def trace(self) -> RankTrace:
        """The trace of the last call. The world must have been made with `trace_events`."""
