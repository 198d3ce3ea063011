# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and studies: what is measured, on what, and how results become tables.

`gpu` measures layers on GPUs, `twin` measures the twin, and each module of `studies` answers one
question. `report` makes tables and plots of what they write. They use the package's public
interface as a user does, and `moeos.cli.shared` as the command line does. They run from a checkout:
nothing of this folder is installed, and nothing in the package imports it.
"""
