# SPDX-License-Identifier: Apache-2.0
"""What is done to the ranks and links of a straggler study, alike for both layers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.studies import scenarios
from bench.studies.links import LimitedAllToAll, Nodes
from bench.studies.scenarios import parse
from moeos.world.faults import SlowLink, StartDelay

STEP = 0.02


def test_a_late_rank_is_late_by_seconds_or_by_undelayed_steps() -> None:
    assert parse("late:1:0.5", 4, STEP).delays(0, 1, 2) == [0.5, 0.5]
    assert parse("late:1:4x", 4, STEP).delays(0, 1, 2) == pytest.approx([0.08, 0.08])
    several = parse("late:3+0:4x", 4, STEP)
    assert several.late == (0, 3)
    assert [several.delays(0, rank, 1)[0] > 0 for rank in range(4)] == [True, False, False, True]


def test_a_slow_rank_has_a_factor_and_no_delay() -> None:
    slow = parse("slow:2:1.5", 4, STEP)
    assert slow.slow == {2: 1.5}
    assert slow.delays(0, 2, 3) == [0.0] * 3
    assert slow.late == ()


@pytest.mark.parametrize("preset", scenarios.PRESETS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_presets_slowest_rank_is_as_slow_as_the_thesis_says(preset: str, ranks: int) -> None:
    scenario = parse(f"jitter:{preset}", ranks, STEP)
    delays = [scenario.delays(1, rank, 20_000) for rank in range(ranks)]
    latest = [max(step) for step in zip(*delays, strict=True)]
    p95 = statistics.quantiles(latest, n=20)[18]
    assert 1 + p95 / STEP == pytest.approx(scenarios.PRESETS[preset], rel=0.05)


def test_delays_are_the_same_whenever_they_are_drawn_and_differ_by_rank_seed_and_scenario() -> None:
    scenario = parse("jitter:thesis-vm", 4, STEP)
    assert scenario.delays(0, 1, 5) == scenario.delays(0, 1, 5)
    other = parse("jitter:thesis-supercomputer", 4, STEP)
    drawn = [scenario.delays(0, 1, 5), scenario.delays(0, 2, 5), scenario.delays(1, 1, 5)]
    assert len({delay for delays in [*drawn, other.delays(0, 1, 5)] for delay in delays}) == 20


def test_a_plan_gives_its_start_delays(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[[start_delay]]\ndistribution = "uniform"\nlow = 0.1\nhigh = 0.2\nrank = 1\n')
    scenario = parse(f"plan:{file}", 2, STEP)
    assert scenario.start_delays == (StartDelay(distribution="uniform", low=0.1, high=0.2, rank=1),)
    assert scenario.delays(0, 0, 2) == [0.0, 0.0]
    assert all(0.1 <= delay <= 0.2 for delay in scenario.delays(0, 1, 9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lat:1:2x", "the scenario 'lat:1:2x' is unknown; allowed: none, late:RANKS"),
        ("late:1", "lacks a part"),
        ("late:4:1x", "names '4'; ranks are 0 to 3"),
        ("late:one:1x", "names 'one'; ranks are 0 to 3"),
        ("late:1:soon", "has 'soon' where a number belongs"),
        ("late:1:-1", "has -1; allowed: 0 to 86400"),
        ("late:1:nan", "has nan; allowed: 0 to 86400"),
        ("slow:1:0.5", "has the factor 0.5; it must be at least 1"),
        ("jitter:normal", "jitter has the presets thesis-supercomputer, thesis-vm"),
    ],
)
def test_what_is_no_scenario_is_refused_with_what_is(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        parse(text, 4, STEP)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = 3\n", "takes .*start_delay.* and nothing else"),
        ('[[fault]]\nkind = "stall"\nrank = 0\ncall = 1\nstage = "product0"\n', "and nothing else"),
        ('[[start_delay]]\ndistribution = "constant"\nseconds = 1\nrank = 9\n', "rank is 9"),
        ('[[start_delay]]\ndistribution = "constant"\nseconds = 1\nlayer = 2\n', "one layer, 0"),
    ],
)
def test_a_plan_that_a_study_cannot_follow_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        parse(f"plan:{file}", 4, STEP)
    with pytest.raises(FileNotFoundError):
        parse(f"plan:{tmp_path / 'none.toml'}", 4, STEP)


def test_ranks_of_other_nodes_are_far() -> None:
    nodes = Nodes(4, 2)
    assert (nodes.ranks_per_node, nodes.far(0), nodes.far(3)) == (2, [2, 3], [0, 1])
    assert Nodes(4, 1).ranks_per_node is None
    assert Nodes(4, 1).far(2) == []


def test_moeos_is_told_of_every_link_between_nodes() -> None:
    links = Nodes(4, 2, 1e-3, 1e9).plan().slow_links
    assert len(links) == 8
    assert SlowLink(rank=1, peer=2, seconds=1e-3, bytes_per_second=1e9) in links
    assert Nodes(4, 2).plan().slow_links == ()


def test_an_exchange_waits_for_the_slowest_link(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "bench.studies.links.dist.all_to_all_single",
        lambda *arguments, **options: made.append((*arguments, options)),
    )
    exchange = LimitedAllToAll(Nodes(4, 2, 0.01, 1e6), rank=0)
    rows = torch.zeros(100, 25)  # 100 bytes a row
    begin = time.perf_counter()
    exchange(rows, rows, [25] * 4, [0, 0, 200, 100], async_op=True)
    assert time.perf_counter() - begin >= 0.01 + 200 * 100 / 1e6
    assert made == [(rows, rows, [25] * 4, [0, 0, 200, 100], {"async_op": True})]
    begin = time.perf_counter()
    exchange(torch.zeros(4000), torch.zeros(4000))  # 1000 numbers to each rank
    assert time.perf_counter() - begin >= 0.01 + 4000 / 1e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 3), "--nodes is 3; it must divide 4 ranks equally"),
        ((4, 0), "--nodes is 0"),
        ((4, 1, 0.1), "--nodes is 1: there is none"),
    ],
)
def test_nodes_that_cannot_be_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Nodes(*arguments)
