# SPDX-License-Identifier: Apache-2.0
"""What is read off compiled kernels, and what is changed in them; two small ones."""

from __future__ import annotations

import pytest

from moeos.compile import jit, machine_code
from moeos.compile.jit import compile_file, sources_in
from tests.host.compile.relocations import relocations

SOURCE = """
extern "C" __global__ void moeos_forward(float* x) { x[threadIdx.x] *= 3.0F; }
extern "C" __global__ void moeos_code_address(unsigned long long* address) {
  asm volatile("mov.u64 %0, moeos_code_address;" : "=l"(*address));
}
"""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A kernel, and one that asks for its own handle, as `jit` makes them."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    folder = tmp_path_factory.mktemp("sources")
    (folder / "small.cu").write_text(SOURCE)
    with sources_in(folder):
        return compile_file("small.cu", "sm_90a")


def test_the_word_that_was_a_handle_is_the_address_of_the_other_kernel(cubin: bytes) -> None:
    assert relocations(cubin) == [(".rela.nv.constant4", machine_code.ADDRESS, jit.KERNEL)]


def test_a_kernel_has_the_size_of_its_instructions(cubin: bytes) -> None:
    sizes = [machine_code.instruction_bytes(cubin, k) for k in (jit.KERNEL, jit.CODE_ADDRESS)]
    assert all(0 < size < 1024 and size % 128 == 0 for size in sizes)


def test_a_kernel_that_is_not_there_has_no_size(cubin: bytes) -> None:
    with pytest.raises(ValueError, match="moeos_backward"):
        machine_code.instruction_bytes(cubin, "moeos_backward")


def test_code_that_asks_for_no_handle_is_left_as_it_is(cubin: bytes) -> None:
    assert machine_code.with_address(cubin, jit.CODE_ADDRESS, jit.KERNEL) == cubin
