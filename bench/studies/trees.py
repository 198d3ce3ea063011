# SPDX-License-Identifier: Apache-2.0
"""Times whole trees of moeos against each other, in turn, on the same GPUs.

    python -m bench.studies.trees --out FILE --shapes A,B --tokens 1,2048 NAME=FOLDER ...

Each FOLDER has an installed moeos (`pip install --target FOLDER .` in a checkout of it); the first
is what the others are compared with. `bench.studies.variants` times kernels that take the
same arguments, in one process. Here each tree has processes of its own, one a GPU, which stay for
the whole run; so any two commits can be compared. All trees are told the same layers and token
counts, one call's time after the other's. It knows nothing of what a tree consists of.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.gpu import suite
from bench.gpu.in_turn import FLUSHED_TOKENS
from bench.gpu.one_rank import describe
from bench.studies import variants
from moeos.cli.shared import failures, machine, output, provenance
from moeos.config.config import MoEConfig

_RANK = Path(__file__).with_name("tree_rank.py")
_COMPILING = 480.0  # seconds for one kernel
_ANSWERING = 300.0  # seconds for one order, the making of a layer included
_ENDING = 60.0  # seconds in which processes leave
_TIMED = 10  # calls of one turn


class Tree:
    """The processes of one tree, one a GPU. A context manager: leaving it ends them."""

    def __init__(self, name: str, folder: Path, ranks: int) -> None:
        self.name = name
        port, meeting = free_ports(2)
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(_RANK), str(meeting)],
                env=environment(folder)
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
                | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:  # all, before one is awaited: they leave together
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, **order: Any) -> Any:
        """Gives all ranks an order; rank 0's answer.

        Raises `RuntimeError` if a rank ends or does not answer in time.
        """
        for process in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended; the answer that lacks says so
                process.stdin.write(json.dumps(order) + "\n")
        answers = [self._answer(rank) for rank in range(len(self._ranks))]
        return answers[0]

    def _answer(self, rank: int) -> Any:
        stdout = self._ranks[rank].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            line = stdout.readline() if selector.select(_ANSWERING) else ""
        if not line:
            raise RuntimeError(
                f"rank {rank} of the tree {self.name} gave no answer within {_ANSWERING:.0f} s; "
                "its own output above says why"
            )
        return json.loads(line)["answer"]


def main(
    trees: Annotated[list[str], typer.Argument(help="NAME=FOLDER, the one to compare with first")],
    out: Annotated[Path, typer.Option(help="Where the results go.")],
    shapes: Annotated[str, typer.Option(help="Shapes of the suite, comma between.")] = "",
    tokens: Annotated[str, typer.Option(help="Token counts, comma between; any.")] = "1,2048",
    ranks: Annotated[int, typer.Option(help="GPUs; all by default.")] = 0,
    suite_file: Annotated[Path, typer.Option("--suite", help="TOML file of the suite.")] = Path(
        "configs/suites/gpu.toml"
    ),
    turns: Annotated[int, typer.Option(help=f"Turns of a tree, of {_TIMED} calls each.")] = 5,
) -> None:
    """Times whole trees of moeos against each other, in turn."""

    def command() -> int:
        folders = parse_trees(trees)
        output.check_writable(out, "--out")
        size = ranks or torch.cuda.device_count()
        names = tuple(name for name in shapes.split(",") if name)
        layers = variants.layers_for(
            suite.read(suite_file).only(names, ()), suite.token_counts(tokens), size
        )
        results: list[dict[str, Any]] = []
        document = {
            "benchmark": "trees-1",
            **describe(provenance.command("bench.studies.trees"), size),
            "commit": provenance.commit(),
            "trees": list(folders),
            "turns": turns,
            "calls_of_a_turn": _TIMED,
            "results": results,
        }
        with tempfile.TemporaryDirectory() as scratch:
            files = write_layers([cfg for _, cfg, _ in layers], Path(scratch))
            compile_all(files, folders, size)
            with contextlib.ExitStack() as stack:
                started = [
                    stack.enter_context(Tree(name, folder, size))
                    for name, folder in folders.items()
                ]
                for (shape, cfg, counts), file in zip(layers, files, strict=True):
                    for tree in started:
                        tree.ask(layer=str(file))
                    for count in counts:
                        of = measure(started, count, turns)
                        results.append(
                            {"shape": shape, "tokens": count, "max_tokens": cfg.max_tokens, **of}
                        )
                        print(line(results[-1]), flush=True)
                        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return failures.DONE

    failures.finish(command)


def free_ports(count: int) -> list[int]:
    """So many TCP ports of this host that nobody has."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def parse_trees(texts: list[str]) -> dict[str, Path]:
    """NAME=FOLDER each.

    Raises `ValueError` as `variants.parse_folders` does, and for a folder without moeos.
    """
    found = variants.parse_folders("tree", texts)
    for name, folder in found.items():
        if not (folder / "moeos" / "__init__.py").is_file():
            raise ValueError(
                f"the tree {name}: {folder} has no moeos; `pip install --target` puts it there"
            )
    return found


def environment(folder: Path) -> dict[str, str]:
    """Variables with which Python imports the moeos in a folder."""
    return os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def write_layers(layers: list[MoEConfig], folder: Path) -> list[Path]:
    """A TOML file for each layer, of what is not the default; older trees know no newer field."""
    files: list[Path] = []
    for cfg in layers:
        fields = {
            field.name: getattr(cfg, field.name)
            for field in dataclasses.fields(cfg)
            if getattr(cfg, field.name) != field.default
        }
        files.append(folder / f"layer{len(files)}.toml")
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
        files[-1].write_text(text, encoding="utf-8")
    return files


def compile_all(files: list[Path], folders: Mapping[str, Path], ranks: int) -> None:
    """Compiles every layer's kernel of every tree, side by side.

    Raises `RuntimeError` with what the first that fails says.
    """

    def compile_one(file: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "moeos.cli", "compile", str(file), "--ranks", str(ranks)]
        ended = subprocess.run(
            command,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=_COMPILING,
            check=False,
        )
        if ended.returncode not in (failures.DONE, failures.LOST_REGISTERS):
            raise RuntimeError(f"{file.name} of {folder.name}: {ended.stderr.strip()}")

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
        for done in [
            pool.submit(compile_one, file, folder) for file in files for folder in folders.values()
        ]:
            done.result()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)


def measure(trees: list[Tree], tokens: int, turns: int) -> dict[str, Any]:
    """The medians of all trees' turns, in seconds, and how far the others are from the first."""
    times: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for turn in range(turns):
        first = turn % len(trees)  # nobody always follows the same one
        for tree in trees[first:] + trees[:first]:
            times[tree.name].append(
                tree.ask(tokens=tokens, flushed=tokens <= FLUSHED_TOKENS, rounds=_TIMED)
            )
    return {
        "times": {
            name: {"median": statistics.median(of), "turns": of} for name, of in times.items()
        }
    }


def line(found: Mapping[str, Any]) -> str:
    """One result in words."""
    times = {name: of["median"] * 1e6 for name, of in found["times"].items()}
    base = next(iter(times.values()))
    told = (f"{name} {took:.1f} ({took / base - 1:+.1%})" for name, took in times.items())
    return f"{found['shape']}:{found['tokens']}: {', '.join(told)}"


if __name__ == "__main__":
    typer.run(main)
