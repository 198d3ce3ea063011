# SPDX-License-Identifier: Apache-2.0
"""Names and the config's layout decide how a block is read, and the shapes of its tensors never."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos.checkpoints import load_block
from moeos.config.config import MoEConfig
from moeos.config.hf import families, layouts

# All square: a matrix that lies the other way has the same shape.
EXPERTS, SIZE = 4, 16
PREFIX = "model.layers.3.feed_forward."


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": SIZE,
        "intermediate": SIZE,
        "experts": EXPERTS,
        "top_k": 2,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_router(transposed: bool) -> dict[str, Tensor]:
    """A block with the names of Llama-4's files, and of Jamba's and Granite's modules."""
    rows = (EXPERTS, SIZE, 2 * SIZE) if transposed else (EXPERTS, 2 * SIZE, SIZE)
    return {
        PREFIX + "router.weight": drawn(EXPERTS, SIZE),
        PREFIX + "experts.gate_up_proj": drawn(*rows),
        PREFIX + "experts.down_proj": drawn(EXPERTS, SIZE, SIZE),
    }


def test_names_of_two_layouts_need_the_config_to_say_which() -> None:
    names = with_router(transposed=True)
    message = (
        f"the names under {PREFIX!r} are those of several layouts (stacked or stacked, "
        "transposed), and shapes do not tell which: set the config's family to the model's"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        load_block(config(), names, PREFIX, 0, 1)


def test_a_square_matrix_is_transposed_where_the_layout_says_so_and_only_there() -> None:
    names = with_router(transposed=False)
    down = names[PREFIX + "experts.down_proj"]
    jamba = load_block(config(family="jamba"), names, PREFIX, 0, 1)
    assert torch.equal(jamba["w2"], down)
    names[PREFIX + "experts.gate_up_proj"] = names[PREFIX + "experts.gate_up_proj"].mT
    llama4 = load_block(config(family="llama4"), names, PREFIX, 0, 1)
    assert torch.equal(llama4["w2"], down.mT)
    assert torch.equal(llama4["w1"], jamba["w1"])


def test_a_square_matrix_under_a_name_of_another_layout_is_refused() -> None:
    names = with_router(transposed=False)
    with pytest.raises(ValueError, match=r"router\.weight is not understood in family 'mixtral'"):
        load_block(config(family="mixtral"), names, PREFIX, 0, 1)
    names[PREFIX + "experts.gate_up_proj_bias"] = drawn(EXPERTS, 2 * SIZE)
    names[PREFIX + "experts.down_proj_bias"] = drawn(EXPERTS, SIZE)
    with pytest.raises(ValueError, match=r"those of several layouts"):
        load_block(config(bias=True), names, PREFIX, 0, 1)


def test_a_matrix_of_the_other_way_is_named_where_it_is_not_square() -> None:
    names = with_router(transposed=True)
    message = f"{PREFIX}experts.gate_up_proj has shape [4, 16, 32]; this config needs [4, 32, 16]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_block(config(family="jamba"), names, PREFIX, 0, 1)


def test_a_layout_that_no_family_has_is_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match=r"family is 'lama4'.*the nearest valid one is 'llama4'"):
        config(family="lama4")


def split(gate: bool = True) -> dict[str, Tensor]:
    projections = ("gate_proj", "up_proj", "down_proj")[1 - gate :]
    return {PREFIX + "gate.weight": drawn(EXPERTS, SIZE)} | {
        f"{PREFIX}experts.{expert}.{projection}.weight": drawn(SIZE, SIZE)
        for expert in range(EXPERTS)
        for projection in projections
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "experts.1.gate_proj.weight",
            "experts.1.gate_project.weight",
            "experts.1.gate_project.weight is not understood in the layout 'one tensor an expert, "
            "gate_proj'; the nearest names are 'experts.{}.gate_proj.weight'",
        ),
        (
            "gate.weight",
            "gate.wieght",
            "gate.wieght is not understood in the layout 'one tensor an expert, gate_proj', in "
            "which 'gate.weight' is missing; the nearest names are 'gate.weight'",
        ),
    ],
)
def test_a_renamed_tensor_is_named_with_the_nearest_names(old: str, new: str, message: str) -> None:
    names = split()
    names[PREFIX + new] = names.pop(PREFIX + old)
    with pytest.raises(ValueError, match=f"^{re.escape(PREFIX + message)}") as raised:
        load_block(config(), names, PREFIX, 0, 1)
    nearest = str(raised.value).split("the nearest names are ")[1].split(", ")
    assert len(nearest) == len(set(nearest)) > 1


