# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for torchtitan: configs."""

from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, derive, override

__all__ = ["Configurable", "OverrideConfig", "apply_overrides", "derive", "override"]
