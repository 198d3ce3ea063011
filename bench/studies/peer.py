# SPDX-License-Identifier: Apache-2.0
"""The command behind `launch/evaluate megamoe`: moeos beside DeepGEMM's MegaMoE in FP8.

    torchrun --nproc-per-node 2 -m bench.studies.peer PEER --out FILE

The peer's kernel is measured by a program of its own. PEER is the JSON that this wrote: its ranks,
and a row for each call. moeos makes the same calls here, on as many ranks, in BF16, with weights in
FP8, and by FP8 as well. Tokens, weights and routing are drawn as that program draws them, and
errors are measured as it does. The document has both, as bench.report.peer_tables reads it,
and is whole after each shape. It knows nothing of how the peer computes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import moeos
from bench.gpu import compile_ahead
from bench.report import report
from bench.report.peer_tables import OURS, PEER, PREFIX
from bench.studies import ranks
from bench.studies.contestants import Clock, clock_of
from moeos.cli.shared import failures, machine, output, process_group, provenance
from moeos.cli.shared.options import Backend
from moeos.system.files import replace

ROUNDS, WARM_UP = 20, 5
FEW_TOKENS = 512
"""Up to so many a layer is made for no more."""
CHECKED = 24
"""Tokens of a rank whose outputs are compared with float32."""
FORMATS: dict[str, dict[str, Any]] = {
    "moeos fp8": {"weight_format": "fp8_block128"},
    OURS: {"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
}
"""What `moeos.quantize` makes of the layer in BF16, by contestants."""
PLAIN = "moeos bf16"
_DEADLINE = 900.0  # seconds; what the compiler takes counts


class Shape(NamedTuple):
    """Of a layer with all experts on all ranks."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
    "granite-3b": Shape(1536, 512, 40, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "deepseek-v3-half": Shape(7168, 2048, 128, 8),
    "llama4-scout": Shape(5120, 8192, 16, 1),
    "glm-4.5-air": Shape(4096, 1408, 128, 8),
    "kimi-k2-quarter": Shape(7168, 2048, 96, 8),
}
"""As the peer's program names them, and in its order, which its random numbers depend on."""


class Call(NamedTuple):
    """One that the peer made on all ranks; `zipf`: the exponent of its routing, 0 if uniform."""

    shape: str
    tokens: int
    zipf: float


def main(
    peer: Annotated[Path, typer.Argument(help="What the peer's program wrote.")],
    out: Annotated[Path, typer.Option(help="Where the results go, as JSON.")],
    backend: Backend = "auto",
) -> None:
    """Measures moeos in BF16 and FP8 with the calls that a peer's kernel has made."""

    def command() -> int:
        output.check_writable(out, "--out")
        return execute(peer, out, backend)

    failures.finish(command)


def execute(peer: Path, out: Path, backend: str = "auto", rounds: int = ROUNDS) -> int:
    """Runs the study; the exit code. Collective.

    Raises `OSError` for a file that cannot be read, `ValueError` for one that the peer's program
    has not written, of other ranks, or of an unknown shape, and what `moeos.init` raises.
    """
    made = read(peer)
    with moeos.init(backend, deadline=_DEADLINE) as world, torch.no_grad():
        if made["ranks"] != world.size:
            raise ValueError(
                f"{peer}: the peer ran on {made['ranks']} ranks, and here are {world.size}: set "
                f"RANKS={made['ranks']}"
            )
        study = _Study(world, made, out, rounds)
        study.run()
    if world.rank == 0:
        report.print_tables(study.document)
    return failures.DONE


