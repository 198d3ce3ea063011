# SPDX-License-Identifier: Apache-2.0
"""What choosing experts costs on a GPU: moeos.topk against torch.topk, with a softmax and without.

    python -m bench.studies.topk --out FILE

Contestants have the same logits, in turn; `read` reads them once at the memory's rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import moeos
from bench import study
from bench.clocks import DeviceClock
from bench.studies import options
from bench.study import Case, Out, Study
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


def make(one: Study, experts: int, k: int, dtype: torch.dtype) -> options.Measure:
    """A router's measurement."""
    return functools.partial(_measure, one, experts, k, dtype)


def _measure(one: Study, experts: int, k: int, dtype: torch.dtype, tokens: int) -> Case:
    assert isinstance(one.clock, DeviceClock)
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = torch.randn(tokens, experts, device="cuda", generator=generator).to(dtype)
    ways: dict[str, Callable[[], object]] = {
        "moeos": functools.partial(moeos.topk, logits, k),
        "torch.topk": functools.partial(torch.topk, logits, k),
        "moeos, softmax": functools.partial(moeos.topk, logits, k, softmax="chosen"),
        "torch.topk, softmax": functools.partial(by_pytorch, logits, k),
        "read": functools.partial(one.clock.reader.read, logits),
    }
    ours, theirs = moeos.topk(logits, k, softmax="chosen"), by_pytorch(logits, k)
    distance = options.require_alike(one, ours.values, theirs.values, AGREES)
    return {"distances": [distance], "seconds": one.timed(ways, tokens)}


def main(out: Out) -> None:
    """Times moeos.topk beside torch.topk, on one GPU."""

    def body(one: Study) -> None:
        if one.world.size > 1:
            raise ValueError(f"there are {one.world.size} ranks; this is measured on one GPU")
        for experts, k in ROUTERS:
            for dtype in DTYPES:
                name = f"{experts} experts, top-{k}, {str(dtype).removeprefix('torch.')}"
                of_router = functools.partial(make, one, experts, k, dtype)
                options.measure(one, name, {}, TOKENS, of_router)

    options.run("topk", out, body)


if __name__ == "__main__":
    study.start(main)
