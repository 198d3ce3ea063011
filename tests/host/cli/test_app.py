# SPDX-License-Identifier: Apache-2.0
"""The command `moeos` itself: its version, and the two ways to start it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import moeos
from moeos.cli.app import app
from tests import programs
from tests.processes import MOEOS, forked


def test_the_version_is_that_of_the_package() -> None:
    ended = CliRunner().invoke(app, ["--version"])
    assert (ended.exit_code, ended.stdout) == (0, f"moeos {moeos.__version__}\n")


def test_without_a_command_it_shows_its_help() -> None:
    shown = CliRunner().invoke(app, []).output
    assert "An expert-parallel Mixture-of-Experts layer" in shown
    for command in ("run", "plan", "doctor", "compile", "fuzz", "trace"):
        assert f"\n  {command} " in shown


@pytest.mark.parametrize("start", [["-c", MOEOS], ["-m", "moeos"]], ids=["script", "package"])
def test_the_script_and_the_package_start_the_same_command(start: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, *start, "--version"], capture_output=True, text=True, timeout=200
    )
    assert (ended.returncode, ended.stdout) == (0, f"moeos {moeos.__version__}\n")


def test_help_is_shown_once_by_all_ranks() -> None:
    ended = forked(2, MOEOS, "run", "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Usage: ") == 1


def test_help_is_shown_where_a_launchers_variables_make_no_sense() -> None:
    senseless = {"RANK": "1", "WORLD_SIZE": "many", "MASTER_ADDR": "here"}
    ended = programs.ended(MOEOS, "run", "--help", environment=senseless)
    assert ended.returncode == 0
    assert ended.stdout.count("Usage: ") == 1
