# SPDX-License-Identifier: Apache-2.0
"""The table [run]: what it may say, and what is said about everything else."""

from pathlib import Path

import pytest

from moeos.cli.shared.settings import RunSettings, read_settings


def settings(folder: Path, text: str) -> RunSettings:
    path = folder / "layer.toml"
    path.write_text(text)
    return read_settings(path)


def test_all_keys_of_the_table_are_read(tmp_path: Path) -> None:
    read = settings(
        tmp_path, 'hidden = 8\n[run]\ntokens = 3\niterations = 4\nvary_tokens = true\ntext = ["a"]'
    )
    assert read == RunSettings(tokens=3, iterations=4, vary_tokens=True, text=("a",))


def test_a_config_without_the_table_has_the_defaults(tmp_path: Path) -> None:
    assert settings(tmp_path, "hidden = 8") == RunSettings()


def test_an_unknown_key_is_refused_with_the_nearest_valid_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'token' in \[run\].*'tokens'"):
        settings(tmp_path, "[run]\ntoken = 3")


@pytest.mark.parametrize("line", ["tokens = true", "iterations = 2.0", 'text = "a"', "text = [1]"])
def test_a_value_of_another_type_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(TypeError, match=line.partition(" ")[0]):
        settings(tmp_path, f"[run]\n{line}")
