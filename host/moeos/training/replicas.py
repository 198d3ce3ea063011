# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts under data parallelism: sums over replicas, averaged as all others are.

Wrappers of a model average gradients over ranks, and leave experts out. Experts' gradients are sums
over the ranks of one world, and no wrapper adds up those of other worlds with these experts. This
file knows which parameters are experts, and must not depend on how a layer computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moeos.layer import wrappers
from moeos.partition import sharding
from moeos.system.errors import ConfigMismatch, PeerTimeout, said
from moeos.system.held_signals import HeldSignals
from moeos.training.gradient_norms import distinct, gradient_of, ids_of_experts
from moeos.world import process_groups, rendezvous
from moeos.world.all_reduce import OfHosts
from moeos.world.control import ControlPlane, StoreControl
from moeos.world.process_groups import Membership
from moeos.world.rendezvous import Meeting
from moeos.world.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")

_WHAT = "the comparison of experts whose gradients are added up"
_SUMS = "the sums of experts' gradients"
_REMEDY = (
    "Nothing has been added up here: call moeos.training.reduce_expert_grads_ on all ranks of the "
    "group again, or end the program on all. A rank that was not in the call that failed may "
    "be told so by its next one; behind that all meet"
)
_MAX_TOLD = 2000  # characters of a rank's error that the others get


def reduce_expert_grads_(
    parameters: Tensor | Iterable[Tensor],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    world: World,
    average: bool = True,
    experts: Iterable[Tensor] = (),
) -> None:
    """Reduces gradients of experts, in place, as data parallelism reduces all others. Collective
    for the ranks of `group`, if there is one.

    Call it once a step, after the last backward and before gradients are clipped. Each process of
    `group` gets the same bits, in every run. No host waits for a device. Hosts compare first what
    they hold, by the group's store, and wait for each other until the world's deadline. On hosts
    gloo adds up, over connections of its own, and sums are kept apart from the gradients until all
    ranks have them: either all gradients of all ranks become sums, or none does. So what a signal's
    handler raises comes out where nothing has changed, or after the last sum.

    Args:
        parameters: of the model, the same on all ranks of `group`. Those that are no experts, or
            frozen, are left alone. An expert without a gradient counts as zeros, and gets one.
            Where it has a `main_grad`, that is its gradient.
        group: the processes that hold the same experts, such as `mesh["dp"].get_group()` where the
            world is of `mesh["ep"]`, or a DeviceMesh of one dimension, such as `mesh["dp"]`.
            Gradients are added up over it. None: each expert lies on one process.
        world: of the layers.
        average: whether to divide by the number of all ranks, those of the world times those of the
            group, as `DistributedDataParallel` and `fully_shard` do: for a loss that is the mean of
            a rank's own tokens. False: for trainers that add up gradients.
        experts: as of `get_total_norm`.

    Raises:
        ConfigMismatch: ranks of `group` hold other experts, or tensors of another shape or dtype;
            the same error on all of them, which names both, and no gradient has changed.
        TypeError: `group` is no group, or as `get_total_norm` says.
        ValueError: ranks of `group` are of the same world, which hold other experts; it is a mesh
            of several dimensions, or has not this process; or as `get_total_norm` says. Where only
            another rank has such an error, it is named.
        PeerTimeout: a rank of `group` did not make the call before the world's deadline, or gave it
            up; all may call it again. A rank that was not in that call at all may get this error
            from its next one, which then fails on all ranks; the call after that is right.
    """
    member = None if group is None else process_groups.membership(group)
    given = distinct(parameters)

    def find() -> list[Tensor]:
        ours = ids_of_experts(given, world, experts)
        if member is not None:
            _require_apart(member.group, world)
        found = [one for one in given if id(one) in ours and one.requires_grad]
        for parameter in found:
            _require_written(gradient_of(parameter))
        return found

    ranks = world.size if average else 1
    if member is None or member.size == 1:
        _scale(find(), ranks)
        return
    among = member
    ranks *= among.size if average else 1
    # The gate makes threads do all of it one after the other.
    world.gate.run(lambda: _together(among, world, find, ranks))


def _require_written(gradient: Tensor | None) -> None:
    """Raises `ValueError` for a gradient that sums cannot be written into, before any rank does."""
    if gradient is None:
        return
    shared = any(
        n > 1 and step == 0 for n, step in zip(gradient.shape, gradient.stride(), strict=True)
    )
    if shared or gradient.is_inference():
        what = "has elements that share memory" if shared else "is an inference tensor"
        raise ValueError(
            f"a gradient of shape {list(gradient.shape)} {what}, so sums cannot be written into "
            "it: set parameter.grad to a clone of it, outside of inference mode"
        )


def _scale(trained: list[Tensor], ranks: int) -> None:
    """Gives each a gradient, and divides it by `ranks`."""
    with torch.no_grad():
        for parameter in trained:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            if ranks > 1:
                gradient.div_(ranks)


