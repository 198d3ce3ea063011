# SPDX-License-Identifier: Apache-2.0
"""Tests of moeos.bench.studies.tensor."""
