# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: a machine without a GPU."""


def is_cuda() -> bool:
    return False
