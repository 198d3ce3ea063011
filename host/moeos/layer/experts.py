# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer without their weights: a call takes the caller's tensors.

`Experts` check the caller's tensors before anything is sent, and pass one call to the engine of
their world. This file must not depend on parameters, heaps, tasks or how ranks communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch.compiler import is_compiling

from moeos.call import autograd, backward_operators, call_checks, custom_op, main_grads
from moeos.call.call_checks import Expected
from moeos.call.known_tensors import KnownTensors
from moeos.config.config import MoEConfig
from moeos.engines.base import Engine
from moeos.engines.machines import engine_class
from moeos.layer import wrappers
from moeos.partition.placement import Placement
from moeos.partition.policies import Layout, Reduce
from moeos.partition.slicing import Output, Parallel, Slicing, digest, slicing_of
from moeos.system import tensor_memory
from moeos.system.spelling import told_nearest
from moeos.world import agreement, interruption
from moeos.world.control import name_ranks
from moeos.world.tracing import RankTrace
from moeos.world.world import Workspace, World, require_workspace, require_world

_NOTHING_ELSE = (None,) * (len(call_checks.ROUTER) + len(call_checks.SHARED))
"""Replaces the tensors before the scales that `Experts` lack."""
_MADE_WITH = ("cfg", "world", "workspace", "device", "engine")
"""The attributes that experts keep as long as they live."""
_NO_SHARED_SCALES = (None,) * len(call_checks.SHARED_SCALES)
"""Replaces the scales of shared experts, which follow the experts' own."""


class CallKind(NamedTuple):
    """What differs between calls of a layer and calls of `Experts`.

    Attributes:
        name: used in errors.
        expected: the tensors that do not belong to a call's tokens, in the order of
            `call_checks.OWN`.
        absent: the error text where one is missing.
        routes: whether routing may be left to the gate.
        any_ids: see `moeos.engines.base.CallTensors`.
    """

    name: str
    expected: tuple[Expected | None, ...]
    absent: str
    routes: bool
    any_ids: bool


