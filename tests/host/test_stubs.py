# SPDX-License-Identifier: Apache-2.0
"""host/moeos/*.pyi must say what the compiled modules have, or mypy checks against others."""

from __future__ import annotations

import pytest

from tests.host import stubs


@pytest.mark.parametrize("module", stubs.STUBS)
def test_a_stub_is_what_the_compiled_module_has(module: str) -> None:
    made, stub = stubs.text_of(module), stubs.STUBS[module]
    assert made == stub.read_text(), "`python -m tests.host.stubs` writes it"
