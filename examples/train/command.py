# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.train`: trains a small language model, and the same in stock PyTorch beside
it.

Every rank trains its part of the sequences of a step. Rank 0 trains the stock model on all of them,
and speaks for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import moeos
from examples.train import curve, saved
from examples.train.batches import MAX_SEED, SEQUENCES, batch
from examples.train.model import LENGTH, LanguageModel
from examples.train.saved import History
from examples.train.stock import StockMixture
from examples.train.trainer import Trainer
from moeos.cli import app, drawing
from moeos.cli.shared import failures, machine, output, process_group
from moeos.cli.shared.options import Backend, Deadline
from moeos.cli.shared.settings import read_settings
from moeos.cli.tensors import piece
from moeos.cli.text import read_documents
from moeos.layer.experts import device_of

BLOCKS = 2
MAX_STEPS = 100_000

_EARLY = 50
"""Steps for which the losses of both models are close."""
_BARS = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (2e-2, 1e-1)}
"""How far apart losses may be, early and later."""
_SAID_EVERY = 20
"""Steps between two lines where there is no bar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the command line says; None where the config or a saved run decides."""

    config: Path
    steps: int | None = None
    seed: int | None = None
    save: Path | None = None
    save_every: int | None = None
    resume: Path | None = None
    plot: Path | None = None
    backend: str = "auto"
    deadline: float = 30.0
    json_file: Path | None = None


class _Plan(NamedTuple):
    """What this rank will do.

    Attributes:
        steps: the last step's number, from 1 on.
        mine: which sequences of a step are this rank's.
        history: of a saved run, or of none.
    """

    cfg: moeos.MoEConfig
    steps: int
    mine: slice
    text: Tensor
    history: History


def train(
    config: Annotated[Path, typer.Argument(help="TOML file of the layers, with a table [run].")],
    steps: Annotated[
        int | None, typer.Option(help="In all, also of a resumed run; else as the config says.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights and sequences; default: 0, or a saved run's."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder into which the run is written after its last step.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps after which --save is written each time, too.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a saved run that goes on, also on other ranks."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draws the losses into this PNG file; needs matplotlib.")
    ] = None,
    backend: Backend = "auto",
    deadline: Deadline = 30.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help=output.JSON_HELP.format("losses of all steps"))
    ] = None,
) -> None:
    """Trains a small language model on text, and compares it step by step with stock PyTorch.

    Exit code 0 if the losses are as close as they must be, 1 if not, 2 for bad input, 3 for a
    failure.
    """
    options = TrainOptions(
        config=config,
        steps=steps,
        seed=seed,
        save=save,
        save_every=save_every,
        resume=resume,
        plot=plot,
        backend=backend,
        deadline=deadline,
        json_file=json_file,
    )
    failures.finish(lambda: execute(options), json_file)


def execute(options: TrainOptions) -> int:
    """Runs the command in the world of this process; the exit code.

    Ranks are processes: threads would share the process group of torch.distributed. Raises what
    `moeos.init` and a call of a layer raise.
    """
    with moeos.init(options.backend, deadline=options.deadline) as world:
        return failures.together(world, lambda: _train(world, options))


def _train(world: moeos.World, options: TrainOptions) -> int:
    plan = failures.agree(world, lambda: _prepare(world, options), "the input of the training")
    with process_group.over(world):  # by which gradients and checkpoints go
        trained, stock = _make(world, plan, options)
        speaks = world.rank == 0
        if speaks:
            _introduce(world, plan)
        history = plan.history
        with _progress(len(history.losses), plan.steps, visible=speaks) as advance:
            for step in range(len(history.losses), plan.steps):
                pieces = batch(plan.text, history.seed, step)
                loss = trained.step(step, pieces[plan.mine], SEQUENCES * LENGTH)
                history.losses.append(loss)
                if stock is not None:
                    history.references.append(stock.step(step, pieces, SEQUENCES * LENGTH))
                    advance(step, loss, history.references[-1])
                if options.save is not None and _is_saved(options, step + 1, plan.steps):
                    write = functools.partial(saved.save, options.save, history, trained, stock)
                    failures.agree(world, write, "a save of the run")
    close = _conclude(world, plan, options) if speaks else True
    close = world.control.allgather(close, "the verdict of the training")[0]
    return failures.DONE if close else failures.ABOVE_TOLERANCE


