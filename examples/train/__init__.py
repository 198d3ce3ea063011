# SPDX-License-Identifier: Apache-2.0
"""A small language model whose layers are Mixtures of Experts, trained on bytes of text.

It trains with the layers of moeos and with ones of stock PyTorch, so that one can be compared with
the other step by step. It runs from a checkout: nothing of this folder is installed.
"""
