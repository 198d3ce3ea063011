# SPDX-License-Identifier: Apache-2.0
"""A layer's counters for Prometheus, added up over its calls.

`prometheus_client` has the text format and the HTTP server; it is not installed everywhere. This
file must not depend on what reads the counters.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moeos.system.files import replace

INSTALL = "pip install 'moeos[metrics]'"


class _Metric(NamedTuple):
    """A metric: its name after moeos_, the field of the stats that it comes from, its help text,
    and the label that distinguishes the field's entries.
    """

    name: str
    field: str
    text: str
    by: str | None = None


_SUMS = (
    _Metric("call_seconds", "seconds", "Seconds of the calls, on the device's clock."),
    _Metric("tokens", "tokens", "Tokens of the rank."),
    _Metric("padding_rows", "padding_rows", "Rows computed only because segments are padded."),
    _Metric("dropped_pairs", "drops", "Pairs beyond their expert's capacity."),
    _Metric("scheduler_sweeps", "sweeps", "Sweeps of the scheduler over its mailboxes."),
    _Metric("count_bytes", "count_bytes_to_peers", "Bytes of row counts written to other ranks."),
    _Metric("flag_bytes", "flag_bytes_to_peers", "Bytes of flags written to other ranks."),
    _Metric("pairs_sent", "pairs_sent", "(token, expert) pairs sent to each rank.", "peer"),
    _Metric("rows_sent", "rows_sent", "Rows that went to each rank for them.", "peer"),
    _Metric("pairs_received", "pairs_received", "Pairs that came from each rank.", "peer"),
    _Metric("row_bytes", "row_bytes_by_peer", "Bytes of rows written to each rank.", "peer"),
    _Metric("waited_seconds", "waited_for", "Seconds by which a rank held up this one.", "peer"),
    _Metric("tasks", "tasks", "Parts of tasks.", "task"),
    _Metric("busy_seconds", "busy_seconds_by_task", "Seconds inside tasks.", "task"),
)
_LAST = (
    _Metric("waiting_parts", "waiting_most", "Most parts that were ready in the last call."),
    _Metric("first_tile_seconds", "first_tile_after", "The last call's begin to its first tile."),
    _Metric("busy_share", "busy_share", "Share of the processors' time in the last call."),
)


class Metrics:
    """Counters of one layer on one rank.

    Every metric is named moeos_..., with the labels rank and layer, and `peer` or `task` where it
    is by rank or by kind. `registry` is its own; serve it with `prometheus_client`, or write it
    with `write`.

    Args:
        rank: whose calls.
        layer: the layer's name.

    Raises:
        RuntimeError: prometheus_client is not installed.
    """

    def __init__(self, rank: int, layer: str = "0") -> None:
        try:
            self._client = importlib.import_module("prometheus_client")
        except ImportError:
            raise RuntimeError(
                f"prometheus_client, which counters for Prometheus need, is missing: {INSTALL}"
            ) from None
        self.registry = self._client.CollectorRegistry()
        self._own = {"rank": str(rank), "layer": layer}
        self._calls = self._make(
            self._client.Counter, _Metric("calls", "", "Calls that ended well.")
        )
        self._sums = [(one, self._make(self._client.Counter, one)) for one in _SUMS]
        self._last = [(one, self._make(self._client.Gauge, one)) for one in _LAST]

    def add(self, stats: Mapping[str, Any]) -> None:
        """Adds a call: what `MoELayer.stats` returned after it. A call that failed has no numbers
        to add, and is left out.
        """
        if stats["seconds"] is None:
            return
        self._calls.labels(**self._own).inc()
        for metric, made in self._sums:
            for labels, value in _entries(metric, stats[metric.field]):
                made.labels(**self._own, **labels).inc(value)
        for metric, made in self._last:
            value = stats[metric.field]
            made.labels(**self._own).set(math.nan if value is None else value)

    def text(self) -> str:
        """All metrics in Prometheus's text format."""
        written: bytes = self._client.generate_latest(self.registry)
        return written.decode()

    def write(self, folder: Path) -> Path:
        """Writes `text` to moeos-rank-R.prom in a folder, for the node exporter's textfile
        collector; the file appears whole. Raises `OSError`.
        """
        file = folder / f"moeos-rank-{self._own['rank']}.prom"
        replace(file, self.text())
        return file

    def _make(self, kind: Any, metric: _Metric) -> Any:
        labels = [*self._own, *([] if metric.by is None else [metric.by])]
        return kind(f"moeos_{metric.name}", metric.text, labels, registry=self.registry)


def _entries(metric: _Metric, value: Any) -> list[tuple[dict[str, str], float]]:
    """The labels and values of a field: one, one a rank, or one a kind of task."""
    if metric.by is None:
        return [({}, value)]
    named = enumerate(value) if metric.by == "peer" else value.items()
    return [({metric.by: str(name)}, each) for name, each in named]
