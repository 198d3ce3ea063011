# SPDX-License-Identifier: Apache-2.0
"""`launch/straggler`: what a late or slow rank costs a layer, with moeos and with an all-to-all."""
