# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's JSON says of where it comes from."""

from __future__ import annotations

import sys

import pytest

from moeos.cli.shared import provenance


def test_a_command_names_files_without_the_folders_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--out", "/somewhere/results.json", "configs/small.toml", "--tokens", "1,2"]
    arguments += ["old=/somewhere/else", "new=here", "--json=/somewhere/of.json"]
    monkeypatch.setattr(sys, "argv", ["started", *arguments])
    found = provenance.command("bench.gpu")
    words = "--out results.json configs/small.toml --tokens 1,2 old=else new=here --json=of.json"
    assert found == f"python -m bench.gpu {words}"
