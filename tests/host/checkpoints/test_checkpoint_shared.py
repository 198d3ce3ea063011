# SPDX-License-Identifier: Apache-2.0
"""load_block: shared experts, under all names and in all formats in which blocks keep them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from moeos import World
from moeos.checkpoints import load_block
from moeos.config.config import MoEConfig
from tests.host.checkpoints.test_stored_matrices import (
    HIDDEN,
    ONE_BY_ONE,
    PREFIX,
    block,
    config,
    fp8_blocks,
    fp8_blocks_ue8m0,
)
from tests.process_group import ranks_of_torch

WIDTH = 96
SHARED: dict[str, Any] = {"shared_experts": 1, "shared_intermediate": WIDTH}
AROUND = "model.layers.3."
MODULES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def routed() -> dict[str, Tensor]:
    """A block's other tensors, unquantised."""
    names, w1, w2 = block(ONE_BY_ONE["fp8_matrix"])
    gate = names[PREFIX + "gate.weight"]
    plain = {PREFIX + "gate.weight": gate}
    for expert, (first, second) in enumerate(zip(w1.float(), w2.float(), strict=True)):
        at = f"{PREFIX}experts.{expert}."
        parts = {"gate_proj": first[: len(first) // 2], "up_proj": first[len(first) // 2 :]}
        plain |= {f"{at}{name}.weight": part for name, part in parts.items()}
        plain[f"{at}down_proj.weight"] = second
    return plain


def matrices(width: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


M = matrices()
KEPT: dict[str, dict[str, Tensor]] = {
    "shared_experts": {
        f"{PREFIX}shared_experts.{name}.weight": M[part] for name, part in MODULES.items()
    },
    "shared_expert": {
        f"{PREFIX}shared_expert.{name}.weight": M[part] for name, part in MODULES.items()
    },
    "shared_mlp": {f"{PREFIX}shared_mlp.{name}.weight": M[part] for name, part in MODULES.items()},
    "w1": {
        f"{PREFIX}shared_experts.w1.weight": M["gate"],
        f"{PREFIX}shared_experts.w3.weight": M["up"],
        f"{PREFIX}shared_experts.w2.weight": M["down"],
    },
    "fused": {
        f"{PREFIX}shared_experts.gate_up_proj.weight": torch.cat((M["gate"], M["up"])),
        f"{PREFIX}shared_experts.down_proj.weight": M["down"],
    },
    "beside": {
        f"{AROUND}shared_mlp.input_linear.weight": torch.cat((M["gate"], M["up"])),
        f"{AROUND}shared_mlp.output_linear.weight": M["down"],
    },
}
"""The same shared experts under the names of each way to keep them."""


def load(cfg: MoEConfig, names: Mapping[str, Tensor], *ignore: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_block(cfg, names, PREFIX, 0, 1, ignore)


@pytest.mark.parametrize("names", KEPT.values(), ids=KEPT)
def test_gate_rows_come_before_up_rows_wherever_they_are_kept(names: dict[str, Tensor]) -> None:
    found = load(config(**SHARED), routed() | names)
    assert torch.equal(found["shared_w1"], torch.cat((M["gate"], M["up"])).unsqueeze(0))
    assert torch.equal(found["shared_w2"], M["down"].unsqueeze(0))
    assert all(found[name].is_contiguous() for name in ("shared_w1", "shared_w2"))
    half = load(config(**SHARED, dtype=torch.bfloat16), routed() | names)
    assert torch.equal(half["shared_w1"], found["shared_w1"].bfloat16())


@pytest.mark.parametrize("names", KEPT.values(), ids=KEPT)
def test_several_shared_experts_take_equal_parts_of_one_mlp(names: dict[str, Tensor]) -> None:
    found = load(config(shared_experts=3, shared_intermediate=32), routed() | names)
    for number in range(3):
        own = slice(32 * number, 32 * (number + 1))
        assert torch.equal(found["shared_w1"][number], torch.cat((M["gate"][own], M["up"][own])))
        assert torch.equal(found["shared_w2"][number], M["down"][:, own])


def test_a_shared_expert_without_gate_rows_is_read_where_the_activation_has_none() -> None:
    names = {name: tensor for name, tensor in routed().items() if "gate_proj" not in name}
    names |= {
        f"{PREFIX}shared_experts.up_proj.weight": M["up"],
        f"{PREFIX}shared_experts.down_proj.weight": M["down"],
    }
    found = load(config(**SHARED, activation="relu2"), names)
    assert torch.equal(found["shared_w1"], M["up"].unsqueeze(0))
    assert torch.equal(found["shared_w2"], M["down"].unsqueeze(0))


def test_the_gate_of_shared_experts_is_a_vector() -> None:
    names = routed() | KEPT["shared_expert"]
    gate = torch.randn(1, HIDDEN)
    given = names | {f"{PREFIX}shared_expert_gate.weight": gate}
    assert torch.equal(load(config(**SHARED, shared_gate=True), given)["shared_gate"], gate[0])
    with pytest.raises(
        ValueError, match=r"shared_expert_gate\.weight is missing; .* with shape \[1, 160\]$"
    ):
        load(config(**SHARED, shared_gate=True), names)
    with pytest.raises(ValueError, match=r"_gate\.weight is not used by .* shared_gate is False;"):
        load(config(**SHARED), given)
    with pytest.raises(ValueError, match=r"shared_gate is True, and what is under .* has none"):
        load(config(**SHARED, shared_gate=True), routed() | KEPT["shared_mlp"])


def drawn(how: Callable[..., Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parts of quantised shared experts, and what they mean in float64."""
    generator = torch.Generator().manual_seed(3)
    parts, meant = {}, {}
    for name, part in MODULES.items():
        found, meant[part] = how(generator, tuple(M[part].shape))
        parts |= {f"{PREFIX}shared_experts.{name}.{end}": tensor for end, tensor in found.items()}
    return parts, meant


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_quantised_ones_are_dequantised_beside_experts_of_any_format(name: str) -> None:
    parts, meant = drawn(ONE_BY_ONE[name])
    for others in (routed(), block(fp8_blocks)[0]):
        found = load(config(**SHARED), others | parts)
        expected = torch.cat((meant["gate"], meant["up"])).unsqueeze(0)
        torch.testing.assert_close(found["shared_w1"].double(), expected, rtol=2**-22, atol=0.0)
        expected = meant["down"].unsqueeze(0)
        torch.testing.assert_close(found["shared_w2"].double(), expected, rtol=2**-22, atol=0.0)


def test_deepseek_v4_has_their_scales_as_scale() -> None:
    parts, meant = drawn(fp8_blocks_ue8m0)
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "weight_scale_inv": "scale"}
    names = routed() | parts
    for old, new in renamed.items():
        names = {name.replace(old, new): tensor for name, tensor in names.items()}
    found = load(config(family="deepseek_v4", **SHARED), names)
    torch.testing.assert_close(found["shared_w2"][0].double(), meant["down"], rtol=2**-22, atol=0.0)


def test_what_they_cost_is_counted() -> None:
    parts, _ = drawn(fp8_blocks)
    with pytest.warns(UserWarning, match=r"experts in FP8 in blocks of 128x128") as caught:
        load_block(config(**SHARED), routed() | parts, PREFIX, 0, 1)
    held = 3 * WIDTH * HIDDEN * 4 / 2**30
    [said] = [str(warning.message) for warning in caught]
    assert f"take {held:.3g} GiB on each rank" in said


def without(names: dict[str, Tensor], end: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in names.items() if not name.endswith(end)}


SPLIT = routed() | KEPT["shared_experts"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            without(SPLIT, "shared_experts.up_proj.weight"),
            "shared_experts.up_proj.weight is missing; this config needs it with shape [96, 160]",
        ),
        (
            SPLIT | {f"{PREFIX}shared_experts.down_proj.weight": torch.zeros(160, 88)},
            "shared_experts.down_proj.weight has shape [160, 88]; this config needs [160, 96]",
        ),
        (
            SPLIT | {f"{PREFIX}shared_experts.down_proj.bias": torch.zeros(160)},
            "shared_experts.down_proj.bias is not used by the layer; if it is computed elsewhere",
        ),
        (
            SPLIT | {f"{PREFIX}shared_experts.down_proj.weight_scale_2": torch.zeros(1)},
            "shared_experts.down_proj.weight has the parts weight, weight_scale_2, which is no",
        ),
        (
            routed() | without(drawn(fp8_blocks)[0], "up_proj.weight_scale_inv"),
            "shared_experts.up_proj.weight is torch.float8_e4m3fn; dequantise it to one of",
        ),
        (
            routed(),
            "shared_experts is 1, and there is no shared expert such as "
            f"{PREFIX}shared_experts.down_proj.weight: set shared_experts=0, or pass shared=False "
            "to MoEConfig.from_hf",
        ),
    ],
)
def test_what_does_not_fit_is_named(names: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(config(**SHARED), names)


def test_a_layout_of_a_family_that_has_none_says_so() -> None:
    with pytest.raises(ValueError, match=r"shared_experts is 1, and blocks of family 'qwen3_moe'"):
        load(config(**SHARED, family="qwen3_moe"), SPLIT)


def test_they_cannot_be_ignored_by_a_config_that_has_them() -> None:
    message = (
        f"ignore is ['shared_experts.'] and {PREFIX}shared_experts.gate_proj.weight is the "
        "layer's, whose shared_experts is 1: leave it out of ignore, or set shared_experts=0 "
        "(MoEConfig.from_hf: shared=False) and add shared experts yourself"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(config(**SHARED), SPLIT, "shared_experts.")
    assert "shared_w1" not in load(config(), SPLIT, "shared_experts.")


def test_dtensors_of_any_placement_are_read_whole() -> None:
    expected = load(config(**SHARED), SPLIT)

    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        for placement in (Shard(0), Shard(1), Replicate()):
            state = {
                name: distribute_tensor(tensor, mesh, [placement]) if "shared" in name else tensor
                for name, tensor in SPLIT.items()
            }
            found = load_block(config(**SHARED), state, PREFIX, world.rank, world.size)
            for name in ("shared_w1", "shared_w2"):
                assert type(found[name]) is Tensor
                assert torch.equal(found[name], expected[name]), (placement, name)
        return True

    assert all(ranks_of_torch(rank_main, 2))
