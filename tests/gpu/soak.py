# SPDX-License-Identifier: Apache-2.0
"""Calls for as long as is asked for, then a rank that is killed amid one:
`torchrun --nproc-per-node 4 -m tests.gpu.soak --seconds 3600 --out soak.json`.

A few layers take turns; token counts, routings, graph replays and delays are drawn. The first
output of each input is compared with the float64 reference, all others with the first one, bit for
bit. In the end rank 1 is killed by SIGKILL in a call, and the others must raise `PeerTimeout` that
names it. Needs at least 2 GPUs, and torchrun: mpirun ends survivors at once. torchrun ends them as
well, but first by SIGTERM, which they ignore, and by SIGKILL no sooner than 30 s later.
`test_soak.py` starts it for some seconds where there are several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import moeos
from moeos import MoEConfig, World
from moeos.cli.shared import provenance
from moeos.world.faults import Fault, FaultPlan, SlowLink, SlowProcessor
from tests.gpu.cases import (
    DEADLINE,
    RankLayer,
    assert_matches,
    call_on_gpu,
    draw_routed_call,
    draw_weights_on_gpu,
)
from tests.gpu.multi import LARGE, OTHERS
from tests.layers import PREFERENCES, Call, config, draw_given_call

INPUTS = 24
"""Of a rank and layer."""
FULL = 0
"""The input of the most tokens, routed by the gate: it has rows for every rank."""
BURSTS, LONGEST_BURST = 40, 12
"""Calls of one layer in a row, and how many times a layer is chosen before ranks compare clocks."""
LONGEST_SLEEP = 0.01  # seconds that a host lets pass before some calls
LONGEST_PAUSE = 2_000_000  # clock cycles that a rank's stream sleeps before some calls
ONE_IN = 50  # calls, before which a host or a stream sleeps
MARGIN = 1.0  # seconds beyond the deadline until a survivor has its error
MERGE_SECONDS = 10.0  # that rank 0 waits for what other survivors have to say

KILLED, KILLED_IN = 1, 4
"""Who is killed, and in which call of the last layer."""

SMALL = config(
    dtype=torch.bfloat16, hidden=512, intermediate=512, experts=32, top_k=4, max_tokens=300
)
LAYERS: dict[str, MoEConfig] = {"large": LARGE, **OTHERS, "late": SMALL, "killed": SMALL}
"""In the order in which they are made. The last two have the kernel with faults, and share it."""
LATE, LAST = len(LAYERS) - 2, len(LAYERS) - 1

_STAGES = ("start", "route", "dispatch", "replicate", "product0", "product1", "combine")

PLAN = FaultPlan(
    faults=(
        *(
            Fault(
                kind="delay",
                rank=number % 2,
                call=3 + 7 * number,
                stage=_STAGES[number % len(_STAGES)],  # type: ignore[arg-type]
                seconds=0.002 * (1 + number),
                layer=LATE,
            )
            for number in range(24)
        ),
        Fault(kind="kill", rank=KILLED, call=KILLED_IN, stage="product0", layer=LAST),
    ),
    slow_processors=(SlowProcessor(rank=0, processor=3, seconds=1e-5, factor=2.0, layer=LATE),),
    slow_links=(SlowLink(rank=1, peer=0, seconds=2e-5, bytes_per_second=20e9, layer=LATE),),
)


class Station:
    """A layer, this rank's inputs for it, and the first output of each.

    Attributes:
        replays: calls that were replays of a graph.
    """

    def __init__(self, cfg: MoEConfig, world: World, number: int, drawn: random.Random) -> None:
        self._weights = draw_weights_on_gpu(cfg, number)
        self.layer = RankLayer(self._weights, world)
        self.replays = 0
        self._drawn = drawn
        self._calls = [self._draw(world, place) for place in range(INPUTS)]
        self._firsts: list[torch.Tensor | None] = [None] * INPUTS
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self._x = torch.zeros(cfg.max_tokens, cfg.hidden, dtype=cfg.dtype, device="cuda")
        self._tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> None:
        """Makes the graph that calls replay. When all layers are made: a graph has the buffers of
        its capture, and here one rank replays where another calls."""
        with torch.cuda.graph(self._graph):
            self._y = self.layer(Call(self._x), self._tokens)

    def _draw(self, world: World, place: int) -> Call:
        """An input: routed by the gate, or by the caller in one of the ways of PREFERENCES, or all
        to one expert; with no tokens, one, the most or any number."""
        cfg = self._weights.cfg
        most = cfg.max_tokens
        tokens = self._drawn.choice((0, 1, most, *(self._drawn.randrange(most) for _ in range(5))))
        if place == FULL:
            tokens = most
        seed = 1000 * world.rank + place
        kinds = ["gate", "gate", *PREFERENCES, "one takes all"]
        kind = kinds[place % len(kinds)]
        if kind == "gate":
            return draw_routed_call(self._weights, tokens, seed)
        if kind == "one takes all":
            popular = torch.full((cfg.experts,), -torch.inf)
            popular[self._drawn.randrange(cfg.experts)] = 0.0
        else:
            popular = PREFERENCES[kind](cfg.experts, world.size)
        return call_on_gpu(draw_given_call(cfg, tokens, seed, popular))

    def call(self, place: int | None = None) -> None:
        """Makes a call of any input, as it is or by replaying the graph, and compares its output.

        The comparison waits for nothing; `check` looks at what it has found.
        """
        place = self._drawn.randrange(INPUTS) if place is None else place
        call, first = self._calls[place], self._firsts[place]
        if first is None:
            self._firsts[place] = self.layer(call)
        elif call.ids is None and self._drawn.random() < 0.5:
            tokens = len(call.x)
            self._x[:tokens].copy_(call.x)
            self._tokens.fill_(tokens)
            self._graph.replay()
            self._wrong += (self._y[:tokens] != first).any() | self._y[tokens:].any()
            self.replays += 1
        else:
            self._wrong += (self.layer(call) != first).any()

    def check(self) -> None:
        """Waits for the calls so far and raises what has gone wrong in them."""
        self.layer.engine.check()

    def wrong(self) -> tuple[int, list[str]]:
        """How many outputs were wrong, and what the reference says of first ones."""
        said = []
        for place, first in enumerate(self._firsts):
            if first is not None:
                try:
                    assert_matches(self._weights, self._calls[place], first, f"input {place}")
                except AssertionError as error:
                    said.append(str(error))
        return int(self._wrong) + len(said), said


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the soak; ends the process, with 0 on rank 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="of calls, before the kill")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with moeos.init("cuda", deadline=DEADLINE, faults=PLAN) as world:
        drawn = random.Random(f"{options.seed} {world.rank}")
        stations = [Station(cfg, world, i, drawn) for i, cfg in enumerate(LAYERS.values())]
        for station in stations:
            station.capture()
        report = soak(world, stations[:LAST], options.seconds, options.seed, drawn)
        good = kill(world, stations[LAST], report, options.out)
        # Leaving the world would wait for the rank that is gone.
        os._exit(0 if good else 1)


def soak(
    world: World, stations: Sequence[Station], seconds: float, seed: int, drawn: random.Random
) -> dict[str, Any]:
    """Makes calls for some seconds, the same layers on all ranks; what came of it on all."""
    shared = random.Random(seed)
    began = time.monotonic()
    elapsed, calls = 0.0, 0
    while elapsed < seconds:
        for _ in range(BURSTS):
            station = shared.choice(stations)
            for _ in range(shared.randint(1, LONGEST_BURST)):
                if drawn.randrange(ONE_IN) == 0:
                    time.sleep(LONGEST_SLEEP * drawn.random())
                if drawn.randrange(ONE_IN) == 0:
                    torch.cuda._sleep(drawn.randrange(LONGEST_PAUSE))
                station.call()
                calls += 1
        for station in stations:
            station.check()
        # Rank 0's clock decides, so that all ranks make as many calls.
        elapsed = world.control.allgather(time.monotonic() - began, "how long it has taken")[0]
        if world.rank == 0:
            print(f"{calls} calls in {elapsed:.0f} s", flush=True)
    found = [station.wrong() for station in stations]
    mine = {
        "calls": calls,
        "replays": sum(station.replays for station in stations),
        "mismatches": sum(count for count, _ in found),
        "wrong": [
            f"{name}: {text}" for name, (_, s) in zip(LAYERS, found, strict=False) for text in s
        ],
    }
    of_all = world.control.allgather(mine, "what came of the calls")
    return {
        "gpu": torch.cuda.get_device_name(),
        "ranks": world.size,
        "commit": provenance.commit(),
        "command": provenance.command("tests.gpu.soak"),
        "seconds": elapsed,
        "calls": sum(one["calls"] for one in of_all),
        "graph_replays": sum(one["replays"] for one in of_all),
        "mismatches": sum(one["mismatches"] for one in of_all),
        "wrong": [
            f"rank {rank}, {text}" for rank, one in enumerate(of_all) for text in one["wrong"]
        ],
    }


def kill(world: World, station: Station, report: dict[str, Any], out: Path) -> bool:
    """Rank `KILLED` dies in a call. Survivors write what they see; rank 0 all of it, to `out`.

    Returns whether this rank has seen what it must; on rank 0, whether all is as it must be.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, when it has seen a rank die
    for _ in range(KILLED_IN - 1):
        station.call(FULL)
    station.check()
    victim = world.control.allgather(os.getpid(), "the ranks' processes")[KILLED]
    gone = threading.Event()
    ended: list[float] = []
    if world.rank != KILLED:
        descriptor = os.pidfd_open(victim)  # before it dies, so that it is the right process

        def watch() -> None:
            ends = select.poll()
            ends.register(descriptor, select.POLLIN)
            if ends.poll(3000 * DEADLINE):
                ended.append(time.monotonic())
            gone.set()

        threading.Thread(target=watch, daemon=True).start()
    world.control.barrier()
    began = time.monotonic()
    error: Exception | None = None
    try:
        station.call(FULL)
        station.check()
    except Exception as raised:  # whatever it is, it is what the survivor has to say
        error = raised
    seconds = time.monotonic() - began
    if world.rank == KILLED:
        print(f"rank {KILLED} was not killed: {error}", flush=True)
        os._exit(3)
    gone.wait(MERGE_SECONDS)
    mine = {
        "rank": world.rank,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "seconds_from_the_call": seconds,
        "seconds_from_the_end_of_the_process": began + seconds - ended[0] if ended else None,
        "named": re.search(rf"PeerTimeout: .*for rank {KILLED}, which owes ", repr_of(error))
        is not None,
        "in_time": seconds <= DEADLINE + MARGIN,
    }
    good = bool(mine["named"] and mine["in_time"])
    if world.rank != 0:
        part = part_of(out, world.rank)
        unfinished = part.with_name(f"{part.name}.unfinished")  # each rank its own
        unfinished.write_text(json.dumps(mine))
        unfinished.rename(part)
        return good
    survivors = [mine, *(read_part(part_of(out, rank), rank) for rank in others(world))]
    report["kill"] = {"rank": KILLED, "deadline": DEADLINE, "survivors": survivors}
    report["good"] = report["mismatches"] == 0 and all(
        one["named"] and one["in_time"] for one in survivors
    )
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{out}: {'good' if report['good'] else 'NOT GOOD'}", flush=True)
    return bool(report["good"])


def others(world: World) -> list[int]:
    """Survivors beside rank 0."""
    return [rank for rank in range(1, world.size) if rank != KILLED]


def part_of(out: Path, rank: int) -> Path:
    """Where a survivor leaves what it has seen for rank 0: the control plane may be gone."""
    return out.with_name(f"{out.name}.rank{rank}")


def read_part(part: Path, rank: int) -> dict[str, Any]:
    """What a survivor has left, which is then removed."""
    ends = time.monotonic() + MERGE_SECONDS
    while not part.exists():
        if time.monotonic() > ends:
            return {"rank": rank, "error": "it says nothing", "named": False, "in_time": False}
        time.sleep(0.01)
    said: dict[str, Any] = json.loads(part.read_text())
    part.unlink()
    return said


def repr_of(error: Exception | None) -> str:
    """The name and the sentence of an error."""
    return "" if error is None else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
