# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several files of the GPU's tests share."""

import pytest

from tests.gpu.cases import CASES, blocks, compile_cases


@pytest.fixture(scope="session")
def kernels() -> None:
    """The kernels of all cases are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())
