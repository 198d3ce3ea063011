# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang: names and calls of SGLang 0.5.23, nothing else.

It has what moeos.integrations.sglang touches and what calls it, written anew.
`tests/integrations/test_mirrors.py` compares names and arguments with SGLang's own source.
"""

__version__ = "0.5.23"
