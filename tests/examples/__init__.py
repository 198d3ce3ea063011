# SPDX-License-Identifier: Apache-2.0
"""Tests of the programs that use moeos."""
