# SPDX-License-Identifier: Apache-2.0
"""The engine of GPUs: memory, arguments, launches, and what a call leaves behind."""
