# SPDX-License-Identifier: Apache-2.0
"""Where results come from: the commit and the command, as every benchmark's JSON records them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def commit(folder: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """The commit of a source tree, of this one unless said, and which files differ from it; None
    outside of git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return ended.stdout.strip()

    try:
        changed = git("diff", "--name-only", "HEAD").splitlines()
        return {"id": git("rev-parse", "HEAD"), "changed_files": changed}
    except (OSError, subprocess.SubprocessError):
        return None


def command(module: str) -> str:
    """The command line of this process, which runs a module; absolute paths, also after a "=",
    become file names, since folders depend on the machine.
    """
    return shlex.join(["python", "-m", module, *map(_without_folders, sys.argv[1:])])


def _without_folders(word: str) -> str:
    name, equals, value = word.rpartition("=")
    return name + equals + Path(value).name if Path(value).is_absolute() else word


def source(found: dict[str, Any] | None) -> str:
    """A commit in words."""
    if found is None:
        return "an unknown commit"
    changes = " with changes" if found["changed_files"] else ""
    return f"commit {found['id'][:12]}{changes}"
