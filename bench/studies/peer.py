# SPDX-License-Identifier: Apache-2.0
"""The study of `launch/evaluate megamoe`: moeos against DeepGEMM's MegaMoE in FP8.

The peer's kernel is measured by a program of its own. PEER is the JSON that this wrote: its ranks,
and a row for each call. moeos makes the same calls here, on as many ranks, in BF16, with weights in
FP8, and by FP8 as well. Tokens, weights and routing are drawn as that program draws them, and
errors are measured as it does. The document has both, as bench.report.option_tables reads it. Must
not depend on how the peer computes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import moeos
from bench import study
from bench.report.option_tables import OURS, PEER, PEER_PREFIX
from bench.study import Case, Out, Rounds, Study
from moeos.cli.shared import failures
from moeos.cli.shared.options import Backend

ROUNDS = Rounds(20, 5)
FEW_TOKENS = 512
"""A layer for up to this many tokens is made for no more."""
CHECKED = 24
"""Tokens of a rank whose outputs are compared with float32."""
FORMATS: dict[str, dict[str, Any]] = {
    "moeos fp8": {"weight_format": "fp8_block128"},
    OURS: {"weight_format": "fp8_block128", "activation_format": "fp8_group128"},
}
"""What `moeos.quantize` makes of the layer in BF16, by contestants."""
PLAIN = "moeos bf16"


class Shape(NamedTuple):
    """Sizes of a layer with all experts on all ranks."""

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
"""Shapes by the names of the peer's program, in its order, which its random numbers depend on."""


class Call(NamedTuple):
    """A call that the peer made on all ranks; `zipf`: the exponent of its routing, 0 if uniform."""

    shape: str
    tokens: int
    zipf: float


def main(
    peer: Annotated[Path, typer.Argument(help="What the peer's program wrote.")],
    out: Out,
    backend: Backend = "auto",
) -> None:
    """Measures moeos in BF16 and FP8 with the calls that a peer's kernel has made."""

    def body(world: moeos.World) -> Study:
        with torch.no_grad():
            return Peer(world, peer, out).measure_all()

    study.run(body, backend)


def read(peer: Path) -> dict[str, Any]:
    """The peer's document, with the rows of calls that it has made.

    Raises `OSError` for a file that cannot be read, and `ValueError` for one that the peer's
    program has not written, or of an unknown shape.
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


class Peer(Study):
    """One rank of the study."""

    def __init__(self, world: moeos.World, peer: Path, out: Path) -> None:
        made = failures.agree(world, lambda: read(peer), "what the peer's program wrote")
        self._rows: list[Case] = made["rows"]

        def about() -> Case:
            if made["ranks"] != world.size:
                raise ValueError(
                    f"{peer}: the peer ran on {made['ranks']} ranks, and here are {world.size}: "
                    f"set RANKS={made['ranks']}"
                )
            return {"peers_versions": made["versions"], "rows": []}

        name = f"{PEER_PREFIX}{world.size}"
        super().__init__(world, out, name, "bench.studies.peer", ROUNDS, about)

    def measure_all(self) -> Peer:
        """Measures everything."""
        groups: dict[tuple[str, bool], list[Call]] = {}
        for row in self._rows:
            call = Call(row["shape"], row["tokens"], row["zipf"])
            groups.setdefault((call.shape, call.tokens <= FEW_TOKENS), []).append(call)
        configs = {
            (shape, few): config_of(SHAPES[shape], max(call.tokens for call in calls))
            for (shape, few), calls in groups.items()
        }
        self.compile(
            [
                (shape, {"cfg": dataclasses.replace(cfg, **formats), "world_size": self.world.size})
                for (shape, _), cfg in configs.items()
                for formats in ({}, *FORMATS.values())
            ]
        )
        for (shape, few), calls in groups.items():
            self._shape(configs[shape, few], calls)
            self.forget()
        return self

    def _shape(self, cfg: moeos.MoEConfig, calls: list[Call]) -> None:
        name, shape, into = calls[0].shape, SHAPES[calls[0].shape], self.document["rows"]
        layers: dict[str, moeos.MoELayer] = {}
        # Rows of a call are added together, the peer's last.
        asked = [{"who": PEER, **call._asdict()} for call in calls]
        for case in self.cases(into, asked):
            call = Call(case["shape"], case["tokens"], case["zipf"])
            if not layers:
                plain = moeos.MoELayer(cfg, self.world).requires_grad_(False)
                for place, number in enumerate(plain.placement.experts_of(self.world.rank)):
                    plain.w1[place], plain.w2[place] = self._expert(name, number)
                layers[PLAIN] = plain
                for contestant, formats in FORMATS.items():
                    layers[contestant] = moeos.quantize(plain, **formats)
            x = self._normal(
                (call.tokens, shape.hidden), self._seeded(7, call.tokens, self.world.rank)
            ).bfloat16()
            ids, weights = self._routing(call)
            expected = self._expected(name, x, ids, weights)
            ways = {
                contestant: functools.partial(layer, x, topk_ids=ids, topk_weights=weights)
                for contestant, layer in layers.items()
            }
            errors = {contestant: self._error(way(), expected) for contestant, way in ways.items()}
            for contestant, times in self.timed(ways).items():
                found = {"us": times["median"] * 1e6, "err": errors[contestant]}
                self.add(into, {"who": contestant, **call._asdict()}, found)
            theirs = next(row for row in self._rows if case.items() <= row.items())
            self.add(into, case, theirs)

    def _error(self, y: Tensor, expected: Tensor) -> float:
        """The relative one of the checked tokens, of the worst rank."""
        return self.worst(study.distance(y[_checked(y)], expected))

    def _expected(self, name: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the checked tokens in float32, by weights that were not rounded to FP8."""
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
        return torch.Generator(self.device).manual_seed(seed)

    def _normal(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device)

    def _expert(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        hidden, values, *_ = SHAPES[name]
        generator = self._seeded(list(SHAPES).index(name), number)
        w1 = self._normal((2 * values, hidden), generator) / hidden**0.5
        w2 = self._normal((hidden, values), generator) / values**0.5
        return w1.bfloat16(), w2.bfloat16()

    def _routing(self, call: Call) -> tuple[Tensor, Tensor]:
        _, _, experts, top_k = SHAPES[call.shape]
        generator = self._seeded(99, call.tokens, experts, top_k, self.world.rank)
        drawn = torch.rand(call.tokens, experts, generator=generator, device=self.device)
        if call.zipf > 0:
            ranks_of = torch.arange(1, experts + 1, device=self.device, dtype=torch.float32)
            drawn = drawn.log() / (1.0 / ranks_of**call.zipf)  # the largest are the soonest
        ids = drawn.topk(top_k, dim=1).indices
        weights = torch.rand(call.tokens, top_k, generator=generator, device=self.device) + 0.1
        return ids.int().contiguous(), (weights / weights.sum(1, keepdim=True)).bfloat16()


def config_of(shape: Shape, max_tokens: int) -> moeos.MoEConfig:
    """The layer of a shape in BF16."""
    return moeos.MoEConfig(
        **shape._asdict(), activation="swiglu", dtype=torch.bfloat16, max_tokens=max_tokens
    )


def _checked(rows: Tensor) -> Tensor:
    """The indices of the rows that are compared."""
    return torch.linspace(0, len(rows) - 1, min(len(rows), CHECKED)).long()


if __name__ == "__main__":
    study.start(main)
