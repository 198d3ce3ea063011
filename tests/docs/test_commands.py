# SPDX-License-Identifier: Apache-2.0
"""Every command that README.md and docs/ show in a block of shell runs here, or has an excuse.

It runs on the twin, in a copy of what users have before them. This file knows nothing of what
commands print, except on the pages of GUIDES.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host.cli import commands
from tests.processes import ROOT

TESTED_ELSEWHERE = {"docs/tracing.md": "tests/host/cli/test_trace.py compares what they print"}
"""Pages whose commands another test runs."""

GUIDES = ("docs/sizing.md", "docs/counts.md")
"""Pages of which nothing depends on the machine or the time. So their Python programs run as well,
each with what the ones before it defined; a block of text is what the command or program before
it printed, or a part of that; and a block of TOML is the file that its first line names."""

EXCUSED = {
    "pip install '.[vllm]'": "installs, in an environment of its own",
    "pip install '.[sglang]'": "installs, in an environment of its own",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B "
    "--moe-runner-backend moeos": "needs SGLang and a model",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B "
    "--moe-runner-backend moeos --tp-size 8 --ep-size 8": "needs SGLang, a model and GPUs",
    "pip install '.[torchtitan]'": "installs, in an environment of its own",
    "pip install '.[transformers]'": "installs",
    "--override.imports moeos.integrations.torchtitan.routed_experts": "an argument of torchtitan",
    "--override.imports 'moeos.integrations.torchtitan.routed_experts="
    '{"max_tokens": 16384}\'': "an argument of torchtitan",
    "vllm serve Qwen/Qwen3-30B-A3B --quantization moeos": "needs vLLM and a model",
    "vllm serve Qwen/Qwen3-30B-A3B --quantization moeos --tensor-parallel-size 8 "
    "--enable-expert-parallel": "needs vLLM, a model and GPUs",
    "vllm serve Qwen/Qwen3-30B-A3B --quantization moeos --data-parallel-size 8 "
    "--enable-expert-parallel": "needs vLLM, a model and GPUs",
    "./launch/demo": "installs, and starts mpirun",
    "./launch/test": "installs, and runs all tests",
    "launch/test tests/host/layer/test_layer.py -k 'test_activations and relu' "
    "--numprocesses 0": "installs, and runs tests",
    "launch/train": "installs, and takes a minute: tests/launch/test_train.py trains",
    "RANKS=2 LAUNCHER=torchrun launch/train --steps 60 --save build/run": "installs",
    "launch/train --steps 100 --resume build/run --save build/run --save-every 20": "installs",
    "launch/bench twin": "installs, and takes minutes",
    "launch/bench gpu --out results.json": "needs a GPU",
    "mkdir plots": "makes room for the plots of the next",
    "RANKS=4 launch/straggler configs/twin-bench.toml --out study.json --plot plots": "installs, "
    "and takes minutes",
    "sbatch --nodes=2 --ntasks=8 launch/straggler.sbatch configs/qwen3-30b-a3b.toml "
    "--out study.json --tokens 2048": "needs a cluster",
    "mkdir -p results/evaluation": "makes room for the results of the next",
    "RANKS=4 launch/evaluate --out results/evaluation/evaluation-cuda-4.json": "installs, "
    "and needs GPUs",
    "python -m bench.report results/evaluation/evaluation-cuda-4.json "
    "--document docs/evaluation.md": "needs the results of GPUs",
    "pip install '.[cuda]'": "installs, for a GPU",
    "mpirun -n 4 python -m tests.gpu.multi": "needs four GPUs",
    "moeos run layer.toml --weights model --prefix model.layers.3.mlp": (
        "tests/host/cli/test_run_checkpoint.py runs it on a small model"
    ),
    "torchrun --nproc-per-node 4 -m moeos.cli trace configs/qwen3-30b-a3b.toml "
    "--backend cuda --tokens 2048": "needs four GPUs",
}
"""Commands that do not run here, and why."""

PAGES = sorted(
    name
    for name in ("README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
    if name not in TESTED_ELSEWHERE
)


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The language and the content of each fenced block that names its language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands_of(block: str) -> list[list[str]]:
    """The words of each command of a block of shell, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def executed(words: list[str]) -> str:
    """What a command prints; it must end well."""
    match words:
        case ["moeos", *arguments]:
            code, out, err = commands.invoke(*arguments)
        case ["python", "-m", *_]:
            ended = subprocess.run(
                [sys.executable, *words[1:]],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                timeout=200,
                check=False,
            )
            code, out, err = ended.returncode, ended.stdout, ended.stderr
        case _:
            pytest.fail(f"{shlex.join(words)!r} cannot be run here: give the reason in EXCUSED")
    assert code == 0, f"{shlex.join(words)}: {err}"
    return out


@pytest.fixture
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder like the repository's root, in which commands may write."""
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("page", PAGES)
def test_a_pages_commands_run_or_are_excused(page: str) -> None:
    shown, defined = "", dict[str, object]()
    for language, content in blocks_of(page):
        if language == "sh":
            for words in commands_of(content):
                shown = "" if shlex.join(words) in EXCUSED else executed(words)
        elif page in GUIDES and language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(content, page, "exec"), defined)
            shown = out.getvalue()
        elif page in GUIDES and language == "toml":
            Path(content.splitlines()[0].removeprefix("# ")).write_text(content)
        elif page in GUIDES and language == "text":
            assert content in shown


def test_there_is_no_excuse_that_no_page_needs() -> None:
    shown = {
        shlex.join(words)
        for page in PAGES
        for language, content in blocks_of(page)
        if language == "sh"
        for words in commands_of(content)
    }
    assert set(EXCUSED) <= shown


def test_a_command_that_is_neither_run_nor_excused_is_noticed() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"'mpirun -n 2 moeos run' cannot be run"):
        executed(["mpirun", "-n", "2", "moeos", "run"])


def test_a_command_that_fails_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"moeos plan missing\.toml"):
        executed(["moeos", "plan", "missing.toml"])


@pytest.mark.usefixtures("_checkout")
def test_a_module_runs_as_a_command() -> None:
    # Of nothing that depends on how a GPU's work is cut: this process may have been told otherwise.
    arguments = ["--version"]
    assert executed(["python", "-m", "moeos.cli", *arguments]) == executed(["moeos", *arguments])
