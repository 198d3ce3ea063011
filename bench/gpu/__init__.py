# SPDX-License-Identifier: Apache-2.0
"""What studies measure with on GPUs, and the guard, which compares two trees."""