def _together(
    member: Membership, world: World, find: Callable[[], list[Tensor]], ranks: int
) -> None:
    """Adds up gradients of what `find` returns over a group, and divides them by `ranks`: on all
    ranks of the group, or on none. Collective.

    On hosts sums are kept apart from the gradients until all ranks have said that they have them.
    From then on this rank looks for no signal. On GPUs sums are launched after that, in place.
    """
    group: _Group | None = None
    sums = list[Tensor | None]()
    well = False
    try:
        group = _group_of(member, world)
        control, by_hosts = group.control, group.by_hosts
        trained = _agreed(member, world, control, find)

        def look() -> None:
            control.look(_SUMS)

        with torch.no_grad():
            for parameter in trained:
                gradient = gradient_of(parameter)
                if parameter.is_cuda:
                    sums.append(None)  # made in place, when all have said so
                else:
                    mine = torch.zeros_like(parameter) if gradient is None else gradient
                    sums.append(by_hosts.sums(mine, look))
        with HeldSignals() as signals:
            if not all(control.allgather(signals.raised is None, _SUMS)):
                raise PeerTimeout(f"{group.what} were not taken: a rank was interrupted. {_REMEDY}")
            # A rank that comes after the others gave up gets their error instead of this barrier.
            control.barrier(_SUMS)
            _take(trained, sums, member.group, ranks)
            well = True
    except BaseException as error:
        if not well and group is not None:
            of_itself = said(error) if isinstance(error, PeerTimeout) else type(error).__name__
            group.leave(f"{of_itself} in reduce_expert_grads_")
        raise
    finally:
        if not well and group is not None:  # a later call begins anew, on all ranks
            world.beside.pop(_key(member), None)
            group.close()


def _take(
    trained: list[Tensor], sums: list[Tensor | None], group: ProcessGroup, ranks: int
) -> None:
    """Makes sums the gradients."""
    with torch.no_grad():
        for parameter, summed in zip(trained, sums, strict=True):
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            if parameter.is_cuda:
                summed = gradient.contiguous()
                dist.all_reduce(summed, group=group)
            assert summed is not None
            if summed is not gradient:
                gradient.copy_(summed)
    _scale(trained, ranks)


def _require_apart(group: ProcessGroup, world: World) -> None:
    """Raises `ValueError` if some ranks of the group are peers of this one's world."""
    ranks = dist.get_process_group_ranks(group)
    peers = sharding.ranks_of(world.group, (world.rank, world.size)) or ()
    others = [rank for rank in ranks if rank in peers and rank != dist.get_rank()]
    if others:
        raise ValueError(
            f"rank {world.rank} of {world}: group has ranks {ranks}, of which {others} are of the "
            "same world and hold other experts: pass the group of ranks that hold the same, such "
            'as mesh["dp"].get_group() beside a world of mesh["ep"], or None'
        )


