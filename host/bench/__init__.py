"""Benchmarks: what `launch/bench` measures, and how its results become tables.

They use the package's public interface as a user does; nothing outside this folder may import it.
"""