def _is_saved(options: TrainOptions, done: int, steps: int) -> bool:
    """Whether the run is written after `done` steps."""
    return done == steps or (options.save_every is not None and done % options.save_every == 0)


def _prepare(world: moeos.World, options: TrainOptions) -> _Plan:
    cfg = moeos.MoEConfig.from_toml(options.config)
    _require_plain(cfg)
    if world.backend == "cuda":
        cfg = dataclasses.replace(cfg, dtype=torch.bfloat16)
    settings = read_settings(options.config)
    output.check_writable(options.json_file)
    output.check_writable(options.plot, "--plot")
    if options.plot is not None and world.rank == 0:
        drawing.matplotlib()
    steps = settings.iterations if options.steps is None else options.steps
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps is {steps}; allowed: 1 to {MAX_STEPS}")
    seed = 0 if options.seed is None else options.seed
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"--seed is {seed}; allowed: 0 to {MAX_SEED}")
    if options.save_every is not None:
        if options.save is None:
            raise ValueError(f"--save-every is {options.save_every}; --save names no folder")
        if options.save_every < 1:
            raise ValueError(f"--save-every is {options.save_every}; it must be at least 1")
    if not settings.text:
        raise ValueError(f"{options.config}: [run] has no text, from which the model learns")
    text = read_documents(settings.text, options.config.parent)
    batch(text, seed, 0)  # is it long enough?
    first, end = piece(SEQUENCES, world.rank, world.size)
    if first == end:
        raise ValueError(
            f"rank {world.rank} of {world.size} has none of the {SEQUENCES} sequences of a step: "
            f"start at most {SEQUENCES} ranks"
        )
    if (end - first) * LENGTH > cfg.max_tokens:
        raise ValueError(
            f"max_tokens is {cfg.max_tokens}, and rank {world.rank} of {world.size} passes "
            f"{(end - first) * LENGTH} tokens in a call: raise it, or start more ranks"
        )
    history = History(seed, cfg.digest(), len(text))
    if options.resume is not None:
        history = _resumed(options, history, steps)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    return _Plan(cfg, steps, slice(first, end), text, history)


def _require_plain(cfg: moeos.MoEConfig) -> None:
    """Raises `ValueError` for a layer that the stock model is not."""
    plain = moeos.MoEConfig(
        hidden=cfg.hidden,
        intermediate=cfg.intermediate,
        experts=cfg.experts,
        top_k=cfg.top_k,
        activation="swiglu",
        dtype=cfg.dtype,
        max_tokens=cfg.max_tokens,
    )
    apart = moeos.config.config.digest_differences(cfg.digest(), plain.digest())
    if apart:
        name, (given, needed) = next(iter(apart.items()))
        raise ValueError(f"{name} is {given}; the stock model that trains beside has {needed}")
    if cfg.dtype not in _BARS:
        raise ValueError(f"dtype is {cfg.dtype}; train in float32 or bfloat16")


def _resumed(options: TrainOptions, fresh: History, steps: int) -> History:
    """What is known of the run that goes on; raises `ValueError` where it is not this one."""
    assert options.resume is not None
    found = saved.read_history(options.resume)
    where = f"the run in {options.resume}"
    if options.seed is not None and options.seed != found.seed:
        raise ValueError(f"--seed is {options.seed}; {where} has {found.seed}: leave it away")
    apart = moeos.config.config.digest_differences(fresh.layer, found.layer)
    if apart:
        name, (given, needed) = next(iter(apart.items()))
        raise ValueError(f"{name} is {given}; {where} has {needed}")
    if fresh.text != found.text:
        raise ValueError(
            f"the text has {fresh.text} bytes, and that of {where} had {found.text}: it goes on "
            "with what it began with"
        )
    if len(found.losses) >= steps:
        raise ValueError(f"steps is {steps}, in all; {where} has made {len(found.losses)}")
    return found


