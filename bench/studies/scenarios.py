# SPDX-License-Identifier: Apache-2.0
"""Scenarios by name: delays of ranks before each step and factors of their speed.

This file must not depend on layers or clocks.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping
from pathlib import Path

from moeos.world.faults import MOST_FACTOR, MOST_SECONDS, FaultPlan, StartDelay

FORMS = (
    "none, late:RANKS:SECONDS, late:RANKS:Nx (N undelayed steps), slow:RANKS:FACTOR, "
    "jitter:PRESET, plan:FILE; RANKS as 1 or 0+2"
)
"""How a scenario is written."""

PRESETS: Mapping[str, float] = {"thesis-supercomputer": 1.32, "thesis-vm": 11.0}
"""P95 of a step's time over the time without stragglers, in the thesis' section 3.1: a 1.3B model's
training on 32 A100 of a supercomputer, and on 8 V100 of one virtual machine. Only these two numbers
are the thesis'; that delays are lognormal, with `SIGMA`, is not."""

SIGMA = 1.0
"""The deviation of the logarithm of a preset's delays."""

DEFAULTS = (
    "none",
    "late:{last}:0.05x",
    "late:{last}:1x",
    "late:{last}:4x",
    "jitter:thesis-supercomputer",
    "jitter:thesis-vm",
)
"""A study's default scenarios; {last} is the last rank."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is done to which ranks in each step.

    Attributes:
        name: as it was asked for.
        start_delays: their sum passes before a rank begins the step, drawn anew each time.
        slow: by what factor a rank's tasks take longer.
    """

    name: str
    start_delays: tuple[StartDelay, ...] = ()
    slow: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def late(self) -> tuple[int, ...]:
        """The ranks that are late by the same time in each step."""
        return tuple(
            delay.rank
            for delay in self.start_delays
            if delay.distribution == "constant" and delay.rank is not None
        )

    def delays(self, seed: int, rank: int, steps: int) -> list[float]:
        """Seconds before each step of a rank; the same whenever it is asked for."""
        source = random.Random(f"{seed} {self.name} {rank}")
        mine = [delay for delay in self.start_delays if delay.rank in (None, rank)]
        return [min(MOST_SECONDS, sum(delay.draw(source) for delay in mine)) for _ in range(steps)]


def parse(text: str, ranks: int, step: float) -> Scenario:
    """The scenario that a text names.

    Args:
        text: one of `FORMS`.
        ranks: P.
        step: seconds of an undelayed step, the unit of "4x" and of the presets.

    Raises:
        ValueError: it is none, or names a rank that is not there.
        OSError: the file of "plan:FILE" cannot be read.
    """
    kind, _, rest = text.partition(":")
    if text == "none":
        return Scenario(text)
    if kind == "late":
        who, amount = _two(text, rest)
        seconds = _number(text, amount.removesuffix("x"), MOST_SECONDS)
        seconds *= step if amount.endswith("x") else 1.0
        delays = [
            StartDelay(distribution="constant", rank=rank, seconds=min(seconds, MOST_SECONDS))
            for rank in _ranks(text, who, ranks)
        ]
        return Scenario(text, tuple(delays))
    if kind == "slow":
        who, amount = _two(text, rest)
        factor = _number(text, amount, MOST_FACTOR)
        if factor < 1:
            raise ValueError(f"{text!r} has the factor {factor:g}; it must be at least 1")
        return Scenario(text, slow=dict.fromkeys(_ranks(text, who, ranks), factor))
    if kind == "jitter":
        return Scenario(text, (_preset(text, rest, ranks, step),))
    if kind == "plan":
        return Scenario(text, _of_file(text, Path(rest), ranks))
    raise ValueError(f"the scenario {text!r} is unknown; allowed: {FORMS}")


def _preset(text: str, name: str, ranks: int, step: float) -> StartDelay:
    """A delay of every rank, so that 5 % of all steps have one that makes the step as long as the
    preset says.
    """
    if name not in PRESETS:
        raise ValueError(f"{text!r} is unknown; jitter has the presets {', '.join(PRESETS)}")
    most = (PRESETS[name] - 1) * step
    quantile = statistics.NormalDist().inv_cdf(0.95 ** (1 / ranks))
    return StartDelay(
        distribution="lognormal", median=most * math.exp(-SIGMA * quantile), sigma=SIGMA
    )


def _of_file(text: str, file: Path, ranks: int) -> tuple[StartDelay, ...]:
    plan = FaultPlan.from_toml(file)
    if plan.faults or plan.slow_links or plan.slow_processors or not plan.start_delays:
        raise ValueError(f"{text!r}: a study takes [[start_delay]] from a plan, and nothing else")
    if any(delay.layer not in (None, 0) for delay in plan.start_delays):
        raise ValueError(f"{text!r}: a study has one layer, 0")
    plan.check_ranks(ranks, processes=True)
    return plan.start_delays


def _two(text: str, rest: str) -> tuple[str, str]:
    first, colon, second = rest.partition(":")
    if not colon:
        raise ValueError(f"the scenario {text!r} lacks a part; allowed: {FORMS}")
    return first, second


def _ranks(text: str, who: str, ranks: int) -> list[int]:
    named = who.split("+")
    if not all(one.isascii() and one.isdigit() and int(one) < ranks for one in named):
        raise ValueError(f"{text!r} names {who!r}; ranks are 0 to {ranks - 1}, with + between")
    return sorted({int(one) for one in named})


def _number(text: str, amount: str, most: float) -> float:
    try:
        number = float(amount)
    except ValueError:
        raise ValueError(f"{text!r} has {amount!r} where a number belongs") from None
    if not 0 <= number <= most:
        raise ValueError(f"{text!r} has {amount}; allowed: 0 to {most:g}")
    return number
