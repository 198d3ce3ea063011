# SPDX-License-Identifier: Apache-2.0
"""Command lines of every kind of wrongness: done, or one line and a documented exit code.

The commands run in this process, for speed, and a few as users start them. Compilers and probes of
the machine are replaced: here it is their arguments that are wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moeos.cli.app import app
from moeos.cli.probes import Finding
from moeos.compile import jit, kernel_shape
from tests.fuzz.outcomes import ended_well, examples
from tests.fuzz.test_safetensors import SHAPES, file_of, header_of

CONFIG = """
hidden = 8
intermediate = 8
experts = 8
top_k = 1
dtype = "bfloat16"
max_tokens = 4
[run]
iterations = 1
"""
OPTIONS = {
    "run": (
        *("--tokens", "--iterations", "--routing", "--weights", "--prefix", "--input"),
        *("--input-text", "--deadline", "--backend", "--ranks", "--seed", "--json"),
        *("--check", "--no-check"),
    ),
    "plan": ("--ranks", "--tokens", "--json"),
    "compile": ("--arch", "--ranks", "--transport", "--json"),
    "doctor": ("--json",),
}
INTEGERS = ("0", "1", "2", "4", "8", "-1", "65", "9" * 23)
COUNTED = ("--tokens", "--iterations", "--deadline", "--ranks", "--seed")
FLAGS = ("--check", "--no-check", "--help")
NUMBERS = (
    *("0", "1", "2", "-1", "3", "5", "65", "1e3", "nan", "inf", "-inf", "0x10", "", " ", "1_0"),
    *("99999999999999999999999", "1" + "0" * 5000, "-0", "\u0661", "1e-320"),
)
WORDS = (
    *("uniform", "one-expert", "zipf:1.2", "zipf:nan", "zipf:", "empty-rank:1", "empty-rank:-1"),
    *("empty-rank:" + "9" * 5000, "zipf:1e400", "twin", "gpu", "auto", "sm_90a", "sm_80"),
    *("none", "mapped", "nvshmem", "experts", "a" * 3000, "\x1b[2J", "\udcff", "a\nb", "**/*"),
)
FILES = (
    *("layer.toml", "bad.toml", "block.safetensors", "bad.safetensors", "text", "empty", "absent"),
    *(
        "folder",
        "loop",
        "pipe",
        "no/file",
        ".",
        "",
        "/dev/zero",
        "/dev/null",
        "/dev/full",
        "x" * 300,
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with right and wrong files, under the names in FILES."""
    made = tmp_path_factory.mktemp("inputs")
    (made / "layer.toml").write_text(CONFIG)
    (made / "bad.toml").write_text(CONFIG.replace("hidden", "hiden"))
    whole = file_of(*header_of(SHAPES))
    (made / "block.safetensors").write_bytes(whole)
    (made / "bad.safetensors").write_bytes(whole[:-1])
    (made / "text").write_text("to be or not to be")
    (made / "empty").write_text("")
    (made / "folder").mkdir()
    (made / "loop").symlink_to("loop")
    os.mkfifo(made / "pipe")
    return made


@pytest.fixture(autouse=True)
def _without_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(shape: kernel_shape.KernelShape) -> None:
        jit.macros(shape)
        raise RuntimeError("no compiler for experts here")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("moeos.compile.jit.compile_kernel", compile_kernel)
    monkeypatch.setattr("moeos.cli.probes.GPU", ())
    monkeypatch.setattr("moeos.cli.probes.TWIN", (lambda: Finding("twin", True, "works"),))


def invoke(command: str, arguments: list[str], kind: str, names: list[str]) -> int:
    ended = CliRunner().invoke(app, [command, *arguments])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended_well(kind, ended.exit_code, ended.stderr, names)


def names_of(arguments: list[str]) -> list[str]:
    """What an error may name: an argument, in one line or as Python shows it, or an option's."""
    stems = [word.strip("-").rpartition("-")[2] for word in arguments if word.startswith("--")]
    words = [" ".join(word.split()) for word in arguments if word.strip()]
    given = [form for word in words for form in (word, ascii(word)[1:-1])]
    shortened = [word[:300] for word in given]
    paths = [str(Path(word)) for word in arguments]  # of "" it is "."
    # The config is there by itself, with its keys.
    return [*stems, *given, *shortened, *paths, "toml", "experts", "tokens", "top_k", "iterations"]


