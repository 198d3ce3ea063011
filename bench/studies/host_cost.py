# SPDX-License-Identifier: Apache-2.0
"""What an eager call on a GPU costs its host.

`python -m bench.studies.host_cost` prints it as JSON.

Each call is timed by itself, from before it to behind its return; nothing waits for the GPU but the
end of a burst. Beside the ways to call there are the parts of one of them, and a call of
`torch.nn.functional.linear`, which says how fast this host is. One process, one GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import moeos
from moeos.cli.shared import machine, provenance
from moeos.engines.base import CallTensors

NAME = "host-cost-1"
BAR = 25e-6
"""Seconds that a call may cost its host."""

CALLS, BURST, WARM_UP = 1000, 100, 100
TOKENS = 8
LAYERS = 48
"""Of a model whose layers share one `Experts`."""

Calls = Callable[[int], object]
"""Makes the call of a number."""


def measure(call: Calls, synchronize: Callable[[], object], calls: int = CALLS) -> dict[str, float]:
    """Seconds of a call: the median, and the 10th and 90th percent, of so many in bursts."""
    seconds: list[float] = []
    clock = time.perf_counter
    with torch.no_grad():
        for number in range(WARM_UP):
            call(number)
        while len(seconds) < calls:
            synchronize()
            for number in range(min(BURST, calls - len(seconds))):
                begun = clock()
                call(number)
                seconds.append(clock() - begun)
        synchronize()
    tenths = statistics.quantiles(seconds, n=10)
    return {"median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[-1]}


def ways(world: moeos.World, cfg: moeos.MoEConfig) -> dict[str, Calls]:
    """The calls that are timed, by what they are."""
    layer = moeos.MoELayer(cfg, world)
    experts = moeos.Experts(cfg, world)
    device = layer.w1.device
    x = torch.randn(TOKENS, cfg.hidden, dtype=cfg.dtype, device=device)
    ids = torch.rand(TOKENS, cfg.experts, device=device).topk(cfg.top_k).indices
    narrow = ids.int()
    weights = torch.rand(TOKENS, cfg.top_k, device=device)
    tokens = torch.tensor([TOKENS - 1], dtype=torch.int32, device=device)
    w1, w2 = layer.w1, layer.w2
    others = list(zip(_places(w1), _places(w2), strict=True))
    out, batch = torch.empty_like(x), x.view(2, -1, cfg.hidden)
    dense = torch.randn(cfg.hidden, cfg.hidden, dtype=cfg.dtype, device=device)
    engine = experts.engine
    packed = CallTensors(
        x=x,
        out=torch.empty_like(x),
        gate=layer.gate.weight,
        selection_bias=None,
        topk_ids=None,
        topk_weights=None,
        w1=w1,
        b1=None,
        w2=w2,
        b2=None,
    )
    return {
        "linear": lambda n: torch.nn.functional.linear(x, dense),
        "layer": lambda n: layer(x),
        "layer, ids of 64 bits": lambda n: layer(x, ids, weights),
        "layer, ids of 32 bits": lambda n: layer(x, narrow, weights),
        "layer, tokens": lambda n: layer(x, tokens=tokens),
        "layer, out": lambda n: layer(x, out=out),
        "layer, a batch of sequences": lambda n: layer(batch),
        "experts": lambda n: experts(x, narrow, weights, w1, w2),
        f"experts of {LAYERS} layers": lambda n: experts(x, narrow, weights, *others[n % LAYERS]),
        "engine": lambda n: engine.forward(packed),
    }


def _places(weight: torch.Tensor) -> list[torch.Tensor]:
    """Weights like this one of many layers, each at an address of its own. They overlap: the host
    sees only where they begin, and gigabytes are not needed.
    """
    row = weight.shape[-1]
    room = torch.zeros(weight.numel() + LAYERS * row, dtype=weight.dtype, device=weight.device)
    return [room[n * row :][: weight.numel()].view(weight.shape) for n in range(LAYERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.studies.host_cost: PyTorch sees no GPU, and its launches are what costs")
    cfg = moeos.MoEConfig(**vars(chosen), max_tokens=TOKENS)
    with moeos.init(backend="cuda") as world:
        found = {
            name: measure(call, torch.cuda.synchronize) for name, call in ways(world, cfg).items()
        }
    document: dict[str, Any] = {
        "benchmark": NAME,
        "command": provenance.command("bench.studies.host_cost"),
        "commit": provenance.commit(),
        "device": machine.gpus()[0],
        "processor": machine.processor(),
        "versions": machine.versions(),
        "calls": CALLS,
        "burst": BURST,
        "tokens": TOKENS,
        "bar": BAR,
        "seconds": found,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
