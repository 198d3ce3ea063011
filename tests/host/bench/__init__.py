"""Tests of the benchmarks: what they measure, write and print; never how fast anything is."""
