# SPDX-License-Identifier: Apache-2.0
"""Made-up results of `launch/bench gpu`, for the tests of what is made of them. Holds no test."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from bench import study, suites
from bench.clocks import timing
from bench.studies.gpu import METHOD, limits
from tests.processes import ROOT

SUITE = ROOT / "configs" / "suites" / "gpu.toml"
COMMIT = {"id": "0123456789abcdef", "changed_files": []}
RATES = {"F": 800e12, "W": 4.4e12, "N": 360e9}

TWO_SHAPES = """
rounds = 3
full_ranks = 4
tokens = [1, 128, 2048]

[[shapes]]
name = "qwen3-30b-a3b"
layer = { hidden = 64, intermediate = 32, experts = 8, top_k = 2 }
lone_token = true
zipf_exponent = 1.2
zipf_tokens = [2048]

[[shapes]]
name = "other"
layer = { hidden = 64, intermediate = 32, experts = 8, top_k = 2, activation = "gelu" }
tokens = [2048]
"""


def small_suite(folder: Path, text: str = TWO_SHAPES, name: str = SUITE.stem) -> Path:
    """The file of a suite with two shapes."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def run_of(ranks: int) -> dict[str, Any]:
    """What a start of the ranks notes."""
    rates = RATES if ranks > 1 else RATES | {"N": None}
    return {
        "began": "2026-01-02T03:04:05+00:00",
        "command": "python -m bench.studies.gpu --out results.json",
        "gpu": {"name": "NVIDIA H200"},
        "driver": "580.1",
        "versions": {"cuda": "13.0", "nccl": "2.28", "torch": "2.11", "moeos": "0.1.0"},
        "rates": rates,
        "rates_of_ranks": [rates] * ranks,
    }


def measured(
    path: Path, suite_file: Path, ranks: int = 4, microseconds: float = 100.0
) -> dict[str, Any]:
    """Complete results of a suite, and their file: moeos takes so long, the baseline thrice
    that.
    """
    asked, about = suites.shapes(suite_file), run_of(ranks)

    def times(factor: float) -> dict[str, Any]:
        one = factor * microseconds * 1e-6
        return timing([one, 0.9 * one, 1.2 * one])

    found: dict[str, Any] = {
        "benchmark": f"{asked.name}-{ranks}",
        "commit": COMMIT,
        "ranks": ranks,
        "rounds": asked.rounds,
        "warm_up_rounds": asked.warm_up_rounds,
        "full_ranks": asked.full_ranks,
        "method": METHOD,
        "runs": [about],
        "shapes": {},
        "results": [],
        "failures": [],
    }
    for shape in asked.shapes:
        cfg = shape.config_on(ranks, asked.full_ranks)
        found["shapes"][shape.name] = json.loads(cfg.digest())
        for call in shape.calls:
            rows = call.tokens * cfg.top_k
            of_rank = {"rows": rows, "experts": min(rows, 2), "from_peers": 0, "to_peers": rows}
            found["results"].append(
                {
                    "shape": shape.name,
                    **dataclasses.asdict(call),
                    "run": 0,
                    "times": {"moeos": times(1), "baseline": times(3), "grouped": times(0.5)},
                    "limits": limits(cfg, call.tokens, [of_rank] * ranks, about["rates"]),
                }
            )
    path.write_text(study.text(found))
    return found