def test_experts_with_and_without_a_gate_need_an_activation_that_fits() -> None:
    with pytest.raises(ValueError, match="activation is 'relu'; these models need 'swiglu'"):
        load_block(config(activation="relu"), split(), PREFIX, 0, 1)
    with pytest.raises(ValueError, match="activation is 'swiglu'; these models need one without"):
        load_block(config(), split(gate=False), PREFIX, 0, 1)
    block = load_block(config(activation="relu"), split(gate=False), PREFIX, 1, 2)
    assert [*block["w1"].shape] == [2, SIZE, SIZE]


def test_a_table_of_hashed_experts_is_the_callers_and_the_error_says_how() -> None:
    names = split()
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        names = {name.replace(old, new): tensor for name, tensor in names.items()}
    names[PREFIX + "gate.tid2eid"] = torch.zeros(8, 2, dtype=torch.int64)
    cfg = config(family="deepseek_v4", routing="ids")
    with pytest.raises(ValueError, match=r"pass ignore=\['gate\.tid2eid'\], and topk_ids with wei"):
        load_block(cfg, names, PREFIX, 0, 1)
    assert "w1" in load_block(cfg, names, PREFIX, 0, 1, ["gate.tid2eid"])


def test_deepseek_v4_calls_its_selection_bias_gate_bias_in_files() -> None:
    names = split()
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        names = {name.replace(old, new): tensor for name, tensor in names.items()}
    names[PREFIX + "gate.bias"] = drawn(EXPERTS)
    with pytest.raises(ValueError, match=r"gate\.bias needs a config with selection_bias=True$"):
        load_block(config(), names, PREFIX, 0, 1)
    block = load_block(config(selection_bias=True), names, PREFIX, 0, 1)
    assert torch.equal(block["gate.selection_bias"], names[PREFIX + "gate.bias"])


def test_a_bias_for_which_a_layout_has_no_name_is_named() -> None:
    names = {
        PREFIX + "router.layer.weight": drawn(EXPERTS, SIZE),
        PREFIX + "input_linear.weight": drawn(EXPERTS, 2 * SIZE, SIZE),
        PREFIX + "output_linear.weight": drawn(EXPERTS, SIZE, SIZE),
    }
    assert "w1" in load_block(config(), names, PREFIX, 0, 1)
    with pytest.raises(ValueError, match=r"bias is True, and the experts under .* have none: they"):
        load_block(config(bias=True), names, PREFIX, 0, 1)


def test_every_row_of_the_table_belongs_to_a_family_and_no_two_are_the_same() -> None:
    used = [row for family in families.FAMILIES.values() for row in family.layouts]
    assert all(row in used for row in layouts.LAYOUTS)
    assert all(row in layouts.LAYOUTS for row in used)
    assert len(set(map(repr, layouts.LAYOUTS))) == len(layouts.LAYOUTS)


def test_an_expert_beyond_those_of_the_config_is_named() -> None:
    names = split()
    names[PREFIX + "experts.4.up_proj.weight"] = drawn(SIZE, SIZE)
    with pytest.raises(
        ValueError, match=r"experts\.4\.up_proj\.weight is of an expert beyond the 4 of this config"
    ):
        load_block(config(), names, PREFIX, 0, 1)


