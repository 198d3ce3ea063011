# SPDX-License-Identifier: Apache-2.0
"""A loaded kernel's instructions lie where it is said that they do.

What is asked of L2 is not waited for, so an address that is wrong would only make calls slower.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.cases import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

# In a process of its own: to read where nothing lies ends all work of the process on the GPU.
PROGRAM = r"""
import io
import cupy, numpy, torch
from elftools.elf.elffile import ELFFile
from moeos.engines.cuda import driver as cuda_driver; from moeos.compile import jit, machine_code
from moeos.engines.cuda.code import code_address
from tests.gpu.cases import CASES, blocks, shape_of

COPY = '''
extern "C" __global__ void copy(unsigned char* out, unsigned long long from, unsigned bytes) {
  for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) {
    out[i] = *reinterpret_cast<const volatile unsigned char*>(from + i);
  }
}
'''
torch.cuda.init()
torch.cuda.current_stream().synchronize()
driver = cuda_driver.load()
cubin = jit.compile_kernel(shape_of(CASES["swiglu-1-rank"], blocks())).cubin
library = cuda_driver.ask(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
address = code_address(library, jit.KERNEL)
assert address != 0
size = machine_code.instruction_bytes(cubin, jit.KERNEL)
found = cupy.zeros(size, dtype=cupy.uint8)
copy = cupy.RawKernel(COPY, "copy")
copy((1,), (256,), (found, cupy.uint64(address), cupy.uint32(size)))
file = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{jit.KERNEL}").data()
loaded, compiled = (
    numpy.frombuffer(text, dtype="V16") for text in (found.get().tobytes(), file)
)
# The driver puts branches to code of its own in place of some: fences of system scope.
same = int((loaded == compiled).sum())
print(same, "of", len(compiled), "instructions are the kernel's")
assert len(loaded) == len(compiled) and same > 0.99 * len(compiled)
"""


def test_the_address_of_a_loaded_kernel_holds_its_instructions() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "instructions are the kernel's" in ended.stdout
