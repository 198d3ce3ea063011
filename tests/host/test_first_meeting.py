# SPDX-License-Identifier: Apache-2.0
"""What a person meets first: names, what is printed, and the words of the first errors."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moeos
from moeos import MoELayer, Placement, World
from moeos.system.errors import RankError, tell_rank
from moeos.world import virtual
from tests import programs
from tests.layers import config
from tests.process_group import ranks_of_torch

CFG = config(bias=True)


def of_one_rank(rank_main: Any, ranks: int = 2) -> Any:
    """What the last rank returns."""
    return virtual.run(rank_main, ranks=ranks)[-1]


# --- Names and what is printed ------------------------------------------------------------------


def test_the_package_lists_what_it_exports_and_nothing_else() -> None:
    assert dir(moeos) == sorted(moeos.__all__)


def test_a_layer_prints_what_it_is_in_a_few_lines() -> None:
    def rank_main(world: World) -> list[str]:
        return repr(MoELayer(CFG, world)).splitlines()

    assert of_one_rank(rank_main) == [
        "MoELayer(",
        "  rank 1 of 2: experts 4 to 7 of 8, trainable",
        "  hidden=64, intermediate=96, experts=8, top_k=2, dtype=torch.float32, max_tokens=128, "
        "bias=True",
        "  w1 float32 [4, 192, 64], w2 float32 [4, 64, 96], b1 float32 [4, 192], "
        "b2 float32 [4, 64], gate.weight float32 [8, 64]",
        "  (gate): Gate()",
        ")",
    ]


def test_a_layer_prints_which_experts_are_here_and_whether_they_learn() -> None:
    apart = Placement([[0, 2, 4, 5], [1, 3, 6, 7]])

    def rank_main(world: World) -> list[str]:
        coded = config(hidden=128, intermediate=128, weight_format="mxfp4", experts=1, top_k=1)
        layers = [
            MoELayer(CFG, world, placement=apart).requires_grad_(False),
            MoELayer(CFG, world, parallel="tensor"),
            MoELayer(coded, world),
        ]
        layers[1].w2.requires_grad_(False)
        return [layer.extra_repr().splitlines()[0] for layer in layers]

    assert of_one_rank(rank_main) == [
        "rank 1 of 2: experts 1, 3, 6 to 7 of 8, frozen",
        "rank 1 of 2: slice 1 of 2 of experts 0 to 7 of 8, trainable but for w2",
        "rank 1 of 2: no experts of 1, frozen",
    ]


def test_experts_that_lie_in_many_places_are_cut_short() -> None:
    many = config(experts=64)
    apart = Placement([[*range(0, 64, 2)], [*range(1, 64, 2)]])

    def rank_main(world: World) -> str:
        return MoELayer(many, world, placement=apart).extra_repr().splitlines()[0]

    assert of_one_rank(rank_main).startswith(
        "rank 1 of 2: experts 1, 3, 5, 7, 9, 11, 13, 15, ... of 64, "
    )


def test_the_help_of_a_layer_begins_with_usage_that_works() -> None:
    summary, empty, *lines = (inspect.getdoc(MoELayer) or "").splitlines()
    assert summary.endswith("one on each rank of a world.")
    assert not empty
    usage = textwrap.dedent("\n".join(lines[: lines.index("")]))
    program = f"import torch, moeos\n{usage}\n    assert layer.w1.grad is not None"
    ended = programs.ended(program)
    assert ended.returncode == 0, ended.stderr


# --- Errors -------------------------------------------------------------------------------------


def test_a_refused_cast_says_that_other_modules_may_have_been_cast() -> None:
    def rank_main(world: World) -> str:
        model = nn.Sequential(nn.Linear(4, 4), MoELayer(CFG, world))
        with pytest.raises(TypeError, match=r"would become torch\.bfloat16") as raised:
            model.bfloat16()
        assert model[0].weight.dtype == torch.bfloat16
        model[0].to(torch.float32)
        return str(raised.value)

    said = of_one_rank(rank_main, 1)
    assert "modules that the model cast before it may have another dtype now" in said
    assert said.endswith("cast them back with .to(torch.float32)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hiden": 64}, "MoEConfig has no argument 'hiden'; the nearest is 'hidden'"),
        (
            {"dtype": "bfloat16"},
            "dtype is 'bfloat16'; it must be a torch.dtype, such as torch.bfloat16",
        ),
        ({"dtype": "torch.float16"}, "it must be a torch.dtype, such as torch.float16"),
        ({"router_dtype": "float"}, "it must be a torch.dtype, such as torch.float32"),
    ],
)
def test_a_misspelt_field_or_dtype_of_a_config_gets_the_right_word(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        config(**arguments)


@pytest.mark.parametrize("kind", [moeos.Experts, MoELayer])
def test_a_misspelt_argument_gets_the_nearest_one(kind: type) -> None:
    def rank_main(world: World) -> None:
        said = f"^{kind.__name__} has no argument 'paralel'; the nearest is 'parallel'$"
        with pytest.raises(TypeError, match=said):
            kind(CFG, world, paralel="tensor")

    of_one_rank(rank_main, 1)


def test_a_function_that_names_the_nearest_argument_keeps_its_signature() -> None:
    for kind in (moeos.MoEConfig, moeos.Experts, MoELayer):
        parameters = inspect.signature(kind).parameters.values()
        assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters)


def test_one_ranks_experts_in_another_world_are_refused_with_ways_to_save_whole() -> None:
    parts = virtual.run(lambda world: MoELayer(CFG, world).state_dict(), ranks=2)

    def rank_main(world: World) -> str:
        with pytest.raises(RuntimeError, match=r"^Error\(s\) in loading") as raised:
            MoELayer(CFG, world).load_state_dict(parts[0])
        return str(raised.value)

    said = of_one_rank(rank_main, 1)
    assert said.count("4 of 8 experts are what one rank of a world of another size has") == 1
    assert "full_state_dict=True" in said
    assert "placement=moeos.Placement.chunk(8, world.size)" in said


def test_state_dicts_that_name_each_expert_are_whole_together() -> None:
    def named(world: World) -> dict[str, Tensor]:
        return MoELayer(CFG, world, placement=Placement.chunk(8, world.size)).state_dict()

    first, second = virtual.run(named, ranks=2)
    virtual.run(lambda world: MoELayer(CFG, world).load_state_dict(first | second), ranks=1)


PROGRAM = """
import sys, moeos, torch
cfg = moeos.MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2, max_tokens=8)

