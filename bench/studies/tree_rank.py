# SPDX-License-Identifier: Apache-2.0
"""One rank of one tree of moeos, as a process that times calls when it is told to.

`bench.studies.trees` starts it by its path, so that `import moeos` finds the tree that is
timed and not this one. It uses nothing of moeos but what every tree has: `init`, `MoEConfig`,
`MoELayer`. Orders come as lines of JSON on stdin; each is answered by one line of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist

import moeos

_FLUSH_BYTES = 256 << 20
_REST = 1_500_000  # clock cycles, in which the host gets ahead of the GPU
_WARM_UP = 2  # calls that do not count
_DEADLINE = 600.0  # seconds; the compiler's time counts
_SEED = 1 << 30


class Timer:
    """A layer of a tree on this rank's GPU, and what times its calls.

    Args:
        config: TOML file of the layer.
    """

    def __init__(self, config: str, world: moeos.World) -> None:
        self._rank = world.rank
        self._one = torch.ones(1, device="cuda")
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._layer = moeos.MoELayer(moeos.MoEConfig.from_toml(config), world)
        generator = torch.Generator("cuda").manual_seed(_SEED)
        for weight in (self._layer.gate.weight, self._layer.w1, self._layer.w2):
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)

    def time(self, tokens: int, flushed: bool, rounds: int) -> float:
        """The median of the slowest rank's times of so many calls, in seconds; `flushed`: with
        nothing in the L2 cache. Collective.
        """
        layer = self._layer
        generator = torch.Generator("cuda").manual_seed(_SEED + 1 + self._rank)
        x = torch.randn(tokens, layer.cfg.hidden, device="cuda", generator=generator)
        x = x.to(torch.bfloat16)
        times = []
        for turn in range(_WARM_UP + rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flushed:
                self._flush.zero_()
            torch.cuda._sleep(_REST)
            if dist.is_initialized():
                dist.all_reduce(self._one)
            begin.record()
            layer(x)
            end.record()
            torch.cuda.synchronize()
            took = torch.tensor([begin.elapsed_time(end) * 1e-3], device="cuda")
            if dist.is_initialized():
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= _WARM_UP:
                times.append(took.item())
        layer.check()
        return statistics.median(times)


def main() -> None:
    """Serves orders until stdin ends; sys.argv[1] is the port at which the ranks meet."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if ranks > 1:  # not at MASTER_PORT, where some trees' worlds meet
        where = f"tcp://127.0.0.1:{sys.argv[1]}"
        dist.init_process_group("nccl", init_method=where, rank=rank, world_size=ranks)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    timer: Timer | None = None
    with contextlib.ExitStack() as world, torch.no_grad():
        for line in sys.stdin:
            order = json.loads(line)
            answer = None
            if "layer" in order:
                timer = None
                world.close()  # with all that its layer had
                gc.collect()
                torch.cuda.empty_cache()
                opened = world.enter_context(moeos.init("cuda", deadline=_DEADLINE))
                timer = Timer(order["layer"], opened)
            elif timer is not None:
                answer = timer.time(order["tokens"], order["flushed"], order["rounds"])
            print(json.dumps({"answer": answer}), file=answers, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
