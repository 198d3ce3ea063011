# SPDX-License-Identifier: Apache-2.0
"""Every module can be the first that a program imports; and who imports whom has an order.

And the command imports nothing that takes long and that one of its subcommands alone needs.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import moeos
from tests import programs
from tests.processes import ROOT

# Each in a process of its own, forked where only the package itself has been imported, as it is
# before any of its modules.
PROGRAM = """
import gc, importlib, os, sys, traceback
gc.disable()  # each child would write to all that has been imported
import matplotlib, mpi4py, moeos, rich, torch, typer

def imported(name):
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0

# What many of them import of others, once; and behind it what takes long and few import, whose
# memory each fork would have to map.
import elftools.elf.elffile, pdb, rich.console, rich.table, rich.text, typer.main
names = sys.argv[1:]
few = [one for one in names if one.startswith("moeos.integrations.")]
wrong = [one for one in names if one not in few and not imported(one)]
import torch._inductor.compile_fx, transformers.integrations.finegrained_fp8
print(*wrong, *[one for one in few if not imported(one)])
"""


NEED_THEIR_LIBRARY = {
    f"moeos.integrations.{name}"
    for name in ("vllm", "vllm_experts", "vllm_quantized", "sglang", "torchtitan")
}
"""Adapters whose library is not installed beside moeos: tests/integrations/test_missing.py."""


def modules() -> dict[str, Path]:
    """The files of the package by the names of their modules."""
    root = Path(moeos.__file__).parent
    found = {
        ".".join(("moeos", *file.relative_to(root).with_suffix("").parts)): file
        for file in sorted(root.rglob("*.py"))
        if file.stem != "__main__"
    }
    assert "moeos.cli.app" in found
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that run as it is imported."""
    for one in body:
        if isinstance(one, (ast.Import, ast.ImportFrom)):
            yield one
        elif not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            typed = isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)
            parts = ("orelse",) if typed else ("body", "orelse", "finalbody", "handlers")
            for part in parts:
                yield from run_at_import(getattr(one, part, []))


def folders_of(name: str) -> list[str]:
    """The packages that a module lies in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def imports_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Of each of these modules, those of them that it imports, and the packages that it lies in."""
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        named = [name]
        for one in run_at_import(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(one, ast.Import):
                named += [alias.name for alias in one.names]
            else:
                assert one.module is not None
                named += [one.module, *(f"{one.module}.{alias.name}" for alias in one.names)]
        every = {part for one in named for part in (*folders_of(one), one)}
        found[name] = (every & files.keys()) - {name}
    return found


def in_circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other, if any do.

    What a package imports of itself is one with it: nobody has one of these before the package,
    which has all of them in an order of its own.
    """

    def reached(name: str) -> set[str]:
        found, more = set(), [name]
        while more:
            one = more.pop()
            if one not in found:
                found.add(one)
                more += imports[one]
        return found

    packages = {package for name in imports for package in folders_of(name)}
    with_all = {package: reached(package) for package in packages}

    def as_one(name: str) -> str:
        return next((one for one in folders_of(name) if name in with_all[one]), name)

    joined: dict[str, set[str]] = {}
    for name, others in imports.items():
        joined.setdefault(as_one(name), set()).update(map(as_one, others))
    sorter = graphlib.TopologicalSorter({one: of - {one} for one, of in joined.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """So each can be the first; mypy tells of what is used and not imported."""
    imports = imports_of(modules())
    assert (
        "moeos.compile.jit"
        in imports["moeos.compile.kernel_cache"] | imports["moeos.engines.cuda.engine"]
    )
    assert in_circles(imports) == []


def test_modules_that_import_each_other_are_noticed(tmp_path: Path) -> None:
    texts = {
        "moeos": "import moeos.first",
        "moeos.first": "from moeos import second",  # as the package does, which comes before both
        "moeos.second": "from moeos import first",
        "moeos.others": "",
        "moeos.others.one": "def later():\n    from moeos.others import two",
        "moeos.others.two": "from moeos.others.one import later",
    }
    files = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    assert in_circles(imports_of(files)) == []
    files["moeos.others.one"].write_text("try:\n    from moeos.others import two\nfinally: ...")
    assert {"moeos.others.one", "moeos.others.two"} <= {*in_circles(imports_of(files))}


LIGHT = """
import sys, moeos
assert "elftools" not in sys.modules, "moeos itself imports what reads machine code"
import moeos.cli.app
assert "sympy" not in sys.modules, "moeos.cli.app imports sympy"
"""


def test_the_command_imports_nothing_that_takes_long() -> None:
    ended = programs.ended(LIGHT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.nightly  # in every run no modules import each other
def test_no_module_needs_another_one_to_be_imported_before_it() -> None:
    names = [name for name in modules() if name not in NEED_THEIR_LIBRARY]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, timeout=240
    )
    assert ended.stdout.split() == [], ended.stderr
    assert ended.returncode == 0, ended.stderr


BELOW = {
    "host/moeos/cli/shared": r"moeos\.cli\.(?!shared\b)",
    "host/moeos/cli/timeline": r"moeos\.cli\.(?!shared\b|timeline\b|drawing\b)",
    "bench/gpu": r"bench\.(report|study|studies|twin)\b",
    "bench/report": r"bench\.(gpu|study|studies|twin)\b",
    "bench/studies": r"bench\.twin\b",
}
"""Folders, and what nothing in them may import; the floors of rooms are in pyproject.toml."""


@pytest.mark.parametrize("folder", BELOW)
def test_no_folder_imports_what_stands_above_it(folder: str) -> None:
    above = re.compile(rf"^ *(?:from|import) {BELOW[folder]}", re.MULTILINE)
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): wrong
        for file in files
        if (wrong := above.findall(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_what_the_package_offers_is_used_by_its_users_alone() -> None:
    """A room that took a name from there would have it from a room above it."""
    taken = re.compile(
        r"^ *(?:from moeos import (?!_runtime|_twin|checkpoints\b)|import moeos$).*", re.MULTILINE
    )
    found = {
        name: wrong
        for name, file in modules().items()
        if not name.startswith(("moeos.cli", "moeos.integrations"))
        and name != "moeos"
        and (wrong := taken.findall(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_late_import_says_which_cost_it_saves() -> None:
    """Elsewhere an import in a function hides a circle."""
    found = []
    for name, file in modules().items():
        text = file.read_text(encoding="utf-8")
        inside = [
            one
            for function in ast.walk(ast.parse(text))
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for one in ast.walk(function)
        ]
        for one in inside:
            named = [alias.name for alias in one.names] if isinstance(one, ast.Import) else []
            named += [str(one.module)] if isinstance(one, ast.ImportFrom) else []
            if any(module.split(".")[0] == "moeos" for module in named):
                line = text.splitlines()[one.lineno - 1]
                found += [] if "  # spares " in line else [f"{name}: {line}"]
    assert found == []
