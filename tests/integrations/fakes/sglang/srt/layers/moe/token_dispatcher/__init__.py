# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: dispatchers."""

from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
)

__all__ = ["StandardCombineInput", "StandardDispatchOutput", "StandardDispatcher"]
