"""The GPU's kernel of every config: `moeos compile` makes it, and it keeps its registers.

A register that is spilled, or a stack frame, costs time in every tile, and comes and goes with
small changes. So each config is compiled whenever the tests run, side by side.
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

from tests.host.cli import commands
from tests.processes import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
OF_THE_TWIN = {"twin-bench"}
"""Configs in float32, which the GPU does not compute with."""
SECONDS = 280
"""For all kernels; one takes 10 to 20 on a core of its own."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of `moeos compile`."""

    code: int
    text: str
    document: dict[str, Any]


def compile_config(name: str, folder: Path) -> Compiled:
    """`moeos compile` of a config, in this process."""
    report = folder / f"{name}.json"
    code, out, err = commands.invoke("compile", CONFIGS[name], "--json", report)
    document = json.loads(report.read_text()) if report.exists() else {}
    return Compiled(code, out + err, document)


def use_cache_in(folder: Path) -> None:
    """Of a process that compiles: no kernel is here from before."""
    os.environ["XDG_CACHE_HOME"] = str(folder)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """`moeos compile` of every config, as many at a time as there are cores."""
    folder = tmp_path_factory.mktemp("compiled")
    cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(
        cores, multiprocessing.get_context("spawn"), use_cache_in, (folder,)
    ) as pool:
        folders = itertools.repeat(folder)
        made = pool.map(compile_config, CONFIGS, folders, timeout=SECONDS)
        return dict(zip(CONFIGS, made, strict=True))


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - OF_THE_TWIN))
def test_the_kernel_neither_spills_nor_has_a_stack_frame(
    name: str, compiled: dict[str, Compiled]
) -> None:
    ended = compiled[name]
    assert ended.code == 0, ended.text
    report = ended.document["report"]
    lost = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
    assert {report[what] for what in lost} == {0}
    assert report["wgmma_instructions"] > 0


@pytest.mark.parametrize("name", sorted(OF_THE_TWIN))
def test_a_config_of_the_twin_alone_is_refused(name: str, compiled: dict[str, Compiled]) -> None:
    assert compiled[name].code == 2
    assert "dtype is torch.float32" in compiled[name].text
