# SPDX-License-Identifier: Apache-2.0
"""A small language model whose layers are Mixtures of Experts, trained on bytes of text.

It trains with the layers of this package and with ones of stock PyTorch, so that one can be
compared with the other step by step. Nothing of the package but its command `train` imports this.
"""
