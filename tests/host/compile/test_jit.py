# SPDX-License-Identifier: Apache-2.0
"""The compiler of kernels: what it refuses, what makes it compile again, and what it reports."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from moeos import MoEConfig
from moeos.compile import jit, kernel_shape, machine_code
from moeos.compile.jit import Kernel, compile_kernel, include_root, macros
from moeos.compile.kernel_shape import KernelShape, Transport
from moeos.engines.cuda.arguments import RECORD_BYTES
from moeos.engines.cuda.backward_arguments import GRADIENT_RECORD_BYTES, SAVING_RECORD_BYTES
from moeos.partition.policies import Layout, Policy
from moeos.partition.slicing import Slicing
from tests.host.compile.kernel_shapes import shape
from tests.host.compile.ordered_loads import SCOPES, in_machine_code, in_ptx
from tests.host.compile.relocations import relocations
from tests.processes import ROOT, ForkedRanks

LARGEST = KernelShape(
    cfg=dataclasses.replace(
        MoEConfig.from_toml(ROOT / "configs" / "qwen3-next-80b-a3b.toml"),
        shared_experts=1,
        shared_intermediate=512,
        shared_gate=True,
    ),
    world_size=8,
    processors=131,
)
"""Of the kernels of configs/ the one whose registers are needed most, and one of the largest: with
the shared expert that its model has, one of eight ranks.
"""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(shape(), id="small"),
        pytest.param(LARGEST, id="largest", marks=pytest.mark.nightly),
    ],
)
def compiled_shape(request: pytest.FixtureRequest) -> KernelShape:
    found: KernelShape = request.param
    return found


@pytest.fixture(scope="module")
def cache(compiled_shape: KernelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this kernel alone."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compilation(compiled_shape: KernelShape, cache: Path) -> tuple[Kernel, str]:
    """A kernel, compiled into `cache`, and its PTX: it takes a while, so once."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    texts: list[str] = []

    def compile_and_note(*arguments: Any) -> tuple[bytes, str, str]:
        cubin, ptx, log = compile_it(*arguments)
        texts.append(ptx)
        return cubin, ptx, log

    compile_it = jit._compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_compile", compile_and_note)
        kernel = compile_kernel(compiled_shape, cache)
    return kernel, texts[0]


