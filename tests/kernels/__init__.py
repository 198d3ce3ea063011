"""Tests of kernels/ that need no GPU."""
