# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: each format means the numbers that its definition says.

The expected numbers are computed here in float64, bit by bit, from the definitions of E4M3, E2M1
and E8M0 and of their blocks. They share no code and no table with the loader.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos.call import call_checks
from moeos.checkpoints import load_block, stored_matrices
from moeos.checkpoints.state_names import state_name
from moeos.config.config import MoEConfig
from moeos.config.element_formats import dequantize
from moeos.config.hf.families import FAMILIES

# No size is a multiple of 128, so that the last blocks are parts; all are of 32.
EXPERTS, HIDDEN, INTERMEDIATE = 4, 160, 288
PREFIX = "model.layers.3.mlp."
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}

Quantised = tuple[dict[str, Tensor], Tensor]
"""The parts of a matrix by the ends of their names, and what they mean, in float64."""

How = Callable[[torch.Generator, tuple[int, int]], Quantised]

Block = tuple[dict[str, Tensor], Tensor, Tensor]
"""A block whose experts are quantised, and w1 and w2 in float64."""


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": 2,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


def drawn_bits(generator: torch.Generator, *shape: int, below: int = 256) -> Tensor:
    return torch.randint(below, shape, generator=generator, dtype=torch.uint8)


def small_float(bits: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Sign, exponent and mantissa of a small IEEE-like number; its bias is 2^(e-1) - 1."""
    bits = bits.long()
    bias = 2 ** (exponent - 1) - 1
    fraction = (bits & (2**mantissa - 1)).double() / 2**mantissa
    power = (bits >> mantissa) & (2**exponent - 1)
    magnitude = torch.where(
        power == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * torch.pow(torch.tensor(2.0).double(), (power - bias).double()),
    )
    sign = 1.0 - 2.0 * ((bits >> (exponent + mantissa)) & 1).double()
    return sign * magnitude


def drawn_e4m3(
    generator: torch.Generator, *shape: int, positive: bool = False
) -> tuple[Tensor, Tensor]:
    """Numbers in FP8 and in float64; none is the NaN, all of whose bits are ones."""
    bits = drawn_bits(generator, *shape, below=127) + (
        0 if positive else 128 * drawn_bits(generator, *shape, below=2)
    )
    return bits.view(torch.float8_e4m3fn), small_float(bits, 4, 3)


def nibbles(pairs: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] halves, the low one first."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def by_groups(numbers: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Each number times the scale of its block of `rows` × `columns`."""
    r = torch.arange(numbers.shape[0]) // rows
    c = torch.arange(numbers.shape[1]) // columns
    return numbers * scales[r][:, c]


def fp8_blocks(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight, numbers = drawn_e4m3(generator, *shape)
    blocks = [-(-length // 128) for length in shape]
    scale = torch.rand(blocks, generator=generator) + 0.5
    parts = {"weight": weight, "weight_scale_inv": scale}
    return parts, by_groups(numbers, scale.double(), 128, 128)


def exponents(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    bits = drawn_bits(generator, *shape, below=16) + 120
    return bits, 2.0 ** (bits.double() - 127)


def fp8_blocks_ue8m0(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight, numbers = drawn_e4m3(generator, *shape)
    bits, scale = exponents(generator, *[-(-length // 128) for length in shape])
    parts = {"weight": weight, "weight_scale_inv": bits.view(torch.float8_e8m0fnu)}
    return parts, by_groups(numbers, scale, 128, 128)


def fp8_blocks_of_bytes(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    parts, numbers = fp8_blocks_ue8m0(generator, shape)
    return parts | {"weight_scale_inv": parts["weight_scale_inv"].view(torch.uint8)}, numbers


def fp8_blocks_of_compressed_tensors(
    generator: torch.Generator, shape: tuple[int, int]
) -> Quantised:
    parts, numbers = fp8_blocks(generator, shape)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, numbers


def int8_rows(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight = drawn_bits(generator, *shape).view(torch.int8)
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.5).bfloat16()
    return {"weight": weight, "weight_scale": scale}, weight.double() * scale.double()


def int8_with_zeros(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    parts, _ = int8_rows(generator, shape)
    zero = drawn_bits(generator, shape[0], 1).view(torch.int8)
    numbers = (parts["weight"].double() - zero.double()) * parts["weight_scale"].double()
    return parts | {"weight_zero_point": zero}, numbers


def mxfp4_packed(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    pairs = drawn_bits(generator, shape[0], shape[1] // 2)
    bits, scale = exponents(generator, shape[0], shape[1] // 32)
    numbers = by_groups(small_float(nibbles(pairs), 2, 1), scale, 1, 32)
    return {"weight_packed": pairs, "weight_scale": bits}, numbers


def fp8_rows(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight, numbers = drawn_e4m3(generator, *shape)
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.5).bfloat16()
    return {"weight": weight, "weight_scale": scale}, numbers * scale.double()


def fp8_matrix(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight, numbers = drawn_e4m3(generator, *shape)
    scale = torch.rand((), generator=generator) + 0.5
    parts = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(3.0)}
    return parts, numbers * scale.double()


def nvfp4(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    pairs = drawn_bits(generator, shape[0], shape[1] // 2)
    scale, scales = drawn_e4m3(generator, shape[0], shape[1] // 16, positive=True)
    over = torch.rand((), generator=generator) + 0.5
    parts = {
        "weight": pairs,
        "weight_scale": scale,
        "weight_scale_2": over,
        "input_scale": torch.tensor(3.0),
    }
    numbers = by_groups(small_float(nibbles(pairs), 2, 1), scales, 1, 16)
    return parts, numbers * over.double()


def nvfp4_packed(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    parts, numbers = nvfp4(generator, shape)
    over = parts["weight_scale_2"]
    packed = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": over.reshape(1),
        "input_global_scale": torch.tensor([3.0]),
    }
    return packed, numbers / over.double() ** 2


def int4(generator: torch.Generator, shape: tuple[int, int], group: int = 32) -> Quantised:
    fields = drawn_bits(generator, *shape, below=16).long()
    words = sum(fields[:, i::8] << (4 * i) for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    scale = (torch.rand(shape[0], shape[1] // group, generator=generator) + 0.5).bfloat16()
    parts = {
        "weight_packed": words,
        "weight_scale": scale,
        "weight_shape": torch.tensor(shape, dtype=torch.int32),
    }
    return parts, by_groups((fields - 8).double(), scale.double(), 1, group)


def int4_rows(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    return int4(generator, shape, group=shape[1])


ONE_BY_ONE: dict[str, How] = {
    "fp8_blocks": fp8_blocks,
    "fp8_blocks_ue8m0": fp8_blocks_ue8m0,
    "fp8_blocks_of_bytes": fp8_blocks_of_bytes,
    "fp8_rows": fp8_rows,
    "fp8_matrix": fp8_matrix,
    "fp8_blocks_of_compressed_tensors": fp8_blocks_of_compressed_tensors,
    "int8_rows": int8_rows,
    "int8_with_zeros": int8_with_zeros,
    "nvfp4": nvfp4,
    "nvfp4_packed": nvfp4_packed,
    "mxfp4_packed": mxfp4_packed,
    "int4": int4,
    "int4_rows": int4_rows,
}


def block(
    how: Callable[[torch.Generator, tuple[int, int]], Quantised],
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A block whose experts are quantised, and w1 and w2 in float64."""
    generator = torch.Generator().manual_seed(0)
    names = {PREFIX + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    w1, w2 = [], []
    for expert in range(EXPERTS):
        made = {}
        for projection, shape in SHAPES.items():
            parts, made[projection] = how(generator, shape)
            for end, part in parts.items():
                names[f"{PREFIX}experts.{expert}.{projection}.{end}"] = part
        w1.append(torch.cat([made["gate_proj"], made["up_proj"]]))
        w2.append(made["down_proj"])
    return names, torch.stack(w1), torch.stack(w2)


def read(
    cfg: MoEConfig, names: dict[str, Tensor], rank: int = 0, ranks: int = 1
) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_block(cfg, names, PREFIX, rank, ranks)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2**-22, atol=0.0)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_quantised_matrix_means_what_its_format_says(name: str) -> None:
    names, w1, w2 = block(ONE_BY_ONE[name])
    whole = read(config(), names)
    assert_close(whole["w1"], w1)
    assert_close(whole["w2"], w2)
    part = read(config(), names, 1, 2)
    assert torch.equal(part["w1"], whole["w1"][2:])
    half = read(config(dtype=torch.bfloat16), names)
    assert torch.equal(half["w2"], whole["w2"].bfloat16())


def stacked(
    how: Callable[[torch.Generator, tuple[int, int]], Quantised],
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same of tensors that hold all experts."""
    generator = torch.Generator().manual_seed(0)
    names = {PREFIX + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    made = {}
    for matrix, shape in (
        ("gate_up_proj", (2 * INTERMEDIATE, HIDDEN)),
        ("down_proj", (HIDDEN, INTERMEDIATE)),
    ):
        every = [how(generator, shape) for _ in range(EXPERTS)]
        for end in every[0][0]:
            name = stored_matrices.part_name(f"{PREFIX}experts.{matrix}", end)
            names[name] = torch.stack([parts[end] for parts, _ in every])
        made[matrix] = torch.stack([numbers for _, numbers in every])
    return names, made["gate_up_proj"], made["down_proj"]


@pytest.mark.parametrize("name", ["fp8_blocks", "fp8_rows"])
def test_stacked_matrices_have_stacked_scales(name: str) -> None:
    names, w1, w2 = stacked(ONE_BY_ONE[name])
    whole = read(config(), names)
    assert_close(whole["w1"], w1)
    assert_close(whole["w2"], w2)
    assert torch.equal(read(config(), names, 3, 4)["w1"], whole["w1"][3:])


def test_deepseek_v4_stores_scales_as_scale_beside_fp8_and_fp4() -> None:
    def fp4(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
        pairs = drawn_bits(generator, shape[0], shape[1] // 2)
        bits, scale = exponents(generator, shape[0], shape[1] // 32)
        parts = {"weight": pairs.view(torch.int8), "scale": bits.view(torch.float8_e8m0fnu)}
        return parts, by_groups(small_float(nibbles(pairs), 2, 1), scale, 1, 32)

    def fp8(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
        parts, numbers = fp8_blocks_ue8m0(generator, shape)
        return {"weight": parts["weight"], "scale": parts["weight_scale_inv"]}, numbers

    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for how in (fp4, fp8):
        names, w1, w2 = block(how)
        for old, new in renamed.items():
            names = {name.replace(old, new): tensor for name, tensor in names.items()}
        whole = read(config(family="deepseek_v4"), names)
        assert_close(whole["w1"], w1)
        assert_close(whole["w2"], w2)


def test_what_dequantising_costs_is_said_once_for_all_layers() -> None:
    names, _, _ = block(fp8_blocks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for layer in (3, 4):
            prefix = f"model.layers.{layer}.mlp."
            moved = {name.replace(PREFIX, prefix): tensor for name, tensor in names.items()}
            load_block(config(), moved, prefix, 0, 1)
    [said] = [str(warning.message) for warning in caught]
    held = 3 * EXPERTS * HIDDEN * INTERMEDIATE * 4 / 2**30
    assert said.startswith("experts in FP8 in blocks of 128x128 (weight_scale_inv) are dequantised")
    assert f"take {held:.3g} GiB on each rank" in said


def damaged(
    end: str, change: Callable[[Tensor], Tensor | None]
) -> Callable[[dict[str, Tensor]], None]:
    def damage(names: dict[str, Tensor]) -> None:
        name = f"{PREFIX}experts.1.up_proj.{end}"
        changed = change(names.pop(name))
        if changed is not None:
            names[name] = changed

    return damage


@pytest.mark.parametrize(
    ("how", "damage", "message"),
    [
        (
            fp8_blocks,
            damaged("weight_scale_inv", lambda scale: None),
            "experts.1.up_proj.weight_scale_inv is missing; FP8 in blocks of 128x128",
        ),
        (
            fp8_blocks,
            damaged("weight_scale_inv", lambda scale: scale[:1]),
            "experts.1.up_proj.weight_scale_inv has shape [1, 2]; this config needs [3, 2]",
        ),
        (
            fp8_blocks,
            damaged("weight", lambda weight: weight.mT),
            "experts.1.up_proj.weight has shape [160, 288]; this config needs [288, 160]",
        ),
        (
            nvfp4,
            damaged("weight_scale", lambda scale: scale.float()),
            "experts.1.up_proj.weight_scale is torch.float32; beside the other parts it must be",
        ),
        (
            nvfp4,
            damaged("weight_scale_2", lambda scale: scale.repeat(2)),
            "experts.1.up_proj.weight_scale_2 has shape [2]; a matrix has one number",
        ),
        (
            int4,
            damaged("weight_shape", lambda shape: shape.flip(0)),
            "experts.1.up_proj.weight_shape is [160, 288]; this config needs [288, 160]",
        ),
        (
            int4,
            damaged("weight_scale", lambda scale: scale[:, :3]),
            "experts.1.up_proj.weight_scale has shape [288, 3]; it must be [288, groups]",
        ),
        (
            int4,
            damaged("weight_packed", lambda packed: packed[:, :10]),
            "experts.1.up_proj.weight_packed has shape [288, 10]; this config needs [288, 20]",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_named(how: Any, damage: Any, message: str) -> None:
    names, _, _ = block(how)
    damage(names)
    with pytest.raises(ValueError, match="^" + re.escape(PREFIX + message)):
        read(config(), names)


@pytest.mark.parametrize("extra", ["weight_scale", "weight_scale_2", "weight_zero_point"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_expert_that_has_a_part_of_another_format_is_named(number: int, extra: str) -> None:
    names, _, _ = block(fp8_blocks)
    own = f"{PREFIX}experts.{number}.up_proj.weight"
    parts = sorted(["weight", "weight_scale_inv", extra])
    names[f"{PREFIX}experts.{number}.up_proj.{extra}"] = torch.ones(1)
    said = f"^{re.escape(own)} has the parts {', '.join(parts)}, which is no format that can be"
    with pytest.raises(ValueError, match=said):
        read(config(), names)


@pytest.mark.parametrize("number", [0, 2])
def test_an_expert_in_another_format_than_the_others_is_named(number: int) -> None:
    names, _, _ = block(fp8_blocks)
    others, _, _ = block(int8_rows)
    of_expert = f"{PREFIX}experts.{number}.up_proj."
    names = {name: part for name, part in names.items() if not name.startswith(of_expert)}
    names |= {name: part for name, part in others.items() if name.startswith(of_expert)}
    said = rf"experts\.{number}\.up_proj\.weight has the parts weight, weight_scale, and .*" + (
        rf"experts\.{1 if number == 0 else 0}\.up_proj\.weight has weight, weight_scale_inv: .* one"
    )
    with pytest.raises(ValueError, match=said):
        read(config(), names)


def test_parts_of_no_format_are_named_with_the_formats_that_can_be_read() -> None:
    names, _, _ = block(nvfp4)
    names = {name: part for name, part in names.items() if not name.endswith(".weight_scale")}
    with pytest.raises(ValueError, match=r"has the parts input_scale, weight, weight_scale_2, whi"):
        read(config(), names)
    asymmetric, _, _ = block(int4)
    asymmetric[f"{PREFIX}experts.0.up_proj.weight_zero_point"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"weight_zero_point is torch\.float32; beside"):
        read(config(), asymmetric)


def test_every_format_is_that_of_some_layout() -> None:
    used = {name for family in FAMILIES.values() for row in family.layouts for name in row.formats}
    assert used == set(stored_matrices.BY_NAME)


# --- as they are shipped ------------------------------------------------------------------------

HELD: dict[str, tuple[How, str]] = {
    "fp8_blocks": (fp8_blocks, "fp8_block128"),
    "fp8_blocks_ue8m0": (fp8_blocks_ue8m0, "fp8_block128"),
    "fp8_blocks_of_bytes": (fp8_blocks_of_bytes, "fp8_block128"),
    "fp8_blocks_of_compressed_tensors": (fp8_blocks_of_compressed_tensors, "fp8_block128"),
    "fp8_rows": (fp8_rows, "fp8_channel"),
    "fp8_matrix": (fp8_matrix, "fp8_tensor"),
    "fp8_matrix, a scale a row": (fp8_matrix, "fp8_channel"),
    "nvfp4": (nvfp4, "nvfp4"),
    "mxfp4_packed": (mxfp4_packed, "mxfp4"),
    "int4": (int4, "int4_group32"),
}


SHARED_HELD = [(name, how) for how, name in HELD.values()]


def meant(cfg: MoEConfig, block: dict[str, Tensor], name: str) -> Tensor:
    """What a block's codes and scales mean, in float64."""
    assert cfg.weight_format is not None
    halves = cfg.halves if name.endswith("w1") else 1
    scales = (block[f"{name}_scale"], block.get(f"{name}_scale_2"))
    return dequantize(block[name], *scales, cfg.weight_format, halves)


def held(cfg: MoEConfig, names: dict[str, Tensor], rank: int = 0, ranks: int = 1) -> Any:
    """The block, by the names of a call's tensors; nothing of it is said to be dequantised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = load_block(cfg, names, PREFIX, rank, ranks)
    known = {state_name(cfg, name): name for name in call_checks.OWN}
    return {known[name]: tensor for name, tensor in block.items()}


def assert_as_expected(cfg: MoEConfig, block: dict[str, Tensor], experts: int) -> None:
    """A layer takes the block as it is."""
    every = (
        *call_checks.expected_weights(cfg, experts),
        *call_checks.expected_scales(cfg, experts),
    )
    for wanted in every:
        if wanted is not None:
            found = block[wanted.name]
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), wanted.name
            assert found.is_contiguous()
    assert {*block} == {"gate.weight", *(wanted.name for wanted in every if wanted is not None)}


@pytest.mark.parametrize("case", HELD)
def test_a_quantised_matrix_is_kept_as_it_is_shipped(case: str) -> None:
    how, name = HELD[case]
    cfg = config(weight_format=name)
    names, w1, w2 = block(how)
    whole = held(cfg, names)
    assert_as_expected(cfg, whole, EXPERTS)
    assert torch.equal(meant(cfg, whole, "w1"), w1)
    assert torch.equal(meant(cfg, whole, "w2"), w2)
    part = held(cfg, names, 1, 2)
    assert_as_expected(cfg, part, EXPERTS // 2)
    for key, tensor in part.items():
        if key != "gate.weight":
            bits = tensor.view(torch.uint8)
            assert torch.equal(bits, whole[key][EXPERTS // 2 :].view(torch.uint8)), key


def test_a_packed_nvfp4_matrix_has_the_reciprocal_of_its_scale() -> None:
    cfg = config(weight_format="nvfp4")
    names, w1, _ = block(nvfp4_packed)
    whole = held(cfg, names)
    assert_as_expected(cfg, whole, EXPERTS)
    assert_close(meant(cfg, whole, "w1"), w1)
    name = f"{PREFIX}experts.1.up_proj.weight_global_scale"
    assert torch.equal(whole["w1_scale_2"][1, 1], 1 / names[name][0])


def test_what_all_experts_have_in_one_tensor_is_kept_as_well() -> None:
    cfg = config(weight_format="fp8_channel")
    names, w1, w2 = stacked(fp8_rows)
    whole = held(cfg, names)
    assert_as_expected(cfg, whole, EXPERTS)
    assert torch.equal(meant(cfg, whole, "w1"), w1)
    assert torch.equal(meant(cfg, whole, "w2"), w2)
    cfg = config(weight_format="fp8_tensor")
    names, w1, _ = stacked(fp8_matrix)  # one scale for gate and up
    whole = held(cfg, {name: part for name, part in names.items() if "input" not in name})
    assert_as_expected(cfg, whole, EXPERTS)
    assert torch.equal(meant(cfg, whole, "w1"), w1)


def test_blocks_that_gate_and_up_share_are_refused_and_others_kept() -> None:
    names, _, _ = stacked(fp8_blocks)
    with pytest.raises(
        ValueError,
        match=r"experts\.gate_up_proj_scale_inv has a block with rows of gate and of up, as 288 is "
        r"no multiple of 128: set weight_format=None, which MoEConfig\.from_hf\(\.\.\., dequantize",
    ):
        held(config(weight_format="fp8_block128"), names)
    cfg = config(weight_format="fp8_block128", activation="relu2")
    names, _, w2 = stacked(fp8_blocks)
    alone = f"{PREFIX}experts."
    up = {
        f"{alone}up_proj{end}": names.pop(f"{alone}gate_up_proj{end}") for end in ("", "_scale_inv")
    }
    up = {name: part[:, : part.shape[1] // 2] for name, part in up.items()}
    up[f"{alone}up_proj_scale_inv"] = torch.ones(EXPERTS, 3, 2)
    whole = held(cfg, names | up)
    assert_as_expected(cfg, whole, EXPERTS)
    assert torch.equal(meant(cfg, whole, "w2"), w2)


def test_mxfp4_is_kept_with_gate_and_up_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    names = {
        PREFIX + "router.weight": torch.randn(EXPERTS, HIDDEN, generator=generator),
        PREFIX + "router.bias": torch.randn(EXPERTS, generator=generator),
    }
    meanings = {}
    for matrix, (rows, columns) in (
        ("gate_up_proj", (2 * INTERMEDIATE, HIDDEN)),
        ("down_proj", (HIDDEN, INTERMEDIATE)),
    ):
        pairs = drawn_bits(generator, EXPERTS, rows, columns // 2)
        bits, scale = exponents(generator, EXPERTS, rows, columns // 32)
        names[f"{PREFIX}experts.{matrix}_blocks"] = pairs.view(EXPERTS, rows, columns // 32, 16)
        names[f"{PREFIX}experts.{matrix}_scales"] = bits
        names[f"{PREFIX}experts.{matrix}_bias"] = torch.zeros(EXPERTS, rows)
        numbers = small_float(nibbles(pairs), 2, 1)
        meanings[matrix] = numbers * scale.repeat_interleave(32, -1)
    rules = {"bias": True, "router_bias": True, "activation": "swigluoai", "family": "gpt_oss"}
    cfg = config(weight_format="mxfp4", **rules)
    whole = held(cfg, names)
    both = meanings["gate_up_proj"]
    assert torch.equal(meant(cfg, whole, "w1"), torch.cat((both[:, 0::2], both[:, 1::2]), 1))
    assert torch.equal(meant(cfg, whole, "w2"), meanings["down_proj"])


def test_deepseek_v4s_scales_are_kept_beside_fp8_and_fp4() -> None:
    def fp4(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
        pairs = drawn_bits(generator, shape[0], shape[1] // 2)
        bits, scale = exponents(generator, shape[0], shape[1] // 32)
        parts = {"weight": pairs.view(torch.int8), "scale": bits.view(torch.float8_e8m0fnu)}
        return parts, by_groups(small_float(nibbles(pairs), 2, 1), scale, 1, 32)

    def fp8(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
        parts, numbers = fp8_blocks_ue8m0(generator, shape)
        return {"weight": parts["weight"], "scale": parts["weight_scale_inv"]}, numbers

    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for how, name in ((fp4, "mxfp4"), (fp8, "fp8_block128")):
        names, w1, w2 = block(how)
        for old, new in renamed.items():
            names = {name.replace(old, new): tensor for name, tensor in names.items()}
        cfg = config(family="deepseek_v4", weight_format=name)
        whole = held(cfg, names)
        assert_as_expected(cfg, whole, EXPERTS)
        assert torch.equal(meant(cfg, whole, "w1"), w1)
        assert torch.equal(meant(cfg, whole, "w2"), w2)


def plain(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    weight = torch.randn(shape, generator=generator)
    return {"weight": weight}, weight.double()


def e5m2(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    parts, numbers = fp8_blocks(generator, shape)
    return parts | {"weight": parts["weight"].float().to(torch.float8_e5m2)}, numbers


def int4_fp16(generator: torch.Generator, shape: tuple[int, int]) -> Quantised:
    parts, numbers = int4(generator, shape)
    return parts | {"weight_scale": parts["weight_scale"].half()}, numbers


@pytest.mark.parametrize(
    ("how", "name", "message"),
    [
        (
            fp8_blocks,
            "mxfp4",
            "weight is FP8 in blocks of 128x128 (weight_scale_inv), and weight_format is 'mxfp4': "
            "set weight_format='fp8_block128'",
        ),
        (
            plain,
            "fp8_tensor",
            "weight is unquantised, and weight_format is 'fp8_tensor': set weight_format=None, and "
            "moeos.quantize the layer",
        ),
        (
            fp8_rows,
            "fp8_tensor",
            "weight_scale has a number for each of 288 rows, which is not 'fp8_tensor': "
            "set weight_format='fp8_channel'",
        ),
        (
            e5m2,
            "fp8_block128",
            "weight is torch.float8_e5m2, and a layer's is torch.float8_e4m3fn: set weight_format",
        ),
        (
            int4_rows,
            "int4_group32",
            "weight_scale is torch.bfloat16 and has a number for 160 columns, and a layer's is to",
        ),
        (
            int4_fp16,
            "int4_group32",
            "weight_scale is torch.float16 and has a number for 32 columns, and a layer's is torc",
        ),
    ],
)
def test_another_format_than_the_configs_is_named(how: How, name: str, message: str) -> None:
    names, _, _ = block(how)
    message = re.escape(f"{PREFIX}experts.2.gate_proj.{message}")
    with pytest.raises(ValueError, match="^" + message):
        held(config(weight_format=name), names, 1, 2)


@pytest.mark.parametrize(
    ("how", "name", "end"),
    [
        (fp8_blocks, "fp8_block128", "weight_scale_inv"),
        (fp8_rows, "fp8_channel", "weight_scale"),
        (nvfp4, "nvfp4", "weight_scale"),
        (int4, "int4_group32", "weight_packed"),
    ],
)
def test_a_kept_part_that_does_not_fit_is_named(how: How, name: str, end: str) -> None:
    names, _, _ = block(how)
    damaged(end, lambda part: part[:-1])(names)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(PREFIX)}experts\.1\.up_proj\.{end} has shape"
    ):
        held(config(weight_format=name), names)


def test_shared_experts_are_numbers_beside_codes() -> None:
    names, _, _ = block(fp8_blocks)
    generator = torch.Generator().manual_seed(5)
    for projection, shape in SHAPES.items():
        for end, part in fp8_blocks(generator, shape)[0].items():
            names[f"{PREFIX}shared_experts.{projection}.{end}"] = part
    cfg = config(weight_format="fp8_block128", shared_experts=1, shared_intermediate=INTERMEDIATE)
    with pytest.warns(UserWarning, match="experts in FP8 in blocks .* are dequantised"):
        whole = load_block(cfg, names, PREFIX, 0, 1)
    assert whole["shared_w1"].dtype == torch.float32
    assert whole["w1_fp8_block128"].dtype == torch.float8_e4m3fn


def with_shared(how: How, width: int = INTERMEDIATE) -> dict[str, Tensor]:
    """A block whose shared expert is in a format, too."""
    names, _, _ = block(how)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "gate_proj": (width, HIDDEN),
        "up_proj": (width, HIDDEN),
        "down_proj": (HIDDEN, width),
    }
    for projection, shape in shapes.items():
        for end, part in how(generator, shape)[0].items():
            names[f"{PREFIX}shared_experts.{projection}.{end}"] = part
    return names


@pytest.mark.parametrize(("name", "how"), SHARED_HELD)
def test_shared_experts_are_kept_as_they_are_shipped(name: str, how: How) -> None:
    shared: dict[str, Any] = {"shared_experts": 1, "shared_intermediate": INTERMEDIATE}
    names = with_shared(how)
    with pytest.warns(UserWarning, match="are dequantised"):
        numbers = load_block(config(weight_format=name, **shared), names, PREFIX, 0, 1)
    cfg = config(weight_format=name, shared_weight_format=name, **shared)
    found = held(cfg, names)
    every = (*call_checks.expected_shared(cfg), *call_checks.expected_shared_scales(cfg))
    for wanted in every:
        if wanted is not None:
            own = found[wanted.name]
            assert (own.shape, own.dtype) == (wanted.shape, wanted.dtype)
    for matrix in ("shared_w1", "shared_w2"):
        means = meant(cfg, found, matrix)
        torch.testing.assert_close(means.float(), numbers[matrix], rtol=2**-22, atol=0.0)


def test_shared_experts_that_are_shipped_otherwise_are_named() -> None:
    shared: dict[str, Any] = {"shared_experts": 1, "shared_intermediate": INTERMEDIATE}
    cfg = config(weight_format="fp8_block128", shared_weight_format="fp8_block128", **shared)
    names = with_shared(fp8_blocks)
    first = f"{PREFIX}shared_experts.gate_proj."
    plain = {name: part for name, part in names.items() if not name.startswith(first)}
    plain[f"{first}weight"] = torch.zeros(INTERMEDIATE, HIDDEN)
    said = rf"^{re.escape(first)}weight is unquantised, and shared_weight_format is 'fp8_block128'"
    with pytest.raises(ValueError, match=said + ": set shared_weight_format=None"):
        held(cfg, plain)
    damaged_scale = names | {f"{first}weight_scale_inv": torch.ones(9, 9)}
    with pytest.raises(ValueError, match=rf"^{re.escape(first)}weight_scale_inv has shape"):
        held(cfg, damaged_scale)
    two = dataclasses.replace(cfg, shared_experts=2, shared_intermediate=INTERMEDIATE // 2)
    with pytest.raises(ValueError, match=r"^shared_experts is 2, and shared experts in a format"):
        held(two, names)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.shared_expert_gate"],
            },
            "fp8_block128",
        ),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["model.layers.1.mlp.shared_expert"],
            },
            None,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.shared_expert*"]},
            None,
        ),
        (None, None),
    ],
)
def test_a_models_config_says_whether_its_shared_experts_are_in_the_format(
    quantization: dict[str, Any] | None, name: str | None
) -> None:
    values = {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "quantization_config": quantization,
    }
    assert MoEConfig.from_hf(values, 1).shared_weight_format == name
    for others in (
        {"shared": False},
        {"dequantize": True},
        {"weight_format": None},
        {"shared_weight_format": None},
        {"shared_experts": 0, "shared_intermediate": 0, "shared_gate": False},
    ):
        assert MoEConfig.from_hf(values, 1, **others).shared_weight_format is None  # type: ignore[arg-type]


def groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


SHIPPED: list[tuple[dict[str, Any] | None, str | None]] = [
    (None, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "fp8_block128"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_tensor"),
    (groups(type="float", num_bits=8, strategy="channel"), "fp8_channel"),
    (groups(type="float", num_bits=8, strategy="tensor"), "fp8_tensor"),
    (
        groups(type="float", num_bits=8, strategy="block", block_structure=[128, 128]),
        "fp8_block128",
    ),
    (groups(type="float", num_bits=4, group_size=16, strategy="tensor_group"), "nvfp4"),
    (groups(type="float", num_bits=4, group_size=32, strategy="group"), "mxfp4"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, None),
    (groups(type="int", num_bits=4, group_size=32, symmetric=True), "int4_group32"),
]


def model(quantization: object) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "quantization_config": quantization,
    }


@pytest.mark.parametrize(("quantization", "name"), SHIPPED)
def test_a_models_config_says_in_which_format_it_ships_its_experts(
    quantization: dict[str, Any] | None, name: str | None
) -> None:
    values = model(quantization)
    assert MoEConfig.from_hf(values).weight_format == name
    assert MoEConfig.from_hf(values, dequantize=True).weight_format is None
    assert MoEConfig.from_hf(values, weight_format=None).weight_format is None
    assert MoEConfig.from_hf(values, weight_format="nvfp4").weight_format == "nvfp4"


def test_deepseek_v4_says_of_its_experts_that_they_are_fp4() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values = {"model_type": "deepseek_v4", "quantization_config": fp8}
    fp4 = MoEConfig.from_hf(values | {"expert_dtype": "fp4"})
    assert (fp4.weight_format, fp4.shared_weight_format) == ("mxfp4", None)
    assert MoEConfig.from_hf(values).weight_format == "fp8_block128"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "fmt is 'e5m2'; a layer holds weights as they are",
        ),
        (
            groups(type="int", num_bits=4, group_size=128, symmetric=True),
            "config_groups.g.weights.group_size is 128; a layer holds weights as they are shipped "
            "with 32: pass dequantize=True",
        ),
        (
            groups(type="int", num_bits=4, group_size=32, symmetric=False),
            "config_groups.g.weights.symmetric is False; ",
        ),
        (groups(type="int", num_bits=8), "config_groups.g.weights is 'int of 8 bits'; "),
    ],
)
def test_a_format_that_no_layer_holds_is_named_and_may_be_dequantised(
    quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"^quantization_config\.{re.escape(said)}"):
        MoEConfig.from_hf(model(quantization))
    assert MoEConfig.from_hf(model(quantization), dequantize=True).weight_format is None


def test_switches_and_tables_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^dequantize is 1; it must be True or False"):
        MoEConfig.from_hf(model(None), dequantize=1)  # type: ignore[arg-type]
    broken = {"quant_method": "compressed-tensors", "config_groups": {"g": 3}}
    with pytest.raises(
        TypeError, match=r"^quantization_config\.config_groups\.g is a int; it must"
    ):
        MoEConfig.from_hf(model(broken))


# --- the functions of others --------------------------------------------------------------------


def test_fp8_is_what_transformers_dequantises() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(1)
    shape = (256, 384)  # its function needs whole blocks
    parts, _ = fp8_blocks(generator, shape)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"])
    assert torch.equal(stored_matrices.BY_NAME["fp8_blocks"].dequantise(parts, shape), theirs)


def test_mxfp4_is_what_transformers_dequantises() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(1)
    blocks = drawn_bits(generator, 1, 64, 3, 16)
    scales, _ = exponents(generator, 1, 64, 3)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    parts = {"blocks": blocks[0], "scales": scales[0]}
    assert torch.equal(stored_matrices.BY_NAME["mxfp4"].dequantise(parts, (64, 96)), theirs[0].mT)


def test_int4_is_what_compressed_tensors_unpacks() -> None:
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    generator = torch.Generator().manual_seed(1)
    parts, _ = int4(generator, (64, 96))
    theirs = packed.unpack_from_int32(parts["weight_packed"], 4, torch.Size((64, 96))).float()
    scales = parts["weight_scale"].float().repeat_interleave(32, dim=1)
    assert torch.equal(
        stored_matrices.BY_NAME["integers"].dequantise(parts, (64, 96)), theirs * scales
    )


def test_nvfp4_is_what_compressed_tensors_unpacks() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    generator = torch.Generator().manual_seed(1)
    parts, _ = nvfp4_packed(generator, (64, 96))
    theirs = helpers.unpack_fp4_from_uint8(parts["weight_packed"], 64, 96).float()
    scales = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    ours = stored_matrices.BY_NAME["nvfp4_packed"].dequantise(parts, (64, 96))
    torch.testing.assert_close(ours, theirs * scales.repeat_interleave(16, dim=1))
