# SPDX-License-Identifier: Apache-2.0
"""Studies: each answers one question, such as what a late rank costs (the frame: bench.study)."""
