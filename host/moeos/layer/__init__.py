# SPDX-License-Identifier: Apache-2.0
"""The layer as a PyTorch module, and what goes with its parameters.

Must not depend on adapters, trainers or the command line.
"""
