# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel of one layer: sizes and rules become macros, NVRTC makes machine code.

Needs no GPU. The only file that knows the macros of kernels/sm90/block/config.cuh and what the
compiler's log says. Must not depend on launches, nor on why a `KernelShape` has its sizes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from moeos.compile import kernel_cache, machine_code
from moeos.compile.kernel_shape import KernelShape, Transport

KERNEL = "moeos_forward"
"""The kernel's name in the machine code."""

BACKWARD, WEIGHT_GRADIENTS = "moeos_backward", "moeos_weight_gradients"
"""The kernel of a call of gradients, and that of the launch after it."""

CODE_ADDRESS = "moeos_code_address"
"""The name of the small kernel that finds where the instructions of `KERNEL` lie."""

INSTALL = "pip install 'moeos[cuda]'"

_ENTRY = "kernels/sm90/forward.cu"
_BACKWARD_ENTRY = "kernels/sm90/backward.cu"
_NVSHMEM_VERSION = "non_abi/nvshmem_version.h"
_NVSHMEM = (3, 4)  # whose internal functions the transport calls: other versions have others
_FORMAT = 2  # the version of cache entries
_LOG_LINES = 20  # lines of a failed compilation's log that an error shows

# Compiled after the kernel, so that the compiler says what the host must know of it.
_FACTS = {
    "shared_bytes": "sizeof(moeos::sm90::Shared)",
    "os_bytes": "sizeof(moeos::sm90::OsShared)",
    "threads": "moeos::sm90::kThreads",
    "argument_bytes": "sizeof(moeos::sm90::RankArguments)",
}
_SAVING_FACTS = {**_FACTS, "argument_bytes": "sizeof(moeos::sm90::SavingArguments)"}
_BACKWARD_FACTS = {**_FACTS, "argument_bytes": "sizeof(moeos::sm90::GradientArguments)"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The compiler's report on a kernel.

    Attributes:
        arch: what it is compiled for.
        compiler: NVRTC's version.
        seconds: that compiling took.
        registers: of a thread at the launch, before warps trade them.
        stack_bytes: the stack frame of the deepest function.
        spill_store_bytes, spill_load_bytes: registers kept in memory, added over all functions.
        shared_bytes: shared memory of a block, given at the launch.
        os_bytes: the part of it that the OS block uses.
        threads: of a block.
        argument_bytes: of one rank's arguments.
        wgmma_instructions: tensor-core instructions in the kernel's PTX, `wgmma.mma_async`.
        code_bytes: of the machine code's file.
    """

    arch: str
    compiler: str
    seconds: float
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    os_bytes: int
    threads: int
    argument_bytes: int
    wgmma_instructions: int
    code_bytes: int

    @property
    def keeps_registers(self) -> bool:
        """Whether nothing that belongs in registers lies in memory."""
        return self.stack_bytes == self.spill_store_bytes == self.spill_load_bytes == 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Machine code (a cubin) and what the compiler says of it; `cached` if it was on disk."""

    cubin: bytes
    report: CompileReport
    cached: bool


def compile_kernel(shape: KernelShape, cache: Path | None = None) -> Kernel:
    """The kernel for a shape, from the disk where it has been compiled before.

    Ranks that ask at the same time compile it once; see `kernel_cache.get_or_make`.

    Args:
        cache: folder; None for `moeos.system.files.cache_folder()`.

    Raises:
        ValueError: a bound (see `KernelShape.sizes`) or the state in shared memory does not fit.
        RuntimeError: NVRTC, a source file or, for its transport, NVSHMEM is missing, or the
            compiler refuses: with the first lines that it says.
    """
    nvrtc = _load_nvrtc()
    root = include_root()
    entry = _BACKWARD_ENTRY if shape.gradients else _ENTRY
    facts = _BACKWARD_FACTS if shape.gradients else _SAVING_FACTS if shape.saves else _FACTS
    unit = _unit(entry, facts)
    options = [f"--gpu-architecture={shape.arch}", *_OPTIONS]
    options += [f"-DMOEOS_{name}={value}" for name, value in macros(shape).items()]
    compiler = _version(nvrtc)
    sources = _sources(root, entry)
    folders = [root]
    if shape.transport == "nvshmem":
        folders += nvshmem_folders()
        sources[_NVSHMEM_VERSION] = (folders[1] / _NVSHMEM_VERSION).read_bytes()
    key = _key(sources, unit, options, compiler)

    def make() -> bytes:
        began = time.perf_counter()
        includes = [f"--include-path={folder}" for folder in folders]
        cubin, ptx, log = _compile(nvrtc, unit, options + includes, kernel_name(shape))
        report = CompileReport(
            arch=shape.arch,
            compiler=compiler,
            seconds=time.perf_counter() - began,
            code_bytes=len(cubin),
            wgmma_instructions=ptx.count("wgmma.mma_async"),
            **_resources(log),
            **_facts(ptx, shape),
        )
        return json.dumps(dataclasses.asdict(report)).encode() + b"\n" + cubin

    kept, found = kernel_cache.get_or_make(key, make, cache)
    header, _, cubin = kept.partition(b"\n")
    return Kernel(cubin, CompileReport(**json.loads(header)), found)


@functools.cache
def compile_file(name: str, arch: str, *sizes: tuple[str, int]) -> bytes:
    """The machine code (a cubin) of a file below `include_root()`, for a GPU such as "sm_90".

    Compiled once in a process. `sizes`: its macros, by their names without the prefix MOEOS_.

    Raises `RuntimeError` as `compile_kernel` does.
    """
    options = [f"--gpu-architecture={arch}", *_OPTIONS, f"--include-path={include_root()}"]
    options += [f"-DMOEOS_{size}={value}" for size, value in sizes]
    return _compile(_load_nvrtc(), f'#include "{name}"\n', options)[0]


_other_root: contextvars.ContextVar[Path | None] = contextvars.ContextVar("root", default=None)


@contextlib.contextmanager
def sources_in(root: Path) -> Iterator[None]:
    """For the length of a with block, kernels are compiled from another tree of sources.

    Its kernels' arguments and memory layout must be as here: the host uses them.
    """
    token = _other_root.set(root)
    try:
        yield
    finally:
        _other_root.reset(token)


def include_root() -> Path:
    """The folder that kernels/ and runtime/ lie in: of the installed package or the working tree,
    or the one that `sources_in` names.

    Raises `RuntimeError` if there is none.
    """
    other = _other_root.get()
    if other is not None:
        return other
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "include", package.parents[1])
    for root in candidates:
        if (root / _ENTRY).is_file():
            return root
    raise RuntimeError(
        f"the kernel's source, {_ENTRY}, is neither in {' nor in '.join(map(str, candidates))}; "
        "install moeos again"
    )


