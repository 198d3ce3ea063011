# SPDX-License-Identifier: Apache-2.0
"""The account of a backward's trace: what its parts of each kind took, and their shares."""

from __future__ import annotations

import pytest
import torch

import moeos
from bench.studies import backward
from bench.studies.training import contestants
from moeos.cli.timeline.call import PRODUCT0, CallTrace


def test_the_account_of_a_backward_has_all_of_its_parts_and_no_time_twice() -> None:
    cfg = moeos.MoEConfig(
        hidden=64,
        intermediate=32,
        experts=4,
        top_k=2,
        activation="swiglu",
        dtype=torch.float32,
        max_tokens=40,
    )
    with moeos.init("twin", trace_events=256) as world:
        inputs = contestants.draw(cfg, 40, "cpu", 0)
        experts = moeos.Experts(cfg, world)
        y = experts(inputs.x, inputs.ids, inputs.weights, inputs.w1, inputs.w2)
        contestants.gradients(y, inputs)
        call = CallTrace.of([experts.trace()])
    found = backward.account(call)
    counts = {kind: told["parts"] for kind, told in found["kinds"].items()}
    assert sum(counts.values()) == len(call.parts)
    assert {"route", "dispatch", "product0", "product1", "combine"} <= counts.keys()
    shares = [told["work_share"] for told in found["kinds"].values()]
    assert min(shares) >= 0
    assert found["work_share"] <= min(1.0, sum(shares) + 1e-9)
    for told in found["kinds"].values():
        assert 0 <= told["first_claimed"] <= told["last_visible"] <= found["length"]
        assert all(took >= 0 for took in told["phases"].values())
    parts = call.parts[call.parts["kind"] == PRODUCT0]
    took = sum(found["kinds"]["product0"]["phases"].values())
    assert took == pytest.approx(float((parts["visible"] - parts["claimed"]).mean()))
