# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several files of the GPU's tests share."""

import pytest
import torch

from tests.gpu.cases import CASES, blocks, compile_cases


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """References on the CPU are many small products: a pool of threads takes ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernels() -> None:
    """The kernels of all cases are compiled, side by side, before the first test."""
    compile_cases(CASES.values(), blocks())
