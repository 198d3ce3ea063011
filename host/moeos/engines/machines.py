# SPDX-License-Identifier: Apache-2.0
"""Which engine runs the layers of a world. The only file that knows all engines.

It sets what makes the memory of a workspace in `moeos.world.world`, which must not depend on it.
"""

from __future__ import annotations

from moeos.engines.base import Engine
from moeos.engines.twin.engine import TwinEngine
from moeos.engines.twin.workspace import TwinWorkspace
from moeos.world.world import MEMORY, SharedMemory, World


def engine_class(world: World) -> type[Engine]:
    """The class of engine that runs a world's calls."""
    if world.backend == "twin":
        return TwinEngine
    from moeos.engines.cuda.engine import CudaEngine  # spares the twin a GPU's modules

    return CudaEngine


def _memory_on_gpus(world: World, number: int) -> SharedMemory:
    from moeos.engines.cuda.workspace import CudaWorkspace  # spares the twin a GPU's modules

    return CudaWorkspace(world, number)


MEMORY["twin"] = TwinWorkspace
MEMORY["cuda"] = _memory_on_gpus
