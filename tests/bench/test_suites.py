# SPDX-License-Identifier: Apache-2.0
"""Suites: what a file says, what it must not say, and the layers of those in the repository."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import suites
from bench.report import papers
from bench.studies import trained, training
from bench.suites import Call
from moeos.compile import kernel_shape
from moeos.compile.kernel_shape import KernelShape
from tests.bench.measured import SUITE, TWO_SHAPES, small_suite

# Those of training name layers, and have a reader and tests of their own.
OF_SHAPES = [
    file for file in sorted(SUITE.parent.glob("*.toml")) if "[[shapes]]" in file.read_text()
]


@pytest.mark.parametrize("file", OF_SHAPES, ids=lambda file: file.stem)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_suite_can_run_on_1_2_and_4_gpus(file: Path, ranks: int) -> None:
    found = suites.shapes(file)
    for shape in found.shapes:
        cfg = shape.config_on(ranks, found.full_ranks)
        kernel_shape.check_supported(cfg)
        kernel_shape.check_supported(cfg.in_numbers())
        if ranks <= found.full_ranks:
            assert cfg.experts_per_rank(ranks) == shape.cfg.experts_per_rank(found.full_ranks)


def test_shapes_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    found = suites.shapes(small_suite(tmp_path))
    first, second = found.shapes
    assert (found.rounds, found.warm_up_rounds, found.full_ranks) == (3, 0, 4)
    assert first.calls == (
        *(Call(1, lone=True), Call(1), Call(128), Call(2048)),
        Call(2048, routing="zipf:1.2"),
    )
    assert second.calls == (Call(2048),)
    assert (second.cfg.activation, second.cfg.max_tokens) == ("gelu", 2048)


def test_few_tokens_have_a_layer_of_their_own(tmp_path: Path) -> None:
    found = suites.shapes(small_suite(tmp_path))
    first, second = found.shapes
    assert found.layers_of(first, 4) == {first.cfg: first.calls}
    split = dataclasses.replace(found, few_tokens=128)
    few, many = split.layers_of(first, 4).items()
    assert few == (dataclasses.replace(first.cfg, max_tokens=128), first.calls[:3])
    assert many == (first.cfg, first.calls[3:])
    assert split.layers_of(second, 4) == {second.cfg: second.calls}
    two, _ = split.layers_of(first, 2)
    assert (two.max_tokens, two.experts) == (128, first.cfg.experts // 2)


def test_a_selection_keeps_the_layers_as_they_are(tmp_path: Path) -> None:
    whole = suites.shapes(small_suite(tmp_path))
    few = whole.only([], [1])
    assert [shape.name for shape in few.shapes] == ["qwen3-30b-a3b"]
    assert few.shapes[0].calls == (Call(1, lone=True), Call(1))
    assert few.shapes[0].cfg == whole.shapes[0].cfg
    assert whole.only(["other"], []).shapes == whole.shapes[1:]
    assert whole.only([], []) == whole


@pytest.mark.parametrize(
    ("shapes", "tokens", "said"),
    [
        (["others"], [], "--shapes has 'others'; the suite has other, qwen3-30b-a3b"),
        ([], [7], "--tokens has 7; the suite has 1, 128, 2048"),
        (["other"], [128], "--shapes and --tokens leave nothing"),
    ],
)
def test_a_selection_of_what_is_not_there_is_refused(
    tmp_path: Path, shapes: list[str], tokens: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        suites.shapes(small_suite(tmp_path)).only(shapes, tokens)


TRAINING = """
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
    found = suites.training(written(tmp_path, TRAINING))
    assert (found.name, found.rounds, found.warm_up_rounds) == ("some", 3, 1)
    assert found.trace_rounds == 3
    assert [layer.cfg.activation for layer in found.layers] == ["silu", "relu"]
    assert all(layer.cfg.max_tokens == 48 and layer.tokens == (16, 48) for layer in found.layers)
    assert [layer.of(torch.float32).cfg.dtype for layer in found.layers] == [torch.float32] * 2
    assert found.lists == (suites.Lists("b", 8, 2, (64,), 64),)


def test_a_layers_own_max_tokens_makes_pieces(tmp_path: Path) -> None:
    text = TRAINING.replace("top_k = 2 }", "top_k = 2, max_tokens = 32 }")
    assert {layer.cfg.max_tokens for layer in suites.training(written(tmp_path, text)).layers} == {
        32
    }


