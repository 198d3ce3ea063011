# SPDX-License-Identifier: Apache-2.0
"""The command `moeos`: run a layer, size one, look into a call, or look at this machine.

Commands use the package's public interface. `app` holds all of them; benchmarks share what lies
below them here, such as `output`, and are in turn what `fuzz` reports with, so importing this
package alone imports none of either.
"""
