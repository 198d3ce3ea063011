# SPDX-License-Identifier: Apache-2.0
"""`launch/bench twin`: how fast the twin is, compared with PyTorch, and what scheduling a task
costs.

Two questions, answered in one run with interleaved rounds and medians:
    1. How much longer do the ranks of the twin take than the same arithmetic in one PyTorch process
       on the same cores? Ranks are processes under mpirun, and then virtual ranks.
    2. How much time does a task cost in addition to what it computes? One rank with one processor,
    and so
       little arithmetic that tasks are short, makes a call of few tasks and one of many. What
       passes outside of tasks is (call − inside tasks); its growth from the one call to the other,
       divided by the growth in tasks, is the cost of a task, and the rest is that of a call. Both
       calls are the last of many in a row, when each of the rank's two threads has a core to
       itself. After a rest Linux sometimes wakes both on the same core, and parts them only
       milliseconds later; so a call of few tasks after a rest is reported as well.
Each process is a rank; PyTorch and virtual ranks are in the first one, and all others sleep
meanwhile. A bar that is missed is a result, no error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn import functional

import moeos
from bench import study
from bench.study import Case, Rounds, Study
from moeos.cli.shared import failures, machine, output
from moeos.cli.shared.settings import read_settings
from moeos.config import reference
from moeos.config.config import MoEConfig, digest_differences
from moeos.config.reference import tolerance_of
from moeos.system import launchers

LARGEST_RATIO = 3.0
"""The bar: the ranks' time is at most this many times PyTorch's."""
LARGEST_TASK_SECONDS = 5e-6
"""The bar: what scheduling a task costs at most, on idle cores."""

LEAST_ROUNDS, WARM_UP_ROUNDS = 9, 3
MATRIX = 2048
"""Rows and columns of the matrices whose product gives the machine's GEMM rate."""
COPIED_BYTES = 1 << 27
"""Bytes that are copied to measure memory; more than any cache holds."""

_PATIENCE = 600.0  # seconds in which ranks meet
_SETTLE = 0.02  # seconds before a job: PyTorch's threads spin for milliseconds after their last
_SEED = 20250
_SEEDS_A_KIND = 1 << 20  # seeds of tokens, the gate and experts lie this far apart
_FEW_TOKENS, _MANY_TOKENS = 1024, 8192
_FEW_REHEARSALS, _MANY_REHEARSALS = 20, 5  # tens of milliseconds: threads find a core each
_SHORT_TASKS = MoEConfig(
    hidden=8,
    intermediate=8,
    experts=16,
    top_k=2,
    dtype=torch.float32,
    max_tokens=_MANY_TOKENS,
)


