# SPDX-License-Identifier: Apache-2.0
"""The Mixture-of-Experts layer as a PyTorch module.

A layer is a gate and `Experts`: it holds the parameters of both on this rank and passes them to its
experts in each call. This file must not depend on heaps, tasks, or how engines compute and ranks
communicate.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from moeos import checkpoints
from moeos.call import call_checks, custom_op, rounded_routing
from moeos.checkpoints import state_names
from moeos.config.config import MoEConfig
from moeos.config.element_formats import quantize_matrix
from moeos.engines import values
from moeos.layer import moving, replacing, wrappers
from moeos.layer.experts import CallKind, Experts, check_supported, device_of, placement_of
from moeos.partition import sharding
from moeos.partition.placement import Placement, why_no_backward
from moeos.partition.policies import Layout, Reduce
from moeos.partition.slicing import Output, Parallel, slicing_of
from moeos.system.held_signals import HeldSignals
from moeos.system.spelling import told_nearest
from moeos.world import agreement, interruption
from moeos.world.tracing import RankTrace
from moeos.world.world import Workspace, World, in_gates, require_workspace, require_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SEED_BITS = 62
_OF_THE_WORLD = ("world", "experts", "_order", "_given")
"""Attributes that belong to a layer's world or memory, and that a copy or a pickle does not get."""
_MADE_WITH = ("cfg", "world")
"""The attributes that a layer keeps as long as it lives in a world."""
_OF_THE_GATE = {
    "router_bias": "gate.bias",
    "selection_bias": "gate.selection_bias",
    "expert_scale": "gate.expert_scale",
}
"""Names in the layer of the tensors that a config knows by these names."""
_COMPUTED_WITH = (*call_checks.WEIGHTS, *call_checks.SHARED)
"""The tensors that have and keep the layer's dtype, unless they are quantized."""
_EQUAL = (*call_checks.SHARED, *call_checks.SHARED_SCALES)
"""The tensors that are equal on all ranks, as the gate is."""
_SMALL_FLOATS = (torch.float8_e4m3fn,)
_SLICE = re.compile(r"([0-9]+)of([0-9]+)")
"""Follows a tensor's name in a state dict: the number of its slice, and how many there are."""
_EXPERT = re.compile(rf"([0-9]+)(\.{_SLICE.pattern})?")
"""Follows a tensor's name in a state dict: an expert's number, or also that of its slice."""
_PART = re.compile(rf"{_EXPERT.pattern}|{_SLICE.pattern}")
"""Any of these endings."""
_HALVED = ("w1", "b1", "shared_w1")
"""Prefixes of the names of tensors that have gate rows and up rows."""
_MOST_RUNS = 8
"""Runs of consecutive experts that `print` shows."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer dtypes, by their bytes."""


class Gate(nn.Module):
    """The router, with R = `cfg.router_rows` rows: weight [R, H]; bias fp32 [R] with
    `cfg.router_bias`; selection_bias fp32 [R] and expert_scale fp32 [R], buffers, where the config
    has them.

    `to` and its like leave these fp32, and the weight where `cfg.router_dtype` says so.

    It holds tensors and is never called: the experts' kernel routes. So hooks on it never run, and
    a module in its place is refused.
    """

    def __init__(self, cfg: MoEConfig) -> None:
        super().__init__()
        rows = cfg.router_rows
        self._keeps_weight = cfg.router_dtype is not None
        self.weight = _parameter(rows, cfg.hidden, dtype=cfg.gate_dtype)
        self.bias = _parameter(rows, dtype=torch.float32) if cfg.router_bias else None
        zeros = torch.zeros(rows, dtype=torch.float32) if cfg.selection_bias else None
        self.register_buffer("selection_bias", zeros)
        self.selection_bias: torch.Tensor | None
        ones = torch.ones(rows, dtype=torch.float32) if cfg.expert_scale else None
        self.register_buffer("expert_scale", ones)
        self.expert_scale: torch.Tensor | None

    def rules(self) -> dict[str, torch.Tensor | None]:
        """What `moeos.reference.route` and `moe` take by name in addition to the weight."""
        return {
            "selection_bias": self.selection_bias,
            "router_bias": self.bias,
            "expert_scale": self.expert_scale,
        }

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Gate:
        """Moves the parameters as `to` asks; what stays fp32 keeps its bits."""
        stay = [self.bias, self.selection_bias, self.expert_scale]
        if self._keeps_weight:
            stay.append(self.weight)

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            kept = any(tensor is one for one in stay)
            return tensor.to(made.device) if kept and made.dtype != tensor.dtype else made

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        taken = dict(state_dict)
        for name in ("weight", "bias", "selection_bias", "expert_scale"):
            key, own = prefix + name, getattr(self, name, None)
            given = state_dict.get(key)
            if isinstance(given, torch.Tensor):
                taken[key] = sharding.for_parameter(key, given, own)
        super()._load_from_state_dict(taken, prefix, *others)


