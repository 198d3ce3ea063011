# SPDX-License-Identifier: Apache-2.0
"""The studies of a layer's options, with the twin and the host's memory in place of a GPU's."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import moeos
from bench.studies import gradients, options, shared_experts, weight_formats, weight_layouts
from bench.study import Rounds, Study

CFG = moeos.MoEConfig(hidden=128, intermediate=128, experts=4, top_k=1, max_tokens=16)
SHARED = dataclasses.replace(CFG, shared_experts=1, shared_intermediate=64)
LAYOUTS = {
    name: (dataclasses.replace(cfg, hidden=128, intermediate=128, experts=4, top_k=1), layouts)
    for name, (cfg, layouts) in weight_layouts.LAYERS.items()
}
_Generator = torch.Generator


class OnHost(TorchFunctionMode):
    """Tensors that are asked for on a GPU lie in the host's memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {**(kwargs or {})}
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


class HostGenerator(torch.Generator):
    def __new__(cls, device: str = "cpu") -> torch.Generator:
        return _Generator("cpu")


@pytest.mark.parametrize(
    ("make", "contestants"),
    [
        (functools.partial(gradients.make, cfg=CFG), {"layer", "grouped_mm"}),
        (functools.partial(shared_experts.make, cfg=SHARED), {"inside", "routed alone"}),
        (functools.partial(weight_formats.make, cfg=CFG), {"plain", "mxfp4", "nvfp4 by FP8"}),
        (functools.partial(weight_layouts.make, name="gpt-oss"), {"plain"}),
        (functools.partial(weight_layouts.make, name="qwen3-30b"), {"plain", "separate"}),
    ],
)
def test_each_token_count_is_measured_once_with_all_contestants(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Study], options.Measure],
    contestants: set[str],
) -> None:
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    monkeypatch.setattr(weight_layouts, "LAYERS", LAYOUTS)
    some = {name: weight_formats.VARIANTS[name] for name in ("mxfp4", "nvfp4 by FP8")}
    monkeypatch.setattr(weight_formats, "VARIANTS", some)
    out = tmp_path / "out.json"
    for counts in ([4], [4, 8]):
        with moeos.init("twin") as world, torch.no_grad(), OnHost():
            one = Study(world, out, "some-1", "bench.studies.some", Rounds(3, 1))
            options.measure(one, "a", {}, counts, functools.partial(make, one))
    found = json.loads(out.read_text())
    results = found["layers"]["a"]["results"]
    assert [(case["tokens"], case["run"]) for case in results] == [(4, 0), (8, 1)]
    for case in results:
        assert contestants <= case["seconds"].keys()
        assert all(times["median"] > 0 for times in case["seconds"].values())


def test_outputs_that_differ_or_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with moeos.init("twin") as world:
        one = Study(world, tmp_path / "out.json", "some-1", "bench.studies.some")
        right = torch.ones(3)
        assert options.require_alike(one, right, right, 0.0) == 0
        for wrong in (2 * right, right * torch.nan):
            with pytest.raises(ValueError, match="outputs of 3 tokens differ by"):
                options.require_alike(one, wrong, right, 0.5)
