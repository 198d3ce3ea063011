# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel of every config: `moeos compile` makes it, and it keeps its registers.

A register that is spilled, or a stack frame, costs time in every tile, and comes and goes with
small changes. All of them are compiled at night, side by side. Whenever the tests run, two are,
and tests/host/compile/test_jit.py compiles a small layer's kernel, which must keep its registers,
too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from moeos import MoEConfig
from moeos.compile import jit
from moeos.compile.kernel_shape import KernelShape
from moeos.partition.rates import H200
from tests.host.cli import commands
from tests.processes import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
pytestmark = pytest.mark.timeout(1200)

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
OF_THE_TWIN = {"train", "twin-bench"}
"""Configs in float32, which the GPU does not compute with."""
ALONE = ("deepseek-v3", "qwen3-30b-a3b", "qwen3-next-80b-a3b")
"""Configs that are compiled for one rank, too: of the most experts of which a fetch warp plans few
rows (Geometry::kPlanFewExperts), or any (Geometry::plans_itself), and of more. All had spilled
where eight ranks did not.
"""
FP32_ROUTERS = ("deepseek-v3", "mixtral-8x7b")
"""Configs that are compiled for a router in fp32, too: of a full bank of experts, whose
accumulators are the most, and of few.
"""
SHARED_EXPERTS = {
    "deepseek-v3": "shared_experts = 1\nshared_intermediate = 2048\n",
    "kimi-k2": "shared_experts = 1\nshared_intermediate = 2048\n",
    "qwen3-next-80b-a3b": "shared_experts = 1\nshared_intermediate = 512\nshared_gate = true\n",
    "qwen3-30b-a3b": "shared_experts = 2\nshared_intermediate = 768\n",
}
"""Configs that are compiled with shared experts, too: what their models have, or several."""
BY_FP8 = 'activation_format = "fp8_group128"\n'
OF_CODES = {
    "qwen3-30b-a3b with 4 bits by fp8 and a shared expert": (
        'weight_format = "mxfp4"\nshared_experts = 1\nshared_intermediate = 768\n' + BY_FP8
    ),
    "qwen3-30b-a3b with 4 bits by fp8 and results in fp8": (
        'weight_format = "mxfp4"\nresult_format = "fp8_group128"\n' + BY_FP8
    ),
}
"""Layers whose tiles have the most code, compiled for two ranks: products of codes, and others."""
_GPT_OSS = """
hidden = 2880
intermediate = 2880
experts = 128
top_k = 4
bias = true
activation = "swigluoai"
swiglu_limit = 7.0
swiglu_alpha = 1.702
gate_up = "interleaved"
"""
IN_PLACE = {
    "gpt-oss in bf16": _GPT_OSS + "transposed = true\n",
    "gpt-oss in mxfp4": _GPT_OSS + 'weight_format = "mxfp4"\n',
    "aria": "hidden = 2560\nintermediate = 1664\nexperts = 64\ntop_k = 6\ntransposed = true\n",
    "llama4": "hidden = 5120\nintermediate = 8192\nexperts = 16\ntop_k = 1\ntransposed = true\n",
    "torchtitan's qwen3": (
        "hidden = 2048\nintermediate = 768\nexperts = 128\ntop_k = 8\n" + 'gate_up = "separate"\n'
    ),
}
"""Layers of `moeos.Experts` whose weights are read where other frameworks have them."""
LOSES = ("gpt-oss in mxfp4", 1)
"""It keeps 20 bytes of registers in memory, as with gate rows, then up rows."""
OF_EXPERTS = 'dtype = "bfloat16"\nmax_tokens = 4096\nrouting = "caller"\n'
EVERYWHERE = 8
"""Ranks of a world that all configs are compiled for."""
WITH_FP32_ROUTER = " with an fp32 router"
WITH_SHARED = " with shared experts"
KERNELS = [
    *((name, EVERYWHERE) for name in sorted(CONFIGS.keys() - OF_THE_TWIN)),
    *((name, 1) for name in ALONE),
    *((name + WITH_FP32_ROUTER, EVERYWHERE) for name in FP32_ROUTERS),
    *((name + WITH_SHARED, ranks) for name in SHARED_EXPERTS for ranks in (1, 2, EVERYWHERE)),
    *((name, 2) for name in OF_CODES),
    *(
        (name, ranks)
        for name in IN_PLACE
        for ranks in (1, 2, 4, EVERYWHERE)
        if (name, ranks) != LOSES
    ),
]
SECONDS = 1100
"""For all kernels; one takes 10 to 20 on a core of its own, and others may work beside them."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of `moeos compile`."""

    code: int
    text: str
    document: dict[str, Any]


def compile_config(kernel: tuple[str, int], folder: Path) -> Compiled:
    """`moeos compile` of a config for so many ranks, in this process."""
    name, ranks = kernel
    report = folder / f"{name}-{ranks}.json"
    options = ("--ranks", ranks, "--json", report)
    config = CONFIGS.get(name)
    if config is None:
        config = folder / f"{name}.toml"
        of = name.partition(" with ")[0]
        if name in IN_PLACE:
            text = OF_EXPERTS + IN_PLACE[name]
        elif name.endswith(WITH_FP32_ROUTER):
            text = 'router_dtype = "float32"\n' + CONFIGS[of].read_text()
        else:
            more = OF_CODES[name] if name in OF_CODES else SHARED_EXPERTS[of]
            text = more + CONFIGS[of].read_text()
        config.write_text(text)
    code, out, err = commands.invoke("compile", config, *options)
    document = json.loads(report.read_text()) if report.exists() else {}
    return Compiled(code, out + err, document)


def use_cache_in(folder: Path) -> None:
    """Of a process that compiles: no kernel is here from before."""
    os.environ["XDG_CACHE_HOME"] = str(folder)


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Compiled]:
    """`moeos compile` of what this run has tests for, as many at a time as there are cores."""
    kernels = [
        (item.callspec.params["name"], item.callspec.params["ranks"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    folder = tmp_path_factory.mktemp("compiled")
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(
        cores, multiprocessing.get_context("spawn"), use_cache_in, (folder,)
    ) as pool:
        folders = itertools.repeat(folder)
        made = pool.map(compile_config, kernels, folders, timeout=SECONDS)
        return dict(zip(kernels, made, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "ranks"), KERNELS)
def test_the_kernel_neither_spills_nor_has_a_stack_frame(
    name: str, ranks: int, compiled: dict[tuple[str, int], Compiled]
) -> None:
    ended = compiled[name, ranks]
    assert ended.code == 0, ended.text
    report = ended.document["report"]
    lost = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
    assert {report[what] for what in lost} == {0}
    assert report["wgmma_instructions"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in IN_PLACE if "mxfp4" not in name])
def test_a_kernel_that_saves_keeps_its_registers_in_every_layout(name: str, tmp_path: Path) -> None:
    config = tmp_path / "layer.toml"
    config.write_text(OF_EXPERTS + IN_PLACE[name])
    cfg = MoEConfig.from_toml(config)
    shape = KernelShape(cfg=cfg, world_size=1, processors=H200.blocks - 1, saves=True)
    assert jit.compile_kernel(shape, tmp_path).report.keeps_registers


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "ranks"), [(name, EVERYWHERE) for name in sorted(OF_THE_TWIN)])
def test_a_config_of_the_twin_alone_is_refused(
    name: str, ranks: int, compiled: dict[tuple[str, int], Compiled]
) -> None:
    ended = compiled[name, ranks]
    assert ended.code == 2
    assert "dtype is torch.float32" in ended.text