def _agreed(
    member: Membership, world: World, control: ControlPlane, find: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """What `find` returns. Raises, on all ranks of the group, unless they hold the same experts and
    it raises on none.

    Collective. All ranks make the same exchanges, whatever each of them holds: what all sent in the
    first exchange decides which ones follow.
    """
    trained: list[Tensor] = []
    error: Exception | None = None

    def compare() -> list[tuple[str, str]]:
        nonlocal trained, error
        try:
            trained = find()
        except (TypeError, ValueError) as raised:
            error = raised
        held = _held(trained, world)
        hashes = [hashlib.sha256(one.encode()).digest()[:8] for one in held]
        mine = hashlib.sha256(b"".join(hashes)).digest()
        wrong = None if error is None else said(error)[:_MAX_TOLD]
        told = control.allgather((mine, wrong), _WHAT)
        if any(text is not None for _, text in told):
            return [("", text or "") for _, text in told]
        if all(its == mine for its, _ in told):
            # A rank that comes after the others gave up gets their error instead of this barrier.
            control.barrier(_WHAT)
            return []
        every = control.allgather(hashes, _WHAT)
        # The first that differs from another rank's; one that some ranks lack comes after all
        # others.
        least, most = min(map(len, every)), max(map(len, every))
        differ = [n for n in range(least) if len({its[n] for its in every}) > 1]
        at = differ[0] if differ else least
        text = held[at] if at < len(held) else f"only {len(held)} of {most} such parameters"
        return [(one, "") for one in control.allgather(text, _WHAT)]

    told = compare()
    if error is not None:
        raise error
    ranks = dist.get_process_group_ranks(member.group)
    for rank, (_, text) in zip(ranks, told, strict=False):
        if text:
            raise ValueError(
                f"rank {rank} of torch.distributed cannot add up gradients of experts: {text}"
            )
    for rank, (its, _) in zip(ranks, told, strict=False):
        if its != told[0][0]:
            raise ConfigMismatch(
                "ranks of group must hold the same experts where gradients are added up: rank "
                f"{ranks[0]} of torch.distributed has {told[0][0]}, and rank {rank} has {its}. "
                "Pass the group of ranks that hold the same, and let layer.replace move experts "
                "alike in all worlds"
            )
    return trained


def _held(trained: list[Tensor], world: World) -> list[str]:
    """What must be equal, for each parameter, on all ranks that have replicas of it."""
    holders = wrappers.experts_held()
    found = []
    for parameter in trained:
        gradient = gradient_of(parameter)
        dtype = parameter.dtype if gradient is None else gradient.dtype
        holder = holders.get(id(parameter))
        name, which = "a parameter", "by number"
        if holder is not None:
            placement = holder.layer.placement
            own = list(placement.ranks[world.rank])
            name = holder.name
            which = f"of experts {own} by the placement {placement.digest()}"
        found.append(f"{name} {list(parameter.shape)}, its gradient in {dtype}, {which}")
    return found


def _key(member: Membership) -> tuple[str, int]:
    """A group's key in `World.beside`: a new group may get the name of a destroyed one."""
    return member.group.group_name, id(member.group)


class _Round:
    """The number of what ranks of a group begin together: one after the last that any has left.

    Each rank writes to the group's store which round it left last, however its call ended. So ranks
    that have missed a call, or left one before the others came, meet again: in any call that no
    rank makes before all have ended the one before.
    """

    def __init__(self, member: Membership, deadline: float, meeting: Meeting) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._deadline = deadline
        self._rank = member.rank
        self._of_group = meeting.store
        self._where = meeting.where
        left = self._ask(lambda: [self._left_by(rank) for rank in range(member.size)])
        self._number = 1 + max(left)
        self.store = PrefixStore(f"moeos/rounds/{self._number}", meeting.store)

    def leave(self) -> None:
        """This rank begins nothing in this round any more."""

        def leave() -> None:
            last = max(self._number, self._left_by(self._rank))  # of another world over this group
            self._of_group.set(f"moeos/left/{self._rank}", str(last))

        self._ask(leave)

    def _left_by(self, rank: int) -> int:
        key = f"moeos/left/{rank}"
        return int(self._of_group.get(key)) if self._of_group.check([key]) else 0

    def _ask(self, question: Callable[[], Value]) -> Value:
        def ask() -> Value | RuntimeError:
            try:
                return question()
            except RuntimeError as error:
                return error

        ends = time.monotonic() + self._deadline
        try:
            found = rendezvous.within(self._deadline, ask)
        except futures.TimeoutError as error:
            if time.monotonic() < ends:  # a signal's handler has raised it
                raise
            raise self._failed(f"gave no answer for {self._deadline:g} s") from error
        if isinstance(found, RuntimeError):
            raise self._failed(f"is lost: {found}") from found
        return found

    def _failed(self, why: str) -> PeerTimeout:
        return PeerTimeout(f"rank {self._rank}: {self._where} {why}. {_REMEDY}")


class _Group:
    """What ranks of a process group have in addition to it: a control plane, and sums of hosts over
    connections that no other all-reduce uses.
    """

    def __init__(self, member: Membership, world: World) -> None:
        meeting = process_groups.meet(member, world.deadline, world.device)
        self.what = f"rank {member.rank} of {member.size}: {_SUMS}"
        self._round = _Round(member, world.deadline, meeting)
        try:
            self.control = StoreControl(
                *(member.rank, member.size, world.deadline, self._round.store),
                where=meeting.where,
                serves=meeting.serves,
                job=tuple(dist.get_process_group_ranks(member.group)),
                remedy=_REMEDY,
                begins=_WHAT,
            )
            sums, waits = (self.control.store(kind) for kind in ("sums", "waits"))
            place, those = member.rank, range(member.size)
            self.by_hosts = OfHosts(sums, waits, place, those, world.deadline, self.what, _REMEDY)
        except BaseException as error:
            self._leave_round()
            if hasattr(self, "control"):
                self.control.abort(said(error))
                self.control.close()
            raise

    def abort(self, reason: str) -> None:
        """Ends the waits of all its ranks."""
        self.control.abort(reason)

    def leave(self, reason: str) -> None:
        """Ends the waits of all its ranks, and lets this rank's next round meet the others' next
        one.
        """
        self._leave_round()
        self.control.abort(reason)

    def _leave_round(self) -> None:
        with contextlib.suppress(PeerTimeout):  # a store that is gone tells the peers as much
            self._round.leave()

    def close(self) -> None:
        """Gives all of it back."""
        self.by_hosts.end()
        self.control.close()


def _group_of(member: Membership, world: World) -> _Group:
    """The group's planes, made in its first call. Collective over the group."""
    found = world.beside.get(_key(member))
    if found is None:
        world.require_open()  # a close has taken it, and no rank would join a new one
        found = world.beside[_key(member)] = _Group(member, world)
    assert isinstance(found, _Group)
    return found
