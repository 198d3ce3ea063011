# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels/ that need no GPU."""
