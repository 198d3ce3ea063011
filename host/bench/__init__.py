# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what `launch/bench` measures, and how its results become tables.

They use the package's public interface as a user does. Outside of this folder `moeos fuzz` alone
imports it, to report as they do.
"""
