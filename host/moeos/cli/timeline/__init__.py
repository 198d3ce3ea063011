# SPDX-License-Identifier: Apache-2.0
"""What can be read out of the ranks' traces of one call: causes, sums, files and pictures.

`moeos.world.tracing` says what a trace is, `CallTrace` joins those of all ranks, and everything
else here reads it. Nothing here knows layers, worlds or how a trace was taken.
"""
