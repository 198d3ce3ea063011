# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: they parse, say how they are used, and set what they promise to set."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT

EXECUTABLE = [
    ROOT / "launch" / name
    for name in (
        "bench",
        "demo",
        "evaluate",
        "nightly",
        "test",
        "mpirun.sh",
        "straggler",
        "torchrun.sh",
        "train",
    )
]
EXECUTABLE.append(ROOT / ".ci" / "run")
SOURCED = [
    ROOT / "launch" / name
    for name in (
        "environment.sh",
        "install.sh",
        "ranks.sh",
        "slurm.sbatch",
        "slurm-gpu.sbatch",
        "straggler.sbatch",
    )
]


def environment_after(script: str, **variables: str) -> dict[str, str]:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{script}; env -0"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in ended.stdout.split("\0") if line)


@pytest.mark.parametrize("script", EXECUTABLE + SOURCED, ids=lambda path: path.name)
def test_a_script_is_valid_bash(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("script", EXECUTABLE, ids=lambda path: path.name)
def test_a_script_that_a_person_starts_is_executable_and_stops_at_its_first_error(
    script: Path,
) -> None:
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.parametrize("name", ["mpirun.sh", "torchrun.sh"])
def test_a_launcher_without_a_config_says_how_it_is_used(name: str) -> None:
    ended = subprocess.run(
        [ROOT / "launch" / name], cwd="/", capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert f"usage: [RANKS=4] launch/{name} CONFIG" in ended.stderr


@pytest.mark.parametrize("name", ["mpirun", "torchrun"])
def test_a_launcher_without_an_installation_names_what_makes_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for script in (f"{name}.sh", "environment.sh"):
        (tmp_path / "launch" / script).write_text((ROOT / "launch" / script).read_text())
    ended = subprocess.run(
        ["bash", tmp_path / "launch" / f"{name}.sh", "configs/demo.toml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == f"{tmp_path}/.venv has no {name} and moeos: run launch/demo first\n"


def test_the_benchmarks_usage_is_help_and_an_unknown_one_names_it() -> None:
    script = ROOT / "launch" / "bench"
    helped, unknown = (
        subprocess.run([script, word], cwd="/", capture_output=True, text=True, check=False)
        for word in ("--help", "tpu")
    )
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("usage: launch/bench twin")
    assert unknown.returncode != 0
    assert helped.stdout.strip() in unknown.stderr


def test_ranks_may_outnumber_cores_and_need_loopback_alone() -> None:
    environment = environment_after("source launch/environment.sh")
    assert environment["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert environment["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert environment["OMPI_MCA_btl"] == "self,tcp"
    assert environment["OMPI_MCA_btl_tcp_if_include"] == "127.0.0.0/8"
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("user", "allowed"), [("0", "1"), ("1000", None)])
def test_only_root_tells_mpirun_that_root_is_meant(user: str, allowed: str | None) -> None:
    environment = environment_after(f"id() {{ echo {user}; }}; source launch/environment.sh")
    assert environment.get("OMPI_ALLOW_RUN_AS_ROOT") == allowed
    assert environment.get("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == allowed


def test_what_the_caller_has_set_is_kept() -> None:
    environment = environment_after(
        "source launch/environment.sh", OMP_NUM_THREADS="3", OMPI_MCA_btl="self,sm"
    )
    assert (environment["OMP_NUM_THREADS"], environment["OMPI_MCA_btl"]) == ("3", "self,sm")


def test_nothing_is_installed_again_until_a_source_changes(tmp_path: Path) -> None:
    for folder in ("launch", "runtime", "kernels", "host", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[build-system]\nrequires = ["builder>=1"]\n')
    (tmp_path / "CMakeLists.txt").touch()
    (tmp_path / "runtime" / "task.hpp").write_text("first")
    script = tmp_path / "launch" / "install.sh"
    script.write_text((ROOT / "launch" / "install.sh").read_text())
    # A Python whose pip writes down what it is asked for.
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        '#!/usr/bin/env bash\nif [[ "$*" == "-m pip "*install* ]]; then echo "$@" >>"$LOG"\n'
        'elif [[ "$*" != "-m pip --version" ]]; then exec python3 "$@"; fi\n'
    )
    python.chmod(0o755)
    log = tmp_path / "log"

    def installs(extra: str) -> list[str]:
        log.write_text("")
        environment_after(f"source {script}; install_moeos {extra}", LOG=str(log))
        return log.read_text().splitlines()

    first = installs("test")
    assert first[-2].endswith("install builder>=1")
    assert first[-1].endswith(f"--no-build-isolation --editable {tmp_path}[test]")
    assert installs("test") == []
    assert installs("run") == []
    (tmp_path / "runtime" / "task.hpp").write_text("second")
    assert installs("run")[-1].endswith(f"--no-build-isolation --editable {tmp_path}")
    assert installs("run") == []
    assert installs("test")[-1].endswith("[test]")


@pytest.mark.parametrize(
    ("launcher", "also", "extras"),
    [("mpirun", "", ["mpi"]), ("mpirun", "plots", ["mpi", "plots"]), ("torchrun", "", [])],
)
def test_ranks_install_what_their_launcher_and_their_script_need(
    launcher: str, also: str, extras: list[str]
) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        extras = ["cuda", *extras]
    # An installer that says what it is asked for and ends there.
    installs = 'install_moeos() { echo "asked for $1" >&2; exit 7; }'
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source launch/ranks.sh; {installs}; run_on_ranks x"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LAUNCHER": launcher, "also": also},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.strip()) == (
        7,
        f"asked for {','.join(extras) or 'run'}",
    )
