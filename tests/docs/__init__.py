# SPDX-License-Identifier: Apache-2.0
"""Tests of the pages for users: what they show is what the package does."""
