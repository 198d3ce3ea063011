# SPDX-License-Identifier: Apache-2.0
"""Everything that checks moeos."""
