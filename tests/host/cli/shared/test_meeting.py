# SPDX-License-Identifier: Apache-2.0
"""Where ranks' GPUs meet, with a recorder in place of CUDA and NCCL."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moeos.cli.shared.meeting import StreamMeeting

GROUP = cast(dist.ProcessGroup, object())


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is put into the stream, in that order."""
    found: list[str] = []

    def all_reduce(number: Tensor, *, group: object) -> None:
        assert (number.numel(), group) == (1, GROUP)
        found.append("all-reduce")

    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append("rest"))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


def test_the_gpu_rests_and_then_meets_the_others_each_time(stream: list[str]) -> None:
    meeting = StreamMeeting(GROUP)
    assert stream == []
    meeting.meet()
    assert stream == ["rest", "all-reduce"]
    meeting.meet()
    assert stream == ["rest", "all-reduce"] * 2


def test_a_rank_without_a_group_only_rests(stream: list[str]) -> None:
    StreamMeeting(None).meet()
    assert stream == ["rest"]
