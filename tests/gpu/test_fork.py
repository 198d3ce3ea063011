# SPDX-License-Identifier: Apache-2.0
"""A forked child of a rank with a GPU: refused by name, and it ends; the parent goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.cases import why_not
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")

PROGRAM = """
import os, sys, time
import torch, moeos

cfg = moeos.MoEConfig(hidden=256, intermediate=256, experts=8, top_k=2, max_tokens=64)
with moeos.init("cuda") as world:
    layer = moeos.MoELayer(cfg, world)
    x = torch.randn(50, 256, device="cuda").bfloat16()
    y = layer(x)
    layer.check()
    pid = os.fork()
    if pid == 0:
        for use in (lambda: layer(x), layer.check, layer.stats, layer.reset,
                    lambda: moeos.MoELayer(cfg, world)):
            try:
                use()
            except RuntimeError as error:
                assert "after the fork" in str(error), error
            else:
                raise AssertionError("not refused")
        world.close()
        with moeos.init("twin") as own:
            own_layer = moeos.MoELayer(cfg, own)
            own_layer(torch.randn(50, 256).bfloat16())
        sys.exit(3)
    ends = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > ends:
            os.kill(pid, 9)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 3
    assert torch.equal(layer(x), y)
    layer.check()
print("done")
"""


def test_a_child_is_refused_the_gpu_by_name_ends_and_leaves_the_parent_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
