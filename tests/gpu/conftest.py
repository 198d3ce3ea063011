"""Fixtures that several files of the GPU's tests share."""

import pytest
import torch

from tests.gpu.cases import compile_cases


@pytest.fixture(scope="session")
def kernels() -> None:
    """The kernels of all cases are compiled, side by side, before the first test."""
    compile_cases(torch.cuda.get_device_properties().multi_processor_count)
