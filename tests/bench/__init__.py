# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmarks: what they measure, write and print; never how fast anything is."""
