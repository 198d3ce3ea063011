# SPDX-License-Identifier: Apache-2.0
"""What choosing experts costs on a GPU: moeos.topk beside torch.topk, with a softmax and without.

    python -m bench.studies.topk --out FILE

Contestants have the same logits, in turn; `read` reads them once at the memory's rate. It times and
compares; whether ties are right is the tests' affair.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moeos
from bench.gpu.in_turn import InTurn
from bench.studies import options
from moeos.call.selection import TopK

ROUTERS = ((64, 6), (128, 8), (256, 8), (512, 10), (1024, 2), (4096, 32))
"""Experts, and how many a token has: of models in use, and what is at most allowed."""

TOKENS = (512, 8192, 32768)
DTYPES = (torch.float32, torch.bfloat16)
AGREES = 1e-3
"""Relative distance between the weights of both."""


def by_pytorch(logits: Tensor, k: int) -> TopK:
    """The chosen ones' softmax by stock PyTorch."""
    values, indices = logits.topk(k, dim=-1)
    return TopK(values.float().softmax(dim=-1), indices)


def measure(experts: int, k: int, dtype: torch.dtype, clock: InTurn) -> list[dict[str, Any]]:
    """Every token count of one router."""
    return [_measure(tokens, experts, k, dtype, clock) for tokens in TOKENS]


def _measure(
    tokens: int, experts: int, k: int, dtype: torch.dtype, clock: InTurn
) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = torch.randn(tokens, experts, device="cuda", generator=generator).to(dtype)
    ways: dict[str, Callable[[], object]] = {
        "moeos": functools.partial(moeos.topk, logits, k),
        "torch.topk": functools.partial(torch.topk, logits, k),
        "moeos, softmax": functools.partial(moeos.topk, logits, k, softmax="chosen"),
        "torch.topk, softmax": functools.partial(by_pytorch, logits, k),
        "read": functools.partial(clock.reader.read, logits),
    }
    ours, theirs = moeos.topk(logits, k, softmax="chosen"), by_pytorch(logits, k)
    distance = options.require_equal(
        f"moeos.topk and torch.topk of {experts} logits", tokens, ours.values, theirs.values, AGREES
    )
    times = options.timed(clock, tokens, ways)
    shown = {name: f"{time['median'] * 1e6:.1f} us" for name, time in times.items()}
    print(f"{experts} experts, top-{k}, {dtype}, {tokens} tokens: {shown}", flush=True)
    return {"tokens": tokens, "distances": [distance], "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="where the JSON document goes")
    chosen = parser.parse_args()
    layers: dict[str, Any] = {}
    with moeos.init(backend="cuda") as world, torch.no_grad():
        if world.size > 1:
            raise SystemExit(f"there are {world.size} ranks; this is measured on one GPU")
        clock = InTurn(world)
        for experts, k in ROUTERS:
            for dtype in DTYPES:
                name = f"{experts} experts, top-{k}, {str(dtype).removeprefix('torch.')}"
                layers[name] = {"results": measure(experts, k, dtype, clock)}
                text = json.dumps(options.document("topk", world.size, layers), indent=1)
                chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