def main(
    config: Annotated[Path, typer.Argument(help="TOML file of the layer, with a table \\[run].")],
    ranks: Annotated[int, typer.Option(help="Ranks of the world.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes every number to this file.")
    ] = None,
) -> None:
    """Measures the twin on this machine, in as many rounds as the config has iterations."""

    def prepare() -> tuple[Workload, int]:
        cfg, rounds = MoEConfig.from_toml(config), read_settings(config).iterations
        if rounds < LEAST_ROUNDS:
            raise ValueError(f"{config}: iterations is {rounds}; allowed: at least {LEAST_ROUNDS}")
        output.check_writable(json_file)
        return Workload(cfg=cfg, ranks=ranks, seed=_SEED), rounds

    def become_ranks() -> int:
        prepare()
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        words = [mpirun, "-n", str(ranks), sys.executable, "-m", "bench.twin", *sys.argv[1:]]
        os.execv(mpirun, words)

    def body(world: moeos.World) -> Study:
        workload, rounds = prepare()
        if world.size != ranks:
            raise ValueError(f"--ranks is {ranks}, but a launcher started {world.size} ranks")
        return Twin(world, workload, rounds, json_file).measure_all()

    if launchers.detect(os.environ).launcher == "none":
        failures.finish(become_ranks)
    study.run(body, "twin", _PATIENCE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A call of a layer that can be repeated: each has the same tokens and weights.

    Attributes:
        cfg: the layer; S is its max_tokens.
        ranks: P, over which tokens and experts are divided.
        seed: of tokens and weights, at least 0.

    Raises:
        ValueError: `cfg` has a feature that the PyTorch side (`PlainLayer`) lacks,
            or there is no rank.
    """

    cfg: MoEConfig
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        cfg = self.cfg
        cfg.experts_per_rank(self.ranks)
        plain = MoEConfig(
            hidden=cfg.hidden,
            intermediate=cfg.intermediate,
            experts=cfg.experts,
            top_k=cfg.top_k,
            dtype=torch.float32,
            max_tokens=cfg.max_tokens,
        )
        for name, (given, needed) in digest_differences(cfg.digest(), plain.digest()).items():
            raise ValueError(
                f"{name} is {given!r}; what is measured against PyTorch has {needed!r}"
            )

    def tokens(self, rank: int) -> Tensor:
        """x [S, H] of one rank: normal, with variance 1."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        return torch.randn(self.cfg.max_tokens, self.cfg.hidden, generator=generator)

    def all_tokens(self) -> Tensor:
        """x [P, S, H] of all ranks."""
        return torch.stack([self.tokens(rank) for rank in range(self.ranks)])

    def gate(self) -> Tensor:
        """The router's weight [E, H]."""
        generator = torch.Generator().manual_seed(self.seed + _SEEDS_A_KIND)
        return _weight(generator, self.cfg.experts, self.cfg.hidden)

    def experts(self, which: range) -> tuple[Tensor, Tensor]:
        """w1 [n, 2I, H] and w2 [n, H, I] of n experts."""
        cfg = self.cfg
        w1 = torch.empty(len(which), cfg.w1_rows, cfg.hidden)
        w2 = torch.empty(len(which), cfg.hidden, cfg.intermediate)
        for place, expert in enumerate(which):
            generator = torch.Generator().manual_seed(self.seed + 2 * _SEEDS_A_KIND + expert)
            w1[place] = _weight(generator, cfg.w1_rows, cfg.hidden)
            w2[place] = _weight(generator, cfg.hidden, cfg.intermediate)
        return w1, w2

    @property
    def flops(self) -> int:
        """FLOPs of one call on all ranks: 2 E H a token for the router, 2 (2I + I) H a pair."""
        cfg = self.cfg
        tokens = self.ranks * cfg.max_tokens
        router = 2 * tokens * cfg.experts * cfg.hidden
        return router + 2 * tokens * cfg.top_k * (cfg.w1_rows + cfg.intermediate) * cfg.hidden

    @property
    def least_bytes(self) -> int:
        """What a call must at least move: all weights and x read once, y written once."""
        cfg = self.cfg
        weights = cfg.experts * (cfg.w1_rows + cfg.intermediate + 1) * cfg.hidden
        return (weights + 2 * self.ranks * cfg.max_tokens * cfg.hidden) * cfg.dtype.itemsize


class PlainLayer:
    """Softmax routing to k renormalised experts, and SwiGLU experts in float32.

    Pairs are sorted by expert once. For each expert the rows are gathered, multiplied, weighted and
    added to their tokens while they are in the cache, in buffers that are kept from call to call.
    Gathering and adding all pairs at once is slower, and so are fresh buffers. No token is dropped.

    Args:
        gate: [E, H].
        w1: [E, 2I, H], gate rows and then up rows.
        w2: [E, H, I].
        top_k: k.
        max_tokens: the most tokens of a call.
    """

    def __init__(self, gate: Tensor, w1: Tensor, w2: Tensor, top_k: int, max_tokens: int) -> None:
        self._gate = gate
        self._w1 = w1
        self._w2 = w2
        self._top_k = top_k
        self._rows = torch.empty(max_tokens, w1.shape[2])
        self._hidden = torch.empty(max_tokens, w1.shape[1])
        self._results = torch.empty(max_tokens, w1.shape[2])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, H] -> [S, H]."""
        experts, intermediate = len(self._gate), self._w2.shape[2]
        weights, ids = (x @ self._gate.T).softmax(dim=1).topk(self._top_k, dim=1)
        weights /= weights.sum(dim=1, keepdim=True)
        pairs_of = ids.flatten()
        order = pairs_of.argsort()
        counts = torch.bincount(pairs_of, minlength=experts).tolist()
        tokens_of = (order // self._top_k).split(counts)
        weights_of = weights.flatten()[order, None].split(counts)
        y = torch.zeros_like(x)
        for expert, (tokens, scale) in enumerate(zip(tokens_of, weights_of, strict=True)):
            count = counts[expert]
            if count == 0:
                continue
            rows = torch.index_select(x, 0, tokens, out=self._rows[:count])
            hidden = torch.mm(rows, self._w1[expert].T, out=self._hidden[:count])
            gated = functional.silu(hidden[:, :intermediate], inplace=True)
            gated *= hidden[:, intermediate:]
            results = torch.mm(gated, self._w2[expert].T, out=self._results[:count])
            y.index_add_(0, tokens, results.mul_(scale))
        return y


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One job.

    Attributes:
        seconds: of the slowest rank.
        cpu_seconds: processor time that the ranks' processes used meanwhile.
        tasks, busy_seconds: sums over the ranks of the twin.
    """

    seconds: float
    cpu_seconds: float
    tasks: int = 0
    busy_seconds: float = 0.0


