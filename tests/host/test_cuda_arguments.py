"""The bytes that a launch is given: which tensor map each matrix has. The driver is a stand-in."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch

from moeos import cuda_driver
from moeos.config import MoEConfig
from moeos.engines.base import CallTensors
from moeos.engines.cuda_arguments import ArgumentPacker, RankBuffers
from moeos.kernel_shape import KernelShape
from tests.layers import config

MAP_WORDS = 16
W1_NARROW = 11  # behind x, gate, eight maps of cells, and w1


class Driver(mock.MagicMock):
    """Makes tensor maps that say how many dimensions they have and how many rows a box has."""

    def cuTensorMapEncodeTiled(
        self, kind: Any, dimensions: int, address: int, sizes: list[int], *rest: Any
    ) -> tuple[int, types.SimpleNamespace]:
        return 0, types.SimpleNamespace(opaque=[dimensions, *[0] * (MAP_WORDS - 1)])

    def cuuint64_t(self, value: int) -> int:
        return value

    cuuint32_t = cuuint64_t


def packer_of(cfg: MoEConfig, deadline: float = 1.0) -> ArgumentPacker:
    """A packer of one rank of one, whose buffers are too small to be used."""
    sizes = KernelShape(cfg=cfg, world_size=1, processors=4).sizes
    memory = torch.zeros(1, dtype=torch.uint8)
    between = torch.zeros(8, cfg.intermediate, dtype=cfg.dtype)
    buffers = RankBuffers(heap=memory, memory=memory, intermediate=between, peers=memory)
    return ArgumentPacker(cfg, sizes, 0, deadline, buffers, 0)


def test_where_the_code_lies_stands_behind_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """RankArguments of kernels/sm90/arguments.cuh; until it is said there are zeros."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    packer = packer_of(config(dtype=torch.bfloat16, hidden=256, intermediate=128), deadline=3.0)
    words = packer.record.view("<u8")
    (behind,) = (words == 3_000_000_000).nonzero()[0] + 1
    assert words[behind : behind + 2].tolist() == [0, 0]
    packer.pack_code(0x7F00_1234_5680, 304_640)
    assert words[behind : behind + 2].tolist() == [0x7F00_1234_5680, 304_640]


def test_a_map_of_weights_is_not_taken_for_that_of_tokens_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128, experts=2, top_k=2)
    packer = packer_of(cfg)
    w1 = torch.zeros(cfg.experts, 2 * cfg.intermediate, cfg.hidden, dtype=cfg.dtype)
    x = w1.view(-1, cfg.hidden)  # as if these had the memory of weights that are gone
    packer.pack(
        CallTensors(
            x=x,
            out=torch.empty_like(x),
            gate=torch.zeros(cfg.experts, cfg.hidden, dtype=cfg.dtype),
            w1=w1,
            w2=torch.zeros(cfg.experts, cfg.hidden, cfg.intermediate, dtype=cfg.dtype),
            b1=None,
            b2=None,
            selection_bias=None,
            topk_ids=None,
            topk_weights=None,
            tokens=None,
        )
    )
    dimensions = packer.record.view("<u8")[::MAP_WORDS]
    assert dimensions[0] == 2
    assert dimensions[W1_NARROW] == 5
