# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs: the sizes that they are compiled for, the compiler, and its cache.

Must not depend on launches or ranks.
"""
