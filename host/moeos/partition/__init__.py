# SPDX-License-Identifier: Apache-2.0
"""Which rank holds what: whole experts, slices of them, tokens; and what either costs.

Must not depend on processes or engines.
"""
