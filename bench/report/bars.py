# SPDX-License-Identifier: Apache-2.0
"""The times and ratios that the project has set itself for the layer on GPUs.

A bar is a sum of limits of one case, see bench.studies.gpu: G is measured, F, W and N follow from
measured rates. The bar of a layer with formats is its time without them. This file must not depend
on tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bench.suites import GATE

FEW_TOKENS = 128
"""Up to this many tokens reading the weights decides."""

WEAK_SCALING = 1.06
"""T of several GPUs is at most this many times T(1 GPU), with as many rows and experts on each."""
WEAK_SCALING_TOKENS = 8192

IN_NUMBERS = "moeos in BF16"
"""The bar of a layer with formats: moeos' layer without, with the numbers of its codes."""

PUBLISHED = "a published FP8 kernel"
PUBLISHED_SECONDS = {
    "qwen3-30b-a3b": {8: 125e-6, 128: 159e-6, 512: 235e-6, 2048: 506e-6, 8192: 1697e-6},
}
"""Times, by shape and tokens, of DeepGEMM's MegaMoE for SM90 on the full deployment, with FP8
weights and routing outside of the kernel, as its pull request 352 has them. They have not been
measured here.
"""

_CALL = 20e-6  # seconds of a call whatever its size
_ZIPF = 1.1  # what uneven routing may add


@dataclasses.dataclass(frozen=True)
class Bar:
    """At most `seconds`, as `words` say."""

    words: str
    seconds: float

    @classmethod
    def of_g_and_n(cls, of_g: float, of_n: float, limits: Mapping[str, float | None]) -> Bar:
        """max(of_g · G, of_n · N)."""
        grouped, links = limits["G"] or 0.0, limits["N"] or 0.0
        words = f"max({of_g:g} G, {of_n:g} N)"
        return cls(words, max(of_g * grouped, of_n * links))


def time_of(found: Mapping[str, Any]) -> float:
    """moeos's time of one case, in seconds."""
    time: float = found["times"]["moeos"]["median"]
    return time


def gate_on_all_ranks(found: Mapping[str, Any]) -> bool:
    """Whether every rank has the case's tokens, and the gate routes them."""
    return found["routing"] == GATE and not found["lone"]


def limits_of(found: Mapping[str, Any]) -> dict[str, float | None]:
    """All limits of one case, in seconds."""
    return {"G": found["times"]["grouped"]["median"], **found["limits"]}


def floor_of(found: Mapping[str, Any]) -> float:
    """The least seconds of any layer on this machine: the largest of F, W and N."""
    return max(found["limits"][name] or 0.0 for name in ("F", "W", "N"))


def time_bar(found: Mapping[str, Any]) -> Bar | None:
    """The bar for moeos's time of one case; None where there is none."""
    if has_formats(found):
        return Bar(IN_NUMBERS, found["times"]["in_numbers"]["median"])
    bar = _gate_bar(found["shape"], found["tokens"], limits_of(found))
    if bar is not None and found["routing"].startswith("zipf"):
        return Bar(f"{_ZIPF:g} × {bar.words}", _ZIPF * bar.seconds)
    return bar


def bars_of(found: Mapping[str, Any], alone: Mapping[str, Any] | None, full: bool) -> list[Bar]:
    """All bars for moeos's time of one case.

    Args:
        found: the case.
        alone: the same case on one GPU, if there are several in `found` and it has been measured.
        full: `found` is of as many GPUs as the full deployment has.
    """
    own = time_bar(found)
    every = [] if own is None else [own]
    if not gate_on_all_ranks(found):
        return every
    if alone is not None and found["tokens"] == WEAK_SCALING_TOKENS:
        every.append(Bar(f"{WEAK_SCALING:g} T(1 GPU)", WEAK_SCALING * time_of(alone)))
    published = PUBLISHED_SECONDS.get(found["shape"], {}).get(found["tokens"])
    if full and published is not None:
        every.append(Bar(PUBLISHED, published))
    return every


def has_formats(found: Mapping[str, Any]) -> bool:
    """Whether a case is of a layer with formats and is compared with that layer without formats."""
    return "in_numbers" in found["times"]


def speed_bar(found: Mapping[str, Any]) -> float | None:
    """How many times faster than the baseline moeos should be at least, on the full deployment;
    None for a layer with formats, which the baseline lacks.
    """
    if has_formats(found):
        return None
    tokens, shape = found["tokens"], found["shape"]
    if tokens <= FEW_TOKENS:
        return 4.0
    if tokens == 8192 and shape.startswith(("qwen3", "deepseek")):
        return 2.5
    return 1.5


def _gate_bar(shape: str, tokens: int, limits: Mapping[str, float | None]) -> Bar | None:
    if tokens == 0:
        return Bar("a call", _CALL)
    if tokens <= FEW_TOKENS:
        return Bar("1.2 W + 20 µs", 1.2 * (limits["W"] or 0.0) + _CALL)
    if tokens >= 2048 and shape.startswith(("qwen3-235b", "deepseek")):
        return Bar("1.05 G", 1.05 * (limits["G"] or 0.0))
    if tokens == 8192 and shape.startswith("qwen3-30b"):
        return Bar.of_g_and_n(0.95, 1.25, limits)
    if (tokens == 2048 and shape.startswith("qwen3-30b")) or (
        tokens >= 4096 and shape.startswith("thesis")
    ):
        return Bar.of_g_and_n(1.0, 1.25, limits)
    return None
