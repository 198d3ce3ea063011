# SPDX-License-Identifier: Apache-2.0
"""moeos: an expert-parallel Mixture-of-Experts layer in one persistent kernel.

Importing this imports next to nothing, so that the command `moeos` listens to Ctrl-C before PyTorch
comes in (`moeos.cli.start`). The first of the names below that is used brings all of them: no call
of a layer may import anything, as peers wait meanwhile.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import moeos.system.interpreter  # noqa: F401 - refuses some before PyTorch crashes in them

if TYPE_CHECKING:
    from typing import Any

    from moeos import checkpoints, training
    from moeos.call.selection import topk
    from moeos.config import reference
    from moeos.config.config import MoEConfig
    from moeos.integrations import metrics as metrics
    from moeos.layer.experts import Experts
    from moeos.layer.layer import MoELayer
    from moeos.layer.quantization import quantize
    from moeos.partition.placement import Placement
    from moeos.system.errors import ConfigMismatch, NumericalError, PeerTimeout
    from moeos.world import faults, virtual
    from moeos.world.bootstrap import init
    from moeos.world.world import TwinOptions, Workspace, World

    __version__: str

__all__ = [
    "ConfigMismatch",
    "Experts",
    "MoEConfig",
    "MoELayer",
    "NumericalError",
    "PeerTimeout",
    "Placement",
    "TwinOptions",
    "Workspace",
    "World",
    "__version__",
    "checkpoints",
    "faults",
    "init",
    "quantize",
    "reference",
    "topk",
    "training",
    "virtual",
]

_MODULES = {
    "checkpoints": "moeos.checkpoints",
    "faults": "moeos.world.faults",
    "metrics": "moeos.integrations.metrics",
    "reference": "moeos.config.reference",
    "training": "moeos.training",
    "virtual": "moeos.world.virtual",
}
_NAMES = {
    "ConfigMismatch": "moeos.system.errors",
    "Experts": "moeos.layer.experts",
    "MoEConfig": "moeos.config.config",
    "MoELayer": "moeos.layer.layer",
    "NumericalError": "moeos.system.errors",
    "PeerTimeout": "moeos.system.errors",
    "Placement": "moeos.partition.placement",
    "TwinOptions": "moeos.world.world",
    "Workspace": "moeos.world.world",
    "World": "moeos.world.world",
    "init": "moeos.world.bootstrap",
    "quantize": "moeos.layer.quantization",
    "topk": "moeos.call.selection",
}

if not TYPE_CHECKING:  # or a name that is misspelt would have a type

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("moeos")
        if name not in _MODULES and name not in _NAMES:
            raise AttributeError(f"module 'moeos' has no attribute {name!r}")
        if name in (
            "checkpoints",
            "training",
        ):  # rooms, which other rooms import while they are imported
            return importlib.import_module(_MODULES[name])
        found = {one: importlib.import_module(module) for one, module in _MODULES.items()}
        for one, module in _NAMES.items():
            found[one] = getattr(importlib.import_module(module), one)
        globals().update(found)
        return found[name]

    def __dir__() -> list[str]:
        return list(__all__)