_OPTIONS = (
    "--std=c++20",
    "--no-source-include",  # or headers would be looked for where the program was started, first
    "--device-as-default-execution-space",
    "--extra-device-vectorization",
    "--ftz=true",  # fp32 below 1e-38 is zero: else each exponential takes three instructions more
    "--ptxas-options=-v",
)


def kernel_name(shape: KernelShape) -> str:
    """The name, in the machine code, of the kernel whose launches are calls."""
    return BACKWARD if shape.gradients else KERNEL


def macros(shape: KernelShape) -> dict[str, str]:
    """The macros that kernels/sm90/block/config.cuh reads, without the prefix MOEOS_."""
    cfg, sizes = shape.cfg, shape.sizes
    ratio = cfg.capacity_ratio
    values: dict[str, int | str] = {
        "FIXED_GEOMETRY": '"kernels/sm90/block/geometry.cuh"',
        "GEOMETRY": sizes.geometry_text,
        "SHAPE": sizes.shape_text,
        "CAPACITY_NUMERATOR": 0 if ratio is None else ratio.numerator,
        "CAPACITY_DENOMINATOR": 0 if ratio is None else ratio.denominator,
        "ROUTER_BIAS": int(cfg.router_bias),
        "EXPERT_SCALE": int(cfg.expert_scale),
        "WEIGHS_GIVEN": int(cfg.routing == "ids"),
        "VIRTUAL_RANKS": shape.virtual_ranks,
        "FLOAT16": int(cfg.dtype == torch.float16),
        "BIAS": int(cfg.bias),
        "SELECTION_BIAS": int(cfg.selection_bias),
        "TRANSPORT": get_args(Transport).index(shape.transport),
        "FAULTS": int(shape.faults),
        "GRADIENTS": int(shape.gradients),
        "SAVES": int(shape.saves),
    }
    return {name: str(value) for name, value in values.items()}


def _unit(entry: str, facts: Mapping[str, str]) -> str:
    lines = (
        f'extern "C" __constant__ const unsigned int moeos_{name} = {value};\n'
        for name, value in facts.items()
    )
    return f'#include "{entry}"\n' + "".join(lines)


def _facts(ptx: str, shape: KernelShape) -> dict[str, int]:
    """The numbers of `_unit` in the PTX; `ValueError` if the OS block's state does not fit."""
    found = dict(re.findall(r"\bmoeos_(\w+) = (\d+);", ptx))
    facts = {name: int(found[name]) for name in _FACTS}
    facts["os_bytes"] += shape.sizes.os_memory_bytes
    if facts["os_bytes"] > facts["shared_bytes"]:
        raise ValueError(
            f"the scheduler's state takes {facts['os_bytes']} bytes of shared memory, and "
            f"{facts['shared_bytes']} fit: lower max_tokens"
        )
    return facts


