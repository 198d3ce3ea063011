# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: stages around a modular kernel."""