class Experts:
    """What a layer computes after its router, with weights that are the caller's: for a model that
    has its own router and its own parameters. One on each rank of a world.

    Collective: all ranks make it with the same config, and call it equally often; each rank may
    pass any number of tokens in a call. It neither holds nor copies weights: all layers of a model
    may share one, each with tensors of its own. A copy of it is the object itself. What its calls
    write belongs to `workspace`, the world's own by default. Experts lie where `placement` says, in
    order by default: see `moeos.Placement`.

    With `parallel="tensor"` ranks have slices of the same experts, and pass the same tokens and
    routing; `parallel`, `output`, `tensor_ranks`, `layout` and `reduce` are as of `MoELayer`.

    A wrapper for data parallelism assumes that all ranks have equal weights. Tell it to ignore
    these, as docs/training.md says.

    Raises:
        ConfigMismatch: the ranks' configs or placements differ; the same error on all of them.
        ValueError: a size does not fit, or the config has shared experts or rounding, which a
            `MoELayer` computes.
    """

    @told_nearest("Experts")
    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        workspace: Workspace | None = None,
        *,
        placement: Placement | None = None,
        parallel: Parallel = "expert",
        output: Output = "replicated",
        tensor_ranks: int | None = None,
        layout: Layout = "auto",
        reduce: Reduce = "auto",
    ) -> None:
        agreement.require_config(cfg)
        agreement.require_placement(placement)
        if cfg.shared_experts > 0:
            raise ValueError(
                f"shared_experts is {cfg.shared_experts}; Experts compute routed experts alone: "
                "make a MoELayer, or set shared_experts=0 and shared_intermediate=0 and add them "
                "yourself"
            )
        if cfg.rounding is not None:
            raise ValueError(
                f"rounding is {cfg.rounding!r}; Experts route nothing: set rounding=None and "
                f"top_k={cfg.slots}, and pass what moeos.training.round_tokens makes with "
                f"slots={cfg.slots}"
            )
        require_world(world)
        require_workspace(workspace, world)
        # Threads make layers one after the other.
        slicing = slicing_of(parallel, output, world.size, tensor_ranks, layout, reduce)
        placed = placement is not None
        placement = placement_of(cfg, world, placement, slicing)
        world.together(
            "the making of Experts",
            lambda: self._make(cfg, world, workspace, placement, slicing, placed),
        )

    @classmethod
    def agreed(
        cls,
        cfg: MoEConfig,
        world: World,
        workspace: Workspace | None,
        placement: Placement,
        slicing: Slicing,
        placed: bool,
    ) -> Experts:
        """Makes experts for a caller that is in the world's gate and has the ranks' agreement.
        Collective.

        `placed`: whether `place` may say later that experts lie elsewhere.
        """
        made = cls.__new__(cls)
        made._start(cfg, world, workspace, placement, slicing, placed)
        return made

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        b1: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_scale_2: torch.Tensor | None = None,
        w2_scale_2: torch.Tensor | None = None,
        *,
        w3: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        pieces: int = 1,
        turned: bool = False,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts. Collective: every rank makes the call.

        Args:
            x: [..., H], at least 2-D, on the device of the world, as of `MoELayer.forward`.
            topk_ids: [rows, k], or [..., k] with the leading dimensions of x: int32 or int64
                experts, numbered over all ranks. An id below 0 or beyond the experts is an unused
                slot.
            topk_weights: floating point weights of these experts, likewise, used as they are.
            w1: [X, 2I, H], or [X, I, H] where the activation has no gate, of `cfg.dtype`,
                contiguous: of this rank's X experts, those of `cfg.experts_of(rank, P)`, or of
                `placement.ranks[rank]`. A rank without experts passes a tensor of none.
                `cfg.gate_up` says which rows are gate rows; with "separate" w1 is [X, I, H].
            w2: [X, H, I], likewise. With `cfg.transposed` w1 is [X, H, 2I], or [X, H, I] without a
                gate or with "separate", and w2 [X, I, H].
            b1, b2: [X, 2I], or [X, I] without a gate, and [X, H] with `cfg.bias`, likewise. b1 is
                in the order of w1's rows; with "separate" all gate biases, then all up biases.
                Where experts are cut, X and I are those of a rank's slices, as `MoELayer` has them;
                b2 is whole, and added once.
            w1_scale, w2_scale, w1_scale_2, w2_scale_2: with `cfg.weight_format` the scales of w1
                and w2, which then are codes, as `MoELayer` has them.
            w3: as w1, the up rows, with `cfg.gate_up` "separate" alone, which excludes
                `cfg.weight_format`.
            x_scale, tokens, out, pieces: as of `MoELayer.forward`.
            turned: w1, w2 and w3 have rows and columns exchanged: they are `transpose(1, 2)` of
                what is said above. So a parameter whose strides say that it lies so is passed
                itself, and its `main_grad` is found.

        A gradient of a weight has the shape and the strides of that weight.

        Returns:
            as x, of `cfg.dtype`; zeros for a token that no expert took.

        Raises:
            TypeError, ValueError: an argument is not as above; or a token has an expert twice.
            PeerTimeout: a rank did not make the call or did not finish it before the world's
                deadline.

        When an error raises, and what a call on the GPU waits for, is as with `MoELayer.forward`.
        """
        y = self.run(
            self._caller,
            self._order,
            x,
            topk_ids,
            topk_weights,
            tokens,
            (
                *(w1, b1, w2, b2, w3, *_NOTHING_ELSE),
                *(w1_scale, w2_scale, w1_scale_2, w2_scale_2, *_NO_SHARED_SCALES),
            ),
            out,
            pieces,
            x_scale=x_scale,
            turned=turned,
        )
        return self.own_rows(y) if self.scatters else y

    def run(
        self,
        caller: CallKind,
        order: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        tokens: torch.Tensor | None,
        own: tuple[torch.Tensor | None, ...],
        out: torch.Tensor | None,
        pieces: int,
        weigh: bool = False,
        holder: torch.nn.Module | None = None,
        x_scale: torch.Tensor | None = None,
        turned: bool = False,
    ) -> torch.Tensor:
        """Checks and makes a call for `caller`. `order`: what it seems to write, see
        `moeos.call.custom_op`; `own`: the tensors that do not belong to its tokens, as
        `caller.expected`; `weigh`: the gate weighs the caller's ids; `holder`: of the tensors,
        where it is a module; `turned`: as of `__call__`.
        """
        given = own
        if turned:
            own = call_checks.turned(own)
        if self.scatters:
            call_checks.check_scattered(tokens, out, pieces)
        cfg, device = self.cfg, self.device
        if type(pieces) is not int or pieces != 1:
            call_checks.check_pieces(pieces)
        rows: torch.Tensor | None = None
        at_once = custom_op.unwatched()
        if not at_once and custom_op.is_transformed():
            custom_op.refuse_onnx()
        if weigh:
            self.engine.check_weighs()
        if x_scale is not None:
            tensor_memory.refuse_proxy(x)
            call_checks.check_may_be_coded(cfg, topk_ids, weigh=weigh)
            rows = call_checks.rows_of(cfg, device, x, pieces, coded=True)
        elif at_once and not weigh:
            known = self._known.get(caller.name) or self._know(caller)
            is_rows = type(x) is torch.Tensor and x.dim() == 2
            rows = x if is_rows else call_checks.rows_of(cfg, device, x, pieces)
            most = pieces * cfg.max_tokens
            if known.are(most, rows, topk_ids, topk_weights, tokens, out, own):
                known_routing = topk_ids, topk_weights, tokens, None
                return self._at_once(caller, x, rows, known_routing, own, out, pieces)
        if rows is None or (rows is x and x_scale is None):
            rows = call_checks.rows_of(cfg, device, x, pieces)
        ids, weights = topk_ids, topk_weights
        if ids is not None or weights is not None or weigh or not caller.routes:
            ids, weights = call_checks.routing_of(
                cfg, device, x.shape[:-1], rows.shape[0], ids, weights, weigh=weigh
            )
        if x_scale is not None:
            x_scale = call_checks.scale_of(cfg, device, x.shape[:-1], rows.shape[0], x_scale)
        if tokens is not None:
            call_checks.check_tokens(device, tokens)
        if out is not None:
            call_checks.check_out(cfg, device, x, out)
        call_checks.check_weights(device, caller.expected, own, caller.absent, holder)
        trains = call_checks.wants_gradient(x, x_scale, topk_weights, out, *own)
        if trains:
            why = autograd.no_backward(self.engine)
            of_tokens = rows, ids, weights, tokens
            call_checks.check_backward(caller.name, cfg, why, out, of_tokens, given)
        call_checks.check_tangents(caller.name, x, x_scale, topk_weights, out, *own)
        routing = (ids, weights, tokens, x_scale)
        if trains:
            if at_once and holder is None:
                wrappers.warn_of_averaged(self, given)
            named = dict(zip(call_checks.OWN, given, strict=True))
            main = main_grads.found(named, {"x": rows, "topk_weights": weights})
            plain = call_checks.PLAIN.issuperset(map(type, (rows, *routing, *own)))
            if plain and (at_once or (main and not is_compiling())):
                call_checks.check_memory(rows, routing, own)
                asked = autograd.How(
                    *(self.engine, cfg, ids, tokens, caller.any_ids, pieces, tuple(main), turned)
                )
                trained = autograd.call(asked, rows, weights, given)
            else:
                trained = backward_operators.call(
                    *(order, self.key, rows, (ids, weights, tokens), own),
                    slots=cfg.slots,
                    pairs=self.slicing.routed_pairs(cfg),
                    saved_rows=self.engine.saved_rows.of_call(rows.shape[0], pieces),
                    saved_columns=self.engine.cfg.w1_rows,
                    any_ids=caller.any_ids,
                    pieces=pieces,
                    main=[main.get(name) for name in call_checks.OWN] if main else [],
                    turned=turned,
                )
            return trained if x.dim() == 2 else trained.view(x.shape)
        if at_once and call_checks.PLAIN.issuperset(map(type, (x, *routing, out, *own))):
            call_checks.check_memory(rows, routing, own)
            # Calls without weights for their ids are not learned, nor are copies, which may be of
            # anything.
            copied = ids is not topk_ids or weights is not topk_weights
            if not (weigh or copied or x_scale is not None) and (rows is x or x.dim() > 2):
                known.learn(rows, topk_ids, topk_weights, tokens, out, own)
            return self._at_once(caller, x, rows, routing, own, out, pieces)
        custom_op.refuse_functionalize()
        tensors = (order, self.key, rows, ids, weights, tokens, *own)
        pairs = self.slicing.routed_pairs(cfg)
        how = {"pairs": pairs, "any_ids": caller.any_ids, "pieces": pieces}
        if out is None and x_scale is None:
            y: torch.Tensor = custom_op.forward(*tensors, **how)
            return y if x.dim() == 2 else y.view(x.shape)
        if out is None:
            out = torch.empty_like(x, dtype=cfg.dtype)
        room = out if x.dim() == 2 else out.view(rows.shape)
        custom_op.forward_into(*tensors, x_scale, room, **how)
        return out

    def _know(self, caller: CallKind) -> KnownTensors:
        """The `KnownTensors` of a caller that has made no call."""
        known = KnownTensors([expected is not None for expected in caller.expected])
        return self._known.setdefault(caller.name, known)

    def _at_once(
        self,
        caller: CallKind,
        x: torch.Tensor,
        rows: torch.Tensor,
        routing: tuple[torch.Tensor | None, ...],
        own: tuple[torch.Tensor | None, ...],
        out: torch.Tensor | None,
        pieces: int,
    ) -> torch.Tensor:
        """The call without an operator between, of tensors that have been checked."""
        engine, any_ids = self.engine, caller.any_ids
        if out is None:
            try:
                if routing[-1] is None:
                    y = torch.empty_like(rows)
                else:  # x is codes
                    y = torch.empty_like(rows, dtype=self.cfg.dtype)
            except RuntimeError:
                engine.require_open()  # else PyTorch raises its own error for a child without CUDA
                raise
            custom_op.call(engine, rows, y, routing, own, any_ids, pieces)
            return y if x.dim() == 2 else y.view_as(x)
        call_checks.check_apart(out, x, routing, own)
        room = out if x.dim() == 2 else out.view_as(rows)
        custom_op.call(engine, rows, room, routing, own, any_ids, pieces)
        if not out.is_inference():  # as the operator's schema does
            torch.autograd.graph.increment_version(out)
        return out

    def own_rows(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's rows of an output, where they are scattered."""
        rows = y.view(-1, self.cfg.hidden)
        mine = self.slicing.tokens_of(self.world.rank, rows.shape[0])
        return rows[mine.start : mine.stop]

    def check_inputs(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        gate: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """As `MoELayer.check_inputs`; `gate`: the router's tensors by their names."""
        equal = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, **(gate or {})}
        world, what = self.world, "the comparison of inputs"
        interruption.told(world.aside, what, lambda: world.gate.run(lambda: self._compare(equal)))

    def _compare(self, equal: Mapping[str, torch.Tensor | None]) -> None:
        """Collective, in the world's gate. Raises as `check_inputs` does."""
        mine = digest({name: None if one is None else one.cpu() for name, one in equal.items()})
        x = equal["x"]
        tokens = 0 if x is None else x.numel() // self.cfg.hidden
        told = self.world.aside.allgather((mine, tokens), "the comparison of the ranks' inputs")
        each = self.slicing.slices if self.slicing.sums else len(told)
        for first in range(0, len(told), each):
            unlike = [rank for rank in range(first, first + each) if told[rank] != told[first]]
            if unlike:
                raise ValueError(
                    f"x, the routing or the gate of {name_ranks(unlike)} differ from those of rank "
                    f"{first}; with parallel='tensor' they must be equal on the {each} ranks with "
                    f"slices of the same experts: {told[unlike[0]][1]} and {told[first][1]} tokens"
                )

    def stats(self) -> dict[str, Any]:
        """As `MoELayer.stats`: of the last call of these experts, by any caller."""
        stats = self._settled().stats()
        return {
            **vars(stats),
            "bytes_to_peers": stats.bytes_to_peers,
            "busy_share": stats.busy_share,
        }

    def trace(self) -> RankTrace:
        """As `MoELayer.trace`."""
        return self._settled().trace()

    def check(self) -> None:
        """As `MoELayer.check`."""
        self._settled().check()

    def place(self, placement: Placement) -> None:
        """Experts lie elsewhere in the calls from now on: the caller that passes their weights has
        moved them. All ranks do it, with one placement, in the workspace's gate.
        """
        self._settled().place(placement)
        self.placement = placement

    def settle(self) -> None:
        """Waits until the GPU has finished what was launched."""
        self._settled()

    def reset(self) -> None:
        """As `MoELayer.reset`."""
        self.workspace.reset()

    def __copy__(self) -> Experts:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        """Returns these experts: a copy would have nothing of its own."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it is memory and threads of this process; make it with "
            "moeos.Experts(cfg, world) where the pickle is read"
        )

    def __repr__(self) -> str:
        return f"Experts({self.cfg}, rank={self.world.rank}, world={self.world.size})"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MADE_WITH and name in self.__dict__:
            raise AttributeError(
                f"{name} of Experts cannot be set, as their memory and their kernel are made for "
                f"the one that they have: make other Experts with the other {name}"
            )
        super().__setattr__(name, value)

    def _make(
        self,
        cfg: MoEConfig,
        world: World,
        workspace: Workspace | None,
        placement: Placement,
        slicing: Slicing,
        placed: bool,
    ) -> None:
        kind = agreement.kind_of("Experts", placement, placed=placed)
        agreement.agree(cfg, world, (world.rank, world.size), kind, placement, slicing)
        check_supported(slicing.cut(cfg), world)
        self._start(cfg, world, workspace, placement, slicing, placed)
        wrappers.watch(self)

    @property
    def own_matrices(self) -> list[call_checks.Expected]:
        """The shapes and dtypes that a rank's w1, w2 and w3 must have."""
        w1, _, w2, _, w3 = self._caller.expected[: len(call_checks.WEIGHTS)]
        return [one for one in (w1, w2, w3) if one is not None]

    def _start(
        self,
        cfg: MoEConfig,
        world: World,
        workspace: Workspace | None,
        placement: Placement,
        slicing: Slicing,
        placed: bool,
    ) -> None:
        """Collective, in the world's gate."""
        slicing = slicing.by(world.rates)
        self.cfg = cfg
        self.placement = placement
        self.slicing = slicing
        self.scatters = not slicing.everywhere
        self.world = world
        own = world.sliced_workspace if slicing.sums else world.workspace
        self.workspace = own if workspace is None else workspace
        cut = slicing.cut(cfg)
        with torch.device("cpu"):  # not the caller's default device, such as meta
            self.device = torch.empty(0, device=device_of(world)).device
            # The ranks of one slice have its experts in order.
            table = placement if placed or not (placement.in_order or slicing.sums) else None
            self.can_be_placed = placed
            self.engine: Engine = engine_class(world)(
                cut, world, self.workspace.shared, table, slicing
            )
            self.key = custom_op.register(self.engine, self.device)
        local = len(placement.experts_of(world.rank))
        weights = call_checks.expected_weights(cut, local)
        scales = call_checks.expected_scales(cut, local)
        self._order = custom_op.order_on(self.device)
        self._known: dict[str, KnownTensors] = {}
        self._caller = CallKind(
            "Experts",
            (*weights, *_NOTHING_ELSE, *scales, *_NO_SHARED_SCALES),
            absent="this config has one",
            routes=False,
            any_ids=True,
        )

    def _settled(self) -> Engine:
        """The engine, after the GPU has finished what was launched.

        The engine waits again where no other thread can launch. Here others may, and a signal's
        handler is in no call.
        """
        if self.device.type == "cuda":
            from moeos.engines.cuda import wait as cuda_wait  # spares the twin a GPU's modules

            self.engine.require_open()
            cuda_wait.synchronize(self.device)
        return self.engine


def placement_of(
    cfg: MoEConfig, world: World, placement: Placement | None, slicing: Slicing
) -> Placement:
    """Where experts, or their slices, lie.

    Raises `ValueError` for a placement of slices, and what `Slicing.cut` raises.
    """
    slicing.cut(cfg)
    if placement is not None:
        slicing.refuse_placement()
    return placement or slicing.placement(cfg.experts, world.size)


def device_of(world: World) -> torch.device:
    """The device of the tensors of the world's calls."""
    if world.backend == "twin":
        return torch.device("cpu")
    return world.device or torch.device("cuda")


def check_supported(cfg: MoEConfig, world: World) -> None:
    """Raises `ValueError`, which names the rank, for a layer that the world's machine does not
    support.
    """
    try:
        engine_class(world).check_supported(cfg)
    except ValueError as error:
        raise ValueError(f"rank {world.rank}: {error}") from error