Job = Callable[[], Sequence[tuple[float, int, float]]]
"""Does a job on this rank: for each rank that it has, seconds, tasks, and seconds inside these."""


class Ranks:
    """A layer of the twin on the ranks of a world, or on virtual ones of this process."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._members: list[Callable[[int], tuple[float, int, float]]] = []
        self.outputs: dict[int, Tensor] = {}

    def join(self, world: moeos.World) -> Callable[[int], tuple[float, int, float]]:
        """What makes a call of one rank with `tokens` tokens. Collective."""
        workload, rank = self._workload, world.rank
        layer = moeos.MoELayer(workload.cfg, world).requires_grad_(False)
        w1, w2 = workload.experts(workload.cfg.experts_of(rank, world.size))
        layer.load_state_dict({"gate.weight": workload.gate(), "w1": w1, "w2": w2})
        x = workload.tokens(rank)

        def call(tokens: int) -> tuple[float, int, float]:
            begin = time.monotonic()
            self.outputs[rank] = layer(x[:tokens])
            took = time.monotonic() - begin
            stats = layer.stats()
            return took, sum(stats["tasks"].values()), stats["busy_seconds"]

        return call


class VirtualRanks(Ranks):
    """On threads that wait for calls."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._gate = threading.Barrier(workload.ranks + 1)
        self._tokens: int | None = None
        self._rehearsals = 0
        self._found: dict[int, tuple[float, int, float]] = {}
        kind: Any = {"args": (self._live, workload.ranks), "daemon": True}
        self._thread = threading.Thread(target=moeos.virtual.run, **kind)
        self._thread.start()

    def call(self, tokens: int, rehearsals: int = 0) -> list[tuple[float, int, float]]:
        """A call of all ranks, right after `rehearsals` calls that do not count; without any it
        follows a rest.
        """
        self._tokens, self._rehearsals = tokens, rehearsals
        self._gate.wait(_PATIENCE)
        self._gate.wait(_PATIENCE)
        return [self._found[rank] for rank in sorted(self._found)]

    def close(self) -> None:
        """Ends the threads."""
        self._tokens = None
        self._gate.wait(_PATIENCE)
        self._thread.join()

    def _live(self, world: moeos.World) -> None:
        try:
            call = self.join(world)
            while True:
                self._gate.wait(_PATIENCE)
                if self._tokens is None:
                    return
                for _ in range(self._rehearsals + 1):
                    self._found[world.rank] = call(self._tokens)
                self._gate.wait(_PATIENCE)
        except BaseException:
            self._gate.abort()
            raise


