# SPDX-License-Identifier: Apache-2.0
"""Waits of the main thread for the GPU see signals; the GPU goes on, and later waits are right."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch

import moeos
from tests.gpu.cases import CASES, assert_matches, call_on_gpu, on_gpu, why_not
from tests.layers import draw_call, draw_weights

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

LONG = 8_000_000_000  # ticks of the GPU's clock: some seconds
CASE = CASES["swiglu-1-rank"]

waits = pytest.mark.parametrize(
    "wait",
    [moeos.MoELayer.check, moeos.MoELayer.stats, moeos.MoELayer.reset],
    ids=["check", "stats", "reset"],
)


@waits
@pytest.mark.parametrize("aside", [False, True], ids=["same-stream", "other-stream"])
def test_a_wait_for_the_gpu_is_left_when_a_handler_raises_and_works_later(
    wait: Callable[[moeos.MoELayer], object], aside: bool
) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        raise LookupError("of a handler")

    weights = on_gpu(draw_weights(CASE.cfg))
    call = call_on_gpu(draw_call(CASE.cfg, 100, 3))
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with moeos.init("cuda") as world:
            layer = weights.layer(world)
            call(layer)
            layer.check()
            ended = torch.cuda.Event()
            with torch.cuda.stream(torch.cuda.Stream() if aside else torch.cuda.current_stream()):
                torch.cuda._sleep(LONG)
                ended.record()
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(LookupError, match="of a handler"):
                wait(layer)
            assert not ended.query()
            wait(layer)
            assert ended.query()
            assert_matches(weights, call, call(layer), "after the signal")
    finally:
        signal.signal(signal.SIGUSR1, before)
