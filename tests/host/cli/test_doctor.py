# SPDX-License-Identifier: Apache-2.0
"""`moeos doctor`: it finds what is here, says what is missing, and judges by the twin."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from moeos.cli import doctor, extras, links, probes
from moeos.cli.app import app
from moeos.cli.links import Link
from moeos.cli.probes import Finding
from moeos.partition import rates
from moeos.system import files
from tests.processes import MOEOS, mpirun


@pytest.mark.parametrize("probe", probes.TWIN, ids=lambda probe: probe.__name__)
def test_all_that_the_twin_needs_is_found_where_the_tests_run(probe: object) -> None:
    finding = probe()  # type: ignore[operator]
    assert finding.works, finding
    assert finding.fix == ""


def test_a_missing_package_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes.machine, "version_of", lambda name: None)
    finding = probes.bindings()
    assert not finding.works
    assert finding.fix == "pip install 'moeos[cuda]'"


def test_what_one_host_does_not_need_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.machine, "version_of", lambda name: None)
    for probe in (probes.mpirun, probes.nvshmem):
        finding = probe()
        assert finding.works, finding
        assert "no" in finding.found
        assert finding.fix == ""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(probes.shutil, "which", lambda name: None)
    assert probes.mpirun().works


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


def test_every_extra_has_a_purpose_which_readme_says_too() -> None:
    root = Path(__file__).parents[3]
    project = files.tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert list(extras.PURPOSES) == sorted(project["optional-dependencies"])
    rows = "".join(f"| `{extra}` | {purpose} |\n" for extra, purpose in extras.PURPOSES.items())
    assert rows in (root / "README.md").read_text()


def test_an_extra_brings_what_the_project_says_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert extras.packages_of("plots") == ["matplotlib"]
    assert "nvshmem4py-cu13" in extras.packages_of("cuda")
    assert not extras.packages_of("no-such-extra")
    monkeypatch.setattr(extras.machine, "version_of", lambda name: None)
    [plots] = [one for one in extras.findings() if one.what == "plots"]
    assert not plots.works
    assert plots.found.endswith("1 of 1 packages are missing: matplotlib")
    assert plots.fix == "pip install 'moeos[plots]'"
    monkeypatch.setattr(extras.machine, "version_of", lambda name: "1.0")
    assert all(one.works for one in extras.findings())


@pytest.mark.parametrize("works", [True, False])
def test_both_tables_agree_on_the_packages_that_a_gpu_needs(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(probes.PACKAGES) < set(probes.GPU)
    monkeypatch.setattr(probes, "PACKAGES", (lambda: Finding("a package", works, ""),))
    monkeypatch.setattr(extras.machine, "version_of", lambda name: None)
    [cuda] = [one for one in extras.findings() if one.what == "cuda"]
    assert cuda.works is works
    assert "nvshmem4py-cu13" in cuda.found
    assert cuda.fix == ("" if works else "pip install 'moeos[cuda]'")


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
    assert document["links"] == []


def with_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: list[Link] | RuntimeError
) -> tuple[str, dict[str, Any]]:
    """What doctor prints and writes on a host with GPUs whose links are as said."""

    def try_local_links() -> list[Link]:
        if isinstance(found, RuntimeError):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(links, "try_local_links", try_local_links)
    monkeypatch.setattr(probes, "TWIN", (lambda: Finding("the twin", True, "runs"),))
    monkeypatch.setattr(probes, "GPU", (lambda: Finding("GPU", True, "2 of them"),))
    ended = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert ended.exit_code == 0
    return ended.stdout, json.loads((tmp_path / "doctor.json").read_text())


def test_links_that_work_are_shown_with_their_bandwidth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [Link(0, 1, 1000, 368.2, ""), Link(1, 0, 2000, 341.7, "")]
    out, document = with_links(monkeypatch, tmp_path, found)
    assert "368" in out
    assert "on the twin and on the GPU" in out
    assert document["links"][1]["gigabytes_per_second"] == 341.7
    assert document["gpu"][-1]["works"] is True
    for text in ("3 000 rounds", "on 2 in 1 s", "342 to 368 GB/s"):
        assert text in document["gpu"][-1]["found"]


def test_a_link_that_fails_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [Link(0, 1, 1000, 368.2, ""), Link(1, 0, 3, None, "the flag did not come; see [this]")]
    out, document = with_links(monkeypatch, tmp_path, found)
    assert "1 of 2 fail" in out
    assert "1 -> 0: the flag did not come; see [this]" in out
    assert "the GPU cannot be used" in out
    assert document["gpu"][-1]["works"] is False


def test_links_that_cannot_be_tried_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, document = with_links(monkeypatch, tmp_path, RuntimeError("NVRTC is missing: install it"))
    assert "NVRTC is missing: install it" in " ".join(out.split())
    assert document["links"] == []


def test_of_several_ranks_one_speaks() -> None:
    program = f"import sys; sys.argv[1:] = ['doctor']; {MOEOS}"
    ended = mpirun(2, program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("The twin: ranks") == 1
    assert "started by it" in ended.stdout
    assert 'layers run here with backend="twin"' in ended.stdout or "on the GPU" in ended.stdout


def as_if_there_were(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of these names, each of which measures the same; no probe takes long."""
    found = {"blocks": 132, "bf16_flops": 8e14, "fp8_flops": 1.4e15, "memory_bytes": 4e12}
    monkeypatch.setattr(probes, "TWIN", (lambda: Finding("the twin", True, ""),))
    monkeypatch.setattr(probes, "GPU", (lambda: Finding("GPU", True, ""),))
    monkeypatch.setattr(doctor.extras, "findings", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(doctor.machine, "gpus", lambda: names)
    monkeypatch.setattr(doctor.device_rates, "measure", lambda: dict(found))
    ends = list(itertools.permutations(range(len(names)), 2)) or [(0, 0)]
    tried = [Link(*pair, 10, 300.0 + pair[0], "") for pair in ends]
    monkeypatch.setattr(links, "try_local_links", lambda: tried)


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Result:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return CliRunner().invoke(app, ["doctor", "--measure", "--json", str(folder / "doctor.json")])


def test_measured_rates_are_kept_by_the_name_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_if_there_were(["NVIDIA H100", "NVIDIA H200", "NVIDIA H100"], monkeypatch)
    ended = measured(monkeypatch, tmp_path)
    assert ended.exit_code == 0, ended.output
    assert str(tmp_path / "moeos" / "device_rates.json") in ended.stdout
    kept = rates.measured_rates()
    assert json.loads((tmp_path / "doctor.json").read_text())["rates"] == kept
    assert set(kept) == {"NVIDIA H100", "NVIDIA H200"}
    assert set(kept["NVIDIA H100"]) == set(rates.MEASURABLE)
    assert kept["NVIDIA H100"]["link_bytes"] == 301e9  # of four links, two from each of its GPUs
    assert rates.rates_of("NVIDIA H100").bf16_flops == 8e14


def test_a_single_gpu_keeps_no_rate_of_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_if_there_were(["NVIDIA H100"], monkeypatch)
    assert measured(monkeypatch, tmp_path).exit_code == 0
    assert "link_bytes" not in rates.measured_rates()["NVIDIA H100"]
    assert rates.rates_of("NVIDIA H100").link_bytes == rates.H200.link_bytes


def test_nothing_is_measured_without_a_gpu_or_by_several_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = measured(monkeypatch, tmp_path)
    assert alone.exit_code == 3
    assert "PyTorch sees no GPU: leave it out" in alone.stderr
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    several = measured(monkeypatch, tmp_path)
    assert several.exit_code == 2
    assert "given to 2 ranks" in several.stderr
    assert "without a launcher" in several.stderr


def test_a_foreign_file_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_if_there_were(["NVIDIA H100"], monkeypatch)
    monkeypatch.setattr(doctor.device_rates, "measure", pytest.fail)
    (tmp_path / "moeos").mkdir()
    (tmp_path / "moeos" / "device_rates.json").write_text("not ours")
    ended = measured(monkeypatch, tmp_path)
    assert ended.exit_code == 2
    assert str(tmp_path / "moeos" / "device_rates.json") in ended.stderr
