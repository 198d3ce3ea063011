# SPDX-License-Identifier: Apache-2.0
"""The runtime headers must compile for the GPU, or the twin and the GPU would drift apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeos.compile import jit
from tests.nightly import all_but, spread

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")

ROOT = Path(__file__).parents[2]
NVSHMEM = Path("runtime/platform/cuda/nvshmem_transport.hpp")
HEADERS = sorted(
    p.relative_to(ROOT) for p in (ROOT / "runtime").rglob("*.hpp") if "twin" not in p.parts
)
OPTIONS = [
    b"--gpu-architecture=compute_90a",  # PTX: kernels' machine code is looked at in other tests
    b"--std=c++20",
    b"--device-as-default-execution-space",
    b"--include-path=" + str(ROOT).encode(),
    b"--diag-error=2809",  # a value that must be used is not
]


def nvshmem_options() -> list[bytes]:
    """Where NVSHMEM's headers are; skips the test where they are not installed."""
    try:
        return [b"--include-path=" + str(folder).encode() for folder in jit.nvshmem_folders()]
    except RuntimeError as error:
        pytest.skip(str(error))


WHOLE_OS = """
#include "runtime/actors/warp_processor.hpp"
#include "runtime/actors/os.hpp"
#include "runtime/platform/cuda/platform.hpp"
#include "runtime/platform/cuda/mapped_transport.hpp"

namespace moeos {

using Gpu = cuda::Machine<cuda::MappedTransport, 4>;
static_assert(Platform<Gpu>);

// Does no arithmetic: what matters here is that every template of the OS is instantiated.
struct NoArithmetic {
  u32 route(u32) { return kNone; }
  void copy_row(u32, u8*) {}
  void replicate_row(const u8*, u8*) {}
  void product(const Task&, u32) {}
  void combine(u32) {}
};

extern "C" __global__ void device_os(Rank<Gpu> rank, Call call) {
  const u32 warp = threadIdx.x / Gpu::kLanes;
  if (blockIdx.x + 1 < gridDim.x) {
    NoArithmetic kernels;
    run_processor(rank, call, kernels, blockIdx.x);
    return;
  }
  if (warp == 0) {
    begin_call(rank, call);
  }
  __syncthreads();
  run_os_warp(rank, call, warp);
}

}  // namespace moeos
"""


def compile_for_gpu(source: str, *more: bytes) -> bytes:
    """The PTX of a translation unit; fails the test with the compiler's log."""
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"unit.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [*OPTIONS, *more]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode(errors="replace")[:8000])
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx


@pytest.mark.parametrize("header", spread(8, HEADERS), ids=str)
def test_header_compiles_on_its_own_for_hopper(header: Path) -> None:
    more = nvshmem_options() if header == NVSHMEM else []
    compile_for_gpu(f'#include "{header}"\n', *more)


@pytest.mark.nightly  # without checks test_configs.py compiles it in every run
def test_whole_device_os_compiles_for_hopper_with_checks() -> None:
    """With remote peers, which is all of it. Without checks it is compiled in every kernel
    (tests/kernels, tests/host/compile/test_jit.py)."""
    assert b"device_os" in compile_for_gpu(WHOLE_OS, b"-DMOEOS_DEBUG_CHECKS")


def test_a_broken_header_would_be_noticed() -> None:
    with pytest.raises(pytest.fail.Exception, match="no_such_member"):
        compile_for_gpu(WHOLE_OS.replace("begin_call(rank, call)", "rank.no_such_member()"))


@pytest.mark.parametrize("look", all_but(["poll"], ["poll", "load_relaxed", "load_acquire"]))
def test_a_look_whose_value_nobody_uses_does_not_compile(look: str) -> None:
    """Machine code is rid of such a load, whatever the source says, and so of what it acquires."""
    called = "run_os_warp(rank, call, warp);"
    assert called in WHOLE_OS
    discarded = f"{called} Gpu::{look}<Scope::device>(rank.memory.epoch);"
    with pytest.raises(pytest.fail.Exception, match="nodiscard"):
        compile_for_gpu(WHOLE_OS.replace(called, discarded))