class MoELayer(nn.Module):
    """An expert-parallel Mixture-of-Experts layer; one on each rank of a world.

        with moeos.init() as world:
            cfg = moeos.MoEConfig(hidden=256, intermediate=512, experts=16, top_k=2)
            layer = moeos.MoELayer(cfg, world)
            x = torch.randn(100, 256, dtype=cfg.dtype, device=layer.w1.device)
            y = layer(x)
            y.float().square().mean().backward()

    Collective: all ranks make it with the same config, and call it equally often; each rank may
    pass any number of tokens in a call.

    Its parameters require gradients, as those of any module do, so a call keeps what its backward
    needs, unless it is made under `torch.no_grad()` or `torch.inference_mode()`. Parameters of a
    layer that has no backward require none: one with `cfg.weight_format`, or whose placement holds
    an expert on several ranks. A backward is a call of its own, as collective as the forward one:
    all ranks make the backwards of their calls in one order, whichever. It has the gradients of x,
    of topk_weights and of all parameters; what every rank holds whole gets those of this rank's
    tokens.

    This rank holds X experts: those of `cfg.experts_of(rank, P)`, on the last ranks fewer than on
    others, or none; or those of `placement.ranks[rank]`.

    Parameters (dtype `cfg.dtype`):
        gate.weight [R, H]: the router, fp32 with `cfg.router_dtype`; R = `cfg.router_rows`, which
            is E + `cfg.zero_experts`.
        w1 [X, 2I, H] (gate rows, then up rows), or [X, I, H] where the activation has no gate.
        w2 [X, H, I].
        b1 [X, 2I or I], b2 [X, H] with `cfg.bias`.
        w1_scale, w2_scale with `cfg.weight_format`, and w1_scale_2, w2_scale_2 with "nvfp4": below.
        shared_w1 [n, 2Is or Is, H], shared_w2 [n, H, Is] with n = `cfg.shared_experts` above 0, and
            shared_gate [H] with `cfg.shared_gate`: equal on all ranks, as the gate is.
        shared_w1_scale, shared_w2_scale with `cfg.shared_weight_format`, and shared_w1_scale_2,
            shared_w2_scale_2 with "nvfp4": as those of w1 and w2, with n for X and Is for I.
        gate.bias fp32 [R] with `cfg.router_bias`.
        gate.selection_bias fp32 [R] with `cfg.selection_bias` (a buffer).
        gate.expert_scale fp32 [R] with `cfg.expert_scale` (a buffer).
    They start uniform in ±1/sqrt(inputs), from a seed that rank 0 draws: an expert starts the same
    on whichever rank it lies. With `init=False` nothing is drawn, and they hold anything until they
    are loaded. What its calls write belongs to `workspace`, the world's own by default.

    With `cfg.weight_format` w1 and w2 are codes: e4m3 with "fp8_block128", "fp8_channel" and
    "fp8_tensor", else uint8 with two weights a byte, the first in its low half: [X, 2I or I, H/2]
    and [X, H, I/2]. A weight is its code times its scale, and times its second one.

    Scales of w1 and of w2 (n is 2 if gated, else 1):
        fp8_block128: fp32 [X, n·ceil(I/128), ceil(H/128)] and [X, ceil(H/128), ceil(I/128)]; blocks
            begin anew at the up rows.
        fp8_channel: fp32 [X, n·I] and [X, H].
        fp8_tensor: fp32 [X, n] and [X, 1].
        mxfp4: e8m0, as uint8, [X, n·I, H/32] and [X, H, I/32].
        nvfp4: e4m3 [X, n·I, H/16] and [X, H, I/16]; the second ones fp32 [X, n] and [X, 1].
        int4_group32: bfloat16 [X, n·I, H/32] and [X, H, I/32]; a code is an integer plus 8.
    None of them may require a gradient. They start as what is drawn, rounded.

    Where parameters have names (`named_parameters`, `state_dict`, `load_state_dict`), what is of a
    format has it in its name: w1_mxfp4, w1_scale_mxfp4, shared_w1_fp8_block128. `layer.w1` is
    w1_mxfp4, too. So nothing that pairs tensors by name takes one format for another.

    With `parallel="tensor"` all ranks have the same tokens and routing, and each has a slice of
    every expert, of I / P. So w1 is [E, 2I/P, H] (this rank's gate rows, then its up rows), w2 is
    [E, H, I/P], b1 is cut as w1 is, and b2 is whole; shared experts likewise. With
    `output="replicated"` each rank returns all tokens, with the same bits; with "scattered" its
    part of the rows, by the rule of `torch.chunk`. With `parallel="sharded_tokens"` each rank has
    tokens of its own, and returns these; experts are cut in the same way, and shared experts are
    not. With `tensor_ranks=T`, below P, ranks form groups of T, of which rank r is in group r // T.
    Groups share out the experts, by the rule of `cfg.experts_of(group, P / T)`, and the ranks of a
    group have slices of theirs, of I / T. With "tensor" they have the same tokens, and the ranks of
    other groups have others. With "expert" and "tensor" `layout` says where first products read
    rows; with "tensor" `reduce` says what adds up the slices' outputs: "fused", the kernel, or
    "after", torch.distributed after the kernel. "auto" takes what costs less by the model of
    `moeos.partition.policies`. docs/tensor_parallel.md has more.

    Raises:
        ConfigMismatch: the ranks' configs, placements, or `init`, differ; the same error on all of
            them.
        ValueError: a size or the placement does not fit.
    """

    experts: Experts | None
    """The experts that compute its calls; None in a layer from a pickle."""

    @told_nearest("MoELayer")
    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        workspace: Workspace | None = None,
        *,
        init: bool = True,
        placement: Placement | None = None,
        parallel: Parallel = "expert",
        output: Output = "replicated",
        tensor_ranks: int | None = None,
        layout: Layout = "auto",
        reduce: Reduce = "auto",
    ) -> None:
        super().__init__()
        agreement.require_config(cfg)
        if cfg.gate_up != "concatenated" or cfg.transposed:
            raise ValueError(
                f"gate_up is {cfg.gate_up!r}, and transposed is {cfg.transposed}; a MoELayer makes "
                "its own weights, gate rows, then up rows, each with an element for every input: "
                "leave both fields out, or make moeos.Experts, whose calls take the caller's"
            )
        agreement.require_placement(placement)
        require_world(world)
        require_workspace(workspace, world)
        self._place = (world.rank, world.size)
        self._slicing = slicing_of(parallel, output, world.size, tensor_ranks, layout, reduce)
        self._placed = placement is not None
        self._given = replacing.Given()
        self._placement = placement_of(cfg, world, placement, self._slicing)
        self.experts = None
        # Threads make layers one after the other.
        world.together("the making of a MoELayer", lambda: self._make(cfg, world, workspace, init))

    @classmethod
    def from_hf(
        cls,
        cfg: MoEConfig,
        world: World,
        state_dict: Mapping[str, torch.Tensor] | str | os.PathLike[str],
        prefix: str,
        ignore: Sequence[str] = (),
        workspace: Workspace | None = None,
        placement: Placement | None = None,
        parallel: Parallel = "expert",
        output: Output = "replicated",
        tensor_ranks: int | None = None,
        layout: Layout = "auto",
        reduce: Reduce = "auto",
    ) -> MoELayer:
        """A layer with the weights of a block of a Hugging Face model, such as Mixtral's.

        `state_dict` holds the block's tensors under their Hugging Face names below `prefix`, such
        as "model.layers.0.mlp."; or it is the path of a folder, an index or a file with them. This
        rank's experts are kept, or its slices, and of files no others are read. A tensor there that
        is not used
        raises, unless its name below `prefix` begins with one of `ignore`: pass
        ("shared_experts.",), and a config without them, where shared experts are computed
        elsewhere. See `moeos.checkpoints.load_block`, which lists what it reads, and whose errors
        this raises. Where only another rank cannot read its experts, `ValueError` names it. Errors
        of calls name the layer by `prefix`.
        """
        require_world(world)

        def make() -> MoELayer:
            layer = cls(
                *(cfg, world, workspace),
                init=False,
                placement=placement,
                parallel=parallel,
                output=output,
                tensor_ranks=tensor_ranks,
                layout=layout,
                reduce=reduce,
            )
            layer._load_hf(world, state_dict, prefix, ignore, placement)
            return layer

        return interruption.told(world.control, "MoELayer.from_hf", make)

    def _load_hf(
        self,
        world: World,
        state_dict: Mapping[str, torch.Tensor] | str | os.PathLike[str],
        prefix: str,
        ignore: Sequence[str],
        placement: Placement | None,
    ) -> None:
        """Takes the weights of `from_hf`. Collective."""
        error: Exception | None = None
        try:
            where = (*self._place, ignore, placement, self._slicing)
            block = checkpoints.load_block(self.cfg, state_dict, prefix, *where)
            if placement is not None and not placement.in_order:
                self._name_experts(block, "")
            self.load_state_dict(block)
        except Exception as raised:
            error = raised
        what = f"the weights under {prefix!r}"
        world.gate.run(lambda: agreement.require_on_all(world, error, what))
        world.layer_names[self._bound().engine.number] = prefix.rstrip(".")

    def _slow_forward(self, *args: Any, **options: Any) -> Any:
        # A module's forward during a trace. torch.onnx passes it all arguments by position.
        custom_op.refuse_onnx()
        return super()._slow_forward(*args, **options)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scale: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        pieces: int = 1,
        weigh: bool = False,
    ) -> torch.Tensor:
        """The layer's output for this rank's tokens. Collective: every rank makes the call.

        Args:
            x: [..., H] of `cfg.dtype`, at least 2-D, on the layer's device: the rows of a call, as
                many as `cfg.max_tokens` or none, different on every rank and in every call. What is
                not contiguous is copied. Under autocast other floating dtypes are cast.
            topk_ids: [rows, k], or [..., k] with the leading dimensions of x: int32 or int64
                experts chosen by the caller, used as they are; −1 marks an unused slot, and ids
                from E on are zero experts. With `cfg.rounding` k is `cfg.slots` here, and nothing
                is rounded. Given together with topk_weights or `weigh`, or not at
                all: then the layer routes by its gate.
            topk_weights: floating point weights of these experts, likewise, used as they are.
            x_scale: with `cfg.activation_format`, a caller that routes may pass x as codes: x in
                torch.float8_e4m3fn, and its scales [rows, H / 128], or [..., H / 128] with the
                leading dimensions of x, fp32 or E8M0 (also as uint8). They are sent as they are.
                Not with shared experts, zero experts or `cfg.apply_router_weight_on_input`.
            weigh: the caller chooses, and the gate weighs: topk_ids without topk_weights. Each
                expert has the weight that it would have had the gate chosen these k (models whose
                experts are hashed by a token's number). On the GPU in layers with routing "ids".
            tokens: S, how many of the rows, from the first on, are tokens of this call: int32, one
                element, on the layer's device, 0 ≤ S ≤ rows. What the rows beyond hold, in x and in
                the routing, does not matter. None: all rows are tokens. On the GPU the kernel reads
                S, so that a captured CUDA graph can be replayed with another.
            out: what the output is written to and is returned: contiguous, of x's shape and of
                `cfg.dtype`, and no memory of other arguments. None: a new tensor.
            pieces: into how many collective calls this one is cut, the same number on all ranks, so
                that it may have pieces · `cfg.max_tokens` rows: each takes the next
                `cfg.max_tokens` rows until there are no more, and then none. A capacity is that of
                a piece.

        Returns:
            as x, of `cfg.dtype`; zeros in the rows beyond the tokens. A token that no expert took
            has zeros too, or what its shared experts return.

        Raises:
            TypeError, ValueError: an argument or a parameter is not as above.
            NumericalError: logits of some token are not finite.
            PeerTimeout: a rank did not make the call or did not finish it before the world's
                deadline.

        Shapes, dtypes and devices are checked before anything is sent. On the twin values are as
        well, and the call itself raises the errors of the protocol. A call on the GPU launches one
        kernel a piece and waits for nothing. Wrong ids, a wrong S, logits that are not finite and
        late peers end it, on all ranks and without a defined output. They raise on each rank in its
        next call that finds them known, or in `check`, until all ranks call `reset`. The kernel
        takes ids of both widths and weights of 32 and 16 bits as they are; for other strides and
        float64 PyTorch copies them first, with kernels of its own.
        """
        experts = self.experts
        if experts is None:
            experts = self._bound()
        if type(weigh) is not bool:
            call_checks.check_weigh(weigh)
        if weigh and self.cfg.routing == "caller":
            raise ValueError(
                "weigh is True, and routing is 'caller': the caller must pass topk_ids and "
                "topk_weights, as the layer cannot weigh as this model does"
            )
        if topk_ids is None and self.cfg.routing != "layer":
            raise ValueError(
                f"topk_ids is None, and routing is {self.cfg.routing!r}: the caller must pass "
                "topk_ids and topk_weights, as the layer cannot choose as this model does"
            )
        # Looked up where modules keep them: `self.w1` costs a call of nn.Module.__getattr__.
        order, own, gate = self._buffers["_order"], self._parameters, self._modules.get("gate")
        assert order is not None
        if type(gate) is not Gate:
            gate = _require_gate(gate)
        w1, b1, w2, b2, w3, *others = map(own.get, self._names)
        tensors = (
            w1,
            b1,
            w2,
            b2,
            w3,
            gate._parameters.get("weight"),
            gate._buffers.get("selection_bias"),
            gate._parameters.get("bias"),
            gate._buffers.get("expert_scale"),
            *others,
        )
        rounds = self.cfg.rounding is not None
        if rounds and topk_ids is None and topk_weights is None and x_scale is None and not weigh:
            topk_ids, topk_weights = self._route(x, tokens, pieces, tensors)
        y = experts.run(
            self._caller,
            order,
            x,
            topk_ids,
            topk_weights,
            tokens,
            tensors,
            out,
            pieces,
            weigh,
            self,
            x_scale,
        )
        return experts.own_rows(y) if experts.scatters else y

    def _route(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None,
        pieces: int,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing of a call in PyTorch, rounded in training mode."""
        call_checks.check_pieces(pieces)
        rows = call_checks.rows_of(self.cfg, self._device, x, pieces)
        if tokens is not None:
            call_checks.check_tokens(self._device, tokens)
        expected, absent = self._caller.expected, self._caller.absent
        call_checks.check_weights(self._device, expected, tensors, absent, self)
        first = len(call_checks.WEIGHTS)
        weight, *others = tensors[first : first + len(call_checks.ROUTER)]
        assert weight is not None  # as the check says
        gate = rounded_routing.GateTensors(weight, *others)
        return rounded_routing.route(self.cfg, gate, rows, tokens, rounds=self.training)

    def bind(self, world: World) -> MoELayer:
        """Lets a layer that was read from a pickle run in `world`; the layer. Collective.

        A pickle holds the config and one rank's weights, and no world. So each rank must bind what
        the same rank of as many has pickled; where that does not fit, make a layer and load a state
        dict.

        Raises:
            RuntimeError: the layer has a world.
            ConfigMismatch: the ranks' configs differ; the same error on all of them.
            ValueError: the layer is another rank's, or that of a world of another size; the same
                error on all ranks.
        """
        if self.experts is not None:
            raise RuntimeError(
                f"the layer has a world, {self.world}; only one from a pickle has none"
            )
        require_world(world)
        kind = "MoELayer.bind"
        world.together(kind, lambda: self._agree_and_use(world, kind, None))
        return self

    def replace(
        self, placement: Placement, *, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        """Moves experts between ranks, so that they lie as `placement` says. Collective: all ranks
        call it, and none is in a call.

        Parameters keep their memory, so that captured graphs and `torch.compile` go on; what they
        hold are the experts of `placement.ranks[rank]`. Until all ranks have received theirs,
        nothing has changed. Each rank needs memory for a second copy of its experts. Between
        processes experts are sent by torch.distributed, over NVLink or a network where it uses
        NCCL.

        A `grad`, a `main_grad` and the states in `optimizers` move with their experts. A step of
        another optimizer that has a state of these experts raises. Other layers with the same
        tensors move, too. Experts in a state dict get memory of their own, so that they stay as
        they were.

        What a signal's handler raises while experts are on their way, such as KeyboardInterrupt,
        is raised when they have moved on all ranks, or on none: `placement` says which.

        Raises:
            TypeError: it is no placement, or `optimizers` no sequence of them.
            ConfigMismatch: ranks pass different ones, or have unlike gradients or states; the same
                error on all of them.
            ValueError: it does not fit, or a rank would have more or fewer experts than now; the
                same on all ranks. A tensor is not as the layer was made, or in the memory of a
                layer that cannot move with this one.
            RuntimeError: the layer was made without a placement, has no world, or its processes
                have no process group.
            PeerTimeout: a rank was interrupted, or did not come, send or take its experts before
                the world's deadline and 5 s; nothing has changed on this rank. Where it is not
                known of all ranks, the world is aborted.
        """
        self._bound()
        held = HeldSignals()  # during the move, in which the other ranks learn of them

        def replace() -> None:
            agreement.require_placement(placement)
            if placement is None:
                raise TypeError("placement is None; it must be a moeos.Placement")
            passed = replacing.require_optimizers(optimizers)
            sharing = replacing.SharingLayers.of(self)
            in_gates(
                *(self.world, sharing.workspaces),
                lambda: self._replace(placement, sharing, passed, held),
            )

        interruption.told(self.world.control, "MoELayer.replace", replace, held)

    def _replace(
        self,
        placement: Placement,
        sharing: replacing.SharingLayers,
        passed: Sequence[torch.optim.Optimizer],
        signals: HeldSignals,
    ) -> None:
        """Collective, in the gates of the world and of the workspaces: no thread makes a call."""
        with replacing.nothing_moves():
            agreement.agree(self.cfg, self.world, self._place, "MoELayer.replace", placement)
        self._require_movable(placement)
        with signals:
            self._move(placement, sharing, passed, signals)

    def _require_movable(self, placement: Placement) -> None:
        """Raises, alike on all ranks, unless experts can move to this placement."""
        world, old = self.world, self.placement
        if self._slicing.cuts:
            raise RuntimeError(
                f"parallel is {self._slicing.parallel!r}: slices of experts lie in order, and none "
                "can move. Make the layer with parallel='expert' and a placement"
            )
        if not self._bound().can_be_placed:
            raise RuntimeError(
                "the layer was made without a placement, and its kernel knows no other place of "
                "its experts than their order: make it with MoELayer(cfg, world, placement=...), "
                f"moeos.Placement.chunk({self.cfg.experts}, {world.size}) for that order"
            )
        for rank, (before, after) in enumerate(zip(old.ranks, placement.ranks, strict=True)):
            if len(before) != len(after):
                raise ValueError(
                    f"rank {rank} has {len(before)} experts, and would have {len(after)}: replace "
                    "keeps the numbers of all ranks. Make a layer with the new placement, or "
                    "propose one with as many slots"
                )
        moving.require_way(world)

    def _move(
        self,
        placement: Placement,
        sharing: replacing.SharingLayers,
        passed: Sequence[torch.optim.Optimizer],
        signals: HeldSignals,
    ) -> None:
        """Collective. All ranks have moved their experts afterwards, or none has, unless a rank is
        lost.
        """
        world, old, experts = self.world, self.placement, self._bound()
        error: Exception | None = None
        held: dict[str, torch.Tensor] = {}
        made: dict[str, torch.Tensor] = {}
        apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A later backward would not see what is written in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            try:
                experts.engine.require_open()
                held = sharing.held(passed)
                made = moving.room(held)
                apart = [(one, one.clone()) for one in sharing.given(held)]
                experts.settle()
            except Exception as raised:  # a misfit, no memory, a failed call
                error = raised
            with replacing.nothing_moves():
                replacing.require_on_all(world, error, signals.raised)
                together = sharing.agreed(held)
            begun = time.monotonic()
            try:
                moving.fill(made, held, old, placement, world)
                experts.settle()  # others may be copying from here
            except Exception as raised:  # a lost peer
                error = raised
            replacing.require_on_all(world, error, signals.raised, since=begun)
            for given, its in apart:
                given.data = its
            for name, tensor in made.items():
                with torch.inference_mode(held[name].is_inference()):
                    held[name].copy_(tensor)
        for each in together:
            each.place(placement)
        sharing.moved(old, passed)

    @property
    def placement(self) -> Placement:
        """Which ranks hold which experts, or slices of them."""
        return self._placement if self.experts is None else self.experts.placement

    def check_inputs(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> None:
        """With `parallel="tensor"`: compares what must be equal on all ranks with slices of the
        same experts, the gate too. Collective, and no call. It waits for these tensors, and is
        meant for a search: the twin compares them in each call.

        Raises `ValueError`, on all ranks, with those that differ from the first of theirs.
        """
        self._bound().check_inputs(x, topk_ids, topk_weights, self.gate.state_dict())

    def stats(self) -> dict[str, Any]:
        """What this rank did in its last call, and when: the fields of
        `moeos.engines.counters.CallStats`, and its `bytes_to_peers` and `busy_share`. Waits for the
        calls so far.
        """
        return self._bound().stats()

    def trace(self) -> RankTrace:
        """What this rank's actors did in its last call, and when. Waits for it.

        Raises `RuntimeError` if the world was made without `trace_events`.
        """
        return self._bound().trace()

    def check(self) -> None:
        """Waits for the calls so far, and raises what went wrong in them.

        On the twin a call raises by itself. On the GPU a call only launches: an error in it is
        known when its kernel has ended, and is raised here or in a later call. On the GPU only this
        function raises `ValueError` for a selection bias that is not finite; its expert is a last
        choice.
        """
        self._bound().check()
        if self.gate.selection_bias is not None:
            values.check_selection_bias(self.gate.selection_bias)

    def reset(self) -> None:
        """Makes the layers of its workspace usable again after a call that failed. Collective; no
        rank may be in a call.
        """
        self._bound().reset()

    def extra_repr(self) -> str:
        """The text that `print` shows for the layer."""
        rank, ranks = self._place
        sliced = ""
        if self._slicing.cuts:
            sliced = f"slice {self._slicing.slice_of(rank)} of {self._slicing.slices} of "
        parameters = dict(self.named_parameters())
        frozen = [name for name, one in parameters.items() if not one.requires_grad]
        learns = f"trainable but for {', '.join(frozen)}" if frozen else "trainable"
        if len(frozen) == len(parameters):
            learns = "frozen"
        lines = [
            f"rank {rank} of {ranks}: {sliced}{_told(self._own())} of {self.cfg.experts}, {learns}",
            ", ".join(
                f"{field.name}={getattr(self.cfg, field.name)!r}"
                for field in dataclasses.fields(self.cfg)
                if getattr(self.cfg, field.name) != field.default
            ),
            ", ".join(
                f"{name} {str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
                for name, one in parameters.items()
            ),
        ]
        if self.experts is None:
            lines.append("without a world: call bind(world)")
        return "\n".join(lines)

    def __copy__(self) -> MoELayer:
        """Another object for the same layer: parameters, engine and calls are shared."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        wrappers.protect(twin)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A layer of the same world with weights of its own. Collective, as making one is."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        if self.experts is None:
            twin.__setstate__(copy.deepcopy(self._state(), memo))
            return twin
        world, workspace = self.world, self.experts.workspace
        kind = "a copy of a MoELayer"

        def make() -> None:
            twin.__setstate__(copy.deepcopy(self._state(), memo))
            world.gate.run(lambda: twin._agree_and_use(world, kind, workspace))

        interruption.told(world.control, kind, make)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: see `_state`. 8-bit floats, which `pickle` cannot read back, are
        there as bytes.
        """
        state = self._state()
        state["_parameters"] = {
            name: tensor
            if tensor is None or tensor.dtype not in _SMALL_FLOATS
            else nn.Parameter(tensor.detach().view(torch.uint8), requires_grad=False)
            for name, tensor in self._parameters.items()
        }
        return state

    def _state(self) -> dict[str, Any]:
        """All attributes but those that belong to the world and what `compile` made: a copy of any
        module is not compiled, or it would run this layer.
        """
        left = (*_OF_THE_WORLD, "_compiled_call_impl")
        state = {name: value for name, value in self.__dict__.items() if name not in left}
        state["_placement"] = self.placement
        state["_buffers"] = {k: v for k, v in self._buffers.items() if k not in _OF_THE_WORLD}
        return wrappers.without_mark(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.experts = None
        self._given = replacing.Given()
        for wanted in self._expected().values():
            own = self._tensor_of(wanted.name)
            if own is None or own.dtype != torch.uint8:
                continue
            if wanted.dtype in _SMALL_FLOATS:
                numbers = nn.Parameter(own.detach().view(wanted.dtype), requires_grad=False)
                self._parameters[state_names.state_name(self.cfg, wanted.name)] = numbers
        wrappers.protect(self)

    def _make(self, cfg: MoEConfig, world: World, workspace: Workspace | None, init: bool) -> None:
        """Makes the parameters and the experts that compute with them. Collective, in the world's
        gate.
        """
        kind = "MoELayer" if init else "MoELayer(init=False)"
        apart = self._agree(cfg, world, kind)
        local = len(self._own())
        whole, cfg = cfg, self._slicing.cut(cfg)
        check_supported(cfg, world)
        self.cfg = whole
        self._names = tuple(state_names.state_name(cfg, name) for name in state_names.OWN)
        self._caller = CallKind(
            "MoELayer",
            (
                *call_checks.expected_weights(cfg, local),
                *call_checks.expected_router(whole),
                *call_checks.expected_shared(cfg),
                *call_checks.expected_scales(cfg, local),
                *call_checks.expected_shared_scales(cfg),
            ),
            absent="the layer was made with one",
            routes=True,
            any_ids=False,
        )
        with torch.device("meta") if _weights_are_meta() else device_of(world):
            self.gate = Gate(whole)
            self.w1: nn.Parameter
            self.w2: nn.Parameter
            w1, b1, w2, b2, _ = map(_parameter_like, call_checks.expected_weights(cfg, local))
            assert w1 is not None  # as every layer has both
            assert w2 is not None
            self.w1, self.w2, self.b1, self.b2 = w1, w2, b1, b2
            self.shared_w1, self.shared_w2, self.shared_gate = map(
                _parameter_like, call_checks.expected_shared(cfg)
            )
            self.w1_scale, self.w2_scale, self.w1_scale_2, self.w2_scale_2 = map(
                _parameter_like, call_checks.expected_scales(cfg, local)
            )
            scales = map(_parameter_like, call_checks.expected_shared_scales(cfg))
            self.shared_w1_scale, self.shared_w2_scale, *second = scales
            self.shared_w1_scale_2, self.shared_w2_scale_2 = second
        nn.Module.requires_grad_(self, self._no_gradient() is None)
        if init:
            self._initialise_alike(world)
        self._use(world, apart, workspace)

    def _agree_and_use(self, world: World, kind: str, workspace: Workspace | None) -> None:
        """`_use` when the ranks agree that they make this kind of layer of it. Collective."""
        self._use(world, self._agree(self.cfg, world, kind), workspace)

    def _agree(self, cfg: MoEConfig, world: World, kind: str) -> bool:
        """See `agreement.agree`."""
        kind = agreement.kind_of(kind, self.placement, placed=self._placed)
        return agreement.agree(cfg, world, self._place, kind, self.placement, self._slicing)

    def _use(self, world: World, apart: bool, workspace: Workspace | None) -> None:
        """Makes this layer one of `world`. Collective. `apart`: see `agreement.agree`."""
        self.world = world
        self._apart = apart
        self.experts = Experts.agreed(
            *(self.cfg, world, workspace, self.placement, self._slicing, self._placed)
        )
        self._device = self.experts.device
        # A buffer, since `torch.export` lets a graph write nothing else; but moves and casts of the
        # layer's buffers leave this one alone, which all layers share.
        self.register_buffer("_order", None, persistent=False)
        self._buffers["_order"] = custom_op.order_on(self._device)
        wrappers.protect(self)

    def _bound(self) -> Experts:
        if self.experts is None:
            raise RuntimeError(
                "this layer was read from a pickle and has no world: all ranks must call "
                "layer.bind(world) first"
            )
        return self.experts

    def _initialise_alike(self, world: World) -> None:
        """Collective: rank 0 draws the seed."""
        drawn = 0
        # Threads share a generator, from which rank 0 alone may draw if the seed is to be known.
        # Processes have one each, and all draw, so that equal ones stay equal.
        if world.rank == 0 or not world.control.shares_memory:
            drawn = int(torch.randint(1 << _SEED_BITS, (), device="cpu").item())
        seed = world.control.allgather(drawn, "the seed of the initial weights")[0]
        if not self.w1.is_meta:
            self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator(self.w1.device)  # on their device, which is fast
        with torch.no_grad():
            generator.manual_seed(seed)
            _fill_uniform(self.gate.weight, generator)
            if self.gate.bias is not None:
                self.gate.bias.zero_()
            if self.cfg.shared_weight_format is None:
                for name in ("shared_w1", "shared_w2"):
                    shared = self._tensor_of(name)
                    if shared is not None:
                        shared.copy_(self._drawn(name, self.cfg.shared_experts, generator))
            else:
                for mlp in range(self.cfg.shared_experts):
                    for name in ("shared_w1", "shared_w2"):
                        self._fill_matrix(name, mlp, generator)
            if self.shared_gate is not None:
                _fill_uniform(self.shared_gate, generator)
            for local, expert in enumerate(self._own()):
                generator.manual_seed((seed + 1 + expert) % (1 << _SEED_BITS))
                for name in ("w1", "w2"):
                    self._fill_matrix(name, local, generator)
                for bias in (self.b1, self.b2):
                    if bias is not None:
                        bias[local].zero_()

    def _fill_matrix(self, name: str, local: int, generator: torch.Generator) -> None:
        """Draws an expert's w1 or w2, or a shared one's."""
        [drawn] = self._drawn(name, 1, generator)
        if self.cfg.weight_format is None:
            getattr(self, name)[local].copy_(drawn)
        else:
            self.set_matrix(name, local, drawn)

    def _drawn(self, name: str, count: int, generator: torch.Generator) -> torch.Tensor:
        """This rank's part of `count` whole matrices that are drawn, in fp32."""
        whole, part = (
            torch.Size((count, *_shapes_of(cfg)[name]))
            for cfg in (self.cfg, self._slicing.cut(self.cfg))
        )
        drawn = _uniform(whole, generator)
        return self._slicing.part(drawn, whole, part, self._halves(name), self._place[0])

    def _halves(self, name: str) -> int:
        """2 for a tensor of gates and ups, each of which is cut alone; else 1."""
        return self.cfg.halves if name.startswith(_HALVED) else 1

    def set_matrix(self, name: str, local: int, numbers: torch.Tensor) -> None:
        """Makes `numbers` [R, C], of any floating dtype, the w1 or w2 of this rank's expert
        `local`, or the shared_w1 or shared_w2 of the shared expert of that number, in
        `cfg.weight_format`.
        """
        cfg = self.cfg
        assert cfg.weight_format is not None
        with torch.no_grad():
            parts = quantize_matrix(numbers, cfg.weight_format, self._halves(name))
            for end, part in zip(("", "_scale", "_scale_2"), parts, strict=True):
                if part is not None:
                    getattr(self, name + end)[local].copy_(part)

    def requires_grad_(self, requires_grad: bool = True) -> MoELayer:
        """See `nn.Module.requires_grad_`; raises `RuntimeError` in a layer that has no backward."""
        why = self._no_gradient()
        if requires_grad and why is not None:
            raise RuntimeError(f"requires_grad_(True) of a MoELayer {why}")
        super().requires_grad_(requires_grad)
        return self

    def _no_gradient(self) -> str | None:
        """Why parameters have no gradient, in words that follow "a MoELayer"; None: they have."""
        if self.cfg.weight_format is not None:
            return (
                f"with weight_format {self.cfg.weight_format!r}, whose codes and scales have no "
                "gradient: call it of the model's other modules"
            )
        why = None if self._slicing.cuts else why_no_backward(self.placement)
        return None if why is None else f"that has no backward{why}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoELayer:
        """Moves the layer's tensors, but not the tensor that orders the calls of all layers.

        Raises `TypeError`, before anything has changed, for `to`, `half` and their like if they
        would give its experts another dtype. Codes and their scales keep theirs.
        """
        coded = self.cfg.weight_format is not None
        if coded:
            like = fn(torch.empty(0, dtype=self.cfg.dtype, device="cpu"))
            self._require_dtype("the layer", like.dtype)
        order = self._buffers.get("_order")
        names = {id(self._tensor_of(name)): name for name in state_names.OWN}
        of_formats = {wanted.name for wanted in self._expected().values() if wanted.part}

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is order:  # it stays in its place: another thread may be calling the layer
                return tensor
            name = names.get(id(tensor))
            if name in of_formats:
                return _as_bits(tensor, fn)
            made = fn(tensor)
            if name in _COMPUTED_WITH and tensor.dtype == self.cfg.dtype:
                self._require_dtype(name, made.dtype)
            return made

        super()._apply(apply, recurse=False)  # type: ignore[no-untyped-call]
        if recurse:
            for module in self.children():
                module._apply(fn)
        return self

    def _require_dtype(self, what: str, dtype: torch.dtype) -> None:
        """Raises `TypeError` for another dtype than the layer's, which `what` would get."""
        if dtype != self.cfg.dtype:
            raise TypeError(
                f"{what} would become {dtype}; this MoELayer computes in {self.cfg.dtype}: "
                "cast the model's other modules only, or, where its backend computes in "
                f"{dtype}, make it with MoEConfig(dtype={dtype}). Nothing of this layer has "
                "changed, but modules that the model cast before it may have another dtype now: "
                f"cast them back with .to({self.cfg.dtype})"
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._slicing.cuts:
            self._name_slices(destination, prefix)
            return
        # A tensor [X, ...] does not say whose experts it has, and experts may move.
        if not self.placement.in_order or (self._placed and self._group() is None):
            self._name_experts(destination, prefix)
        else:
            for name in self._names_of_experts():
                local = destination.get(prefix + name)
                if local is not None:
                    destination[prefix + name] = self._of_all_ranks(local)
        if self._placed:
            self._given.add(self._given_to(destination, prefix))

    def _given_to(self, state: Mapping[str, Any], prefix: str) -> Iterator[torch.Tensor]:
        """The tensors of experts in a state dict; of a DTensor, the local part."""
        for name in self._names_of_experts():
            keys = [f"{prefix}{name}.{expert}" for expert in self._own()]
            for key in (prefix + name, *keys):
                if key in state:
                    yield sharding.local_part(state[key])

    def _tensor_of(self, name: str) -> nn.Parameter | None:
        """The parameter that a call knows as `name`, one of `state_names.OWN`."""
        return self._parameters.get(state_names.state_name(self.cfg, name))

    def _key(self, prefix: str, name: str) -> str:
        """The key, in a state dict, of the parameter that a call knows as `name`."""
        return prefix + state_names.state_name(self.cfg, name)

    def _names_of_experts(self) -> list[str]:
        """The names of the parameters that each rank holds for its own experts."""
        return [state_names.state_name(self.cfg, name) for name in wrappers.EXPERTS]

    def _holding(self) -> tuple[int, int]:
        """This rank's number among the ranks that divide the experts, and how many these are."""
        rank, ranks = self._place
        return self._slicing.holder(rank), self._slicing.holders(ranks)

    def _own(self) -> Sequence[int]:
        """This rank's experts."""
        return self.placement.experts_of(self._place[0])

    def _name_experts(self, state: dict[str, Any], prefix: str) -> None:
        """Gives each expert in a state dict tensors of its own, such as w1.3 in place of w1.

        So a checkpoint has each expert once, however many ranks hold it, and layers with any
        placement can read it.
        """
        for name in self._names_of_experts():
            held = state.pop(prefix + name, None)
            for local, expert in enumerate(() if held is None else self._own()):
                state[f"{prefix}{name}.{expert}"] = held[local]

    def _name_slices(self, state: dict[str, Any], prefix: str) -> None:
        """Gives this rank's slices in a state dict names of their own, such as w1.0of2 for w1.
        Where groups of ranks divide the experts, each expert has names of its own, such as
        w1.3.0of2; so do its tensors that are not cut, such as b2.3.

        So a checkpoint has the slices of all ranks. What is equal on all ranks keeps its name.
        """
        mine, (_, groups) = self._slicing.slice_of(self._place[0]), self._holding()
        for name, whole in self._expected_of(self.cfg).items():
            key = self._key(prefix, name)
            held = state.get(key)
            if held is None:
                continue
            end = "" if held.shape == whole.shape else f".{mine}of{self._slicing.slices}"
            if groups > 1 and name in wrappers.EXPERTS:
                del state[key]
                for local, expert in enumerate(self._own()):
                    state[f"{key}.{expert}{end}"] = held[local]
            elif end:
                state[key + end] = state.pop(key)

    def _join_slices(self, taken: dict[str, Any], prefix: str, errors: list[str]) -> set[str]:
        """Joins slices, such as w1.0of2 and w1.1of2, to a whole w1, where all are there; or takes
        this rank's own. For each expert of this rank it likewise joins w1.3.0of2 and w1.3.1of2 to
        w1.3. Where neither is possible, an error names the slices that are there. Returns the keys
        that have such an error.
        """
        found: dict[str, dict[tuple[int, int], str]] = {}  # by what they are slices of
        for key in taken:
            joined, _, end = key.rpartition(".")
            if match := _SLICE.fullmatch(end):
                number, count = map(int, match.groups())
                found.setdefault(joined, {})[number, count] = key
        held = self._expected()
        refused: set[str] = set()
        for name, whole in self._expected_of(self.cfg).items():
            joined = self._key(prefix, name)
            how = (self._halves(name), held[name].shape != whole.shape)
            for key in (joined, *(f"{joined}.{expert}" for expert in self._own())):
                if key not in found:
                    continue
                made = self._join_slices_of(key, found[key], whole.shape, *how, taken)
                if made or joined in taken or key in taken:
                    continue
                errors.append(self._told_of_slices(key, sorted(found[key])))
                for part in self._parts_of(joined, taken):  # neither missing nor unexpected
                    del taken[part]
                taken[joined] = self._tensor_of(name)
                refused.add(joined)
                break
        return refused

    def _join_slices_of(
        self,
        joined: str,
        found: Mapping[tuple[int, int], str],
        whole: torch.Size,
        halves: int,
        is_cut: bool,
        taken: dict[str, Any],
    ) -> bool:
        """Joins the slices of one tensor, called `joined`: of all experts, with the shape `whole`,
        or of a single one. `found`: the keys of its slices, by number and count; `is_cut`: whether
        ranks of this layer have slices of it. Returns whether it is there now.
        """
        slicing = self._slicing
        for count in sorted({of for _, of in found}):
            keys = [found.get((number, count)) for number in range(count)]
            own = keys[slicing.slice_of(self._place[0])] if count == slicing.slices else None
            if own is not None and is_cut:
                taken[joined] = taken[own]
            elif None not in keys:
                parts = [sharding.everything(key, taken[key]) for key in keys if key]
                single = parts[0].dim() < len(whole)
                parts = [part.unsqueeze(0) for part in parts] if single else parts
                every = torch.Size((parts[0].shape[0], *whole[1:]))  # of all experts
                made = slicing.joined(parts, every, halves)
                taken[joined] = made[0] if single else made
            else:
                continue
            for key in filter(None, keys):
                taken.pop(key, None)
            return True
        return False

    def _parts_of(self, joined: str, taken: Mapping[str, Any]) -> list[str]:
        """The keys of a tensor's slices, of single experts' parts of it, and of slices of these."""
        begin = joined + "."
        return [
            key for key in taken if key.startswith(begin) and _PART.fullmatch(key[len(begin) :])
        ]

    def _told_of_slices(self, key: str, found: list[tuple[int, int]]) -> str:
        """The error text for slices, each a number and a count, that are not this rank's own and do
        not make a whole.
        """
        there = ", ".join(f"{key}.{number}of{count}" for number, count in found)
        slicing, rank = self._slicing, self._place[0]
        count = found[0][1]
        wanted = f"all of {key}.0of{count} to {key}.{count - 1}of{count}"
        if slicing.cuts:
            wanted += f", or {key}.{slicing.slice_of(rank)}of{slicing.slices}"
        return (
            f"the state dict has {there}; rank {rank} needs {wanted}: each is in the state dict of "
            "another rank of the layer that was saved. Load their union, which "
            "torch.distributed.checkpoint keeps"
        )

    def _cut(self, name: str, given: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor of its experts, or of the shared ones; a tensor with
        the shape of a slice is returned as it is.
        """
        whole, part = self._expected_of(self.cfg)[name].shape, self._expected()[name].shape
        if given.shape != whole or whole == part:
            return given
        return self._slicing.part(given, whole, part, self._halves(name), self._place[0])

    def _fqn_modifiers(self) -> dict[str, str]:
        """What PyTorch's functions of distributed state dicts ask a module that has it: none.

        Raises `RuntimeError` unless experts lie whole and in order: a full state dict would be that
        of one rank, whose experts are not all.
        """
        if self.placement.in_order and not self._slicing.cuts:
            return {}
        cut = self._slicing.cuts
        made = f"parallel={self._slicing.parallel!r}" if cut else "a placement"
        raise RuntimeError(
            "get_model_state_dict and its like would keep one rank's experts of a MoELayer with "
            f"{made}: save model.state_dict() by torch.distributed.checkpoint.save, which keeps "
            "all, and load with load_state_dict"
        )

    def _join_experts(self, taken: dict[str, Any], prefix: str, errors: list[str]) -> set[str]:
        """Stacks the tensors of single experts, such as w1.3, to this rank's w1, where there is no
        w1, and leaves out those of other ranks. If one is missing, all stay, and PyTorch names
        them. Returns the keys of the tensors that it has made.
        """
        joined = set()
        whole, part = self._expected_of(self.cfg), self._expected()
        for name, kept in zip(wrappers.EXPERTS, self._names_of_experts(), strict=True):
            own = self._parameters.get(kept)
            begin = f"{prefix}{kept}."
            there = {
                key
                for key in taken
                if key.startswith(begin)
                and (match := _EXPERT.fullmatch(key[len(begin) :]))
                and int(match[1]) < self.cfg.experts
            }
            wanted = [f"{begin}{expert}" for expert in self._own()]
            if own is None or prefix + kept in taken or not there.issuperset(wanted):
                continue
            if not there and self.placement.in_order:
                continue  # of a rank without experts, whose w1 is missing
            try:
                shapes = whole[name].shape[1:], part[name].shape[1:]
                single = [self._single(key, name, taken[key], *shapes) for key in wanted]
                taken[prefix + kept] = _stacked(single) if single else own.detach()
            except ValueError as error:
                errors.append(str(error))
                taken[prefix + kept] = own
            for key in there:
                del taken[key]
            joined.add(prefix + kept)
        return joined

    def _single(
        self, key: str, name: str, given: Any, whole: torch.Size, part: torch.Size
    ) -> torch.Tensor:
        """This rank's part of one expert's tensor, which a state dict has under `key`, and which a
        call knows as a part of `name`: of shape `part`, or cut from a `whole` one. Raises
        `ValueError` for others.
        """
        single = sharding.everything(key, given)
        if single.shape not in (whole, part):
            raise ValueError(
                f"{key} has shape {list(single.shape)}; an expert needs {list(part)}"
                + ("" if whole == part else f", or whole {list(whole)}")
            )
        if single.shape != part:
            one = torch.Size((1, *whole)), torch.Size((1, *part))
            halves, rank = self._halves(name), self._place[0]
            cut = self._slicing.part(single.unsqueeze(0), *one, halves, rank)
            return cut[0]
        return single

    def _of_all_ranks(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor [E, ...] of which this rank's part is `local` [X, ...]; `local` itself where
        torch.distributed does not have the ranks of the world.

        Raises `RuntimeError` where experts do not lie in order, which a DTensor cannot say.
        """
        if not self.placement.in_order:
            what, remedy = (
                ("of slices of experts", "with parallel='expert'")
                if self._slicing.cuts
                else ("of experts that a placement puts elsewhere", "without one")
            )
            raise RuntimeError(
                f"the state of an optimizer {what} cannot be told from another's: make the layer "
                f"{remedy}, or give the optimizer the model's other parameters"
            )
        group = self._group()
        if group is None:
            return local
        return sharding.whole(local, self.cfg.experts, self._device, group)

    def _group(self) -> ProcessGroup | None:
        """The process group of the world's ranks, if torch.distributed has one."""
        known = None if self.experts is None else self.world.group
        group = None if known is None else sharding.found_again(known)
        is_default = not self._apart and sharding.process_group_place() == self._place
        return sharding.default_group() if group is None and is_default else group

    def _of_this_rank(self, name: str, given: torch.Tensor, each: torch.Size) -> torch.Tensor:
        """What this rank holds of what `sharding.part` takes; `each`: the shape of an expert's."""
        return sharding.part(
            name,
            given,
            self._own(),
            self.cfg.experts,
            each,
            *self._holding(),
            in_order=self._slicing.cuts or self.placement.in_order,
        )

    def _mine_of(self, key: str, name: str, given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """This rank's part of its experts' tensor in a state dict."""
        if not self._slicing.cuts:
            return self._of_this_rank(key, given, own.shape[1:])
        given = sharding.everything(key, given)
        each = self._expected_of(self.cfg)[name].shape[1:]
        each = each if given.shape[1:] == each else own.shape[1:]
        return self._cut(name, self._of_this_rank(key, given, each))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        taken = dict(state_dict)
        errors: list[str] = others[-1]
        assigns = others[0].get("assign_to_params_buffers", False)
        refused = state_names.take_other_formats(self.cfg, taken, prefix)
        errors += refused
        if refused:  # so it is not missing as well
            named = {prefix + name: self._parameters.get(name) for name in self._names}
            taken = {key: kept for key, kept in named.items() if kept is not None} | taken
        joined = self._join_slices(taken, prefix, errors)
        joined |= self._join_experts(taken, prefix, errors)
        remedies: set[str] = set()
        for name in wrappers.EXPERTS:
            own, key = self._tensor_of(name), self._key(prefix, name)
            given = taken.get(key)
            if own is None or not isinstance(given, torch.Tensor):
                continue
            try:
                self._require_loadable(key, name, given.dtype)
                if key in joined:
                    continue
                mine = self._mine_of(key, name, given, own)
            except ValueError as error:
                errors.append(str(error))
                remedies |= self._remedies_of_part(given, own)
                mine = own  # so neither missing nor of a wrong shape as well
            taken[key] = _apart(mine) if assigns and mine is not given else mine
        errors += remedies
        for name in _EQUAL:
            shared, key = self._tensor_of(name), self._key(prefix, name)
            given = taken.get(key)
            if not isinstance(given, torch.Tensor):
                continue
            whole = sharding.for_parameter(key, given, shared)
            cuts = shared is not None and self._slicing.cuts
            mine = self._cut(name, whole) if cuts else whole
            taken[key] = _apart(mine) if assigns and mine is not whole else mine
            if shared is not None:
                try:
                    self._require_loadable(key, name, given.dtype)
                except ValueError as error:
                    errors.append(str(error))
                    taken[key] = shared
        super()._load_from_state_dict(taken, prefix, *others)

    def _remedies_of_part(self, given: torch.Tensor, own: torch.Tensor) -> set[str]:
        """Further remedies for a tensor that has some experts, such as one of a rank of another
        world.
        """
        some = given.dim() == own.dim() and 0 < len(given) < self.cfg.experts
        if sharding.is_dtensor(given) or not some or given.shape[1:] != own.shape[1:]:
            return set()
        return {
            f"{len(given)} of {self.cfg.experts} experts are what one rank of a world of another "
            "size has: save all of them there. Where torch.distributed has the ranks, use torch."
            "distributed.checkpoint, or save what its state_dict.get_model_state_dict returns with "
            "StateDictOptions(full_state_dict=True). Elsewhere make the layer with "
            f"placement=moeos.Placement.chunk({self.cfg.experts}, world.size), whose state dict "
            "names each expert, and save the state dicts of all ranks as one"
        }

    def _require_loadable(self, key: str, name: str, dtype: torch.dtype) -> None:
        """Raises `ValueError` where PyTorch would convert codes, or numbers to codes, as if they
        were the same. `key`: of a state dict, and of what a call knows as `name`.
        """
        wanted = self._expected().get(name)
        if wanted is None or not (wanted.part or dtype in call_checks.CODES):
            return
        wrong = call_checks.wrong_dtype(wanted, dtype)
        if wrong:
            raise ValueError(key + wrong.removeprefix(name))

    def _expected(self) -> dict[str, call_checks.Expected]:
        """What the parameters are to be, except for the router's."""
        return self._expected_of(self._slicing.cut(self.cfg))

    def _expected_of(self, cfg: MoEConfig) -> dict[str, call_checks.Expected]:
        """What the parameters, except for the router's, are to be with the sizes of `cfg`."""
        local = len(self._own())
        every = (
            *call_checks.expected_weights(cfg, local),
            *call_checks.expected_scales(cfg, local),
            *call_checks.expected_shared(cfg),
            *call_checks.expected_shared_scales(cfg),
        )
        return {wanted.name: wanted for wanted in every if wanted is not None}

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """`layer.w1` is the parameter in any format, whose name has the format: see
        `moeos.checkpoints.state_names`.
        """
        kept = self._named(name)
        return super().__getattr__(name) if kept == name else getattr(self, kept)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute as any module does, where `layer.w1` is as `__getattr__` says; raises
        `AttributeError` for what a layer was made with.
        """
        if name in _MADE_WITH and name in self.__dict__:
            raise AttributeError(
                f"{name} of a MoELayer cannot be set, as its memory and its kernel are made for "
                f"the one that it has: make a MoELayer with the other {name}, and load this one's "
                "state dict"
            )
        super().__setattr__(self._named(name), value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(self._named(name))

    def _named(self, name: str) -> str:
        cfg = self.__dict__.get("cfg")  # there is none before the ranks agree on it
        return name if cfg is None else state_names.state_name(cfg, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `nn.Module.register_parameter`; raises `TypeError` for experts in a DTensor, and
        `ValueError` for what calls look for in the gate. Shared experts are DTensors between calls
        where `fully_shard` has cut them.
        """
        name = self._named(name)
        _require_place(name)
        cut = param is not None and sharding.is_dtensor(param)
        if cut and name in self._names_of_experts():
            raise TypeError(
                f"{name} would become a DTensor; each rank of a MoELayer holds its own experts as "
                "a plain tensor: leave the layer out, and shard or replicate the modules around it"
            )
        super().register_parameter(name, param)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """See `nn.Module.register_buffer`; raises `ValueError` as `register_parameter` does."""
        _require_place(name)
        super().register_buffer(name, tensor, persistent)

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            "MoELayer cannot be compiled by torch.jit.script: use torch.compile or torch.export"
        )

    def _replicate_for_data_parallel(self) -> MoELayer:
        raise RuntimeError(
            "MoELayer cannot be used in nn.DataParallel, whose one process calls copies of it on "
            "several devices: start a process for each device, with torchrun or mpirun"
        )


def _told(experts: Sequence[int]) -> str:
    """These experts in words; of many runs, the first."""
    if not experts:
        return "no experts"
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][-1] + 1:
            runs[-1][1:] = [expert]
        else:
            runs.append([expert])
    named = [" to ".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    more = ", ..." if len(runs) > _MOST_RUNS else ""
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(named)}{more}"


def _shapes_of(cfg: MoEConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of an expert's matrices, and of a shared one's."""
    return {
        "w1": (cfg.w1_rows, cfg.hidden),
        "w2": (cfg.hidden, cfg.intermediate),
        "shared_w1": (cfg.shared_w1_rows, cfg.hidden),
        "shared_w2": (cfg.hidden, cfg.shared_intermediate),
    }


def _require_gate(gate: nn.Module | None) -> nn.Module:
    """Raises unless it is a gate, whose class a tool may have extended, but not by a `forward`."""
    if gate is None:
        raise ValueError(
            "gate is missing; the layer was made with one, which may choose or weigh: set "
            "layer.gate to what it was, or make the layer again and load its state dict"
        )
    if not isinstance(gate, Gate) or type(gate).forward is not Gate.forward:
        raise TypeError(
            f"gate is a {type(gate).__name__}, which would never be run, as the layer computes "
            "with its own gate's tensors: set layer.gate to what it was (merge_and_unload() merges "
            "an adapter of PEFT), keep your router beside the layer, and pass what it chooses as "
            "topk_ids and topk_weights (with MoEConfig(routing='caller') a call without them "
            "raises)"
        )
    return gate


def _require_place(name: str) -> None:
    """Raises for a tensor of the router's that would lie where no call reads it."""
    place = _OF_THE_GATE.get(name)
    if place is not None:
        raise ValueError(
            f"{name} of a MoELayer would be read by no call: make the layer with "
            f"MoEConfig({name}=True), and set layer.{place}"
        )


def _weights_are_meta() -> bool:
    """Whether parameters that are made now get no values: under `torch.device("meta")`, or where
    `register_parameter` moves them there, as accelerate's `init_empty_weights` makes it do.
    """
    probe = nn.Module()
    probe.register_parameter("tensor", _parameter(0, dtype=torch.float32))
    return probe.get_parameter("tensor").is_meta


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _parameter_like(wanted: call_checks.Expected | None) -> nn.Parameter | None:
    return None if wanted is None else _parameter(*wanted.shape, dtype=wanted.dtype)


def _as_bits(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `fn`, which may move and cast, makes of a tensor that keeps its dtype."""
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    made = fn(bits)
    if made.dtype != bits.dtype:  # as Module.type casts integers, too
        made = bits.to(made.device)
    return made.view(tensor.dtype)


def _stacked(single: list[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors [...] of X experts to [X, ...]. They are stacked as bits: not all 8-bit floats
    can be.
    """
    kind = single[0].dtype
    if kind not in _SMALL_FLOATS:
        return torch.stack(single)
    return torch.stack([one.view(torch.uint8) for one in single]).view(kind)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: a parameter must be contiguous, and must not keep alive the
    tensor that it was cut from.
    """
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _fill_uniform(weight: torch.Tensor, generator: torch.Generator) -> None:
    weight.copy_(_uniform(weight.shape, generator))


def _uniform(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """fp32 numbers within ±1/sqrt(inputs), on the generator's device."""
    bound = shape[-1] ** -0.5
    drawn = torch.empty(shape, dtype=torch.float32, device=generator.device)
    return drawn.uniform_(-bound, bound, generator=generator)
