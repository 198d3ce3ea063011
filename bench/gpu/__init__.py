# SPDX-License-Identifier: Apache-2.0
"""`launch/bench gpu`: layers on GPUs beside stock PyTorch, and what else measures on GPUs needs."""
