# SPDX-License-Identifier: Apache-2.0
"""The command `moeos`: run a layer, size one, look into a call, or look at this machine.

Commands use the package's public interface. `app` holds all of them, and `start` is what the script
`moeos` starts. `shared` is what benchmarks and examples need as well, and `timeline` reads traces.

Must not depend on benchmarks or examples. No other room depends on this one.
"""
