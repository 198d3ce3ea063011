"""Compiles the kernel of one layer: sizes and rules become macros, NVRTC makes machine code.

Needs no GPU. The only file that knows the macros of kernels/sm90/config.cuh and what the compiler's
log says. It knows nothing of launches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import re
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from moeos import _twin, kernel_cache
from moeos.config import Activation, MoEConfig, Scoring
from moeos.sizes import Tiles, layer_sizes

ARCHITECTURES = ("sm_90a",)
"""What kernels can be compiled for: Hopper, whose own instructions they use."""
DTYPES = (torch.bfloat16, torch.float16)
"""Storage types that the GPU computes with."""
MAX_EXPERTS = 256
"""Route computes all logits in the columns of one tile."""
MAX_TOP_K = 32
"""A lane of a warp looks up one pair."""
GROUP_MULTIPLE = 8
"""Each of a token's eight lanes holds as much of each expert group."""

Transport = Literal["none", "mapped", "nvshmem"]
"""How remote peers are reached: there are none; by stores into heaps that this GPU addresses (of
virtual ranks); by NVSHMEM."""

KERNEL = "moeos_forward"
"""The kernel's name in the machine code."""

INSTALL = "pip install 'moeos[cuda]'"

_TILE_ROWS = 128
_TILE_COLUMNS = 256
_NARROW_ROWS = 64
_FEW_TOKENS = 512  # a layer for at most so many in a call is one for few
_ROUTE_TOKENS, _ROUTE_TOKENS_OF_FEW = 64, 32  # of a block, and of one in a layer for few
_ROUTE_DEPTH = 64  # columns of x that a block's Route multiplies in one step, or twice as many
_MOST_SLICES, _LEAST_STEPS = 8, 4  # of a block's Route, and of each of them
_GROUPS = 2  # consumer warpgroups

_ENTRY = "kernels/sm90/forward.cu"
_NVSHMEM_VERSION = "non_abi/nvshmem_version.h"
_NVSHMEM = (3, 4)  # whose internal functions the transport calls: other versions have others
_FORMAT = 1  # of what is cached
_LOG_LINES = 20  # of a failed compilation that an error shows

