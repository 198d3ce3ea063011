"""The GPU's kernel of every config: `moeos compile` makes it, and it keeps its registers.

A register that is spilled, or a stack frame, costs time in every tile, and comes and goes with
small changes. So each config is compiled whenever the tests run, side by side.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.processes import ROOT

pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
OF_THE_TWIN = {"twin-bench"}
"""Configs in float32, which the GPU does not compute with."""
SECONDS = 280
"""For one kernel; it takes 10 to 20 on a core of its own."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of `moeos compile`."""

    code: int
    text: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """`moeos compile` of every config, as many at a time as there are cores."""
    folder = tmp_path_factory.mktemp("compiled")

    def compile_config(name: str) -> Compiled:
        report = folder / f"{name}.json"
        command = [sys.executable, "-m", "moeos.cli", "compile", CONFIGS[name], "--json", report]
        ended = subprocess.run(
            command,
            env={**os.environ, "XDG_CACHE_HOME": str(folder)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        document = json.loads(report.read_text()) if report.exists() else {}
        return Compiled(ended.returncode, ended.stdout + ended.stderr, document)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(CONFIGS, pool.map(compile_config, CONFIGS), strict=True))


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
