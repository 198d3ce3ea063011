# SPDX-License-Identifier: Apache-2.0
"""What goes along when a layer's experts move, and what keeps them from moving.

In addition to the weights these are gradients, optimizer states, other layers with these weights,
and what state dicts hold. This file must not depend on engines, or on how tensors get to other
ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from moeos.call import call_checks, main_grads
from moeos.layer import optimizers, wrappers
from moeos.layer.experts import Experts
from moeos.partition.placement import Placement
from moeos.system import tensor_memory
from moeos.system.errors import ConfigMismatch, PeerTimeout, in_job, said
from moeos.world.world import MARGIN, Workspace, World

if TYPE_CHECKING:
    from moeos.layer.layer import MoELayer

_AT_LEAST = 1.0  # seconds that the last exchange waits, however long a rank's experts took
_NOTHING = "No expert has moved"
_MAX_TOLD = 2000  # characters of a rank's error that the others get


class Given:
    """The tensors in a layer's memory that its state dicts have, as long as they are referenced.

    State dicts name them by expert. So before other experts take their place, they get memory of
    their own.
    """

    def __init__(self) -> None:
        self._references: list[TensorWeakRef] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds some, and forgets those that are no longer referenced."""
        kept = [one for one in self._references if one() is not None]
        self._references = kept + [TensorWeakRef(tensor) for tensor in tensors]

    def within(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The remembered tensors that share memory with `tensors`."""
        alive = [tensor for one in self._references if (tensor := one()) is not None]
        return [one for one in alive if any(_overlap(one, other) for other in tensors)]


class SharingLayers(NamedTuple):
    """A layer, and the other layers that share its weights.

    Attributes:
        layer: the one whose experts are to move.
        fellows: others of the same weights, by their numbers.
        unknown: such layers where this rank has no experts and so cannot distinguish them from
            layers with other weights.
        own: the numbers of further layers of this world that could move: they have other weights.
        error: why they cannot move together; None where they can.
    """

    layer: MoELayer
    fellows: dict[int, MoELayer]
    unknown: dict[int, MoELayer]
    own: tuple[int, ...]
    error: ValueError | None

    @classmethod
    def of(cls, layer: MoELayer) -> SharingLayers:
        """Describes what a layer shares now on this rank."""
        fellows: dict[int, MoELayer] = {}
        unknown: dict[int, MoELayer] = {}
        own: list[int] = []
        none_here = len(layer._own()) == 0
        error: ValueError | None = None
        for other in wrappers.layers():
            experts = other.experts
            if other is layer or (experts is not None and experts is layer.experts):
                continue  # a copy, whose experts are those of the layer
            pairs = [
                (name, its)
                for name, mine in _named(layer)
                for its, tensor in _named(other)
                if _overlap(mine, tensor)
            ]
            if pairs:
                why = _why_apart(layer, other)
                if why:
                    name, its = pairs[0]
                    error = error or ValueError(
                        f"{name} of {_told(layer)} lies in the memory of {its} of {_told(other)}, "
                        f"which {why}: it would take experts for others. Give it tensors of its "
                        "own, such as those of copy.deepcopy"
                    )
                elif experts is not None:
                    fellows[experts.engine.number] = other
            elif experts is not None and experts.can_be_placed and other.world is layer.world:
                if none_here and other.placement == layer.placement:
                    unknown[experts.engine.number] = other
                else:
                    own.append(experts.engine.number)
        return cls(layer, fellows, unknown, tuple(own), error)

    @property
    def workspaces(self) -> list[Workspace]:
        """The workspaces of all its layers, through whose gates experts move."""
        every = (self.layer, *self.fellows.values(), *self.unknown.values())
        return [layer.experts.workspace for layer in every if layer.experts is not None]

    def held(self, passed: Sequence[Optimizer]) -> dict[str, Tensor]:
        """All tensors [X, ...] of this rank that move, by names that all ranks have.

        Raises what a call raises for weights that no longer fit the layer, `TypeError` and
        `ValueError` for a `main_grad` or a state that does not fit, and `error`.
        """
        if self.error is not None:
            raise self.error
        layer = self.layer
        expected = layer._expected()
        held = {}
        for name in wrappers.EXPERTS:
            own = layer._tensor_of(name)
            if name in expected:
                call_checks.check_weight(
                    layer._device, expected[name], own, "the layer was made with one"
                )
            if own is not None:
                held[name] = own.detach()
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                what = f"the gradient of {name}"
                held[what] = _writable(what, parameter.grad, parameter)
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is not None:
                main_grads.check(f"main_grad of {name}", main_grad, parameter)
                held[f"main_grad of {name}"] = main_grad
            for number, optimizer in enumerate(passed):
                what = f"{name} in optimizers[{number}]"
                kept = optimizers.state_of(optimizer, parameter, what, self.layer.world.rank)
                for key, tensor in kept.items():
                    held[key] = _writable(key, tensor, parameter)
        return held

    def given(self, held: dict[str, Tensor]) -> list[Tensor]:
        """The tensors of state dicts in the memory of `held`."""
        tensors = list(held.values())
        return [
            one
            for layer in (self.layer, *self.fellows.values())
            for one in layer._given.within(tensors)
        ]

    def agreed(self, held: dict[str, Tensor]) -> list[Experts]:
        """Returns the experts of all its layers. Collective.

        Raises `ConfigMismatch`, alike on all ranks, unless they move the same tensors and layers.
        """
        world = self.layer.world
        signature = {name: (str(one.dtype), list(one.shape[1:])) for name, one in held.items()}
        some = len(self.layer._own()) > 0
        mine = (signature if some else None, sorted(self.fellows), self.own)
        told = world.control.allgather(mine, "what moves with the experts")
        _require_same_tensors([signature for signature, _, _ in told])
        _require_same_fellows(world, [(set(shared), set(own)) for _, shared, own in told])
        numbers = {number for _, shared, _ in told for number in shared}
        others = [
            one for number, one in {**self.fellows, **self.unknown}.items() if number in numbers
        ]
        return [one.experts for one in (self.layer, *others) if one.experts is not None]

    def moved(self, old: Placement, passed: Sequence[Optimizer]) -> None:
        """Tells optimizers that were not passed that all experts lie elsewhere now."""
        for name, parameter in self._parameters():
            optimizers.left_behind(self.layer, name, parameter, old, passed)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all layers' experts, each once, by names that all ranks have."""
        seen = set()
        for number, layer in [(None, self.layer), *sorted(self.fellows.items())]:
            for name in wrappers.EXPERTS:
                parameter = layer._tensor_of(name)
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name if number is None else f"{name} of layer {number}", parameter


def require_on_all(
    world: World,
    error: Exception | None,
    interrupted: BaseException | None,
    *,
    since: float | None = None,
) -> None:
    """Raises on all ranks where one has an error or is interrupted: then no expert has moved.
    Collective.

    `interrupted`: what a signal's handler has raised here. `since`: when experts began to be sent,
    of `time.monotonic()`; after this exchange ranks change what they have. A rank that got no
    experts comes here at the deadline from then on, and all wait `MARGIN` longer for it. A rank
    that cannot know whether the others have changed theirs aborts the world.

    Raises this rank's own error; else `PeerTimeout` for a rank that was late, is gone, or was
    interrupted, and `ValueError` with the text of any other error.
    """
    what = "the experts of its new placement"
    told: tuple[str, str] | None = None
    if interrupted is not None:
        told = "interrupted", type(interrupted).__name__
    elif error is not None:
        told = "late" if isinstance(error, PeerTimeout) else "failed", said(error)[:_MAX_TOLD]
    try:
        beyond = 0.0
        if since is not None:
            left = round(MARGIN - (time.monotonic() - since), 1)
            beyond = max(left, _AT_LEAST - world.deadline)
        every = world.control.allgather(told, what, beyond=beyond)
    except PeerTimeout as timeout:
        if since is None:
            raise error or timeout from None
        world.abort(said(timeout))
        raise PeerTimeout(
            f"{timeout}. Load a checkpoint then: rank {world.rank} has its experts as before, and "
            "others may have moved theirs"
        ) from error
    if interrupted is not None:
        raise interrupted
    job = () if world.group is None else world.group.ranks
    for rank, one in enumerate(every):
        if one is not None and one[0] == "interrupted":
            raise PeerTimeout(
                f"rank {rank} was interrupted by a signal in MoELayer.replace ({one[1]}), and with "
                f"it rank {world.rank}: no expert has moved. All ranks may call reset() and go on"
                f"{in_job([rank, world.rank], job)}"
            )
    if error is not None:
        raise error
    for rank, one in enumerate(every):
        if one is not None:
            kind = PeerTimeout if one[0] == "late" else ValueError
            raise kind(f"rank {rank} cannot take {what}: {one[1]}")


@contextlib.contextmanager
def nothing_moves() -> Iterator[None]:
    """Wraps what precedes the last exchange: a rank that is missing there keeps all others from
    moving their experts.
    """
    try:
        yield
    except PeerTimeout as error:
        text = str(error)
        if _NOTHING.lower() not in text.lower():
            text = f"{text}. {_NOTHING}"
        raise PeerTimeout(text) from error.__cause__


def require_optimizers(given: object) -> Sequence[Optimizer]:
    """The value. Raises `TypeError` unless it is a sequence of optimizers."""
    if isinstance(given, Optimizer):
        raise TypeError("optimizers is an optimizer; it must be a sequence: pass [optimizer]")
    if isinstance(given, Sequence) and all(isinstance(one, Optimizer) for one in given):
        return given
    kinds = f" of {type(given[0]).__name__}" if isinstance(given, Sequence) and given else ""
    raise TypeError(
        f"optimizers is a {type(given).__name__}{kinds}; it must be a sequence of "
        "torch.optim.Optimizer"
    )


def _named(layer: MoELayer) -> list[tuple[str, Tensor]]:
    """The parameters of a layer's experts, by the names that calls have for them."""
    every = [(name, layer._tensor_of(name)) for name in wrappers.EXPERTS]
    return [(name, tensor) for name, tensor in every if tensor is not None]


def _writable(name: str, tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor's memory. Raises `TypeError` or `ValueError` unless it can be sent as that of the
    parameter, and each element be written alone.
    """
    tensor_memory.require_dense(name, tensor)
    if tensor.device != parameter.device:
        raise ValueError(
            f"{name} is on {tensor.device}, and its parameter on {parameter.device}: experts move "
            "where both are on one device"
        )
    tensor_memory.require_memory(name, tensor)
    if tensor.numel() > 0 and tensor_memory.extent(tensor) < tensor.nbytes:
        raise ValueError(
            f"{name} has strides {tensor.stride()}, so that elements share memory, and cannot be "
            f"written: make it {name}.clone()"
        )
    return tensor.detach()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory."""
    if one.is_meta or other.is_meta or one.numel() == 0 or other.numel() == 0:
        return False
    ends = [tensor.data_ptr() + tensor_memory.extent(tensor) for tensor in (one, other)]
    return one.data_ptr() < ends[1] and other.data_ptr() < ends[0]


def _why_apart(layer: MoELayer, other: MoELayer) -> str:
    """Why a layer cannot move with one whose memory it has; empty where it can."""
    if other.experts is None:
        return "has no world"
    if other.world is not layer.world:
        return f"is of {other.world}"
    if other.experts.workspace.shared.closed:
        return "is of a closed workspace"
    if not other.experts.can_be_placed:
        return "was made without a placement"
    if other.placement != layer.placement:
        return f"has the placement {other.placement.digest()}"
    for (name, mine), (its_name, its) in zip(_named(layer), _named(other), strict=False):
        if (mine.data_ptr(), mine.shape, mine.dtype) != (its.data_ptr(), its.shape, its.dtype):
            return f"has a {its_name} elsewhere" if name == its_name else "has another config"
    return "" if len(_named(layer)) == len(_named(other)) else "has another config"


def _told(layer: MoELayer) -> str:
    """The name of a layer in an error."""
    if layer.experts is None:
        return "a layer from a pickle"
    return _numbered(layer.world, layer.experts.engine.number)


def _numbered(world: World, number: int) -> str:
    name = world.layer_names.get(number)
    return f"layer {number}" if name is None else f"layer {number}, {name!r}"


def _require_same_tensors(signatures: list[dict[str, tuple[str, list[int]]] | None]) -> None:
    """`signatures`: by rank; None of one without experts."""
    told = [(rank, one) for rank, one in enumerate(signatures) if one is not None]
    first_rank, first = told[0]
    for rank, other in told[1:]:
        for name in [*first, *other]:
            if name not in first or name not in other:
                there, missing = (first_rank, rank) if name in first else (rank, first_rank)
                raise ConfigMismatch(
                    f"rank {there} has {name}, and rank {missing} has none: all ranks with experts "
                    "must have it when experts move, or none. Make a backward or a step on all of "
                    "them, or clear it on all (zero_grad, optimizer.state.clear)"
                )
            if first[name] != other[name]:
                kinds = [
                    f"{dtype} {[*each]} an expert" for dtype, each in (first[name], other[name])
                ]
                raise ConfigMismatch(
                    f"{name} is {kinds[0]} on rank {first_rank} and {kinds[1]} on rank {rank}: it "
                    "must be the same on all ranks when experts move"
                )


def _require_same_fellows(world: World, told: list[tuple[set[int], set[int]]]) -> None:
    """`told` has, by rank, which layers have these weights, and which have others."""
    for rank, (shared, _) in enumerate(told):
        for other_rank, (_, own) in enumerate(told):
            both = shared & own
            if both:
                raise ConfigMismatch(
                    f"{_numbered(world, min(both))} has the weights of this layer on rank {rank}, "
                    f"and others on rank {other_rank}: let layers share weights on all ranks, or "
                    "on none, before experts move"
                )
