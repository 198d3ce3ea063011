# SPDX-License-Identifier: Apache-2.0
"""The ranks: how they meet, what they exchange, and how they end.

Must not depend on engines or layers.
"""
