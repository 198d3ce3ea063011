# SPDX-License-Identifier: Apache-2.0
"""Suites of the training study: those of the repository, and files that are not as they must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.report import papers
from bench.studies import grouped
from bench.studies.training import study, suite
from moeos.compile.kernel_shape import KernelShape
from tests.processes import ROOT

SUITES = ROOT / "configs" / "suites"
WHOLE = """
rounds = 3
warm_up_rounds = 1
[[layers]]
name = "a"
tokens = [16, 48]
activations = ["silu", "relu"]
layer = { hidden = 32, intermediate = 48, experts = 8, top_k = 2 }
[[lists]]
name = "b"
tokens = [64]
experts = 8
top_k = 2
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "some.toml"
    file.write_text(text)
    return file


def test_each_activation_makes_a_layer_of_the_most_tokens(tmp_path: Path) -> None:
    found = suite.read(written(tmp_path, WHOLE))
    assert (found.name, found.rounds, found.warm_up_rounds) == ("some", 3, 1)
    assert found.trace_rounds == 3
    assert [layer.cfg.activation for layer in found.layers] == ["silu", "relu"]
    assert all(layer.cfg.max_tokens == 48 and layer.tokens == (16, 48) for layer in found.layers)
    assert [layer.of(torch.float32).cfg.dtype for layer in found.layers] == [torch.float32] * 2
    assert found.lists == (suite.Lists("b", 8, 2, (64,), 64),)


def test_a_layers_own_max_tokens_makes_pieces(tmp_path: Path) -> None:
    text = WHOLE.replace("top_k = 2 }", "top_k = 2, max_tokens = 32 }")
    assert {layer.cfg.max_tokens for layer in suite.read(written(tmp_path, text)).layers} == {32}


def test_names_choose_and_unknown_ones_are_told(tmp_path: Path) -> None:
    found = suite.read(written(tmp_path, WHOLE))
    assert found.only([]) == found
    assert (found.only(["b"]).layers, len(found.only(["b"]).lists)) == ((), 1)
    with pytest.raises(ValueError, match="--names has 'c'; the suite has a, b"):
        found.only(["a", "c"])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rounds = 3", "rounds = 2", "rounds is 2; it must be at least 3"),
        ("rounds = 3", "rounds = 3\ntrace_rounds = 2", "trace_rounds is 2"),
        ("warm_up_rounds = 1", "warm_up_rounds = 0", "warm_up_rounds is 0"),
        ("rounds = 3", "", "a suite has no key rounds"),
        ("[16, 48]", "[48, 16]", "token counts in ascending order"),
        ("[16, 48]", "[]", "token counts in ascending order"),
        ('name = "a"', 'other = "a"', "unknown key 'other' in layers"),
        ('name = "a"', "name = 1", "name is 1; it must be of type str"),
        ("top_k = 2\n", "top_k = 9\n", "top_k is 9; of 8 experts"),
        ("experts = 8\n", "", "lists has no key experts"),
        ("hidden = 32", "hidden = 33", "hidden is 33"),
    ],
)
def test_a_suite_that_is_not_as_it_must_be_is_refused_with_its_name(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    text = WHOLE.replace(old, new, 1)
    assert text != WHOLE
    with pytest.raises((ValueError, TypeError), match=r"some\.toml: ") as raised:
        suite.read(written(tmp_path, text))
    assert told in str(raised.value)


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        suite.read(written(tmp_path, "rounds = 3\nwarm_up_rounds = 1\n"))


@pytest.mark.parametrize("name", [papers.SONICMOE, papers.MOEBLAZE])
def test_the_gpu_has_what_the_papers_suites_ask_for(name: str) -> None:
    found = suite.read(SUITES / f"{name}.toml")
    assert {layer.cfg.activation for layer in found.layers} <= set(grouped.ACTIVATIONS)
    configs = [layer.cfg for layer in found.layers if layer.cfg.experts <= 1024]
    assert len(found.layers) - len(configs) == (name == papers.SONICMOE)  # of 2048 experts
    configs += [study.routing_layer(lists) for lists in found.lists]
    for cfg in configs:
        assert KernelShape(cfg=cfg, world_size=1, processors=131).sizes.heap_bytes > 0


def test_the_papers_figures_are_of_layers_that_are_measured() -> None:
    sonic, blaze = (
        suite.read(SUITES / f"{name}.toml") for name in (papers.SONICMOE, papers.MOEBLAZE)
    )
    assert papers.SONICMOE_TFLOPS.keys() <= {layer.name for layer in sonic.layers}
    measured = {
        (layer.cfg.activation, tokens)
        for layer in blaze.layers
        if layer.name == papers.SCALING_LAYER
        for tokens in layer.tokens
    }
    assert papers.SCALING.keys() <= measured
    assert papers.DISPATCH_MS.keys() == {lists.name for lists in blaze.lists}
