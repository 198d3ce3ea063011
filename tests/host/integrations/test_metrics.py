# SPDX-License-Identifier: Apache-2.0
"""Counters for Prometheus: what a scraper reads is the sum of what the calls said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeos import World
from moeos.integrations.metrics import Metrics
from moeos.world import virtual
from tests.layers import config, draw_call, draw_weights

parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus_client")

CFG = config(max_tokens=64)


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and by peer or kind, of a text in Prometheus's format."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = sample.labels
                assert (labels["rank"], labels["layer"]) == ("1", "moe")
                by = labels.get("peer", labels.get("task", ""))
                found[sample.name, by] = sample.value
    return found


def test_metrics_are_sums_over_calls_and_say_the_last() -> None:
    def rank_main(world: World) -> tuple[list[dict[str, Any]], str]:
        layer = draw_weights(CFG).layer(world)
        metrics = Metrics(world.rank, "moe")
        said = []
        for tokens in (40, 0, 64):
            draw_call(CFG, tokens, world.rank)(layer)
            said.append(layer.stats())
            metrics.add(said[-1])
        return said, metrics.text()

    said, text = virtual.run(rank_main, 2)[1]
    found = samples(text)
    assert found["moeos_calls_total", ""] == 3
    assert found["moeos_tokens_total", ""] == 104
    seconds = sum(stats["seconds"] for stats in said)
    assert found["moeos_call_seconds_total", ""] == pytest.approx(seconds)
    for peer in range(2):
        for name, field in (("pairs_sent", "pairs_sent"), ("row_bytes", "row_bytes_by_peer")):
            total = sum(stats[field][peer] for stats in said)
            assert found[f"moeos_{name}_total", str(peer)] == total
    assert found["moeos_row_bytes_total", "0"] > 0
    for kind in ("route", "product0", "combine"):
        assert found["moeos_tasks_total", kind] == sum(stats["tasks"][kind] for stats in said)
    assert found["moeos_waiting_parts", ""] == said[-1]["waiting_most"]
    assert found["moeos_busy_share", ""] == pytest.approx(said[-1]["busy_share"])


def test_a_call_that_failed_is_left_out() -> None:
    metrics = Metrics(1, "moe")
    metrics.add({"seconds": None})
    assert ("moeos_calls_total", "") not in samples(metrics.text())


def test_a_file_appears_whole_under_its_ranks_name(tmp_path: Path) -> None:
    metrics = Metrics(7)
    assert metrics.write(tmp_path) == tmp_path / "moeos-rank-7.prom"
    assert [file.name for file in tmp_path.iterdir()] == ["moeos-rank-7.prom"]
    assert (tmp_path / "moeos-rank-7.prom").read_text() == metrics.text()


def test_the_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("moeos.metrics.importlib.import_module", refuse)
    with pytest.raises(RuntimeError, match=r"prometheus_client.*pip install 'moeos\[metrics\]'"):
        Metrics(0)
