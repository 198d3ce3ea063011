# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: a machine without a GPU."""

from __future__ import annotations


class Platform:
    device_name = "cpu"

    def is_cpu(self) -> bool:
        return True

    def is_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        return False


current_platform = Platform()