class Twin(Study):
    """One rank of the benchmark."""

    def __init__(
        self, world: moeos.World, workload: Workload, rounds: int, out: Path | None
    ) -> None:
        self._workload = workload

        def about() -> Case:
            return {"config": json.loads(workload.cfg.digest()), "seed": workload.seed}

        super().__init__(world, out, "twin", "bench.twin", Rounds(rounds, WARM_UP_ROUNDS), about)

    def measure_all(self) -> Twin:
        """Measures everything, unless the document has it."""
        if self.world.control.allgather("layer" in self.document)[0]:
            return self
        average_before = os.getloadavg()
        workload = self._workload
        processes = Ranks(workload)
        call = processes.join(self.world)
        tokens = workload.cfg.max_tokens
        jobs: dict[str, Job] = {"mpirun": lambda: [call(tokens)]}
        if self.world.rank == 0:
            threads = VirtualRanks(workload)
            alone = VirtualRanks(Workload(cfg=_SHORT_TASKS, ranks=1, seed=_SEED))
            pytorch = PyTorch(workload)
            jobs |= {
                "pytorch": pytorch.call,
                "virtual": lambda: threads.call(tokens),
                "matmul": pytorch.matmul,
                "copy": pytorch.copy,
                "few": lambda: alone.call(_FEW_TOKENS, _FEW_REHEARSALS),
                "many": lambda: alone.call(_MANY_TOKENS, _MANY_REHEARSALS),
                "rested": lambda: alone.call(_FEW_TOKENS),
            }
        names = self.world.control.allgather(list(jobs))[0]

        def do(name: str) -> Outcome:
            return self._do(jobs.get(name, lambda: []))

        for name in ("mpirun", "virtual", "pytorch"):
            do(name)
        gathered = self._gather(processes.outputs[self.world.rank])
        errors: dict[str, float] = {}
        if self.world.rank == 0:
            of_threads = [threads.outputs[rank] for rank in range(self.world.size)]
            made = {"mpirun": torch.cat(gathered), "virtual": torch.cat(of_threads)}
            errors = errors_of(workload, made, pytorch.y)
        require_right(workload, self.world.control.allgather(errors)[0])
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        others = []
        for turn in range(WARM_UP_ROUNDS + self.rounds.count):
            if self.world.rank == 0:
                output.tell(f"round {turn + 1} of {WARM_UP_ROUNDS + self.rounds.count}")
            looked, used = time.monotonic(), self._used_by_others()
            first = turn % len(names)  # no contestant always follows the same one
            for name in names[first:] + names[:first]:
                outcome = do(name)
                if turn >= WARM_UP_ROUNDS:
                    outcomes[name].append(outcome)
            others.append((self._used_by_others() - used) / (time.monotonic() - looked))
        if self.world.rank == 0:
            threads.close()
            alone.close()
        self.document["load"] = {
            "average_before": average_before,
            "average_after": os.getloadavg(),
            "cores_used_by_others": others[WARM_UP_ROUNDS:],
        }
        self.begin_run()
        if self.world.rank == 0:
            self.document |= results_of(workload, outcomes, errors)
        self.write()
        return self

    def _gather(self, y: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(y) for _ in range(self.world.size)]
        if self.group is None:
            return [y]
        dist.all_gather(gathered, y, group=self.group)
        return gathered

    def _do(self, job: Job) -> Outcome:
        """Has all ranks do a job at once, and times it; some have none. Collective."""
        time.sleep(_SETTLE)
        found: list[tuple[float, int, float]] = []
        cpu = time.process_time()
        self.clock.begin(lambda: found.extend(job()))
        mine = (time.process_time() - cpu, found)
        told = self.world.control.allgather(mine, "a job")
        parts = [part for _, of_rank in told for part in of_rank]
        return Outcome(
            seconds=max(seconds for seconds, _, _ in parts),
            cpu_seconds=sum(seconds for seconds, _ in told),
            tasks=sum(tasks for _, tasks, _ in parts),
            busy_seconds=sum(busy for _, _, busy in parts),
        )

    def _used_by_others(self) -> float:
        """Processor time that other processes of this machine have used, by /proc/stat; what a
        hypervisor took away counts as theirs.
        """
        own = self.world.control.allgather(time.process_time(), "processor time")
        return _used_seconds() - sum(own)