def _make(world: moeos.World, plan: _Plan, options: TrainOptions) -> tuple[Trainer, Trainer | None]:
    """The model of all ranks, and on rank 0 the stock one. Both begin with equal numbers, which all
    ranks draw alike.
    """
    cfg, device = plan.cfg, device_of(world)
    torch.manual_seed(plan.history.seed)
    mixtures = [
        StockMixture(cfg.hidden, cfg.intermediate, cfg.experts, cfg.top_k, cfg.dtype)
        for _ in range(BLOCKS)
    ]
    stock = LanguageModel(cfg.hidden, mixtures, cfg.dtype)
    layers = [moeos.MoELayer(cfg, world, init=False) for _ in range(BLOCKS)]
    model = LanguageModel(cfg.hidden, layers, cfg.dtype).to(device)
    model.load_state_dict(stock.state_dict())
    trained = Trainer(model, world)
    beside = Trainer(stock.to(device), None) if world.rank == 0 else None
    if options.resume is not None:
        read = functools.partial(saved.load, options.resume, plan.history, trained, beside)
        failures.agree(world, read, "the saved run")
    return trained, beside


def _bars(plan: _Plan) -> list[float]:
    """What the losses of each step may differ by."""
    early, later = _BARS[plan.cfg.dtype]
    return [early if step < _EARLY else later for step in range(plan.steps)]


def _introduce(world: moeos.World, plan: _Plan) -> None:
    cfg, done = plan.cfg, len(plan.history.losses)
    goes_on = f", from {done} on" if done else ""
    print(
        f"{output.plural(world.size, 'rank')} on the {world.backend}, "
        f"{output.plural(machine.processors_of(world), 'processor')} each\n"
        f"a model of {BLOCKS} blocks: {cfg.experts} experts, top {cfg.top_k}, hidden {cfg.hidden}, "
        f"intermediate {cfg.intermediate}, {str(cfg.dtype).removeprefix('torch.')}\n"
        f"{plan.steps} steps{goes_on}, each of {SEQUENCES} sequences of {LENGTH} bytes, "
        f"from {len(plan.text)} bytes of text",
        flush=True,
    )


class _Advance:
    """Says how far a run has come."""

    def __init__(self, steps: int, bar: Progress | None, done: int) -> None:
        self._steps = steps
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=steps, completed=done)

    def __call__(self, step: int, loss: float, reference: float) -> None:
        said = f"loss {loss:.4f}, reference {reference:.4f}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=said)
        elif (step + 1) % _SAID_EVERY == 0:
            output.say(f"step {step + 1} of {self._steps}: {said}")


@contextlib.contextmanager
def _progress(done: int, steps: int, *, visible: bool) -> Iterator[_Advance]:
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield _Advance(steps, None, done)
        return
    with Progress(console=console) as bar:
        yield _Advance(steps, bar, done)


def _conclude(world: moeos.World, plan: _Plan, options: TrainOptions) -> bool:
    """Says what came of it; whether the losses are close enough."""
    losses, references = plan.history.losses, plan.history.references
    bars = _bars(plan)
    apart = [abs(a - b) for a, b in zip(losses, references, strict=True)]
    if options.plot is not None:
        curve.draw(losses, references, bars, options.plot)
    if options.json_file is not None:
        document: dict[str, Any] = {
            "command": shlex.join(sys.argv),
            "versions": machine.versions(),
            "machine": machine.describe(),
            "config": json.loads(plan.cfg.digest()),
            "backend": world.backend,
            "ranks": world.size,
            "seed": plan.history.seed,
            "losses": losses,
            "references": references,
            "tolerances": bars,
        }
        output.write_json(options.json_file, document)
    found = [f"{max(apart[:_EARLY]):.1e} up to step {min(_EARLY, plan.steps)}"]
    found[0] += f" (tolerance {bars[0]:.0e})"
    if plan.steps > _EARLY:
        found.append(f"{max(apart[_EARLY:]):.1e} behind it (tolerance {bars[-1]:.0e})")
    print(f"largest difference {', '.join(found)}")
    print(f"final loss {losses[-1]:.4f}, reference {references[-1]:.4f}", flush=True)
    for step, (difference, bar) in enumerate(zip(apart, bars, strict=True), 1):
        if not difference <= bar:
            output.say(
                f"losses differ by {difference:.1e} in step {step}; at most {bar:.0e} is right"
            )
            return False
    return True


command = typer.Typer(
    name="examples.train",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command.command()(train)


def main() -> None:
    """The command; it ends as `moeos` does."""
    app.main(command)
