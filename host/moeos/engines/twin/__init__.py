# SPDX-License-Identifier: Apache-2.0
"""The engine of the twin: a layer of the device OS on CPU threads."""