# Compiled behind the kernel, so that what the host must know of it is said by the compiler.
_FACTS = {
    "shared_bytes": "sizeof(moeos::sm90::Shared)",
    "os_bytes": "sizeof(moeos::sm90::OsShared)",
    "threads": "moeos::sm90::kThreads",
    "argument_bytes": "sizeof(moeos::sm90::RankArguments)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShape:
    """What a kernel is compiled for.

    Attributes:
        cfg: the layer.
        world_size: P.
        processors: blocks of each rank that run tasks; all but one of its share of the grid.
        virtual_ranks: ranks in one launch: 1, or P when all of them share one GPU.
        transport: how those peers are reached whose memory is not written directly.
        trace_events: events that each actor notes of a call, at most; 0 compiles none of it in.
        faults: whether it does what a fault plan asks of it (runtime/faults.hpp); otherwise it has
            no code for that.
        arch: one of `ARCHITECTURES`.

    Raises:
        ValueError: the GPU does not have this layer yet; the message says what it has.
    """

    cfg: MoEConfig
    world_size: int
    processors: int
    virtual_ranks: int = 1
    transport: Transport = "none"
    trace_events: int = 0
    faults: bool = False
    arch: str = ARCHITECTURES[0]

    def __post_init__(self) -> None:
        check_supported(self.cfg)
        self.cfg.experts_per_rank(self.world_size)
        if self.arch not in ARCHITECTURES:
            allowed = ", ".join(ARCHITECTURES)
            raise ValueError(f"arch is {self.arch!r}; kernels can be compiled for {allowed}")
        if self.virtual_ranks not in (1, self.world_size):
            raise ValueError(
                f"virtual_ranks is {self.virtual_ranks}; allowed: 1, or all {self.world_size} ranks"
            )
        if self.transport not in get_args(Transport):
            allowed = ", ".join(map(repr, get_args(Transport)))
            raise ValueError(f"transport is {self.transport!r}; allowed: {allowed}")
        if self.processors < 1:
            raise ValueError(f"processors is {self.processors}; a rank needs at least 1")

    @property
    def couriers(self) -> int:
        """Couriers of each rank: every processor's block has one."""
        return self.processors

    @functools.cached_property
    def sizes(self) -> _twin.Sizes:
        """Buffers and bounds of one rank, as the runtime derives them.

        Raises `ValueError` when a bound does not fit the runtime's words.
        """
        tiles = Tiles(
            rows=_TILE_ROWS,
            route_tokens=_route_tokens(self.cfg),
            gemm0_columns=_gemm0_columns(self.cfg),
            gemm1_columns=_TILE_COLUMNS,
            narrow_rows=_NARROW_ROWS,
            # Rows of any number lie next to those of another source. They take more boxes to load,
            # for which there are too few lanes where weights have small ones.
            segment_align=1 if has_whole_parts(self.cfg) else _twin.SEGMENT_ALIGN,
            route_slices=_route_slices(self.cfg, self.processors),
        )
        return layer_sizes(
            self.cfg,
            self.world_size,
            self.processors,
            tiles,
            couriers=self.couriers,
            remote=self.transport != "none",
            trace_events=self.trace_events,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What the compiler says of a kernel.

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


def check_supported(cfg: MoEConfig) -> None:
    """Raises `ValueError` if the GPU does not have such a layer; the twin has all but float16."""
    if cfg.dtype not in DTYPES:
        allowed = " or ".join(map(str, DTYPES))
        raise ValueError(f"dtype is {cfg.dtype}; the GPU computes with {allowed}")
    if cfg.experts > MAX_EXPERTS:
        raise ValueError(f"experts is {cfg.experts}; the GPU routes to at most {MAX_EXPERTS}")
    if cfg.top_k > MAX_TOP_K:
        raise ValueError(f"top_k is {cfg.top_k}; on the GPU at most {MAX_TOP_K} are allowed")
    size = cfg.experts // cfg.expert_groups
    if cfg.expert_groups > 1 and size % GROUP_MULTIPLE != 0:
        raise ValueError(
            f"expert_groups is {cfg.expert_groups}, which makes groups of {size} experts; on the "
            f"GPU a group's size must be a multiple of {GROUP_MULTIPLE}"
        )


def compile_kernel(shape: KernelShape, cache: Path | None = None) -> Kernel:
    """The kernel for a shape, from the disk where it has been compiled before.

    Ranks that ask at the same time compile it once; see `kernel_cache.get_or_make`.

    Args:
        cache: folder; None for `kernel_cache.default_folder()`.

    Raises:
        ValueError: a bound does not fit, see `KernelShape.sizes`, or a state shared memory.
        RuntimeError: NVRTC, a source file or, for its transport, NVSHMEM is missing, or the
            compiler refuses: with the first lines that it says.
    """
    nvrtc = _load_nvrtc()
    root = include_root()
    unit = _unit()
    options = [f"--gpu-architecture={shape.arch}", *_OPTIONS]
    options += [f"-DMOEOS_{name}={value}" for name, value in macros(shape).items()]
    compiler = _version(nvrtc)
    sources = _sources(root)
    folders = [root]
    if shape.transport == "nvshmem":
        folders += nvshmem_folders()
        sources[_NVSHMEM_VERSION] = (folders[1] / _NVSHMEM_VERSION).read_bytes()
    key = _key(sources, unit, options, compiler)

    def make() -> bytes:
        began = time.perf_counter()
        includes = [f"--include-path={folder}" for folder in folders]
        cubin, ptx, log = _compile(nvrtc, unit, options + includes)
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

    entry, found = kernel_cache.get_or_make(key, make, cache)
    header, _, cubin = entry.partition(b"\n")
    return Kernel(cubin, CompileReport(**json.loads(header)), found)


@functools.cache
def compile_file(name: str, arch: str) -> bytes:
    """The machine code (a cubin) of a file below `include_root()`, for a GPU such as "sm_90".

    Compiled once in a process.

    Raises `RuntimeError` as `compile_kernel` does.
    """
    options = [f"--gpu-architecture={arch}", *_OPTIONS, f"--include-path={include_root()}"]
    return _compile(_load_nvrtc(), f'#include "{name}"\n', options)[0]


def include_root() -> Path:
    """The folder that kernels/ and runtime/ lie in: of the installed package or the working tree.

    Raises `RuntimeError` if there is none.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "include", *package.parents[:2])
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


def route_columns(cfg: MoEConfig) -> int:
    """Columns of the tile in which a block's logits are computed: one for each expert, and more."""
    return next(columns for columns in (64, 128, MAX_EXPERTS) if cfg.experts <= columns)


def _gemm0_columns(cfg: MoEConfig) -> int:
    """Columns of the first GEMM's result in a part of a wide tile; of a gated one it multiplies as
    many gate and as many up columns.
    """
    return _TILE_COLUMNS // 2 if cfg.gated else _TILE_COLUMNS


def narrow_gemm0_columns(cfg: MoEConfig) -> int:
    """The same of a narrow tile."""
    return _gemm0_columns(cfg) // 2


def has_whole_parts(cfg: MoEConfig) -> bool:
    """Whether every part of both GEMMs has all the columns of a tile: kWholeParts of
    kernels/sm90/config.cuh.
    """
    return cfg.hidden >= _TILE_COLUMNS and cfg.intermediate >= _gemm0_columns(cfg)


def _route_tokens(cfg: MoEConfig) -> int:
    """Tokens of a block, which one processor sorts: fewer where calls are so small that their
    blocks are few, and each of them is waited for.
    """
    return _ROUTE_TOKENS_OF_FEW if cfg.max_tokens <= _FEW_TOKENS else _ROUTE_TOKENS


def _route_slices(cfg: MoEConfig, processors: int) -> int:
    """Route parts of a block, in every call of the layer: several where the largest call leaves
    processors without a block (of a layer for many tokens: more than half of them), since one alone
    takes long to read a router.

    Until they are added up, the sums of a token lie in its row of the output, which they must fit.
    """
    columns = route_columns(cfg)
    depth = _ROUTE_DEPTH if columns > 128 else 2 * _ROUTE_DEPTH  # kRouteDepth
    by_steps = -(-cfg.hidden // depth) // _LEAST_STEPS
    by_room = cfg.hidden * cfg.dtype.itemsize // (_GROUPS * columns * 4)
    blocks = -(-cfg.max_tokens // _route_tokens(cfg))
    by_processors = processors // (blocks if cfg.max_tokens <= _FEW_TOKENS else 2 * blocks)
    return max(1, min(_MOST_SLICES, by_steps, by_room, by_processors))


def macros(shape: KernelShape) -> dict[str, str]:
    """What kernels/sm90/config.cuh reads, without the prefix MOEOS_."""
    cfg, sizes = shape.cfg, shape.sizes
    capacity, ratio = cfg.capacity(cfg.max_tokens), cfg.capacity_ratio
    limit = cfg.swiglu_limit
    values: dict[str, int | str] = {
        "FIXED_GEOMETRY": '"kernels/sm90/geometry.cuh"',
        "WORLD": shape.world_size,
        "EXPERTS": cfg.experts,
        "TOP_K": cfg.top_k,
        "MAX_TOKENS": cfg.max_tokens,
        "HIDDEN": cfg.hidden,
        "INTERMEDIATE": cfg.intermediate,
        "ROW_MAP": int(cfg.resolved_row_map == "capacity"),
        "CAPACITY": cfg.max_tokens if capacity is None else capacity,
        "CAPACITY_NUMERATOR": 0 if ratio is None else ratio.numerator,
        "CAPACITY_DENOMINATOR": 0 if ratio is None else ratio.denominator,
        "CHUNK_ROWS": sizes.chunk_rows,
        "TILE_ROWS": sizes.tile_rows,
        "ROUTE_TOKENS": sizes.route_tokens,
        "ROUTE_SLICES": sizes.route_slices,
        "SEGMENT_ALIGN": sizes.segment_align,
        "LARGE_EXPERTS": int(sizes.large_experts),
        "GEMM0_PARTS": sizes.gemm0_parts,
        "GEMM1_PARTS": sizes.gemm1_parts,
        "NARROW_ROWS": sizes.narrow_rows,
        "GEMM0_NARROW_PARTS": sizes.gemm0_narrow_parts,
        "GEMM1_NARROW_PARTS": sizes.gemm1_narrow_parts,
        "PROCESSORS": shape.processors,
        "ACTIVATION": get_args(Activation).index(cfg.activation),
        "SWIGLU_LIMIT": "moeos::kInfinity" if limit is None else f"{limit!r}F",
        "SCORING": get_args(Scoring).index(cfg.scoring),
        "RENORMALIZE": int(cfg.renormalize),
        "ROUTED_SCALING": f"{cfg.routed_scaling!r}F",
        "EXPERT_GROUPS": cfg.expert_groups,
        "TOP_GROUPS": cfg.top_groups,
        "VIRTUAL_RANKS": shape.virtual_ranks,
        "FLOAT16": int(cfg.dtype == torch.float16),
        "BIAS": int(cfg.bias),
        "SELECTION_BIAS": int(cfg.selection_bias),
        "TRACE_EVENTS": shape.trace_events,
        "TRANSPORT": get_args(Transport).index(shape.transport),
        "FAULTS": int(shape.faults),
    }
    return {name: str(value) for name, value in values.items()}


def _unit() -> str:
    facts = (
        f'extern "C" __constant__ const unsigned int moeos_{name} = {value};\n'
        for name, value in _FACTS.items()
    )
    return f'#include "{_ENTRY}"\n' + "".join(facts)


def _facts(ptx: str, shape: KernelShape) -> dict[str, int]:
    """What `_unit` makes the compiler say; `ValueError` if the OS block's state does not fit."""
    found = dict(re.findall(r"\bmoeos_(\w+) = (\d+);", ptx))
    facts = {name: int(found[name]) for name in _FACTS}
    facts["os_bytes"] += shape.sizes.os_memory_bytes
    if facts["os_bytes"] > facts["shared_bytes"]:
        raise ValueError(
            f"the scheduler's state takes {facts['os_bytes']} bytes of shared memory, and "
            f"{facts['shared_bytes']} fit: lower max_tokens"
        )
    return facts


def _sources(root: Path) -> dict[str, bytes]:
    """The kernel's source and all that it includes: path below `root` -> content."""
    found: dict[str, bytes] = {}
    waiting = [_ENTRY]
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
    # One header names its neighbour without its folder, where NVRTC does not look for it.
    return [*folders, folders[0] / "non_abi" / "device" / "pt-to-pt"]


def _load_nvrtc() -> Any:
    """The bindings of NVRTC, whose library can be loaded."""
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


def _compile(nvrtc: Any, unit: str, options: list[str]) -> tuple[bytes, str, str]:
    """The cubin, the PTX and the log of a translation unit."""
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
        return cubin, ptx.decode(errors="replace"), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ask(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """An answer of the bindings, whose status says that it is one."""
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
