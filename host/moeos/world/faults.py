# SPDX-License-Identifier: Apache-2.0
"""Faults on demand: what ranks of a running world do wrong, and at which of their calls.

A `FaultPlan` is given to `moeos.init` or `moeos.virtual.run`, or lies in the TOML file that the
environment variable MOEOS_FAULTS names. Without one a world has none of this, and the GPU's kernel
is another. This file reads plans, draws delays and packs what the device OS reads of a plan
(runtime/memory/records.def). Must not depend on engines, heaps or launchers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy
import torch

from moeos import _runtime
from moeos.config.records import dtype_of
from moeos.system.files import open_regular, read_toml

ENVIRONMENT = "MOEOS_FAULTS"
"""Names the file of the plan where a program gives none."""

Kind = Literal["delay", "stall", "kill"]
Stage = Literal["start", "route", "combine", "product1", "product0", "dispatch", "replicate"]
Distribution = Literal["constant", "uniform", "lognormal", "samples"]

MOST_SECONDS = 86_400.0
"""The longest delay, drawn or given."""
MOST_FACTOR = 1e6
MOST_SAMPLES = 100_000
"""Delays in a file of samples."""

_MAX_INTEGER = 2**31 - 1
_MAX_SAMPLE_BYTES = 1 << 22
_LOOK_SECONDS = 1e-3  # between two looks at whether this process is to be killed

_STAGES = ("start", *_runtime.task_kinds())  # the device's numbers of them
assert set(_STAGES) == set(get_args(Stage))
_PLAN = dtype_of("FaultPlan")
_FOREVER = 2**64 - 1

Entry = TypeVar("Entry", bound="_Entry")


class _Entry:
    """An entry of a plan: fields that are checked when it is made, and a table in TOML.

    Attributes:
        TABLE: the table's name.
    """

    TABLE: ClassVar[str]
    rank: int | None
    layer: int | None

    def _check_places(self, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            low = 1 if name == "call" else 0
            if not low <= value <= _MAX_INTEGER:
                raise ValueError(f"{name} is {value}; allowed: {low} to {_MAX_INTEGER}")

    def _check_layer(self) -> None:
        if self.layer is not None:
            self._check_places(["layer"])

    def _check_number(self, name: str, low: float, high: float) -> None:
        """Checks a field and stores an int as the float that it means."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}; it must be a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name} is {value!r}; allowed: {low:g} to {high:g}")
        object.__setattr__(self, name, float(value))

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; {_one_of(value, allowed)}")

    def of_layer(self, layer: int) -> bool:
        """Whether it is meant for a layer."""
        return self.layer is None or self.layer == layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault(_Entry):
    """A rank that is late, stands still or dies at one of its calls. Happens once.

    Attributes:
        kind: "delay": no part of the stage begins before `seconds` have passed since the first was
            about to. "stall": none ever does. "kill": none ever does, and the process ends by
            SIGKILL within some milliseconds.
        rank: whose.
        call: of each layer, counted from 1 since it was made. Forgotten when the layer is reset.
        stage: what the rank is about to begin: "start" (the call's first part), or a part of
            "route", "dispatch", "replicate", "product0", "product1" or "combine". A rank without
            such a part in that call is not held; but one without tokens is at "start" and "route",
            before its row counts.
        seconds: of a delay; up to a day.
        layer: of the world's layers, in the order in which they were made, from 0; None: each.
    """

    TABLE: ClassVar[str] = "fault"
    kind: Kind
    rank: int
    call: int
    stage: Stage
    seconds: float = 0.0
    layer: int | None = None

    def __post_init__(self) -> None:
        self._check_choice("kind", get_args(Kind))
        self._check_places(["rank", "call"])
        self._check_layer()
        self._check_choice("stage", get_args(Stage))
        self._check_number("seconds", 0.0, MOST_SECONDS)
        if (self.kind == "delay") != (self.seconds > 0):
            rule = "a delay needs seconds above 0" if self.kind == "delay" else "only a delay has"
            raise ValueError(f"seconds is {self.seconds!r} of a {self.kind}; {rule}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowProcessor(_Entry):
    """A processor whose every part takes `factor` times as long, and `seconds` more.

    On the GPU it also begins no part before the previous one is done; other processors overlap two
    parts, which makes them fast.
    """

    TABLE: ClassVar[str] = "slow_processor"
    rank: int
    processor: int
    seconds: float = 0.0
    factor: float = 1.0
    layer: int | None = None

    def __post_init__(self) -> None:
        self._check_places(["rank", "processor"])
        self._check_layer()
        self._check_number("seconds", 0.0, MOST_SECONDS)
        self._check_number("factor", 1.0, MOST_FACTOR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowLink(_Entry):
    """A link from a rank to a peer over which everything comes later: rows, results, their flags.

    They are late by `seconds`, and, where `bytes_per_second` is set, by the time that all rows so
    far take at that rate. The processor waits before it begins the part that sends them.
    """

    TABLE: ClassVar[str] = "slow_link"
    rank: int
    peer: int
    seconds: float = 0.0
    bytes_per_second: float | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        self._check_places(["rank", "peer"])
        self._check_layer()
        if self.rank == self.peer:
            raise ValueError(f"rank and peer are both {self.peer}; a link joins two ranks")
        self._check_number("seconds", 0.0, MOST_SECONDS)
        if self.bytes_per_second is not None:
            self._check_number("bytes_per_second", 1.0, 1e15)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartDelay(_Entry):
    """Time that the host lets pass before each call, drawn anew for each; those that apply add up.

    Attributes:
        distribution: "constant" (`seconds`), "uniform" (`low` to `high`), "lognormal" (`median`,
            and `sigma` of the logarithm) or "samples" (one of `samples`, any as likely as another).
            Each takes exactly its own of these, in seconds.
        rank: whose calls; None: every rank's.
        samples: in TOML `file`, of numbers between white space, relative to the plan's folder.
        layer: as of `Fault`.
    """

    TABLE: ClassVar[str] = "start_delay"
    distribution: Distribution
    rank: int | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    median: float | None = None
    sigma: float | None = None
    samples: tuple[float, ...] | None = None
    layer: int | None = None

    _TAKES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "constant": ("seconds",),
        "uniform": ("low", "high"),
        "lognormal": ("median", "sigma"),
        "samples": ("samples",),
    }

    def __post_init__(self) -> None:
        self._check_choice("distribution", get_args(Distribution))
        if self.rank is not None:
            self._check_places(["rank"])
        self._check_layer()
        takes = self._TAKES[self.distribution]
        for name in (name for names in self._TAKES.values() for name in names):
            if (getattr(self, name) is not None) != (name in takes):
                given = "is missing" if name in takes else "is given"
                own = " and ".join(takes)
                raise ValueError(f"{name} {given}; distribution {self.distribution!r} takes {own}")
        for name in takes:
            if name == "samples":
                self._check_samples()
            else:
                self._check_number(name, 0.0, 10.0 if name == "sigma" else MOST_SECONDS)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low!r}; it must be at most high, {self.high!r}")

    def _check_samples(self) -> None:
        samples = self.samples
        if not isinstance(samples, tuple) or not all(
            isinstance(sample, (int, float)) and not isinstance(sample, bool) for sample in samples
        ):
            raise TypeError(f"samples is {samples!r:.100}; it must be a tuple of numbers")
        if not 1 <= len(samples) <= MOST_SAMPLES:
            raise ValueError(f"samples has {len(samples)} numbers; allowed: 1 to {MOST_SAMPLES}")
        for place, sample in enumerate(samples):
            if not 0 <= sample <= MOST_SECONDS:
                raise ValueError(f"samples[{place}] is {sample!r}; allowed: 0 to {MOST_SECONDS:g}")

    def draw(self, source: random.Random) -> float:
        """Seconds before a call."""
        drawn = 0.0
        if self.seconds is not None:
            drawn = self.seconds
        elif self.low is not None and self.high is not None:
            drawn = source.uniform(self.low, self.high)
        elif self.median is not None and self.sigma is not None:
            drawn = self.median * math.exp(self.sigma * source.gauss(0.0, 1.0))
        elif self.samples is not None:
            drawn = source.choice(self.samples)
        return min(drawn, MOST_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The faults of a world; every rank is given the whole plan and does its own part.

    Attributes:
        faults, slow_processors, slow_links, start_delays: at most 16 of each of the
            first three for one rank and layer.
        seed: of the start delays.

    Raises:
        TypeError: an attribute has the wrong type.
    """

    faults: tuple[Fault, ...] = ()
    slow_processors: tuple[SlowProcessor, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    start_delays: tuple[StartDelay, ...] = ()
    seed: int = 0

    _ENTRIES: ClassVar[Mapping[str, type[_Entry]]] = {
        "faults": Fault,
        "slow_processors": SlowProcessor,
        "slow_links": SlowLink,
        "start_delays": StartDelay,
    }

    def __post_init__(self) -> None:
        for name, kind in self._ENTRIES.items():
            entries = getattr(self, name)
            if not isinstance(entries, tuple) or not all(isinstance(e, kind) for e in entries):
                raise TypeError(
                    f"{name} is {entries!r:.100}; it must be a tuple of {kind.__name__}"
                )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed is {self.seed!r}; it must be an integer")

    @classmethod
    def from_toml(cls, path: str | Path) -> FaultPlan:
        """Reads `seed` and the arrays of tables [[fault]], [[slow_processor]], [[slow_link]] and
        [[start_delay]], whose keys are named like the fields.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not TOML, a table or key is unknown or missing, a value is not
                allowed, or a file of samples cannot be read.
            TypeError: a value has the wrong type.
        """
        values = read_toml(path)
        arguments: dict[str, Any] = {"seed": values.pop("seed")} if "seed" in values else {}
        tables = {kind.TABLE: (name, kind) for name, kind in cls._ENTRIES.items()}
        for table, entries in values.items():
            if table not in tables:
                raise ValueError(f"{path}: unknown key {table!r}; {_one_of(table, tables)}")
            name, kind = tables[table]
            if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
                raise TypeError(f"{path}: {table} must be an array of tables, [[{table}]]")
            arguments[name] = tuple(
                _read_entry(kind, entry, Path(path), place) for place, entry in enumerate(entries)
            )
        try:
            return cls(**arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def check_ranks(self, size: int, processes: bool) -> None:
        """Raises `ValueError` for a rank that a world of `size` ranks does not have, and for a kill
        where ranks are not processes."""
        for name in self._ENTRIES:
            for place, entry in enumerate(getattr(self, name)):
                where = f"{entry.TABLE} {place} of the fault plan"
                for field in ("rank", "peer"):
                    rank = getattr(entry, field, None)
                    if rank is not None and rank >= size:
                        raise ValueError(
                            f"{where}: {field} is {rank}; the world has ranks 0 to {size - 1}"
                        )
                if isinstance(entry, Fault) and entry.kind == "kill" and not processes:
                    raise ValueError(
                        f"{where}: kind is 'kill' of a virtual rank, which is a thread of this "
                        "process: use 'stall', or start ranks as processes"
                    )


def plan_of(faults: FaultPlan | None) -> FaultPlan | None:
    """The plan of a world: the one that is given, or that of MOEOS_FAULTS, or none.

    Raises `TypeError` for something else than a plan, and what `FaultPlan.from_toml` raises.
    """
    if faults is not None and not isinstance(faults, FaultPlan):
        raise TypeError(f"faults is {faults!r}; it must be a moeos.faults.FaultPlan")
    if faults is None and os.environ.get(ENVIRONMENT):
        path = os.environ[ENVIRONMENT]
        try:
            return FaultPlan.from_toml(path)
        except OSError as error:
            said = f"{ENVIRONMENT} names a file that cannot be read: {error.strerror}"
            raise OSError(error.errno, said, path) from error
    return faults


class LayerFaults:
    """One rank's part of a plan in one of its layers.

    Args:
        layer: in the order in which the world's layers are made, from 0.
        processors: of each rank.
        pinned: whether the GPU must reach the word by which the device asks for a kill.

    Attributes:
        on_device: whether the device OS has something of the plan to do in this layer, on this rank
            or another: then it is the one with faults.
        late: whether this rank may start calls late.

    Raises:
        ValueError: a rank has too many entries, or not such a processor; on all ranks.
    """

    def __init__(
        self, plan: FaultPlan | None, rank: int, layer: int, processors: int, *, pinned: bool
    ) -> None:
        plan = plan or FaultPlan()
        entries = [*plan.faults, *plan.slow_processors, *plan.slow_links]
        self.on_device = any(entry.of_layer(layer) for entry in entries)
        _check_device_entries(entries, layer, processors)
        self._holds = _of(plan.faults, rank, layer)
        self._processors = _of(plan.slow_processors, rank, layer)
        self._links = _of(plan.slow_links, rank, layer)
        self._delays = _of(plan.start_delays, rank, layer)
        self.late = bool(self._delays)
        self._source = random.Random(f"{plan.seed} {rank} {layer}")
        kills = any(fault.kind == "kill" for fault in self._holds)
        self._executioner = _Executioner(pinned) if kills else None

    def before_call(self) -> None:
        """Lets the time pass that this rank starts its next call late."""
        seconds = sum(delay.draw(self._source) for delay in self._delays)
        if seconds > 0:
            time.sleep(min(seconds, MOST_SECONDS))

    def packed(self, *, again: bool = False) -> bytes:
        """The bytes of `moeos::FaultPlan`; `again`: after a reset, without what happens once."""
        holds = [] if again else self._holds
        word = 0 if self._executioner is None else self._executioner.address
        entries = {
            "hold": [_pack_hold(fault) for fault in holds],
            "processor": [_pack_processor(slow) for slow in self._processors],
            "link": [_pack_link(slow) for slow in self._links],
        }
        plan = numpy.zeros(1, _PLAN)
        plan["kill_word"] = word
        for name, packed in entries.items():
            plan[f"{name}s"] = len(packed)
            for place, fields in enumerate(packed):
                for field, value in fields.items():
                    plan[name][field][0, place] = value
        return plan.tobytes()

    def close(self) -> None:
        """From now on this process is not killed."""
        if self._executioner is not None:
            self._executioner.close()


class _Executioner:
    """Ends this process by SIGKILL when the device OS asks for it.

    Attributes:
        address: of the word that the device sets.
    """

    def __init__(self, pinned: bool) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._words = self._memory.numpy()
        self.address = self._memory.data_ptr()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="moeos-kill", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if self._words[0] != 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _of(entries: Iterable[Entry], rank: int, layer: int) -> list[Entry]:
    """The entries of one rank in one layer."""
    return [entry for entry in entries if entry.of_layer(layer) and entry.rank in (None, rank)]


def _check_device_entries(entries: Iterable[_Entry], layer: int, processors: int) -> None:
    """Raises `ValueError` where a rank has more entries of a kind than the device has room for, or
    not such a processor."""
    counts: dict[tuple[str, int | None], int] = {}
    for entry in entries:
        if not entry.of_layer(layer):
            continue
        key = entry.TABLE, entry.rank
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > _runtime.FAULTS:
            raise ValueError(
                f"rank {entry.rank} has more than {_runtime.FAULTS} of {entry.TABLE} in layer "
                f"{layer} of the fault plan; at most {_runtime.FAULTS} are allowed"
            )
        if isinstance(entry, SlowProcessor) and entry.processor >= processors:
            raise ValueError(
                f"slow_processor of rank {entry.rank} of the fault plan: processor is "
                f"{entry.processor}; a rank has processors 0 to {processors - 1}"
            )


def _pack_hold(fault: Fault) -> dict[str, int]:
    return {
        "call": fault.call,
        "stage": _STAGES.index(fault.stage),
        "kills": fault.kind == "kill",
        "hold_ns": _nanoseconds(fault.seconds) if fault.kind == "delay" else _FOREVER,
    }


def _pack_processor(slow: SlowProcessor) -> dict[str, int]:
    return {
        "index": slow.processor,
        "factor_milli": round(slow.factor * 1000),
        "extra_ns": _nanoseconds(slow.seconds),
    }


def _pack_link(slow: SlowLink) -> dict[str, int]:
    rate = 0 if slow.bytes_per_second is None else round(slow.bytes_per_second)
    return {
        "peer": slow.peer,
        "latency_ns": _nanoseconds(slow.seconds),
        "bytes_per_second": rate,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _read_entry(kind: type[Entry], table: dict[str, Any], path: Path, place: int) -> Entry:
    """An entry of a file; its errors name the file, the table and which of them it is."""
    where = f"{path}: {kind.TABLE} {place}"
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if kind is StartDelay:
        fields["file"] = fields.pop("samples")
    for key in table:
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; {_one_of(key, fields)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ValueError(f"{where}: missing key {name}")
    arguments = dict(table)
    try:
        if "file" in arguments:
            arguments["samples"] = _read_samples(path.parent, arguments.pop("file"))
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _read_samples(folder: Path, name: object) -> tuple[float, ...]:
    if not isinstance(name, str) or not name or "\0" in name:
        raise TypeError(f"file is {name!r}; it must be the path of a file")
    path = folder / name
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_SAMPLE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"file is {name!r}; {path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_SAMPLE_BYTES:
        raise ValueError(f"file is {name!r}, which is larger than {_MAX_SAMPLE_BYTES} bytes")
    samples = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        for word in line.split():
            try:
                samples.append(float(word))
            except ValueError:
                raise ValueError(
                    f"file is {name!r}; {word!r:.50} in line {number} is no number"
                ) from None
    return tuple(samples)


def _one_of(value: object, allowed: Iterable[str]) -> str:
    names = list(allowed)
    nearest = difflib.get_close_matches(str(value)[:100], names, n=1, cutoff=0.0)[0]
    return f"allowed: {', '.join(names)}; the nearest is {nearest!r}"
