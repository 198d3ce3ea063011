# SPDX-License-Identifier: Apache-2.0
"""`moeos compile`: what the compiler says, as a table, as JSON and as an exit code."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from moeos.compile.jit import CompileReport, Kernel
from moeos.compile.kernel_shape import KernelShape
from tests.host.cli import commands
from tests.processes import ROOT

DEMO = ROOT / "configs" / "demo.toml"
REPORT = CompileReport(
    arch="sm_90a",
    compiler="NVRTC 13.0",
    seconds=21.5,
    registers=168,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=0,
    shared_bytes=232_448,
    os_bytes=9_216,
    threads=384,
    argument_bytes=1408,
    wgmma_instructions=16,
    code_bytes=425_984,
)


invoke = functools.partial(commands.invoke, "compile")


def give(monkeypatch: pytest.MonkeyPatch, report: CompileReport) -> list[KernelShape]:
    """Makes the compiler say this; the shapes that it is asked for."""
    asked: list[KernelShape] = []

    def compile_kernel(shape: KernelShape) -> Kernel:
        asked.append(shape)
        return Kernel(b"cubin", report, cached=False)

    monkeypatch.setattr("moeos.cli.compile.jit.compile_kernel", compile_kernel)
    return asked


def test_a_kernel_that_keeps_its_registers_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = give(monkeypatch, REPORT)
    code, out, err = invoke(DEMO, "--ranks", 4, "--json", tmp_path / "report.json")
    assert (code, err) == (0, "")
    assert [(shape.world_size, shape.virtual_ranks, shape.arch) for shape in asked] == [
        (4, 1, "sm_90a")
    ]
    for shown in ("NVRTC 13.0", "21.5 s", "168", "227 KiB", "9 KiB", "384", "416 KiB", "16"):
        assert shown in out
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["report"] == dataclasses.asdict(REPORT)
    assert (document["ranks"], document["cached"]) == (4, False)
    assert document["config"]["hidden"] == 128


@pytest.mark.parametrize(
    ("transport", "virtual_ranks", "processors"),
    [("none", 1, 131), ("nvshmem", 1, 131), ("mapped", 4, 32)],
)
def test_the_kernel_of_a_world_with_remote_peers_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, transport: str, virtual_ranks: int, processors: int
) -> None:
    asked = give(monkeypatch, REPORT)
    assert invoke(DEMO, "--ranks", 4, "--transport", transport)[0] == 0
    assert [(shape.transport, shape.virtual_ranks, shape.processors) for shape in asked] == [
        (transport, virtual_ranks, processors)
    ]


def test_a_transport_that_is_none_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = give(monkeypatch, REPORT)
    code, _, err = invoke(DEMO, "--transport", "carrier pigeon")
    assert (code, asked) == (2, [])
    assert "transport is 'carrier pigeon'; allowed: 'none', 'mapped', 'nvshmem'" in err


@pytest.mark.parametrize("lost", ["stack_bytes", "spill_store_bytes", "spill_load_bytes"])
def test_a_kernel_with_registers_in_memory_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    give(monkeypatch, dataclasses.replace(REPORT, **{lost: 24}))
    code, out, _ = invoke(DEMO)
    assert code == 1
    assert "24 B" in out
    assert "registers in memory" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DEMO, "--arch", "sm_80"), "arch is 'sm_80'"),
        ((DEMO, "--ranks", 0), "--ranks is 0; it must be at least 1"),
        ((DEMO, "--json", "/no/such/folder/report.json"), "--json is"),
        ((ROOT / "configs" / "twin-bench.toml",), "dtype is torch.float32"),
        ((ROOT / "no-such.toml",), "no-such.toml"),
    ],
    ids=["arch", "ranks", "json", "dtype", "config"],
)
def test_bad_input_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    asked = give(monkeypatch, REPORT)
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not asked


def test_a_missing_compiler_is_one_line_and_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("NVRTC is missing: pip install 'moeos[cuda]'")

    monkeypatch.setattr("moeos.compile.jit._load_nvrtc", missing)
    code, _, err = invoke(DEMO)
    assert code == 3
    assert err == "moeos: NVRTC is missing: pip install 'moeos[cuda]'\n"
