# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several files of tests share."""

import math
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The tests' ranks are threads that share few cores; PyTorch's own would only contend."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def poisoned_output() -> Iterator[None]:
    """Fills every output of a layer with NaN before the call, and fails if no output was made
    so.
    """
    poisoned = 0

    def poison(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal poisoned
        poisoned += 1
        return torch.full_like(like, math.nan, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeos.layer.layer.torch.empty_like", poison)
        yield
    assert poisoned > 0, "the layer does not allocate its output with torch.empty_like any more"
