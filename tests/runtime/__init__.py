# SPDX-License-Identifier: Apache-2.0
"""Tests of runtime/: one file for each property of the device OS."""
