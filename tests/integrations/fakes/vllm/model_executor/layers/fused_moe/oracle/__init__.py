# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: which kernel computes."""
