# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and studies: what is measured, on what, and how results become tables.

`gpu` measures layers on GPUs, `twin` measures the twin, and each module of `studies` answers one
question. `report` makes tables and plots of what they write. They use the package's public
interface as a user does, and `moeos.commands` as the command line does, but nothing of that.
Outside of this folder `moeos fuzz` alone imports it, to report as they do.
"""
