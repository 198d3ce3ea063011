# SPDX-License-Identifier: Apache-2.0
"""The tables of a paper on tensor parallelism on one node, and what a layer in slices gains."""