def read(peer: Path) -> dict[str, Any]:
    """The peer's document, with the rows of calls that it has made.

    Raises `OSError` and `ValueError` as `execute` does.
    """
    try:
        found = json.loads(peer.read_text(encoding="utf-8"))
        rows = [row for row in found["rows"] if row["who"] == PEER and "error" not in row]
        calls = [Call(row["shape"], row["tokens"], row["zipf"]) for row in rows]
        ranks_there = int(found["ranks"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{peer}: not what the peer's program writes: {error!r}") from error
    if not calls:
        raise ValueError(f"{peer}: no call of {PEER}; run the peer's program for it first")
    for call in calls:
        if call.shape not in SHAPES:
            raise ValueError(
                f"{peer}: shape {call.shape!r} is unknown; it must be one of {', '.join(SHAPES)}"
            )
    return {"ranks": ranks_there, "rows": rows, "versions": found.get("versions", {})}


class _Study:
    """A run, and its document."""

    def __init__(self, world: moeos.World, peer: Mapping[str, Any], out: Path, rounds: int) -> None:
        self._world = world
        self._rows: list[dict[str, Any]] = list(peer["rows"])
        self._out, self._rounds = out, rounds
        self._device = "cuda" if world.backend == "cuda" else "cpu"
        self._clock: Clock = clock_of(world, process_group.start(world))
        on_gpu = world.backend == "cuda"
        self.document: dict[str, Any] = {
            "benchmark": f"{PREFIX}{world.size}",
            "commit": provenance.commit(),
            "command": provenance.command("bench.studies.peer"),
            "gpus": machine.gpus() if on_gpu else [f"the twin, {machine.processor()}"],
            "ranks": world.size,
            "versions": {**machine.versions(), **peer["versions"]},
            "rows": [],
        }

    def run(self) -> None:
        """Measures everything."""
        groups: dict[tuple[str, bool], list[Call]] = {}
        for row in self._rows:
            call = Call(row["shape"], row["tokens"], row["zipf"])
            groups.setdefault((call.shape, call.tokens <= FEW_TOKENS), []).append(call)
        configs = {
            (shape, few): config_of(SHAPES[shape], max(call.tokens for call in calls))
            for (shape, few), calls in groups.items()
        }
        if self._device == "cuda":
            self._compile(configs)
        for (shape, few), calls in groups.items():
            self._shape(configs[shape, few], calls)
            if self._world.rank == 0:
                replace(self._out, output.json_text(self.document))

    def _compile(self, configs: Mapping[tuple[str, bool], moeos.MoEConfig]) -> None:
        """The kernels of all layers, side by side."""
        every = [
            (shape, cfg if formats is None else quantized(cfg, formats))
            for (shape, _), cfg in configs.items()
            for formats in (None, *FORMATS.values())
        ]
        mine = every[self._world.rank :: self._world.size]
        processors = torch.cuda.get_device_properties().multi_processor_count
        with compile_ahead.started(mine, self._world.size, processors) as compiling:
            refused = compiling.wait(lambda: None)
        self._world.control.allgather(None)
        if refused:
            raise RuntimeError(f"the compiler refuses: {refused}")

    def _shape(self, cfg: moeos.MoEConfig, calls: list[Call]) -> None:
        name, shape = calls[0].shape, SHAPES[calls[0].shape]
        plain = moeos.MoELayer(cfg, self._world)
        for place, number in enumerate(plain.placement.experts_of(self._world.rank)):
            plain.w1[place], plain.w2[place] = self._expert(name, number)
        layers = {PLAIN: plain}
        for contestant, formats in FORMATS.items():
            layers[contestant] = moeos.quantize(plain, **formats)
        for call in calls:
            output.say(f"{call.shape}, {call.tokens} tokens")
            x = self._normal(
                (call.tokens, shape.hidden), self._seeded(7, call.tokens, self._world.rank)
            ).bfloat16()
            ids, weights = self._routing(call)
            expected = self._expected(name, x, ids, weights)
            ways = {
                contestant: functools.partial(layer, x, topk_ids=ids, topk_weights=weights)
                for contestant, layer in layers.items()
            }
            errors = {contestant: self._error(way(), expected) for contestant, way in ways.items()}
            for contestant, seconds in self._times(ways).items():
                self.document["rows"].append(
                    {
                        "who": contestant,
                        **call._asdict(),
                        "us": seconds * 1e6,
                        "err": errors[contestant],
                    }
                )
            self.document["rows"] += [
                row for row in self._rows if Call(row["shape"], row["tokens"], row["zipf"]) == call
            ]

    def _times(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Medians of the slowest rank, in turn."""
        names = list(ways)
        mine: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(WARM_UP + self._rounds):
            first = turn % len(names)  # nobody always follows the same one
            for name in names[first:] + names[:first]:
                mine[name].append(self._clock.measure(0.0, ways[name]))
        every = self._world.control.allgather(mine)
        return {
            name: statistics.median(
                [max(of) for of in zip(*(one[name] for one in every), strict=True)][WARM_UP:]
            )
            for name in names
        }

    def _error(self, y: Tensor, expected: Tensor) -> float:
        """The relative one of the checked tokens, of the worst rank."""
        own = float((y[_checked(y)].float() - expected).norm() / expected.norm())
        worst: float = max(self._world.control.allgather(own))
        return worst

    def _expected(self, name: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the checked tokens in float32, by weights that nobody has rounded to FP8."""
        chosen = _checked(x)
        y = torch.zeros(len(chosen), x.shape[1], device=x.device)
        for nth, token in enumerate(chosen.tolist()):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                w1, w2 = self._expert(name, expert)
                gate, up = (w1.float() @ x[token].float()).chunk(2)
                y[nth] += weight.float() * (w2.float() @ (torch.nn.functional.silu(gate) * up))
        return y

    # --- random numbers, as the peer's program draws them ---

    def _seeded(self, *numbers: int) -> torch.Generator:
        seed = 17
        for number in numbers:
            seed = (seed * 1000003 + number) & 0x7FFFFFFF
        return torch.Generator(self._device).manual_seed(seed)

    def _normal(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self._device)

    def _expert(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        hidden, values, *_ = SHAPES[name]
        generator = self._seeded(list(SHAPES).index(name), number)
        w1 = self._normal((2 * values, hidden), generator) / hidden**0.5
        w2 = self._normal((hidden, values), generator) / values**0.5
        return w1.bfloat16(), w2.bfloat16()

    def _routing(self, call: Call) -> tuple[Tensor, Tensor]:
        _, _, experts, top_k = SHAPES[call.shape]
        generator = self._seeded(99, call.tokens, experts, top_k, self._world.rank)
        drawn = torch.rand(call.tokens, experts, generator=generator, device=self._device)
        if call.zipf > 0:
            ranks_of = torch.arange(1, experts + 1, device=self._device, dtype=torch.float32)
            drawn = drawn.log() / (1.0 / ranks_of**call.zipf)  # the largest are the soonest
        ids = drawn.topk(top_k, dim=1).indices
        weights = torch.rand(call.tokens, top_k, generator=generator, device=self._device) + 0.1
        return ids.int().contiguous(), (weights / weights.sum(1, keepdim=True)).bfloat16()


def config_of(shape: Shape, max_tokens: int) -> moeos.MoEConfig:
    """The layer of a shape in BF16."""
    return moeos.MoEConfig(
        **shape._asdict(), activation="swiglu", dtype=torch.bfloat16, max_tokens=max_tokens
    )


def quantized(cfg: moeos.MoEConfig, formats: Mapping[str, Any]) -> moeos.MoEConfig:
    """The same layer in formats."""
    return dataclasses.replace(cfg, **formats)


def _checked(rows: Tensor) -> Tensor:
    """Which of them are."""
    return torch.linspace(0, len(rows) - 1, min(len(rows), CHECKED)).long()


if __name__ == "__main__":
    ranks.start(main)
