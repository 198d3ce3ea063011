# SPDX-License-Identifier: Apache-2.0
"""Each rank of a layer in slices reads its slice of a checkpoint's experts, in every layout."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moeos import MoEConfig, MoELayer, Placement, World
from moeos.checkpoints import load_block, open_tensors
from moeos.config import reference
from moeos.partition.slicing import Parallel, Slicing
from moeos.world import virtual
from tests.host.checkpoints import test_stored_matrices as quantised
from tests.host.checkpoints.test_checkpoint import PREFIX, fused_names, split_names
from tests.host.checkpoints.test_checkpoint import config as small
from tests.host.checkpoints.test_checkpoint_files import bytes_read, sharded
from tests.host.checkpoints.test_stored_matrices import (
    HELD,
    fp8_blocks,
    fp8_matrix,
    fp8_rows,
    nvfp4,
    stacked,
)
from tests.layers import TOLERANCE
from tests.nightly import covering, in_turn
from tests.tiny_models import TINY, TinyBlock, tiny

read = bytes_read

Block = dict[str, Tensor]


def sliced(cfg: MoEConfig, whole: Block, number: int, slices: int, *, apart: bool = False) -> Block:
    """Of a block of whole experts, one of so many slices: by the definition."""

    def part(tensor: Tensor, dim: int, halves: int) -> Tensor:
        bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        mine = [half.chunk(slices, dim)[number] for half in bits.chunk(halves, dim)]
        return torch.cat(mine, dim).view(tensor.dtype)

    found = {}
    for name, tensor in whole.items():
        routed = not name.startswith("shared_")
        kind = name.removeprefix("shared_").split("_")[0]
        one_a_matrix = tensor.dim() == 2 and tensor.shape[1] <= 2  # its scale
        if (not routed and apart) or one_a_matrix:
            found[name] = tensor
        elif kind in ("w1", "b1"):
            found[name] = part(tensor, 1, cfg.halves)
        elif kind == "w2" and tensor.dim() == 3:
            found[name] = part(tensor, 2, 1)
        else:
            found[name] = tensor
    return found


def assert_same(actual: Block, expected: Block) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = actual[name]
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype), name
        assert mine.is_contiguous(), name
        bits = [one.contiguous().view(torch.uint8) for one in (mine, tensor)]
        assert torch.equal(*bits), name


def slices_of(
    cfg: MoEConfig, tensors: Any, prefix: str, ranks: int, ignore: Any = (), *, apart: bool = False
) -> list[Block]:
    """By rank, what it reads."""
    slicing = Slicing(ranks, apart=apart)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            load_block(cfg, tensors, prefix, rank, ranks, ignore, slicing=slicing)
            for rank in range(ranks)
        ]


def whole_of(cfg: MoEConfig, tensors: Any, prefix: str, ignore: Any = ()) -> Block:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_block(cfg, tensors, prefix, 0, 1, ignore)


@pytest.mark.parametrize("names", [split_names, fused_names], ids=["split", "stacked"])
@pytest.mark.parametrize("of_file", [False, True], ids=["memory", "file"])
def test_a_rank_reads_its_slice_of_each_expert_and_b2_whole(
    names: Any, of_file: bool, tmp_path: Path, read: dict[str, int]
) -> None:
    cfg, block = small(bias=True, intermediate=48), {}
    for name, tensor in names(bias=True).items():  # twice as wide
        rows = "down" not in name and "gate.w" not in name
        columns = "down" in name and "bias" not in name
        dim = tensor.dim() - 1 if columns else int("experts.g" in name)
        block[name] = torch.cat([tensor, tensor + 1], dim) if rows or columns else tensor
    tensors: Any = open_tensors(sharded(tmp_path, block)) if of_file else block
    whole = whole_of(cfg, block, PREFIX)
    for ranks in (2, 3):
        read.clear()
        found = slices_of(cfg, tensors, PREFIX, ranks)
        for rank, mine in enumerate(found):
            assert_same(mine, sliced(cfg, whole, rank, ranks))
        if of_file:
            every = sum(
                tensor.nbytes * (ranks if "down_proj" in name and "bias" in name else 1)
                for name, tensor in block.items()
                if "experts" in name
            )
            gate = block[PREFIX + "gate.weight"].nbytes
            assert sum(read.values()) == every + ranks * gate


def tiny_of(name: str, ranks: int, **options: Any) -> TinyBlock:
    """A family's model with an I that so many ranks divide."""
    square = name in ("gpt_oss", "llama4")  # with I = H = 64
    return tiny(name, **options, **({"intermediate_size": 96} if square and ranks == 3 else {}))


