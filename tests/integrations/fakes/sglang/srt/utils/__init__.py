# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: a machine without a GPU."""

from sglang.srt.utils.common import is_cuda

__all__ = ["is_cuda"]
