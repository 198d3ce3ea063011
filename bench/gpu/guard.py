# SPDX-License-Identifier: Apache-2.0
"""Is this tree slower than another one? Twelve cases on one GPU, both trees in turn.

    launch/bench guard --base COMMIT [--out FILE]

Forward calls in BF16, FP8 and 4 bits, backward calls, and calls of virtual ranks, 1 to 8192 tokens
(`guard_worker.CASES`). Each tree is installed into a folder of its own and runs in a process of its
own, with the host code that belongs to its kernels; work that the GPU does before each call hides
what the host costs. In each round both trees make some calls, and they take turns in beginning; a
case's number is the median of the rounds' ratios. A case beyond the limit is timed once more, in
twice as many rounds, before it counts. Exit code 1: a case is slower by more than the limit, or
failed. Must not depend on the package of either tree.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT = 0.01
"""The fraction by which a case may be slower."""
ROUNDS = 16
_WORKER = Path(__file__).with_name("guard_worker.py")
_HERE = "this"
_BASE = "base"


class Worker:
    """A tree's process, which makes calls when it is asked to."""

    def __init__(self, packages: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), "serve"],
            env=_environment(packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises `RuntimeError` for one that failed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="launch/bench guard", description=__doc__)
    parser.add_argument("--base", required=True, help="a commit, or a folder with its tree")
    parser.add_argument("--tree", type=Path, default=Path(), help="the tree to judge")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cases", default="", help="names, comma between; all by default")
    asked = parser.parse_args()
    names = [name for name in asked.cases.split(",") if name] or case_names()
    with tempfile.TemporaryDirectory() as folder:
        trees = {_BASE: base_tree(asked.base, asked.tree, Path(folder)), _HERE: asked.tree}
        packages = install(trees, Path(folder))
        warm(packages, names)
        workers = {name: Worker(where) for name, where in packages.items()}
        try:
            found = {name: measure(name, workers, asked.rounds) for name in names}
        finally:
            for worker in workers.values():
                worker.close()
    failed = [name for name, case in found.items() if is_slower(case)]
    if asked.out is not None:
        document = {
            "benchmark": "guard-1",
            "command": shlex.join(["launch/bench", "guard", "--base", asked.base]),
            "commit": commit(asked.tree),
            "base": asked.base,
            "machine": machine(),
            "rounds": asked.rounds,
            "limit": LIMIT,
            "cases": found,
        }
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    said = f"slower or failed: {', '.join(failed)}" if failed else "no case is slower"
    print(f"{len(names)} cases, limit {LIMIT:.0%}: {said}")
    return 1 if failed else 0


def is_slower(case: Mapping[str, Any]) -> bool:
    """Whether a case failed, or this tree takes longer than the limit allows."""
    return "error" in case or case["ratio"] > 1 + LIMIT


def case_names() -> list[str]:
    """The names of all cases. They are read from the worker's text: importing it imports moeos."""
    names: list[str] = []
    inside = False
    for line in _WORKER.read_text(encoding="utf-8").splitlines():
        inside = inside or line.startswith("CASES")
        if inside and line.startswith('    "'):
            names.append(line.split('"')[1])
        elif inside and line.startswith("}"):
            break
    return names


def base_tree(base: str, tree: Path, folder: Path) -> Path:
    """The tree to compare with: a folder as it is, or a commit's files in one of their own."""
    if Path(base).is_dir():
        return Path(base)
    packed = subprocess.run(
        ["git", "-C", str(tree), "archive", base], capture_output=True, check=True
    ).stdout
    into = folder / "tree"
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(into, filter="data")
    return into


def install(trees: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Folders that have the trees' packages, without what they depend on."""

    def one(name: str, tree: Path) -> Path:
        into = folder / f"packages-{name}"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        how = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(into)]
        build = f"--config-settings=build-dir={folder / f'build-{name}'}"
        subprocess.run([*pip, *how, build, str(tree.absolute())], check=True, cwd=folder)
        return into

    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = {name: pool.submit(one, name, tree) for name, tree in trees.items()}
        return {name: future.result() for name, future in made.items()}


def warm(packages: Mapping[str, Path], names: list[str]) -> None:
    """Compiles all kernels side by side: a process for each case and tree. What fails here fails
    again, and is said, where it is timed."""

    def one(where: Path, name: str) -> None:
        command = [sys.executable, str(_WORKER), "warm", name]
        subprocess.run(command, env=_environment(where), capture_output=True, timeout=400)

    jobs = [(where, name) for name in names for where in packages.values()]
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        list(pool.map(lambda job: one(*job), jobs))


def measure(name: str, workers: Mapping[str, Worker], rounds: int) -> dict[str, Any]:
    """A case's times, medians in seconds, and their ratio; or what went wrong."""
    try:
        for worker in workers.values():
            worker.ask(make=name)
        calls = calls_of_turn(workers[_BASE])
        found = _rounds(workers, rounds, calls)
        if found["ratio"] > 1 + LIMIT:
            found = {**_rounds(workers, 2 * rounds, calls), "first_ratio": found["ratio"]}
        for worker in workers.values():
            worker.ask(drop=name)
    except RuntimeError as error:
        print(f"{name}: {error}", flush=True)
        return {"error": str(error)}
    print(
        f"{name:16} {found[_BASE] * 1e6:10.1f} {found[_HERE] * 1e6:10.1f} us  "
        f"{found['ratio'] - 1:+.2%}",
        flush=True,
    )
    return found


def calls_of_turn(worker: Worker) -> int:
    """The number of calls that take some 20 ms."""
    one = min(worker.ask(time=4)["times"])
    return max(2, min(64, int(0.02 / one)))


def _rounds(workers: Mapping[str, Worker], rounds: int, calls: int) -> dict[str, Any]:
    medians: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for turn in range(rounds + 1):
        for name in names if turn % 2 == 0 else names[::-1]:
            times = workers[name].ask(time=calls)["times"]
            if turn > 0:  # the first warms up
                medians[name].append(statistics.median(times))
    ratios = [mine / its for mine, its in zip(medians[_HERE], medians[_BASE], strict=True)]
    return {name: statistics.median(of) for name, of in medians.items()} | {
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def commit(tree: Path) -> str | None:
    """The tree's commit; None outside of git."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None


def machine() -> dict[str, str]:
    """The GPU and the versions that matter."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def _environment(packages: Path) -> dict[str, str]:
    found = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


if __name__ == "__main__":
    sys.exit(main())
