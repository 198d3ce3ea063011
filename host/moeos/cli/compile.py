# SPDX-License-Identifier: Apache-2.0
"""`moeos compile`: compiles a layer's kernel without a GPU, and says what it needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from moeos.cli.shared import failures, machine, output
from moeos.compile import jit, kernel_shape
from moeos.compile.jit import CompileReport
from moeos.compile.kernel_shape import KernelShape, Transport
from moeos.config.config import MoEConfig
from moeos.partition.slicing import WHOLE


def compile_(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer.")],
    arch: Annotated[str, typer.Option(help="What to compile for.")] = kernel_shape.ARCHITECTURES[0],
    ranks: Annotated[int, typer.Option(help="Ranks of the world, a GPU each.")] = 8,
    transport: Annotated[
        str, typer.Option(help=f"How remote peers are reached: {', '.join(get_args(Transport))}.")
    ] = "none",
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("the report"))
    ] = None,
) -> None:
    """Compiles a layer's kernel. Exit code 1 if it keeps registers in memory."""
    failures.finish(lambda: execute(config, arch, ranks, transport, json_file), json_file)


def execute(config: Path, arch: str, ranks: int, transport: str, json_file: Path | None) -> int:
    """Runs the command; the exit code.

    Raises `OSError`, `ValueError` and `TypeError` for a file, a config or an argument, and
    `RuntimeError` if there is no compiler or it refuses the kernel.
    """
    cfg = MoEConfig.from_toml(config)
    output.check_writable(json_file)
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1")
    _, rates = machine.rates()
    virtual_ranks = ranks if transport == "mapped" else 1
    shape = KernelShape(
        cfg=cfg,
        world_size=ranks,
        processors=rates.blocks // virtual_ranks - 1,
        virtual_ranks=virtual_ranks,
        transport=cast(Transport, transport),
        slicing=WHOLE.by(rates),
        arch=arch,
    )
    kernel = jit.compile_kernel(shape)
    report = kernel.report
    if json_file is not None:
        document = {
            "config": json.loads(cfg.digest()),
            "ranks": ranks,
            "transport": transport,
            "cached": kernel.cached,
            "report": dataclasses.asdict(report),
        }
        output.write_json(json_file, document)
    where = "found in the cache" if kernel.cached else "compiled"
    print(f"{config}: the kernel of one of {ranks} ranks, for {arch}, {where}", flush=True)
    _print(report)
    if not report.keeps_registers:
        print("the kernel keeps registers in memory: stack frame and spills must be 0 bytes")
        return failures.LOST_REGISTERS
    return failures.DONE


def _print(report: CompileReport) -> None:
    made = output.table(report.compiler)
    made.add_row("compiling took", output.duration(report.seconds))
    made.add_row("machine code", output.size(report.code_bytes))
    made.add_section()
    made.add_row("threads of a block", output.count(report.threads))
    made.add_row("registers of a thread", output.count(report.registers))
    made.add_row("stack frame", output.size(report.stack_bytes))
    made.add_row("spill stores", output.size(report.spill_store_bytes))
    made.add_row("spill loads", output.size(report.spill_load_bytes))
    made.add_section()
    made.add_row("shared memory of a block", output.size(report.shared_bytes))
    made.add_row("of it for the OS block", output.size(report.os_bytes))
    made.add_row("arguments of a rank", output.size(report.argument_bytes))
    made.add_row("WGMMA instructions (PTX)", output.count(report.wgmma_instructions))
    output.tables(1).print(made)
