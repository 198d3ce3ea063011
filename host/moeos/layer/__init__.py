# SPDX-License-Identifier: Apache-2.0
"""The layer as a PyTorch module, and what goes with its parameters."""
