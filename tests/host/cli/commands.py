# SPDX-License-Identifier: Apache-2.0
"""Runs a command of `moeos` in this process, as its tests see it."""

from __future__ import annotations

from typer.testing import CliRunner

from moeos.cli.app import app


def invoke(command: str, *arguments: object) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `moeos COMMAND ARGUMENTS`; what it raises is raised."""
    ended = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.stdout, ended.stderr