@st.composite
def arguments_of(draw: st.DrawFn, command: str) -> list[str]:
    """Mostly options that the command has, with values that mostly are of another kind."""
    known = OPTIONS[command]
    values = st.sampled_from([*NUMBERS, *WORDS, *FILES])
    arguments = []
    if command != "doctor":
        arguments = draw(st.sampled_from([["layer.toml"]] * 6 + [["bad.toml"], []]))
        arguments = arguments or [draw(values)]
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.sampled_from([*known, *known, *known, "--help", "--unknown", "-x", "--"]))
        if option == "--json":  # what it names is written
            arguments += [option, draw(st.sampled_from(["out", "folder", "no/file", "/dev/full"]))]
        elif option in FLAGS:
            arguments.append(option)
        else:
            likely = st.sampled_from(INTEGERS) if option in COUNTED else values
            arguments += [option, draw(st.one_of(likely, likely, values))]
    return arguments


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_random_arguments_are_done_or_refused_in_one_line(command: str) -> None:
    @examples({"doctor": 4, "run": 15}.get(command, 20))
    @given(arguments=arguments_of(command))
    def ends_well(arguments: list[str]) -> None:
        invoke(command, arguments, f"moeos {command}", names_of(arguments))

    ends_well()


@examples(20)
@given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4))
def test_random_words_are_no_command(words: list[str]) -> None:
    ended = CliRunner().invoke(app, ["?", *words])
    assert isinstance(ended.exception, SystemExit)
    assert ended_well("moeos, random words", ended.exit_code, ended.stderr, []) == 2


@pytest.mark.parametrize(
    ("command", "option", "value", "said"),
    [
        ("plan", "--ranks", "0", "--ranks is 0"),
        ("plan", "--ranks", "-3", "--ranks is -3"),
        ("plan", "--ranks", "9" * 30, "the world's size is 999"),
        ("plan", "--tokens", "9" * 30, "tokens is 999"),
        ("plan", "--json", "/dev/full", "/dev/full: No space left on device"),
        ("compile", "--ranks", "0", "--ranks is 0"),
        ("compile", "--transport", "x", "transport is 'x'"),
        ("compile", "--arch", "sm_80", "arch is 'sm_80'"),
        ("run", "--input-text", "/dev/zero", "/dev/zero: not a regular file"),
        ("run", "--input-text", "pipe", "pipe: not a regular file"),
        ("run", "--input", "pipe", "pipe: not a regular file"),
        ("run", "--weights", "bad.safetensors", "bad.safetensors: not a safetensors file"),
        ("run", "--seed", "9" * 30, "--seed is 999"),
        ("run", "--routing", "empty-rank:" + "9" * 5000, "--routing is 'empty-rank:999"),
        ("run", "--prefix", "\x1b[2J", "--prefix is '\\x1b[2J'"),
    ],
)
def test_a_bad_argument_is_named(command: str, option: str, value: str, said: str) -> None:
    transport = ["--transport", "mapped"] if command == "compile" else []
    ended = CliRunner().invoke(app, [command, "layer.toml", *transport, option, value])
    assert ended_well("moeos, one bad argument", ended.exit_code, ended.stderr, [said]) == 2


@pytest.mark.parametrize(("experts", "ranks"), [(1 << 16, 1), (1 << 14, 1 << 14)])
def test_the_largest_layers_are_planned_in_seconds(
    tmp_path: Path, experts: int, ranks: int
) -> None:
    path = tmp_path / "large.toml"
    path.write_text(f"hidden = 8\nintermediate = 8\nexperts = {experts}\ntop_k = 1\nmax_tokens = 1")
    invoke("plan", [str(path), "--ranks", str(ranks)], "moeos plan", [str(path)])


def test_a_document_that_a_pattern_repeats_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeos.cli.text.MAX_DOCUMENTS", 100)
    for name in "ab":
        (tmp_path / name).symlink_to(".")
    (tmp_path / "x.txt").write_text("x")
    pattern = str(tmp_path / "**" / "*.txt")
    assert invoke("run", ["layer.toml", "--input-text", pattern], "moeos run", ["pattern"]) == 2


def test_a_file_name_of_two_lines_is_told_in_one(tmp_path: Path) -> None:
    path = str(tmp_path / "a\nb\x1b.toml")
    assert invoke("plan", [path], "moeos plan", ["a b\\x1b.toml"]) == 2


@pytest.mark.nightly  # commands end as processes in tests/host/cli/test_app.py and test_streams.py
def test_processes_end_as_the_commands_do(folder: Path) -> None:
    (folder / "not-text-\udcff.toml").write_text(CONFIG)
    lines: list[tuple[list[Any], int]] = [
        (["plan", "not-text-\udcff.toml", "--ranks", "2"], 0),
        (["run", "layer.toml", "--weights", "bad.safetensors"], 2),
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "moeos.cli", *map(os.fsencode, arguments)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for arguments, _ in lines
    ]
    for process, (arguments, expected) in zip(started, lines, strict=True):
        err = process.communicate(timeout=100)[1].decode()
        assert ended_well("moeos, processes", process.returncode, err, names_of(arguments)) == (
            expected
        )
