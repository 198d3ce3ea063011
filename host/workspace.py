# SPDX-License-Identifier: Apache-2.0
"""A workspace: all that calls of layers write, which the layers of a world share.

It knows which engine's memory it is, and nothing of what lies there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

from moeos import agreement, interruption
from moeos.engines.twin_workspace import TwinWorkspace
from moeos.held_signals import HeldSignals
from moeos.world import MARGIN, SharedMemory, World


class Workspace:
    """What calls write: the symmetric heap, queues, buffers between the GEMMs.

    Layers of a world, of any shapes, share its default one, `world.workspace`, unless they are made
    with another: `MoELayer(cfg, world, workspace=moeos.Workspace(world))`. Calls of its layers run
    one at a time, and all ranks must make them in the same order. Each buffer is as large as the
    largest layer needs; a layer that needs more makes it grow when it is made, never in a call. A
    graph that was captured before keeps the buffers that it was captured with. A failed call fails
    all layers of its workspace until `reset`.

    All ranks must make their workspaces in the same order.

    Attributes:
        world: the ranks' world.
        shared: the engine's memory.
    """

    def __init__(self, world: World) -> None:
        agreement.require_world(world)
        self.world = world
        self.shared: SharedMemory = _memory_of(world, world.number_workspace())
        world.note_workspace(self)  # as one that a reset finds, and so with its memory
        world.hold(self, self.shared)

    def reset(self) -> None:
        """Makes its layers usable after a failure. Collective; no rank may be in a call."""
        reset(self.world, [self])

    def close(self) -> None:
        """Gives the memory back; calls of its layers raise `RuntimeError` then. Collective.

        Memory that a captured graph may use stays until the world is closed.
        """
        if self.shared.gate.held_here:
            raise RuntimeError("a workspace cannot be closed within a call of one of its layers")
        interruption.told(
            self.world.control,
            "the end of a workspace",
            lambda: in_gates(self.world, [self], self._close),
        )
        self.world.release(self.shared)

    def _close(self) -> None:
        self.shared.settle()
        self.world.control.barrier("the end of a workspace")  # no rank is inside a call any more
        self.shared.close()

    def __copy__(self) -> Workspace:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Workspace:
        """This one: a copy of a layer writes where the layer does."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a workspace cannot be pickled: it is memory of this process")


def require_workspace(workspace: object, world: World) -> None:
    """Raises unless it is one of this world, or None: before anything is sent."""
    if workspace is None:
        return
    if not isinstance(workspace, Workspace):
        raise TypeError(
            f"workspace is a {type(workspace).__name__}; it must be a moeos.Workspace, or None for "
            "the world's own"
        )
    if workspace.world is not world:
        raise ValueError(
            f"the workspace is of another world, {workspace.world}, and the layer of {world}: pass "
            "moeos.Workspace(world), or None for the world's own"
        )


def reset(world: World, workspaces: list[Workspace]) -> None:
    """Resets workspaces of a world, the same ones on all ranks. Collective."""

    def settle_and_clear() -> None:
        for workspace in workspaces:
            workspace.shared.settle()
        # No rank is inside a call any more. One may be in a call that this rank has not made, as
        # when its own arguments were wrong, and leaves it at the deadline.
        world.control.barrier("reset", beyond=MARGIN)
        with HeldSignals():  # what is cleared in part would be taken for a call's
            for workspace in workspaces:
                workspace.shared.clear()
            world.renew_aside()
        world.control.barrier("the end of reset")  # all heaps are clean before anyone writes there

    interruption.told(world.control, "reset", lambda: in_gates(world, workspaces, settle_and_clear))


def in_gates(world: World, workspaces: list[Workspace], do: Callable[[], None]) -> None:
    """Does it in the gates of a world and of its workspaces, each of them once."""
    for gate in dict.fromkeys([*(each.shared.gate for each in workspaces), world.gate]):
        do = functools.partial(gate.run, do, within=gate is not world.gate)
    do()


def _memory_of(world: World, number: int) -> SharedMemory:
    if world.backend == "twin":
        return TwinWorkspace(world, number)
    from moeos.engines.cuda_workspace import CudaWorkspace  # needs packages of a GPU's machine

    return CudaWorkspace(world, number)
