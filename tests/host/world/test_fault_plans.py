# SPDX-License-Identifier: Apache-2.0
"""Fault plans: what is read from a file, what is refused and how, and how delays are drawn."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import moeos
from moeos import World
from moeos.world import virtual
from moeos.world.faults import Fault, FaultPlan, Kind, SlowLink, SlowProcessor, StartDelay
from tests.layers import config, draw_weights


def plan(kind: Kind) -> FaultPlan:
    return FaultPlan(faults=(Fault(kind=kind, rank=1, call=3, stage="product0"),))


GOOD = """
seed = 11
[[fault]]
kind = "delay"
rank = 1
call = 3
stage = "product0"
seconds = 0.25
[[fault]]
kind = "kill"
rank = 0
call = 9
stage = "start"
layer = 2
[[slow_processor]]
rank = 0
processor = 2
factor = 1.5
[[slow_link]]
rank = 0
peer = 1
seconds = 1e-3
bytes_per_second = 1_000_000
[[start_delay]]
distribution = "samples"
file = "delays.txt"
[[start_delay]]
distribution = "constant"
rank = 3
seconds = 1
"""


def test_a_plan_is_read_from_a_file_and_its_samples_beside_it(tmp_path: Path) -> None:
    (tmp_path / "delays.txt").write_text("0.1 0.2\n\n3e-1\n")
    file = tmp_path / "plan.toml"
    file.write_text(GOOD)
    assert FaultPlan.from_toml(file) == FaultPlan(
        seed=11,
        faults=(
            Fault(kind="delay", rank=1, call=3, stage="product0", seconds=0.25),
            Fault(kind="kill", rank=0, call=9, stage="start", layer=2),
        ),
        slow_processors=(SlowProcessor(rank=0, processor=2, factor=1.5),),
        slow_links=(SlowLink(rank=0, peer=1, seconds=0.001, bytes_per_second=1e6),),
        start_delays=(
            StartDelay(distribution="samples", samples=(0.1, 0.2, 0.3)),
            StartDelay(distribution="constant", rank=3, seconds=1.0),
        ),
    )


FAULT = {"kind": "stall", "rank": 1, "call": 2, "stage": "product0"}
DELAY = {"distribution": "constant", "seconds": 1.0}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "stage": ("fault", {**FAULT, "stage": "prod0"}, "stage is 'prod0'; .* nearest is 'product0'"),
    "kind": ("fault", {**FAULT, "kind": "stal"}, "kind is 'stal'; .* nearest is 'stall'"),
    "key": ("fault", {**FAULT, "stages": 1}, "unknown key 'stages'; .* nearest is 'stage'"),
    "missing": ("fault", {"kind": "stall"}, "missing key rank"),
    "call": ("fault", {**FAULT, "call": 0}, "call is 0; allowed: 1 to"),
    "negative rank": ("fault", {**FAULT, "rank": -1}, "rank is -1; allowed: 0 to"),
    "rank": ("fault", {**FAULT, "rank": "one"}, "rank is 'one'; it must be an integer"),
    "boolean": ("fault", {**FAULT, "rank": True}, "rank is True; it must be an integer"),
    "no delay": ("fault", {**FAULT, "kind": "delay"}, "seconds is 0.0 of a delay; .* above 0"),
    "stall": ("fault", {**FAULT, "seconds": 1}, "seconds is 1.0 of a stall; only a delay has"),
    "long": ("fault", {**FAULT, "kind": "delay", "seconds": 1e6}, "seconds is 1000000.0; allowed"),
    "itself": ("slow_link", {"rank": 1, "peer": 1}, "rank and peer are both 1; a link joins"),
    "rate": ("slow_link", {"rank": 1, "peer": 0, "bytes_per_second": 0}, "bytes_per_second is 0;"),
    "factor": ("slow_processor", {"rank": 0, "processor": 0, "factor": 0.5}, "factor is 0.5;"),
    "distribution": ("start_delay", {"distribution": "normal"}, "distribution is 'normal'; .*allo"),
    "parameter": ("start_delay", {**DELAY, "sigma": 1.0}, "sigma is given; .*'constant' takes sec"),
    "no parameter": ("start_delay", {"distribution": "uniform", "low": 1}, "high is missing; "),
    "turned": (
        "start_delay",
        {"distribution": "uniform", "low": 2, "high": 1},
        "low is 2.0; it must be at most high, 1.0",
    ),
    "no file": (
        "start_delay",
        {"distribution": "samples", "file": "gone.txt"},
        r"file is 'gone.txt'; .*gone.txt cannot be read: No such file",
    ),
    "a word": ("start_delay", {"distribution": "samples", "file": "words.txt"}, "'b' in line 2"),
    "negative": (
        "start_delay",
        {"distribution": "samples", "file": "minus.txt"},
        r"samples\[1\] is -1.0; allowed: 0 to 86400",
    ),
    "empty": ("start_delay", {"distribution": "samples", "file": "empty.txt"}, "has 0 numbers"),
    "table": ("faults", FAULT, "unknown key 'faults'; .* nearest is 'fault'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_cannot_be_is_refused_with_file_table_and_key(
    name: str, tmp_path: Path
) -> None:
    table, entry, words = BAD[name]
    for file, text in (("words.txt", "1\n2 b"), ("minus.txt", "0.5 -1"), ("empty.txt", "\n")):
        (tmp_path / file).write_text(text)
    file = tmp_path / "plan.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    file.write_text("\n".join([f"[[{table}]]", *lines]))
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        FaultPlan.from_toml(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert table == "faults" or f"{table} 0: " in str(raised.value)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (
            plan("stall"),
            "fault 0 of the fault plan: rank is 1; the world has ranks 0 to 0",
        ),
        (
            FaultPlan(slow_links=(SlowLink(rank=0, peer=7),)),
            "slow_link 0 of the fault plan: peer is 7; the world has ranks 0 to 0",
        ),
        (
            FaultPlan(start_delays=(StartDelay(distribution="constant", rank=2, seconds=1.0),)),
            "start_delay 0 of the fault plan: rank is 2",
        ),
    ],
)
def test_a_rank_that_the_world_does_not_have_is_refused(faults: FaultPlan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        virtual.run(lambda world: None, 1, faults=faults)
    with pytest.raises(ValueError, match=words):
        moeos.init("twin", faults=faults)


def test_a_virtual_rank_cannot_be_killed() -> None:
    with pytest.raises(ValueError, match=r"kind is 'kill' of a virtual rank, .* use 'stall'"):
        virtual.run(lambda world: None, 2, faults=plan("kill"))


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match=r"it must be a moeos\.faults\.FaultPlan"):
        virtual.run(lambda world: None, 2, faults="plan.toml")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"faults is .* must be a tuple of Fault"):
        FaultPlan(faults=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (
            FaultPlan(slow_processors=(SlowProcessor(rank=1, processor=2, factor=2.0),)),
            "slow_processor of rank 1 .*: processor is 2; a rank has processors 0 to 0",
        ),
        (
            FaultPlan(faults=plan("stall").faults * 17),
            "rank 1 has more than 16 of fault in layer 0",
        ),
    ],
)
def test_what_the_device_has_no_room_for_is_refused_by_all_ranks(
    faults: FaultPlan, words: str
) -> None:
    def rank_main(world: World) -> None:
        with pytest.raises(ValueError, match=words):
            draw_weights(config()).layer(world)

    virtual.run(rank_main, 2, faults=faults)


DELAYS = {
    "constant": (StartDelay(distribution="constant", seconds=0.5), 0.5, 0.5, 0.5),
    "uniform": (StartDelay(distribution="uniform", low=1.0, high=3), 1.0, 2.0, 3.0),
    "lognormal": (StartDelay(distribution="lognormal", median=0.1, sigma=0.5), 0.0, 0.1, 5.0),
    "samples": (StartDelay(distribution="samples", samples=(0.1, 0.1, 0.2)), 0.1, 0.1, 0.2),
}


@pytest.mark.parametrize("name", DELAYS)
def test_delays_are_drawn_from_their_distribution(name: str) -> None:
    delay, low, median, high = DELAYS[name]
    source = random.Random(0)
    drawn = [delay.draw(source) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.1)


def test_a_lognormal_delay_spreads_by_its_sigma_and_has_a_bound() -> None:
    source = random.Random(0)
    delay = StartDelay(distribution="lognormal", median=1.0, sigma=0.5)
    quartiles = statistics.quantiles((delay.draw(source) for _ in range(4000)), n=4)
    assert quartiles[2] == pytest.approx(1.401, rel=0.05)  # exp(0.5 * 0.6745)
    wild = StartDelay(distribution="lognormal", median=86_400.0, sigma=10.0)
    assert max(wild.draw(source) for _ in range(20)) == 86_400.0