def test_experts_that_are_there_twice_are_read_once_the_caller_says_which_are_his() -> None:
    names = split()
    expected = load_block(config(), names, PREFIX, 0, 1)
    for name, shape in (("gate_up_proj", (2 * SIZE, SIZE)), ("down_proj", (SIZE, SIZE))):
        names[f"{PREFIX}experts.{name}"] = drawn(EXPERTS, *shape)
    with pytest.raises(ValueError, match=r"in 2 layouts at once \(.*\), .*gate_up_proj among them"):
        load_block(config(), names, PREFIX, 0, 1)
    ignore = ["experts.gate_up_proj", "experts.down_proj"]
    actual = load_block(config(), names, PREFIX, 0, 1, ignore)
    assert torch.equal(actual["w2"], expected["w2"])


@pytest.mark.parametrize("rule", ["router_bias", "expert_scale"])
def test_a_rule_for_which_a_layout_has_no_tensor_is_named(rule: str) -> None:
    names = with_router(transposed=False)
    message = (
        f"{rule} is True, and what is under {PREFIX!r} has none: it is stored as 'stacked' with "
        f"'router.weight'; set {rule}=False"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_block(config(family="jamba", **{rule: True}), names, PREFIX, 0, 1)


def of_gpt_oss() -> dict[str, Tensor]:
    return with_router(transposed=True) | {
        PREFIX + "router.bias": drawn(EXPERTS),
        PREFIX + "experts.gate_up_proj_bias": drawn(EXPERTS, 2 * SIZE),
        PREFIX + "experts.down_proj_bias": drawn(EXPERTS, SIZE),
    }


def of_gemma4() -> dict[str, Tensor]:
    names = {
        name.replace("r.weight", "r.proj.weight"): tensor
        for name, tensor in with_router(transposed=False).items()
    }
    return names | {
        PREFIX + "router.scale": drawn(SIZE),
        PREFIX + "router.per_expert_scale": drawn(EXPERTS),
        PREFIX + "pre_feedforward_layernorm_2.weight": torch.ones(SIZE),
    }


@pytest.mark.parametrize(
    ("layout", "rule", "name"),
    [
        ("gpt_oss", "router_bias", "router.bias"),
        ("gpt_oss", "bias", "experts.gate_up_proj_bias"),
        ("gemma4", "expert_scale", "router.per_expert_scale"),
    ],
)
def test_a_rule_is_set_exactly_where_its_tensor_is_there(layout: str, rule: str, name: str) -> None:
    """A tensor that a config does not use is named, and one that it uses and is not there."""
    names = of_gpt_oss() if layout == "gpt_oss" else of_gemma4()
    rules = {"router_bias": True, "bias": True} if layout == "gpt_oss" else {"expert_scale": True}
    block = load_block(config(family=layout, **rules), names, PREFIX, 0, 1)
    assert {"gpt_oss": "gate.bias", "gemma4": "gate.expert_scale"}[layout] in block
    with pytest.raises(ValueError, match=f"{name} needs a config with {rule}=True$"):
        load_block(config(family=layout, **(rules | {rule: False})), names, PREFIX, 0, 1)
    del names[PREFIX + name]
    with pytest.raises(ValueError, match=f"{name} is missing; this config needs it with shape"):
        load_block(config(family=layout, **rules), names, PREFIX, 0, 1)


def test_what_a_file_has_for_experts_that_return_x_is_read_past() -> None:
    names = {
        name.replace("gate.weight", "router.classifier.weight"): tensor
        for name, tensor in split().items()
        if "experts." in name or name.endswith("gate.weight")
    }
    names[PREFIX + "router.classifier.weight"] = drawn(EXPERTS + 2, SIZE)
    cfg = config(family="longcat_flash", zero_experts=2)
    expected = load_block(cfg, names, PREFIX, 1, 2)
    for expert in (EXPERTS, EXPERTS + 1):
        for projection in ("gate_proj", "up_proj"):
            names[f"{PREFIX}experts.{expert}.{projection}.weight"] = drawn(SIZE, SIZE)
    actual = load_block(cfg, names, PREFIX, 1, 2)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    names[f"{PREFIX}experts.{EXPERTS}.down_proj.weight"] = drawn(SIZE, SIZE)
    with pytest.raises(
        ValueError, match=r"experts\.4\.down_proj\.weight is of an expert beyond the"
    ):
        load_block(cfg, names, PREFIX, 1, 2)
