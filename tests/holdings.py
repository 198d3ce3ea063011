# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what a layer holds, for tests of worlds. Holds no test."""

from __future__ import annotations

from collections.abc import Callable

from moeos import World
from moeos.system.call_gate import CallGate


class Held:
    """`Holdings` of a world that do what the test says, and take part in its end."""

    def __init__(
        self,
        world: World,
        *,
        on_interrupt: Callable[[str], object] = lambda reason: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.gate = CallGate(world.rank)
        self.may_end = True
        self.ended = 0
        self._on_interrupt = on_interrupt
        self._on_end = on_end
        world.hold(None, self)

    def interrupt(self, reason: str) -> None:
        self._on_interrupt(reason)

    def end(self, *, world_ends: bool = False) -> bool:
        if not (self.may_end or world_ends):
            return False
        self.ended += 1
        self._on_end()
        return True

    def memory(self) -> dict[str, int]:
        return {}
