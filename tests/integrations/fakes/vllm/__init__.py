# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM, where it cannot be installed: names and calls of vLLM 0.32.0, nothing else.

It has what moeos.integrations.vllm touches and what calls it, with the arguments, shapes and order
of that version, written anew. `tests/integrations/test_mirrors.py` compares names and arguments
with vLLM's own source.
"""

__version__ = "0.32.0"
