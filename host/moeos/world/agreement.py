# SPDX-License-Identifier: Apache-2.0
"""What all ranks must agree on before they make a layer together. Collective.

Must not depend on weights or engines: it knows configs and the control plane.
"""

from __future__ import annotations

from typing import NamedTuple

from moeos.config.config import MoEConfig, digest_differences
from moeos.partition import sharding
from moeos.partition.placement import Placement, differences
from moeos.partition.slicing import WHOLE, Slicing
from moeos.system.errors import ConfigMismatch, PeerTimeout, said
from moeos.world.control import ControlPlane
from moeos.world.world import World

_MAX_TOLD = 2000  # characters of a rank's error that the others get


def require_config(cfg: object) -> None:
    """Raises `TypeError` unless it is a config."""
    if not isinstance(cfg, MoEConfig):
        raise TypeError(f"cfg is a {type(cfg).__name__}; it must be a MoEConfig")


def require_placement(placement: object) -> None:
    """Raises `TypeError` unless it is a placement, or None."""
    if placement is not None and not isinstance(placement, Placement):
        raise TypeError(
            f"placement is a {type(placement).__name__}; it must be a moeos.Placement, or None "
            "for experts in order"
        )


def kind_of(what: str, placement: Placement, *, placed: bool) -> str:
    """What a rank makes, as `agree` compares it. `placed`: see
    `moeos.layer.experts.Experts.agreed`."""
    return f"{what} with a placement" if placed and placement.in_order else what


def agree(
    cfg: MoEConfig,
    world: World,
    place: tuple[int, int],
    what: str,
    placement: Placement,
    slicing: Slicing = WHOLE,
) -> bool:
    """Checks that all ranks make the same: `what`, such as "Experts", of the same config, with
    experts in the same places, and cut alike.

    `place`: the rank, and the number of ranks, whose weights this rank holds. Raises alike on all
    ranks: `ConfigMismatch`, or `ValueError` where a rank holds another's weights or the placement
    does not fit.

    Returns:
        whether torch.distributed knows some rank by another number, so that a DTensor would mix
        them up.
    """
    kind = f"{what} with {slicing.name}" if slicing.cuts else what
    mine = (cfg.digest(), place, sharding.process_group_place(), kind, placement.digest())
    told = world.control.allgather(mine, "the comparison of the ranks' configs")
    _require_one_kind([kind for _, _, _, kind, _ in told])
    _require_equal([digest for digest, _, _, _, _ in told])
    places = [(rank, world.size) for rank in range(world.size)]
    for right, (_, held, _, _, _) in zip(places, told, strict=True):
        if held != right:
            raise ValueError(
                f"rank {right[0]} of {right[1]} has the layer that rank {held[0]} of {held[1]} "
                "pickled; each rank must bind its own, in a world of the same size. Otherwise make "
                "a layer with MoELayer(cfg, world) and load a state dict"
            )
    _require_same_places([table for _, _, _, _, table in told])
    if not slicing.cuts:  # slices lie where all ranks alike have put them
        placement.require_fits(cfg, world.size)
    return any(
        known not in (None, right) for right, (_, _, known, _, _) in zip(places, told, strict=True)
    )


def require_on_all(
    world: World, error: Exception | None, what: str, control: ControlPlane | None = None
) -> None:
    """Raises on all ranks where one has an error: its own, or `ValueError` with that of the lowest
    rank that has one. Collective; no rank waits for `what` later that another does not have.

    `control`: the world's own, or its `aside`.
    """
    told = None if error is None else said(error)[:_MAX_TOLD]
    try:
        every = (control or world.control).allgather(told, what)
    except PeerTimeout as timeout:
        raise error or timeout from None
    if error is not None:
        raise error
    for rank, text in enumerate(every):
        if text is not None:
            raise ValueError(f"rank {rank} cannot take {what}: {text}")


class Admission(NamedTuple):
    """A rank's view of the workspace that a new layer is to share.

    Attributes:
        number: of the workspace, in the order in which those of its world are made.
        closed: whether it is closed.
        grows: whether it must become larger here.
        captured: whether a graph may use its buffers here.
        remote: whether this rank reaches some peer by puts. All ranks have the words and queues for
            that, or none has.
    """

    number: int
    closed: bool
    grows: bool
    captured: bool
    remote: bool


def agree_workspace(world: World, mine: Admission) -> Admission:
    """The views of all ranks, combined. Collective.

    Raises alike on all ranks: `ConfigMismatch` where they mean different workspaces, and
    `RuntimeError` for a closed one.
    """
    told = world.control.allgather(mine, "the comparison of the ranks' workspaces")
    for rank, other in enumerate(told):
        if other.number != told[0].number:
            raise ConfigMismatch(
                f"all ranks must make a layer in the same workspace: rank 0 makes it in workspace "
                f"{told[0].number} of its world, and rank {rank} in workspace {other.number}. Make "
                "workspaces in the same order on all ranks"
            )
        if other.remote != told[0].remote:
            some, none = (rank, 0) if other.remote else (0, rank)
            raise ConfigMismatch(
                f"all ranks must have remote peers, or none: rank {some} has some, and rank {none} "
                "writes the memory of all. Pass moeos.init the same ranks_per_node on all ranks"
            )
        if other.closed:
            raise closed(f"workspace {other.number} is closed on rank {rank}")
    return Admission(
        mine.number,
        closed=False,
        grows=any(other.grows for other in told),
        captured=any(other.captured for other in told),
        remote=mine.remote,
    )


def closed(what: str) -> RuntimeError:
    """The error for a workspace that is closed; `what` says which."""
    return RuntimeError(
        f"{what}: make the layer in another one, "
        "MoELayer(cfg, world, workspace=moeos.Workspace(world))"
    )


def _require_one_kind(kinds: list[str]) -> None:
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigMismatch(
                f"all ranks must make the same at the same time: rank 0 makes {kinds[0]} and rank "
                f"{rank} makes {kind}"
            )


def _require_same_places(digests: list[str]) -> None:
    """Raises `ConfigMismatch`, alike on all ranks, unless all have the same placement."""
    for rank, digest in enumerate(digests):
        unlike = differences(digests[0], digest)
        if unlike:
            raise ConfigMismatch(
                "all ranks must make the layer with the same placement. By those of rank 0 and of "
                f"rank {rank}: {unlike}"
            )


def _require_equal(digests: list[str]) -> None:
    """Raises `ConfigMismatch`, with the same sentence on every rank, unless all digests are
    equal.
    """
    for rank, digest in enumerate(digests):
        listed = "; ".join(
            f"{name} is {first!r} on rank 0 and {other!r} on rank {rank}"
            for name, (first, other) in digest_differences(digests[0], digest).items()
        )
        if listed:
            raise ConfigMismatch(f"all ranks must make the layer with the same config: {listed}")