def rank_main(world):
    moeos.MoELayer(cfg, world)(torch.zeros(3, 63))

moeos.virtual.run(rank_main, ranks=2)
"""


def test_what_virtual_ranks_print_begins_with_the_sentence() -> None:
    ended = programs.ended(PROGRAM)
    first, *others = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert "RankError: virtual rank 0 of 2: ValueError: x has shape [3, 63]; it must be" in first
    assert any("in rank_main" in line for line in others)


def test_what_a_rank_of_a_process_prints_begins_with_the_sentence() -> None:
    def live(world: World) -> str:
        with pytest.raises(KeyError) as raised, world:
            raise KeyError("a name")
        return str(raised.value.__cause__)

    assert ranks_of_torch(live, 2) == [f"rank {rank} of 2: KeyError: 'a name'" for rank in (0, 1)]


def test_a_rank_is_told_once_before_all_that_is_printed() -> None:
    def failed() -> KeyError:
        try:
            try:
                raise ValueError("first\nsecond")
            except ValueError as error:
                raise TypeError("between") from error
        except TypeError:
            try:
                raise KeyError("last")
            except KeyError as error:
                return error

    error = failed()
    tell_rank(error, "rank 1 of 2")
    tell_rank(error, "rank 0 of 4")
    assert isinstance(error.__context__, TypeError)
    first = error.__context__.__cause__
    assert isinstance(first, ValueError)
    assert isinstance(first.__cause__, RankError)
    assert str(first.__cause__) == "rank 1 of 2: KeyError: 'last'"
    ends = SystemExit(2)
    tell_rank(ends, "rank 1 of 2")
    assert ends.__cause__ is None
