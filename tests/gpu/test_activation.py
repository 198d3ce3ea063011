# SPDX-License-Identifier: Apache-2.0
"""The GPU's activations are as right as kernels/sm90/epilogue/activation.cuh says, at a million
values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from moeos.compile import jit
from moeos.engines.cuda import driver as cuda_driver
from tests.gpu.cases import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

VALUES = 1 << 20
MOST = 40.0
THREADS = 256

UNIT = """
#include "kernels/sm90/epilogue/activation.cuh"
constexpr moeos::Activation kOne{{moeos::Curve::{name}, false, {alpha}F, 0.0F, 0.0F, false}};
extern "C" __global__ void activations(const float2* x, float2* out) {{
  const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = moeos::sm90::curve_of<moeos::sm90::{type}, kOne>(x[i]);
}}
"""

EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swish": torch.nn.functional.silu,
    "swish 1.702": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
    "identity": lambda x: x,
}

FIT = 6e-6
"""Of GELU's polynomial, and of fp32."""
ROUGH, FINE = 1 / 4096, 1e-6
"""Of x: half of tanh's 2^-11; some roundings of fp32."""


def activations(type_name: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """What the device makes of x, float32 [VALUES], before its result is a `type_name`."""
    driver = cuda_driver.load()
    options = ["--gpu-architecture=sm_90a", *jit._OPTIONS]
    options.append(f"--include-path={jit.include_root()}")
    curve, _, alpha = name.partition(" ")
    unit = UNIT.format(type=type_name, name=curve, alpha=alpha or "1.0")
    cubin = jit._compile(jit._load_nvrtc(), unit, options)[0]
    library = cuda_driver.ask(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    try:
        kernel = cuda_driver.ask(driver.cuLibraryGetKernel(library, b"activations"))
        function = cuda_driver.ask(driver.cuKernelGetFunction(kernel))
        out = torch.full_like(x, torch.nan)
        stream = torch.cuda.current_stream().cuda_stream
        arguments = ((x.data_ptr(), out.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p))
        blocks = VALUES // 2 // THREADS
        cuda_driver.ask(
            driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
        )
        torch.cuda.synchronize()
    finally:
        cuda_driver.ask(driver.cuLibraryUnload(library))
    return out


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("type_name", "share"), [("Bfloat16", ROUGH), ("Float16", FINE)])
def test_an_activation_is_as_right_as_its_type_needs(
    type_name: str, share: float, name: str
) -> None:
    x = torch.linspace(-MOST, MOST, VALUES, device="cuda")
    exact = EXACT[name](x.double())
    allowed = FIT + share * torch.maximum(x.abs().double(), exact.abs())
    error = (activations(type_name, name, x).double() - exact).abs()
    worst = int((error - allowed).argmax())
    assert error[worst] <= allowed[worst], f"x = {x[worst]}: off by {error[worst]}"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("type_name", ["Bfloat16", "Float16"])
def test_a_nan_stays_one_and_spoils_no_other(type_name: str, name: str) -> None:
    x = torch.linspace(-MOST, MOST, VALUES, device="cuda")
    x[::3] = torch.nan
    assert torch.equal(activations(type_name, name, x).isnan(), x.isnan())
