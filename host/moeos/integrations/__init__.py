# SPDX-License-Identifier: Apache-2.0
"""Adapters by which other programs run their Mixture-of-Experts layers on moeos.

Each module is for one library, which is no dependency of moeos: importing the module without it
raises, and says what is missing. This package imports none of them. docs/integrations.md has the
versions, how each is switched on, and what it refuses.

Must not depend on `training` or on the command line.
"""
