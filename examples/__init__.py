# SPDX-License-Identifier: Apache-2.0
"""Programs that use moeos. They run from a checkout: nothing of this folder is installed."""
