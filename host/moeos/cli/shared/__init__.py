# SPDX-License-Identifier: Apache-2.0
"""What commands share: those of `moeos` and those that measure.

Their options and exit codes, their output, the machine that they name, and how they begin calls.
This imports neither the command line nor a benchmark.
"""
