# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: runners."""

from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core

__all__ = ["MoeRunner", "register_moe_runner_core"]
