# SPDX-License-Identifier: Apache-2.0
"""The engine of GPUs: memory, arguments, launches, and the records of a call."""
