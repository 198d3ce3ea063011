# SPDX-License-Identifier: Apache-2.0
"""The command `moeos`: run a layer, size one, look into a call, or look at this machine.

Commands use the package's public interface. `app` holds all of them. What benchmarks need as well
is in `moeos.commands`, and `fuzz` reports as benchmarks do.
"""