@pytest.fixture(scope="module")
def compiled(compilation: tuple[Kernel, str]) -> Kernel:
    return compilation[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The small layer's kernel."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    return compile_kernel(shape(), tmp_path_factory.mktemp("small"))


def refuse(*arguments: object) -> Any:
    raise AssertionError("this must not be compiled")


def test_a_kernel_is_machine_code_for_hopper(compiled: Kernel) -> None:
    assert not compiled.cached
    assert compiled.cubin.startswith(b"\x7fELF")
    assert jit.KERNEL.encode() in compiled.cubin
    assert compiled.report.arch == "sm_90a"


def test_no_look_at_a_word_of_others_is_gone_from_the_machine_code(
    compilation: tuple[Kernel, str],
) -> None:
    kernel, ptx = compilation
    asked, found = in_ptx(ptx), in_machine_code(kernel.cubin, jit.KERNEL)
    assert set(asked) == set(SCOPES.values())
    for scope, looks in asked.items():
        assert found[scope] >= looks, scope  # more where ptxas has two copies of a loop


def test_a_look_whose_value_nobody_uses_is_gone_from_the_machine_code(tmp_path: Path) -> None:
    """So it would be noticed by the test before."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    options = ["--gpu-architecture=sm_90a"]
    counts = []
    for used in ("gone", "kept"):
        source = f"""
        extern "C" __global__ void {jit.KERNEL}(const unsigned* word, unsigned* out) {{
          unsigned gone, kept;
          asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(gone) : "l"(word) : "memory");
          asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(kept) : "l"(word + 1) : "memory");
          *out = {used} + kept;
        }}"""
        cubin, ptx, _ = jit._compile(nvrtc, source, options)
        assert in_ptx(ptx) == {"gpu": 1, "sys": 1}
        counts.append(in_machine_code(cubin, jit.KERNEL))
    assert counts == [{"gpu": 1, "sys": 1}, {"gpu": 1}]


def test_the_kernel_can_be_asked_for_where_it_lies(compiled: Kernel) -> None:
    """By this compiler; another may make otherwise, and then nothing is prefetched."""
    found = relocations(compiled.cubin)
    asked = [(section, kind) for section, kind, of in found if of == jit.KERNEL]
    assert asked == [(".rela.nv.constant4", machine_code.ADDRESS)]
    assert machine_code.HANDLE not in [kind for _, kind, _ in found]
    assert machine_code.instruction_bytes(compiled.cubin, jit.KERNEL) > 100_000


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
def test_a_kernel_with_remote_peers_keeps_its_registers_as_any_other(
    small: Kernel, tmp_path: Path, transport: Transport
) -> None:
    """A call that is not inlined would end that: see nvshmem_transport.hpp."""
    if transport == "nvshmem":
        try:
            jit.nvshmem_folders()
        except RuntimeError as error:
            pytest.skip(str(error))
    made = compile_kernel(dataclasses.replace(shape(), transport=transport), tmp_path)
    assert made.report.keeps_registers
    assert made.report.wgmma_instructions == small.report.wgmma_instructions
    # What NVSHMEM looks for when it fills in its state.
    for name in (b"nvshmemi_device_state_d", b"nvshmemi_device_lib_version_d"):
        assert (name in made.cubin) == (transport == "nvshmem")


@pytest.mark.nightly
@pytest.mark.parametrize("router_dtype", [None, torch.float32], ids=["16 bits", "fp32"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_most_experts_and_choices_leave_registers_where_they_are(
    ranks: int, router_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    rules = {"scoring": "sigmoid", "selection_bias": True, "expert_groups": 8, "top_groups": 4}
    most = shape(experts=1024, top_k=32, hidden=2048, router_dtype=router_dtype, **rules)
    made = compile_kernel(dataclasses.replace(most, world_size=ranks), tmp_path)
    assert made.report.keeps_registers


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "gathered"), (2, "gathered"), (8, "gathered"), (1, "token_major")]
)
@pytest.mark.parametrize("hidden", [2048, 2880], ids=["whole steps", "a step amid a row's end"])
def test_a_kernel_that_gathers_rows_keeps_its_registers(
    hidden: int, ranks: int, layout: Layout, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    sizes = {"intermediate": 768, "experts": 128, "top_k": 8, "max_tokens": 8192}
    gathers = dataclasses.replace(
        shape(hidden=hidden, **sizes),
        world_size=ranks,
        slicing=Slicing(policy=Policy(layout)),
    )
    made = compile_kernel(gathers, tmp_path)
    assert made.report.keeps_registers


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transport", "once_bytes"),
    [
        pytest.param("none", 1 << 40, id="a row each"),
        pytest.param("mapped", 1, id="tokens once, remote peers"),
    ],
)
def test_a_kernel_with_faults_keeps_its_registers_and_is_another(
    small: Kernel,
    tmp_path: Path,
    transport: Transport,
    once_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that the faults made too long to be inlined would have a stack."""
    monkeypatch.setattr(kernel_shape, "ONCE_BYTES", once_bytes)
    monkeypatch.setattr(kernel_shape, "DEDUP_TOKENS", 1)
    made = compile_kernel(dataclasses.replace(shape(), transport=transport, faults=True), tmp_path)
    assert made.report.keeps_registers
    assert made.report.wgmma_instructions == small.report.wgmma_instructions
    assert (b"WithFaults" in made.cubin, b"WithFaults" in small.cubin) == (True, False)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "changes", "record_bytes"),
    [
        pytest.param({"saves": True}, {}, SAVING_RECORD_BYTES, id="saves"),
        pytest.param({"gradients": True}, {}, GRADIENT_RECORD_BYTES, id="gradients"),
        pytest.param(
            {"gradients": True}, {"bias": True}, GRADIENT_RECORD_BYTES, id="gradients, biases"
        ),
        pytest.param(
            {"gradients": True, "saves": True},
            {},
            GRADIENT_RECORD_BYTES,
            id="gradients of what is saved",
        ),
        pytest.param(
            {"gradients": True, "saves": True, "places": 8},
            {"zero_experts": 4},
            GRADIENT_RECORD_BYTES,
            id="gradients, zero experts, a table of places",
        ),
        pytest.param(
            {"gradients": True},
            {
                "apply_router_weight_on_input": True,
                "top_k": 1,
                "scoring": "sigmoid",
                "renormalize": False,
            },
            GRADIENT_RECORD_BYTES,
            id="gradients, weights on inputs",
        ),
    ],
)
def test_kernels_of_training_keep_their_registers_and_take_what_the_host_packs(
    ranks: int, kind: dict[str, Any], changes: dict[str, Any], record_bytes: int, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    of_training = dataclasses.replace(shape(**changes), world_size=ranks, **kind)
    made = compile_kernel(of_training, tmp_path)
    assert made.report.keeps_registers
    assert made.report.argument_bytes == record_bytes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hidden", "intermediate", "saves", "ranks"),
    [
        pytest.param(2048, 768, False, 8, id="H 2048, I 768, one of eight"),
        pytest.param(4096, 1024, True, 1, id="H 4096, I 1024, saved rows, alone"),
        pytest.param(4096, 1024, True, 2, id="H 4096, I 1024, saved rows, one of two"),
        pytest.param(4096, 1024, True, 8, id="H 4096, I 1024, saved rows, one of eight"),
    ],
)
def test_a_kernel_of_gradients_of_a_large_layer_keeps_its_registers(
    hidden: int, intermediate: int, saves: bool, ranks: int, tmp_path: Path
) -> None:
    """Of eight ranks, and with saved rows, some lay in memory where small layers had none there."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    large = shape(hidden=hidden, intermediate=intermediate, experts=128, top_k=8, max_tokens=8192)
    of_gradients = dataclasses.replace(large, world_size=ranks, gradients=True, saves=saves)
    made = compile_kernel(of_gradients, tmp_path)
    assert made.report.keeps_registers


def test_nvshmem_that_is_not_installed_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    with pytest.raises(RuntimeError, match=r"nvshmem and .* missing.*pip install 'moeos\[cuda\]'"):
        compile_kernel(dataclasses.replace(shape(), transport="nvshmem"), tmp_path)


def test_nvshmem_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.pathfinder", reason="install the test extra for NVRTC")
    version = tmp_path / "non_abi" / "nvshmem_version.h"
    version.parent.mkdir()
    version.write_text(
        "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 8\n"
    )
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"headers of NVSHMEM 3\.8; .*made with 3\.4"):
        jit.nvshmem_folders()


def test_the_report_says_what_the_launch_needs(compiled: Kernel) -> None:
    report = compiled.report
    assert 0 < report.registers <= 65_536 // report.threads
    assert report.threads % 32 == 0
    assert 0 < report.os_bytes < report.shared_bytes <= 227 * 1024
    assert report.wgmma_instructions > 0
    assert report.keeps_registers
    assert report.code_bytes == len(compiled.cubin)
    assert report.seconds > 0
    assert report.compiler.startswith("NVRTC 13.")


def test_the_host_packs_as_many_bytes_as_the_kernel_takes(compiled: Kernel) -> None:
    assert compiled.report.argument_bytes == RECORD_BYTES


def test_the_second_time_the_kernel_comes_from_the_cache(
    compiled: Kernel, compiled_shape: KernelShape, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeos.compile.jit._compile", refuse)
    assert compile_kernel(compiled_shape, cache) == dataclasses.replace(compiled, cached=True)


def test_a_kernel_in_a_damaged_file_is_compiled_again(
    compiled: Kernel,
    compiled_shape: KernelShape,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = shutil.copytree(cache, tmp_path / "copy")
    [path] = copy.glob("*.kernel")
    path.write_bytes(path.read_bytes()[:-7])
    monkeypatch.setattr("moeos.compile.jit._compile", refuse)
    with pytest.raises(AssertionError, match="must not be compiled"):
        compile_kernel(compiled_shape, copy)


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    def compile_for_ptx(*arguments: object) -> tuple[bytes, str, str]:
        with open(tmp_path / "compiled", "a") as file:
            file.write("x")
        return b"cubin", PTX, LOG

    def rank_main(rank: int) -> tuple[bytes, bool]:
        jit._compile = compile_for_ptx  # in this forked process alone
        kernel = compile_kernel(shape(), tmp_path / "cache")
        return kernel.cubin, kernel.cached

    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    outcomes = ForkedRanks(rank_main, 4).ended(60)
    assert sorted(outcomes) == [(b"cubin", False)] + [(b"cubin", True)] * 3
    assert (tmp_path / "compiled").read_text() == "x"


PTX = """
.const .align 4 .u32 moeos_shared_bytes = 30000;
.const .align 4 .u32 moeos_os_bytes = 500;
.const .align 4 .u32 moeos_threads = 384;
.const .align 4 .u32 moeos_argument_bytes = 128;
wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
"""
LOG = """
ptxas info    : 313 bytes gmem
ptxas info    : Compiling entry function 'moeos_forward' for 'sm_90a'
ptxas info    : Function properties for helper
ptxas         .     24 bytes stack frame, 40 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for moeos_forward
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 24 bytes cumulative stack size
"""


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """NVRTC is replaced by one that always says the same; the options that it was given."""
    options: list[list[str]] = []

    def compile_nothing(
        nvrtc: object, unit: str, given: list[str], kernel: str
    ) -> tuple[bytes, str, str]:
        options.append(given)
        return b"cubin", PTX, LOG

    monkeypatch.setattr("moeos.compile.jit._load_nvrtc", lambda: None)
    monkeypatch.setattr("moeos.compile.jit._version", lambda _: "NVRTC 13.0")
    monkeypatch.setattr("moeos.compile.jit._compile", compile_nothing)
    return options


@pytest.mark.usefixtures("without_compiler")
def test_stack_frames_and_spills_of_all_functions_are_reported(tmp_path: Path) -> None:
    report = compile_kernel(shape(), tmp_path).report
    assert (report.registers, report.stack_bytes) == (168, 24)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (44, 32)
    assert (report.shared_bytes, report.threads, report.argument_bytes) == (30000, 384, 128)
    assert 8_000 < report.os_bytes < 10_000
    assert report.wgmma_instructions == 2


@pytest.mark.parametrize("lost", ["stack_bytes", "spill_store_bytes", "spill_load_bytes"])
@pytest.mark.usefixtures("without_compiler")
def test_registers_are_kept_only_without_stack_and_spills(tmp_path: Path, lost: str) -> None:
    none = {"stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
    report = dataclasses.replace(compile_kernel(shape(), tmp_path).report, **none)
    assert report.keeps_registers
    assert not dataclasses.replace(report, **{lost: 8}).keeps_registers


CHANGES: dict[str, Callable[[], KernelShape]] = {
    "hidden": lambda: shape(hidden=72),
    "intermediate": lambda: shape(intermediate=72),
    "experts": lambda: shape(experts=16),
    "top_k": lambda: shape(top_k=3),
    "activation": lambda: shape(activation="gelu"),
    "dtype": lambda: shape(dtype=torch.float16),
    "max_tokens": lambda: shape(max_tokens=65),
    "scoring": lambda: shape(scoring="sigmoid"),
    "selection_bias": lambda: shape(selection_bias=True),
    "renormalize": lambda: shape(renormalize=False),
    "capacity": lambda: shape(capacity_factor=0.5, row_map="ragged"),
    "row_map": lambda: shape(row_map="capacity"),
    "routed_scaling": lambda: shape(routed_scaling=2.5),
    "expert_groups": lambda: shape(experts=16, expert_groups=2, top_groups=2),
    "top_groups": lambda: shape(experts=16, expert_groups=2, top_groups=1),
    "group_score": lambda: shape(experts=16, expert_groups=2, top_groups=1, group_score="max"),
    "swiglu_limit": lambda: shape(swiglu_limit=7.0),
    "swiglu_clamp": lambda: shape(swiglu_limit=7.0, swiglu_clamp="after"),
    "gate_up": lambda: shape(gate_up="interleaved"),
    "transposed": lambda: shape(transposed=True),
    "swiglu_alpha": lambda: shape(swiglu_alpha=1.5),
    "gated gelu": lambda: shape(activation="geglu_tanh"),
    "up_offset": lambda: shape(activation="swigluoai", swiglu_alpha=1.0),
    "bias": lambda: shape(bias=True),
    "router_dtype": lambda: shape(router_dtype=torch.float32),
    "world_size": lambda: dataclasses.replace(shape(), world_size=4),
    "processors": lambda: dataclasses.replace(shape(), processors=65),
    "virtual_ranks": lambda: dataclasses.replace(shape(), virtual_ranks=2),
    "transport": lambda: dataclasses.replace(shape(), transport="mapped"),
}


def test_every_change_of_the_shape_is_another_kernel(
    without_compiler: list[list[str]], tmp_path: Path
) -> None:
    for made in [shape, *CHANGES.values()]:
        assert not compile_kernel(made(), tmp_path).cached
    assert len(set(map(tuple, without_compiler))) == 1 + len(CHANGES)


@pytest.mark.usefixtures("without_compiler")
def test_a_scheduler_whose_state_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes \d+ bytes of shared memory, and 30000 fit: lower"):
        compile_kernel(shape(max_tokens=60_000, top_k=4), tmp_path)


def copy_sources(folder: Path) -> Path:
    for name in ("kernels", "runtime"):
        shutil.copytree(include_root() / name, folder / name)
    return folder


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("edited", ["kernels/sm90/forward.cu", "runtime/words/base.hpp"])
def test_a_changed_source_is_compiled_again_wherever_it_lies(edited: str, tmp_path: Path) -> None:
    compile_kernel(shape(), tmp_path / "cache")
    root = copy_sources(tmp_path / "moved")
    with jit.sources_in(root):
        assert compile_kernel(shape(), tmp_path / "cache").cached
        with open(root / edited, "a") as file:
            file.write("// changed\n")
        assert not compile_kernel(shape(), tmp_path / "cache").cached


@pytest.mark.usefixtures("without_compiler")
def test_a_source_that_the_kernel_does_not_include_changes_nothing(tmp_path: Path) -> None:
    compile_kernel(shape(), tmp_path / "cache")
    root = copy_sources(tmp_path / "moved")
    (root / "kernels" / "twin" / "forward.cpp").write_text("")
    with jit.sources_in(root):
        assert compile_kernel(shape(), tmp_path / "cache").cached


@pytest.mark.usefixtures("without_compiler")
def test_another_compiler_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernel(shape(), tmp_path)
    monkeypatch.setattr("moeos.compile.jit._version", lambda _: "NVRTC 13.1")
    assert not compile_kernel(shape(), tmp_path).cached


@pytest.mark.usefixtures("without_compiler")
def test_a_missing_source_is_named(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "moved")
    (root / "runtime" / "words" / "task.hpp").unlink()
    missing = pytest.raises(RuntimeError, match=r"runtime/words/task\.hpp.*install moeos again")
    with jit.sources_in(root), missing:
        compile_kernel(shape(), tmp_path / "cache")


@pytest.mark.usefixtures("without_compiler")
def test_another_tree_is_compiled_within_its_block_alone(tmp_path: Path) -> None:
    root = copy_sources(tmp_path / "other")
    (root / "kernels" / "sm90" / "forward.cu").write_text("// another\n")
    with jit.sources_in(root):
        assert include_root() == root
        assert not compile_kernel(shape(), tmp_path / "cache").cached
    assert include_root() == ROOT
    assert not compile_kernel(shape(), tmp_path / "cache").cached


def test_sources_are_found_in_the_working_tree() -> None:
    assert include_root() == ROOT


def test_sources_are_found_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "moeos"
    copy_sources(package / "include")
    monkeypatch.setattr("moeos.compile.jit.__file__", str(package / "compile" / "jit.py"))
    assert include_root() == package / "include"


def test_an_installation_without_sources_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moeos.compile.jit.__file__", str(tmp_path / "a" / "moeos" / "compile" / "jit.py")
    )
    with pytest.raises(RuntimeError, match="install moeos again"):
        include_root()


def test_a_missing_compiler_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(RuntimeError, match=r"NVRTC.*pip install 'moeos\[cuda\]'"):
        compile_kernel(shape(), tmp_path)


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    monkeypatch.setattr(
        "moeos.compile.jit._unit", lambda *_: "int f() { return no_such_word; }\n" * 100
    )
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC 13.*no_such_word") as raised:
        compile_kernel(shape(), tmp_path)
    assert len(str(raised.value).splitlines()) < 30
    assert not list(tmp_path.glob("*.kernel"))


def test_headers_where_the_program_was_started_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    (tmp_path / "runtime" / "words").mkdir(parents=True)
    (tmp_path / "runtime" / "words" / "base.hpp").write_text("#error the wrong header")
    monkeypatch.chdir(tmp_path)
    facts = "".join(
        f'extern "C" __constant__ const unsigned int moeos_{name} = {value};\n'
        for name, value in {**dict.fromkeys(jit._FACTS, 1), "shared_bytes": 30_000}.items()
    )
    kernel = 'extern "C" __global__ void k(unsigned* line) { *line = moeos::kCacheLine; }\n'
    monkeypatch.setattr(
        "moeos.compile.jit._unit", lambda *_: f'#include "runtime/words/base.hpp"\n{facts}{kernel}'
    )
    assert compile_kernel(shape(), tmp_path / "cache").cubin


def test_floats_keep_their_value_as_macros() -> None:
    text = macros(shape(routed_scaling=1e16, swiglu_limit=0.1))["SHAPE"]
    for name, value in (("routed_scaling", 1e16), ("limit", 0.1)):
        [written] = re.findall(rf"\.{name}=(\S+?)F,", text)
        assert float.fromhex(written) == numpy.float32(value)
    assert ".limit=moeos::kInfinity," in macros(shape())["SHAPE"]


@pytest.mark.usefixtures("without_compiler")
def test_the_report_is_kept_with_the_code(tmp_path: Path) -> None:
    report = compile_kernel(shape(), tmp_path).report
    found = compile_kernel(shape(), tmp_path)
    assert found.cached
    assert json.loads(json.dumps(dataclasses.asdict(found.report))) == dataclasses.asdict(report)
