# SPDX-License-Identifier: Apache-2.0
"""Tables and plots, from what benchmarks and studies wrote. Nothing is measured here."""
