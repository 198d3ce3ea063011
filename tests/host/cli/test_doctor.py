"""`moeos doctor`: it finds what is here, says what is missing, and judges by the twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moeos.cli import app, probes
from moeos.cli.probes import Finding


@pytest.mark.parametrize("probe", probes.TWIN, ids=lambda probe: probe.__name__)
def test_all_that_the_twin_needs_is_found_where_the_tests_run(probe: object) -> None:
    finding = probe()  # type: ignore[operator]
    assert finding.works, finding
    assert finding.fix == ""


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    finding = probes.package("no-such-package", "nothing")
    assert not finding.works
    assert finding.fix == "pip install no-such-package"


def test_a_cpu_build_of_pytorch_is_told_from_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not probes.torch_cuda().works
    assert "torch" in probes.torch_cuda().fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert probes.torch_cuda() == Finding("PyTorch's CUDA", True, "CUDA 13.0")


def test_a_broken_twin_is_found_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_twin_error", lambda: 1.0)
    assert not probes.twin().works

    def fail() -> float:
        raise RuntimeError("it does not start")

    monkeypatch.setattr(probes, "_twin_error", fail)
    assert "it does not start" in probes.twin().found


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 3)])
def test_the_exit_code_says_whether_the_twin_works(
    works: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = "with [brackets]"
    twin = (lambda: Finding("mpirun", False, "none", "a command"),)
    monkeypatch.setattr(probes, "TWIN", (*twin, lambda: Finding("the twin", works, found)))
    monkeypatch.setattr(probes, "GPU", (lambda: Finding("GPU", False, "none"),))
    ended = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert ended.exit_code == code
    for text in (found, "mpirun", "a command", "missing"):
        assert text in ended.stdout
    document = json.loads((tmp_path / "doctor.json").read_text())
    assert document["twin"][1]["works"] is works
    assert document["gpu"][0]["what"] == "GPU"
