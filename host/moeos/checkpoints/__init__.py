# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries: whose blocks can be read, from which files, into which layer.

Must not depend on the layer that will hold the weights.
"""

from moeos.checkpoints.block import load_block
from moeos.checkpoints.files import open_tensors

__all__ = ["load_block", "open_tensors"]
