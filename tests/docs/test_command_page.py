# SPDX-License-Identifier: Apache-2.0
"""docs/command.md names every command, every key of [run] with its default, and every exit code."""

from __future__ import annotations

import dataclasses
import re

from moeos.cli.app import app
from moeos.cli.shared import failures
from moeos.cli.shared.settings import RunSettings
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")


def test_every_command_is_there() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert set(re.findall(r"^\| `moeos (\w+)", PAGE, re.MULTILINE)) == names


def test_every_key_of_the_table_run_is_there_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [\w ]+ \| ([^|]*) \|", PAGE, re.MULTILINE)
    shown = dict(rows)
    assert set(shown) == {field.name for field in dataclasses.fields(RunSettings)}
    assert shown["iterations"] == str(RunSettings().iterations)


def test_every_exit_code_is_there() -> None:
    codes = set(map(int, re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)))
    assert codes == {
        failures.DONE,
        failures.ABOVE_TOLERANCE,
        failures.DOES_NOT_FIT,
        failures.BAD_INPUT,
        failures.FAILURE,
    }