class PyTorch:
    """The whole workload in PyTorch on all cores, and the two rates that bound it on this machine.

    Attributes:
        y: the output of the last call.
    """

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(machine.cores())
        cfg = workload.cfg
        most = workload.ranks * cfg.max_tokens
        w1, w2 = workload.experts(range(cfg.experts))
        self._layer = PlainLayer(workload.gate(), w1, w2, cfg.top_k, most)
        self._x = workload.all_tokens().flatten(0, 1)
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._product = torch.empty_like(self._matrix)
        self._source = torch.ones(COPIED_BYTES // 4)
        self._target = torch.empty_like(self._source)
        self.y = self._x

    def call(self) -> list[tuple[float, int, float]]:
        """The layer."""

        def work() -> None:
            self.y = self._layer(self._x)

        return self._timed(work)

    def matmul(self) -> list[tuple[float, int, float]]:
        """A product of two matrices."""
        return self._timed(lambda: torch.mm(self._matrix, self._matrix, out=self._product))

    def copy(self) -> list[tuple[float, int, float]]:
        """A copy of memory."""
        return self._timed(lambda: self._target.copy_(self._source))

    @staticmethod
    def _timed(work: Callable[[], object]) -> list[tuple[float, int, float]]:
        begin = time.monotonic()
        work()
        return [(time.monotonic() - begin, 0, 0.0)]


def errors_of(workload: Workload, made: Mapping[str, Tensor], expected: Tensor) -> dict[str, float]:
    """Relative errors of outputs; tokens on the edge between two experts are left out."""
    x = workload.all_tokens().flatten(0, 1)
    certain = reference.margin_in_errors(x, workload.gate(), workload.cfg) > 1
    return {
        name: reference.relative_error(y[certain], expected[certain]) for name, y in made.items()
    }


def require_right(workload: Workload, errors: Mapping[str, float]) -> None:
    """Raises `RuntimeError` where one is beyond the tolerance."""
    allowed = tolerance_of(workload.cfg)
    for name, error in errors.items():
        if not error <= allowed:
            raise RuntimeError(
                f"the output of {name} is not PyTorch's: its relative error is {error:.1e}, and "
                f"{allowed:.0e} is allowed"
            )


def results_of(
    workload: Workload, outcomes: Mapping[str, Sequence[Outcome]], errors: Mapping[str, float]
) -> dict[str, Any]:
    """What the measurements say: times, ratios, the cost of a task, floors, and the bars."""
    medians = {
        name: statistics.median(outcome.seconds for outcome in found)
        for name, found in outcomes.items()
    }
    layer: dict[str, dict[str, Any]] = {}
    for name in ("pytorch", "mpirun", "virtual"):
        found = outcomes[name]
        layer[name] = {
            "seconds": [outcome.seconds for outcome in found],
            "median_seconds": medians[name],
            "median_cpu_seconds": statistics.median(o.cpu_seconds for o in found),
            "flops_per_second": workload.flops / medians[name],
            "ratio_to_pytorch": medians[name] / medians["pytorch"],
        }
    for name in ("mpirun", "virtual"):
        layer[name]["tasks"] = [outcome.tasks for outcome in outcomes[name]]
        layer[name]["relative_error"] = errors[name]

    cost = scheduling(outcomes["few"], outcomes["many"], outcomes["rested"])
    gemm_rate = 2 * MATRIX**3 / medians["matmul"]
    memory_rate = 2 * COPIED_BYTES / medians["copy"]
    return {
        "layer": layer,
        "scheduling": cost,
        "floors": {
            "flops": workload.flops,
            "gemm_flops_per_second": gemm_rate,
            "flops_seconds": workload.flops / gemm_rate,
            "bytes": workload.least_bytes,
            "memory_bytes_per_second": memory_rate,
            "bytes_seconds": workload.least_bytes / memory_rate,
        },
        "bars": {
            "mpirun_ratio": _bar(layer["mpirun"]["ratio_to_pytorch"], LARGEST_RATIO),
            "virtual_ratio": _bar(layer["virtual"]["ratio_to_pytorch"], LARGEST_RATIO),
            "task_seconds": _bar(cost["median_task_seconds"], LARGEST_TASK_SECONDS),
        },
    }


def scheduling(
    few: Sequence[Outcome], many: Sequence[Outcome], rested: Sequence[Outcome]
) -> dict[str, Any]:
    """The cost of a task and of a call, in each round and the medians."""
    task_seconds, call_seconds = [], []
    for short, long in zip(few, many, strict=True):
        outside_short = short.seconds - short.busy_seconds
        outside_long = long.seconds - long.busy_seconds
        cost = (outside_long - outside_short) / (long.tasks - short.tasks)
        task_seconds.append(cost)
        call_seconds.append(outside_short - cost * short.tasks)
    task_cost = statistics.median(task_seconds)
    rested_call_seconds = [
        outcome.seconds - outcome.busy_seconds - task_cost * outcome.tasks for outcome in rested
    ]
    return {
        "config": json.loads(_SHORT_TASKS.digest()),
        "few": {"tokens": _FEW_TOKENS, "rehearsals": _FEW_REHEARSALS, **_columns(few)},
        "many": {"tokens": _MANY_TOKENS, "rehearsals": _MANY_REHEARSALS, **_columns(many)},
        "rested": {"tokens": _FEW_TOKENS, "rehearsals": 0, **_columns(rested)},
        "task_seconds": task_seconds,
        "median_task_seconds": task_cost,
        "call_seconds": call_seconds,
        "median_call_seconds": statistics.median(call_seconds),
        "rested_call_seconds": rested_call_seconds,
        "median_rested_call_seconds": statistics.median(rested_call_seconds),
    }


def _columns(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "seconds": [outcome.seconds for outcome in outcomes],
        "busy_seconds": [outcome.busy_seconds for outcome in outcomes],
        "tasks": [outcome.tasks for outcome in outcomes],
    }


def _bar(value: float, limit: float) -> dict[str, Any]:
    return {"value": value, "limit": limit, "met": value <= limit}


def _used_seconds() -> float:
    """Processor time since the machine started, over its cores."""
    all_cores = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, interrupt, soft_interrupt, stolen = map(
        int, all_cores[1:9]
    )
    ticks = user + nice + system + interrupt + soft_interrupt + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def _weight(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)


if __name__ == "__main__":
    study.start(main)