@pytest.mark.parametrize(("name", "ranks"), in_turn(TINY, [2, 3]))
def test_slices_of_every_family_are_those_of_whole_experts(
    name: str, ranks: int, tmp_path: Path
) -> None:
    block = tiny_of(name, ranks)
    cfg = block.config
    if cfg.zero_experts:
        with pytest.raises(ValueError, match=r"zero_experts is \d+; a layer with parallel='tensor"):
            slices_of(cfg, block.state_dict, block.prefix, ranks, block.ignore)
        return
    whole = whole_of(cfg, block.state_dict, block.prefix, block.ignore)
    apart = cfg.shared_intermediate % (8 * ranks) != 0  # then shared experts are whole
    for tensors, prefix in ((block.state_dict, block.prefix), block.files(tmp_path)):
        found = slices_of(cfg, tensors, prefix, ranks, block.ignore, apart=apart)
        for rank, mine in enumerate(found):
            assert_same(mine, sliced(cfg, whole, rank, ranks, apart=apart))


def test_groups_of_ranks_read_slices_of_their_own_experts(tmp_path: Path) -> None:
    block = tiny("mixtral")
    cfg = block.config
    tensors, prefix = block.files(tmp_path)
    slicing = Slicing(2, apart=True)
    for group in range(2):
        experts = slice(group * cfg.experts // 2, (group + 1) * cfg.experts // 2)
        whole = whole_of(cfg, block.state_dict, block.prefix, block.ignore)
        whole |= {name: whole[name][experts] for name in ("w1", "w2")}
        for number in range(2):
            rank = 2 * group + number
            mine = load_block(cfg, tensors, prefix, rank, 4, block.ignore, slicing=slicing)
            assert_same(mine, sliced(cfg, whole, number, 2))


@pytest.mark.parametrize(
    ("name", "parallel", "ranks"),
    covering(
        ["mixtral", "deepseek_v3", "gpt_oss", "llama4", "nemotron_h"],
        ["tensor", "sharded_tokens"],
        [2, 3],
    ),
)
def test_a_layer_in_slices_computes_what_transformers_module_computes(
    name: str, parallel: Parallel, ranks: int, tmp_path: Path
) -> None:
    shared = name == "deepseek_v3"  # those of the others are too narrow for three ranks
    block = tiny_of(name, ranks, shared=shared)
    tensors, prefix = block.files(tmp_path)
    x = block.draw(37, 0)

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(
            *(block.config, world, tensors, prefix, block.ignore), parallel=parallel
        )
        rows = x if parallel == "tensor" else x[world.rank :]
        y: Tensor = layer(block.layer_input(rows).float(), **block.routing(rows))
        return y

    expected = block.output(x)
    for rank, y in enumerate(virtual.run(rank_main, ranks=ranks)):
        wanted = expected if parallel == "tensor" else expected[rank:]
        assert reference.relative_error(y, wanted) <= TOLERANCE[torch.float32]


QUANTISED = {
    **{case: (how, name, 512) for case, (how, name) in HELD.items()},
    "fp8_blocks, in numbers": (fp8_blocks, None, 288),
    "fp8_rows, in numbers": (fp8_rows, None, 288),
    "nvfp4, in numbers": (nvfp4, None, 288),
    "int8_rows, in numbers": (quantised.int8_rows, None, 288),
    "int8_with_zeros, in numbers": (quantised.int8_with_zeros, None, 288),
}
"""How a case is shipped, what a layer holds it as, and I, of which a part may end amid a block."""

WHOLE_READ = ("int4", "fp8_blocks, in numbers")
"""Of these each rank reads all: words of several codes are told their shape, and slices end amid
blocks."""


@pytest.mark.parametrize("case", QUANTISED)
def test_slices_of_codes_have_their_scales(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: dict[str, int]
) -> None:
    how, weight_format, size = QUANTISED[case]
    monkeypatch.setattr(
        quantised,
        "SHAPES",
        {
            **dict.fromkeys(("gate_proj", "up_proj"), (size, quantised.HIDDEN)),
            "down_proj": (quantised.HIDDEN, size),
        },
    )
    cfg = quantised.config(intermediate=size, weight_format=weight_format)
    names, _, _ = quantised.block(how)
    save_file({name: tensor.contiguous() for name, tensor in names.items()}, tmp_path / "x")
    whole = whole_of(cfg, names, quantised.PREFIX)
    ranks = 2 if weight_format else 3
    for tensors in (names, open_tensors(tmp_path / "x")):
        for rank, mine in enumerate(slices_of(cfg, tensors, quantised.PREFIX, ranks)):
            assert_same(mine, sliced(cfg, whole, rank, ranks))
    twice = sum(
        count
        for name, count in read.items()
        if name.endswith(("proj.weight", "proj.weight_packed")) and count > names[name].nbytes
    )
    assert bool(twice) == (case in WHOLE_READ), "what the ranks read together"


@pytest.mark.parametrize(("how", "weight_format"), [(fp8_rows, "fp8_channel"), (fp8_matrix, None)])
def test_slices_of_codes_of_all_experts_in_one_tensor(how: Any, weight_format: Any) -> None:
    cfg = quantised.config(weight_format=weight_format)
    names, _, _ = stacked(how)
    names = {name: part for name, part in names.items() if "input" not in name}
    whole = whole_of(cfg, names, quantised.PREFIX)
    for ranks in (2, 3):
        for rank, mine in enumerate(slices_of(cfg, names, quantised.PREFIX, ranks)):
            assert_same(mine, sliced(cfg, whole, rank, ranks))


def test_rows_of_gate_and_up_in_turn_are_cut_in_mxfp4(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    experts, hidden, size = quantised.EXPERTS, quantised.HIDDEN, quantised.INTERMEDIATE
    names = {
        PREFIX + "router.weight": torch.randn(experts, hidden, generator=generator),
        PREFIX + "router.bias": torch.randn(experts, generator=generator),
    }
    for matrix, rows, columns in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
        base, groups = f"{PREFIX}experts.{matrix}_proj", columns // 32
        names[f"{base}_blocks"] = quantised.drawn_bits(generator, experts, rows, groups, 16)
        names[f"{base}_scales"], _ = quantised.exponents(generator, experts, rows, groups)
        names[f"{base}_bias"] = torch.randn(experts, rows, generator=generator)
    rules = {"bias": True, "router_bias": True, "activation": "swigluoai", "family": "gpt_oss"}
    save_file(names, tmp_path / "x")
    for weight_format in ("mxfp4", None):
        cfg = quantised.config(weight_format=weight_format, **rules)
        whole = whole_of(cfg, names, PREFIX)
        for tensors in (names, open_tensors(tmp_path / "x")):
            for rank, mine in enumerate(slices_of(cfg, tensors, PREFIX, 3)):
                assert_same(mine, sliced(cfg, whole, rank, 3))


def test_what_slices_cost_in_numbers_is_that_of_slices() -> None:
    names, _, _ = quantised.block(fp8_blocks)
    cfg, said = quantised.config(), []
    for slicing in (Slicing(), Slicing(2)):
        with pytest.warns(UserWarning, match="are dequantised") as caught:
            load_block(cfg, names, quantised.PREFIX, 0, slicing.slices, slicing=slicing)
        said.append([float(found) for found in re.findall(r"(\S+) GiB", str(caught[0].message))])
    assert len(said[0]) == 2
    assert said[1] == pytest.approx([one / 2 for one in said[0]], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "arguments", "match"),
    [
        ({"intermediate": 24}, {}, "intermediate is 24; 2 ranks .* must be a multiple of 16"),
        (
            {"intermediate": 128, "weight_format": "fp8_block128", "hidden": 128},
            {},
            "intermediate is 128; .* in blocks of 128: it must be a multiple of 256",
        ),
        (
            {"intermediate": 48},
            {"placement": Placement.chunk(4, 2)},
            "placement is given, and parallel is 'tensor': .* Leave it out, or pass parallel='exp",
        ),
    ],
    ids=["sizes", "blocks", "placement"],
)
def test_what_cannot_be_cut_is_refused_by_name(
    changes: dict[str, Any], arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        load_block(small(**changes), {}, PREFIX, 0, 2, slicing=Slicing(2), **arguments)


def test_a_tensor_of_another_shape_is_named_with_the_shape_of_whole_experts(tmp_path: Path) -> None:
    block = split_names()
    name = f"{PREFIX}experts.2.up_proj.weight"
    block[name] = block[name][:16].contiguous()
    save_file(block, tmp_path / "x")
    cfg = small(intermediate=24)
    for tensors in (block, open_tensors(tmp_path / "x")):
        with pytest.raises(ValueError, match=r"experts\.2\.up_proj.* \[16, 16\]; .* \[24, 16\]"):
            slices_of(cfg, tensors, PREFIX, 3)


def test_a_part_of_another_shape_is_named_with_the_shape_of_whole_experts(tmp_path: Path) -> None:
    names, _, _ = quantised.block(fp8_rows)
    name = f"{quantised.PREFIX}experts.2.up_proj.weight"
    names[name] = names[name][:144].contiguous()
    save_file(names, tmp_path / "x")
    for tensors in (names, open_tensors(tmp_path / "x")):
        with pytest.raises(ValueError, match=r"2\.up_proj.* \[144, 160\]; .* \[288, 160\]"):
            slices_of(quantised.config(), tensors, quantised.PREFIX, 2)
