# SPDX-License-Identifier: Apache-2.0
"""moeos: an expert-parallel Mixture-of-Experts layer in one persistent kernel."""

from importlib.metadata import version

import moeos.interpreter  # noqa: F401 - refuses some before PyTorch crashes in them
from moeos import checkpoints, faults, reference, training, virtual
from moeos.bootstrap import init
from moeos.config import MoEConfig
from moeos.errors import ConfigMismatch, NumericalError, PeerTimeout
from moeos.experts import Experts
from moeos.layer import MoELayer
from moeos.placement import Placement
from moeos.quantization import quantize
from moeos.selection import topk
from moeos.workspace import Workspace
from moeos.world import TwinOptions, World

__version__ = version("moeos")

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
