# SPDX-License-Identifier: Apache-2.0
"""Configs of Hugging Face's models: which families are known, and the layer of each."""
