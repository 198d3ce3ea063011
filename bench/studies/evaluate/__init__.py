# SPDX-License-Identifier: Apache-2.0
"""`launch/evaluate`: the thesis' evaluation, with moeos and with an all-to-all."""
