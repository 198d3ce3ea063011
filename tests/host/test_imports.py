# SPDX-License-Identifier: Apache-2.0
"""Every module can be the first that a program imports; and who imports whom has an order.

And the command imports nothing that takes long and that one of its subcommands alone needs.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import moeos

# Each in a process of its own, forked where only the package itself has been imported, as it is
# before any of its modules.
PROGRAM = """
import gc, importlib, os, sys, traceback
gc.disable()  # each child would write to all that has been imported
import matplotlib, mpi4py, moeos, rich, torch, typer
assert "elftools" not in sys.modules, "moeos itself imports what reads machine code"

def imported(name, without=None):
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
            assert without not in sys.modules, f"{name} imports {without}"
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0

assert imported("moeos.cli.app", without="sympy")
# What many of them import of others, once; and behind it what takes long and few import, whose
# memory each fork would have to map.
import elftools.elf.elffile, pdb, rich.console, rich.table, rich.text, typer.main
names = sys.argv[1:]
few = [one for one in names if one.startswith(("moeos.integrations.", "moeos.bench.studies."))]
wrong = [one for one in names if one not in few and not imported(one)]
import torch._inductor.compile_fx, transformers.integrations.finegrained_fp8
print(*wrong, *[one for one in few if not imported(one)])
"""


NEED_THEIR_LIBRARY = {
    f"moeos.integrations.{name}"
    for name in ("vllm", "vllm_experts", "vllm_formats", "sglang", "torchtitan")
}
"""Adapters whose library is not installed beside moeos: tests/integrations/test_missing.py."""


def test_no_module_needs_another_one_to_be_imported_before_it() -> None:
    root = Path(moeos.__file__).parent
    names = [
        ".".join(("moeos", *file.relative_to(root).with_suffix("").parts))
        for file in sorted(root.rglob("*.py"))
        if file.stem != "__main__"
    ]
    names = [name.removesuffix(".__init__") for name in names]
    assert "moeos.bench.gpu.suite" in names
    names = [name for name in names if name not in NEED_THEIR_LIBRARY]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, timeout=240
    )
    assert ended.stdout.split() == [], ended.stderr
    assert ended.returncode == 0, ended.stderr


BELOW = {
    "commands": ("cli", "bench"),
    "bench": ("cli",),
    "language": ("cli", "bench", "commands"),
    "bench/gpu": ("bench.report", "bench.twin", "bench.studies"),
    "bench/report": ("bench.twin", "bench.studies"),
    "bench/twin": ("bench.gpu", "bench.studies"),
    "bench/studies": ("bench.twin",),
}
"""Folders of the package, and what nothing in them may import."""


@pytest.mark.parametrize("folder", BELOW)
def test_no_folder_imports_what_stands_above_it(folder: str) -> None:
    root = Path(moeos.__file__).parent
    above = re.compile(rf"^ *(?:from|import) moeos\.({'|'.join(BELOW[folder])})\b", re.MULTILINE)
    files = sorted((root / folder).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(root)): wrong
        for file in files
        if (wrong := above.findall(file.read_text(encoding="utf-8")))
    }
    assert found == {}
