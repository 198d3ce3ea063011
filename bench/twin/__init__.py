# SPDX-License-Identifier: Apache-2.0
"""`launch/bench twin`: the twin beside PyTorch on the same cores, and what a task costs."""
