# SPDX-License-Identifier: Apache-2.0
"""The tables of papers on training: `launch/evaluate training`."""