def _sources(root: Path, entry: str) -> dict[str, bytes]:
    """A kernel's source and all that it includes: path below `root` -> content."""
    found: dict[str, bytes] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            try:
                found[name] = (root / name).read_bytes()
            except OSError as error:
                message = f"{root / name}: {error.strerror}; install moeos again"
                raise RuntimeError(message) from error
            included = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', found[name], re.MULTILINE)
            waiting += [path.decode() for path in included]
    return found


def _key(sources: dict[str, bytes], unit: str, options: list[str], compiler: str) -> str:
    """SHA-256 of everything that the machine code depends on, in hexadecimal digits."""
    digest = hashlib.sha256()
    texts = {name: hashlib.sha256(text).hexdigest() for name, text in sources.items()}
    digest.update(json.dumps([_FORMAT, compiler, unit, options, sorted(texts.items())]).encode())
    return digest.hexdigest()


def nvshmem_folders() -> list[Path]:
    """Where the headers of NVSHMEM lie, and of CUDA's runtime and C++ library, which they use.

    Raises `RuntimeError` if they are not installed, or are of another NVSHMEM than the kernel uses.
    """
    try:
        find = importlib.import_module("cuda.pathfinder").find_nvidia_header_directory
    except ImportError as error:
        raise RuntimeError(
            f"cuda-pathfinder, which finds NVSHMEM, is missing: {INSTALL}"
        ) from error
    found = {name: find(name) for name in ("nvshmem", "cudart", "cccl")}
    missing = [name for name, folder in found.items() if folder is None]
    if missing:
        raise RuntimeError(
            f"the headers of {' and '.join(missing)} are missing, with which kernels are compiled "
            f"that reach remote peers: {INSTALL}"
        )
    folders = [Path(folder) for folder in found.values()]
    text = (folders[0] / _NVSHMEM_VERSION).read_text()
    version = tuple(map(int, re.findall(r"NVSHMEM_VENDOR_(?:MAJOR|MINOR)_VERSION (\d+)", text)))
    if version != _NVSHMEM:
        raise RuntimeError(
            f"{folders[0]} has the headers of NVSHMEM {'.'.join(map(str, version))}; kernels that "
            f"reach remote peers are made with {'.'.join(map(str, _NVSHMEM))}: {INSTALL}"
        )
    # One header names its neighbour without a folder, where NVRTC does not look.
    return [*folders, folders[0] / "non_abi" / "device" / "pt-to-pt"]


def _load_nvrtc() -> Any:
    """The bindings of NVRTC; its library can be loaded."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"NVRTC, which compiles kernels, is missing ({error}): {INSTALL}"
        ) from error
    return nvrtc


def _version(nvrtc: Any) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"NVRTC {major}.{minor}"


def _compile(
    nvrtc: Any, unit: str, options: list[str], kernel: str = KERNEL
) -> tuple[bytes, str, str]:
    """The cubin, the PTX and the log of a translation unit. `kernel`: its address is asked for."""
    _, program = _ask(nvrtc.nvrtcCreateProgram(unit.encode(), b"moeos.cu", 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )[0]
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(status) != 0:
            first = "\n".join(text.splitlines()[:_LOG_LINES])
            raise RuntimeError(f"{_version(nvrtc)} refuses the kernel ({status.name}):\n{first}")
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = machine_code.with_address(cubin, CODE_ADDRESS, kernel)
        return cubin, ptx.decode(errors="replace"), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ask(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """`answer`; raises `RuntimeError` if its status says that the call failed."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"NVRTC failed: {answer[0].name}")
    return answer


def _read(size: Any, get: Any, program: Any) -> bytes:
    text = bytearray(_ask(size(program))[1])
    _ask(get(program, text))
    return bytes(text)


def _resources(log: str) -> dict[str, int]:
    """Registers, stack and spills from what `ptxas -v` says."""
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.findall(r"Used (\d+) registers", log)
    if not frames or not registers:
        raise RuntimeError(f"the compiler's log does not tell what the kernel uses:\n{log[:2000]}")
    return {
        "registers": max(map(int, registers)),
        "stack_bytes": max(int(stack) for stack, _, _ in frames),
        "spill_store_bytes": sum(int(stores) for _, stores, _ in frames),
        "spill_load_bytes": sum(int(loads) for _, _, loads in frames),
    }
