# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchtitan: names and calls of torchtitan 0.3.0, nothing else.

It has what moeos.integrations.torchtitan touches and what calls it, written anew.
`tests/integrations/test_mirrors.py` compares names and arguments with torchtitan's own source.
"""

__version__ = "0.3.0"
