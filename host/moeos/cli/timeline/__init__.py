# SPDX-License-Identifier: Apache-2.0
"""Reads causes, sums, files and pictures out of the ranks' traces of one call.

`moeos.world.tracing` says what a trace is, `CallTrace` joins those of all ranks, and everything
else here reads it. Must not depend on layers, worlds or how a trace was taken.
"""
