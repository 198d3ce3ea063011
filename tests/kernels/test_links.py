# SPDX-License-Identifier: Apache-2.0
"""The kernels that try links between GPUs, and read their clocks, compile wherever NVRTC is."""

from __future__ import annotations

import pytest

from moeos.compile import jit

pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_of_links_compile_for_every_gpu_that_a_host_may_have(arch: str) -> None:
    cubin = jit.compile_file("kernels/links.cu", arch)
    for name in ("send", "receive", "stream"):
        assert f"moeos_link_{name}".encode() in cubin


def test_the_kernel_that_tells_the_time_compiles_for_the_gpus_of_layers() -> None:
    assert b"moeos_clock" in jit.compile_file("kernels/clock.cu", "sm_90")


def test_a_file_that_does_not_exist_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"no-such\.cu"):
        jit.compile_file("kernels/no-such.cu", "sm_90")