def test_names_choose_and_unknown_ones_are_told(tmp_path: Path) -> None:
    found = suites.training(written(tmp_path, TRAINING))
    assert found.only([]) == found
    assert (found.only(["b"]).layers, len(found.only(["b"]).lists)) == ((), 1)
    with pytest.raises(ValueError, match="--names has 'c'; the suite has a, b"):
        found.only(["a", "c"])


@pytest.mark.parametrize("name", [papers.SONICMOE, papers.MOEBLAZE])
def test_the_gpu_has_what_the_papers_suites_ask_for(name: str) -> None:
    found = suites.training(SUITE.parent / f"{name}.toml")
    assert {layer.cfg.activation for layer in found.layers} <= set(trained.ACTIVATIONS)
    configs = [layer.cfg for layer in found.layers if layer.cfg.experts <= 1024]
    assert len(found.layers) - len(configs) == (name == papers.SONICMOE)  # of 2048 experts
    configs += [training.routing_layer(lists) for lists in found.lists]
    for cfg in configs:
        assert KernelShape(cfg=cfg, world_size=1, processors=131).sizes.heap_bytes > 0


def test_the_papers_figures_are_of_layers_that_are_measured() -> None:
    sonic, blaze = (
        suites.training(SUITE.parent / f"{name}.toml")
        for name in (papers.SONICMOE, papers.MOEBLAZE)
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


SLICES = """
rounds = 3
warm_up_rounds = 1
trace_rounds = 3
hidden = 64
experts = 8
top_k = 2
tokens = [4, 40]
slices = [16, 32]
staged = 16
reduced = 32
"""


WRONG = {
    (suites.shapes, TWO_SHAPES): [
        ("rounds = 3", "", "a suite has no key rounds"),
        ("rounds = 3", "rounds = 2", "rounds is 2; it must be at least 3"),
        ("rounds = 3", "round = 3", "unknown key 'round' in a suite"),
        ("tokens = [1, 128, 2048]", "tokens = [128, 1]", "tokens is .* ascending order"),
        ("tokens = [1, 128, 2048]", "tokens = 1", "tokens is 1; it must be of type list"),
        ("tokens = [1, 128, 2048]", "", "the shape qwen3-30b-a3b has no tokens"),
        ("zipf_exponent = 1.2", "", "zipf_tokens needs a zipf_exponent"),
        ('name = "other"', 'name = "qwen3-30b-a3b"', "there must be some, with different names"),
        ('name = "other"', "", "it needs a name, and a config or a layer"),
        ("hidden = 64", "hidden = 63", "hidden is 63"),
        ("rounds = 3", "rounds", "not a TOML file"),
    ],
    (suites.training, TRAINING): [
        ("rounds = 3", "rounds = 3\ntrace_rounds = 2", "trace_rounds is 2"),
        ("warm_up_rounds = 1", "warm_up_rounds = 0", "warm_up_rounds is 0"),
        ("[16, 48]", "[]", "token counts in ascending order"),
        ('name = "a"', 'other = "a"', "unknown key 'other' in layers"),
        ('name = "a"', "name = 1", "name is 1; it must be of type str"),
        ("top_k = 2\n", "top_k = 9\n", "top_k is 9; of 8 experts"),
        ("experts = 8\n", "", "lists has no key experts"),
        (TRAINING[TRAINING.index("[[") :], "", "needs layers or lists, and this one has neither"),
    ],
    (suites.slices, SLICES): [
        ("tokens = [4, 40]", "tokens = [4, true]", "it must be token counts in ascending order"),
        ("staged = 16", "staged = 8", r"staged is 8; it must be one of slices, \[16, 32\]"),
        ("staged = 16", "", "a suite has no key staged"),
    ],
}


@pytest.mark.parametrize(
    ("read", "text", "old", "new", "said"),
    [(*suite, *change) for suite, changes in WRONG.items() for change in changes],
)
def test_a_mistake_in_a_file_is_named_with_the_file(
    tmp_path: Path, read: Callable[[Path], object], text: str, old: str, new: str, said: str
) -> None:
    assert old in text
    path = tmp_path / "some.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises((ValueError, TypeError), match=rf"some\.toml: .*{said}"):
        read(path)
