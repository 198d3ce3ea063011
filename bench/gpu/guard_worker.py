# SPDX-License-Identifier: Apache-2.0
"""One source tree's part of `launch/bench guard`: makes the guard's layers and times their calls.

    python guard_worker.py warm CASE     makes one call, so that its kernels are in the cache
    python guard_worker.py serve         answers requests, a line of JSON each, until its input ends

`bench.gpu.guard` starts one worker with each tree's package on its path. Must not depend on
anything but torch and the names that README promises of moeos.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import moeos

FLUSH_BYTES = 1 << 28
"""Read to put everything else out of the L2 cache."""
READS = 24
"""Reads of these bytes before a call, about 1.5 ms: the host launches the call before they end."""
SEED = 20261129

QWEN3 = {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
GPT_OSS = {"hidden": 2880, "intermediate": 2880, "experts": 32, "top_k": 4} | {
    "activation": "swigluoai",
    "bias": True,
}
FP8 = {"weight_format": "fp8_block128", "activation_format": "fp8_group128"}

CASES: dict[str, dict[str, Any]] = {
    "bf16-1": {"layer": QWEN3, "tokens": 1},
    "bf16-64": {"layer": QWEN3, "tokens": 64},
    "bf16-2048": {"layer": QWEN3, "tokens": 2048},
    "bf16-8192": {"layer": QWEN3, "tokens": 8192},
    "fp8-8": {"layer": QWEN3 | FP8, "tokens": 8},
    "fp8-8192": {"layer": QWEN3 | FP8, "tokens": 8192},
    "mxfp4-8": {"layer": GPT_OSS | {"weight_format": "mxfp4"}, "tokens": 8},
    "mxfp4-512": {"layer": GPT_OSS | {"weight_format": "mxfp4"}, "tokens": 512},
    "backward-2048": {"layer": QWEN3, "tokens": 2048, "backward": True},
    "backward-8192": {"layer": QWEN3, "tokens": 8192, "backward": True},
    "two-ranks-128": {"layer": QWEN3, "tokens": 128, "ranks": 2},
    "four-ranks-2048": {"layer": QWEN3, "tokens": 2048, "ranks": 4},
}
"""Cases by name: the layer, tokens of a rank, virtual ranks (1 unless said), and whether it is the
backward of a call that is timed.
"""


class Caller:
    """Makes a case's calls on one thread for each virtual rank, and times those of rank 0."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        self._tokens: int = case["tokens"]
        self._backward: bool = case.get("backward", False)
        self._ranks: int = case.get("ranks", 1)
        saves: dict[str, Any] = {"save": "preactivation"} if self._backward else {}
        self._cfg = moeos.MoEConfig(**case["layer"], **saves, max_tokens=max(512, self._tokens))
        self._asked: list[int] = [0] * self._ranks  # calls to make, of each rank; 0: none any more
        self._gates = [threading.Semaphore(0) for _ in range(self._ranks)]
        self._done = threading.Semaphore(0)
        self._times: list[float] = []
        self._failed: list[str] = []
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self._meet()

    def time(self, calls: int) -> list[float]:
        """Seconds that each of `calls` calls took on the GPU."""
        self._times = []
        for rank in range(self._ranks):
            self._asked[rank] = calls
            self._gates[rank].release()
        self._meet()
        return self._times

    def close(self) -> None:
        """Ends the threads and gives the memory back."""
        for rank in range(self._ranks):
            self._asked[rank] = 0
            self._gates[rank].release()
        self._thread.join(60)
        torch.cuda.empty_cache()

    def _meet(self) -> None:
        for _ in range(self._ranks):
            while not self._done.acquire(timeout=1):
                if not self._thread.is_alive():
                    raise RuntimeError("; ".join(self._failed) or "the ranks have ended")

    def _live(self) -> None:
        try:
            if self._ranks == 1:
                with moeos.init("cuda", deadline=120.0) as world:
                    self._rank(world)
            else:
                moeos.virtual.run(self._rank, ranks=self._ranks, backend="cuda", deadline=120.0)
        except BaseException as error:
            self._failed.append(f"{type(error).__name__}: {error}")

    def _rank(self, world: moeos.World) -> None:
        generator = torch.Generator("cuda").manual_seed(SEED + world.rank)
        if world.rank == 0:  # which draws the layer's seed: both trees route alike
            torch.manual_seed(SEED)
        layer = moeos.MoELayer(self._cfg, world)
        layer.requires_grad_(self._backward)

        def random() -> torch.Tensor:
            shape = (self._tokens, self._cfg.hidden)
            return torch.randn(shape, device="cuda", generator=generator).to(self._cfg.dtype)

        x, d_out = random().requires_grad_(self._backward), random()
        cold = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

        def once() -> Callable[[], Any]:
            """The function that is timed: the call, or the backward of a call that is made here."""
            if not self._backward:
                return lambda: layer(x)
            y = layer(x)
            leaves = [x, *layer.parameters()]
            return lambda: torch.autograd.grad(y, leaves, d_out)

        once()()
        torch.cuda.synchronize()
        layer.check()
        while True:
            self._done.release()
            self._gates[world.rank].acquire()
            if self._asked[world.rank] == 0:
                return
            for _ in range(self._asked[world.rank]):
                timed = once()
                for _ in range(READS):
                    cold.max()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                timed()
                end.record()
                end.synchronize()
                if world.rank == 0:
                    self._times.append(begin.elapsed_time(end) * 1e-3)


def serve() -> None:
    """Answers {"make": case}, {"time": calls} and {"drop": case} until the input ends."""
    caller: Caller | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "make" in asked:
                caller = Caller(asked["make"])
            elif "time" in asked and caller is not None:
                answer["times"] = caller.time(asked["time"])
            elif caller is not None:
                caller.close()
                caller = None
        except Exception as error:  # the guard says it, and goes on with the next case
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "warm":
        Caller(sys.argv[2]).close()
    else:
        serve()
