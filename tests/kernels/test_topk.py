# SPDX-License-Identifier: Apache-2.0
"""The kernel of moeos.topk compiles wherever NVRTC is."""

from __future__ import annotations

import pytest

from moeos.compile import jit
from moeos.engines.cuda import topk as topk_kernel
from tests.nightly import in_turn

pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")


@pytest.mark.parametrize(
    ("arch", "type_", "kept"),
    in_turn(["sm_80", "sm_90", "sm_100"], range(len(topk_kernel.TYPES)), [1, 8, 32]),
)
def test_the_kernel_compiles_for_every_gpu_that_a_host_may_have(
    arch: str, type_: int, kept: int
) -> None:
    cubin = jit.compile_file("kernels/topk.cu", arch, ("TYPE", type_), ("KEPT", kept))
    assert b"moeos_topk" in cubin
