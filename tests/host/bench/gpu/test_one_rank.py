# SPDX-License-Identifier: Apache-2.0
"""What a rank of the GPU benchmark computes on the host: the limits of a case."""

import pytest

from moeos import MoEConfig
from moeos.bench.gpu.one_rank import limits

CFG = MoEConfig(hidden=64, intermediate=32, experts=8, top_k=2, max_tokens=16)
RATES = {"F": 1e9, "W": 1e8, "N": 1e7}


def load(rows: int, experts: int, from_peers: int, to_peers: int) -> dict[str, int]:
    return {"rows": rows, "experts": experts, "from_peers": from_peers, "to_peers": to_peers}


def test_limits_are_those_of_the_rank_with_most() -> None:
    found = limits(CFG, 16, [load(20, 3, 5, 11), load(12, 4, 11, 5)], RATES)
    router = 2 * 16 * 8 * 64
    weights = (64 + 32) * 64
    assert found["F"] == pytest.approx((router + 2 * 20 * weights) / 1e9)
    assert found["W"] == pytest.approx(4 * weights * 2 / 1e8)
    assert found["N"] == pytest.approx(16 * 64 * 2 / 1e7)


def test_one_gpu_has_no_links() -> None:
    assert limits(CFG, 16, [load(32, 8, 0, 0)], RATES | {"N": None})["N"] is None
