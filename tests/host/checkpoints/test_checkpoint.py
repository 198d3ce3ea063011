# SPDX-License-Identifier: Apache-2.0
"""load_block: Hugging Face names and layouts in, this rank's weights out."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos.checkpoints import load_block
from moeos.config.config import MoEConfig
from tests.huggingface import FAMILIES

HIDDEN, INTERMEDIATE, EXPERTS = 16, 24, 4
PREFIX = "model.layers.3.mlp."


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": 2,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


def split_names(bias: bool = False) -> dict[str, Tensor]:
    """A block as checkpoint files of Qwen3-MoE, OLMoE and DeepSeek-V3 hold it."""
    generator = torch.Generator().manual_seed(0)
    names = {PREFIX + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    shapes = {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    for expert in range(EXPERTS):
        for projection, shape in shapes.items():
            name = f"{PREFIX}experts.{expert}.{projection}"
            names[f"{name}.weight"] = torch.randn(shape, generator=generator)
            if bias:
                names[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    return names


def mixtral_names() -> dict[str, Tensor]:
    """The same block as a Mixtral checkpoint file names it."""
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}
    names = {}
    for name, tensor in split_names().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        names[name] = tensor
    return names


def fused_names(bias: bool = False) -> dict[str, Tensor]:
    """The same block as transformers' modules hold it."""
    split = split_names(bias)

    def every(projection: str, kind: str) -> Tensor:
        return torch.stack(
            [split[f"{PREFIX}experts.{expert}.{projection}.{kind}"] for expert in range(EXPERTS)]
        )

    names = {PREFIX + "gate.weight": split[PREFIX + "gate.weight"]}
    for kind, suffix in [("weight", ""), ("bias", "_bias")][: 1 + bias]:
        gate_up = torch.cat([every("gate_proj", kind), every("up_proj", kind)], dim=1)
        names[f"{PREFIX}experts.gate_up_proj{suffix}"] = gate_up
        names[f"{PREFIX}experts.down_proj{suffix}"] = every("down_proj", kind)
    return names


class Recording(Mapping[str, Tensor]):
    """A state_dict that remembers which tensors were asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def assert_same_block(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_gate_rows_come_before_up_rows() -> None:
    names = split_names()
    block = load_block(config(), names, PREFIX, rank=0, world_size=1)
    assert set(block) == {"gate.weight", "w1", "w2"}
    assert torch.equal(block["gate.weight"], names[PREFIX + "gate.weight"])
    for expert in range(EXPERTS):
        name = f"{PREFIX}experts.{expert}."
        gate, up = block["w1"][expert].chunk(2)
        assert torch.equal(gate, names[name + "gate_proj.weight"])
        assert torch.equal(up, names[name + "up_proj.weight"])
        assert torch.equal(block["w2"][expert], names[name + "down_proj.weight"])


def test_all_layouts_give_the_same_block() -> None:
    expected = load_block(config(), split_names(), PREFIX, rank=1, world_size=2)
    mixtral = load_block(
        config(), mixtral_names(), "model.layers.3.block_sparse_moe.", rank=1, world_size=2
    )
    assert_same_block(mixtral, expected)
    assert_same_block(load_block(config(), fused_names(), PREFIX, rank=1, world_size=2), expected)


@pytest.mark.parametrize("names", [split_names, fused_names])
def test_expert_biases_are_laid_out_like_the_rows_they_add_to(names: Any) -> None:
    state_dict = names(bias=True)
    split = split_names(bias=True)
    block = load_block(config(bias=True), state_dict, PREFIX, rank=1, world_size=4)
    assert_same_block(
        {name: block[name] for name in ("b1", "b2")},
        {
            "b1": torch.cat(
                [split[f"{PREFIX}experts.1.{name}.bias"] for name in ("gate_proj", "up_proj")]
            ).unsqueeze(0),
            "b2": split[f"{PREFIX}experts.1.down_proj.bias"].unsqueeze(0),
        },
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_files_and_modules_of_each_family_give_the_same_block(
    family: str, tmp_path: Path
) -> None:
    made = FAMILIES[family]()
    from_module = load_block(made.config, made.state_dict, made.prefix, 1, 2, made.ignore)
    from_file = load_block(
        made.config, made.save_checkpoint(tmp_path), made.checkpoint_prefix, 1, 2, made.ignore
    )
    assert_same_block(from_file, from_module)
    if made.config.selection_bias:
        assert made.selection_bias is not None
        assert torch.equal(from_file["gate.selection_bias"], made.selection_bias.float())


@pytest.mark.parametrize("names", [split_names, fused_names])
def test_ranks_hold_consecutive_experts_and_all_of_them_together(names: Any) -> None:
    whole = load_block(config(), names(), PREFIX, rank=0, world_size=1)
    parts = [load_block(config(), names(), PREFIX, rank=rank, world_size=2) for rank in range(2)]
    for name in ("w1", "w2"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    for part in parts:
        assert torch.equal(part["gate.weight"], whole["gate.weight"])


def test_other_ranks_experts_are_never_looked_up() -> None:
    names = Recording(split_names())
    load_block(config(), names, PREFIX, rank=2, world_size=4)
    experts = {name.split(".")[5] for name in names.read if ".experts." in name}
    assert experts == {"2"}


@pytest.mark.parametrize("names", [split_names, fused_names])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_contiguous_copies_in_the_layers_dtype(names: Any, dtype: torch.dtype) -> None:
    state_dict = {name: tensor.requires_grad_() for name, tensor in names().items()}
    before = {name: tensor.detach().clone() for name, tensor in state_dict.items()}
    block = load_block(config(dtype=dtype), state_dict, PREFIX, rank=0, world_size=2)
    for tensor in block.values():
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    for name, tensor in state_dict.items():
        assert torch.equal(tensor, before[name])


def test_the_selection_bias_stays_float32() -> None:
    bias = torch.randn(EXPERTS, dtype=torch.float32)
    names = split_names() | {PREFIX + "gate.e_score_correction_bias": bias}
    cfg = config(dtype=torch.bfloat16, selection_bias=True)
    block = load_block(cfg, names, PREFIX, rank=0, world_size=1)
    assert block["gate.selection_bias"].dtype == torch.float32
    assert torch.equal(block["gate.selection_bias"], bias)


def test_a_router_in_fp32_keeps_its_bits_beside_experts_in_16() -> None:
    names = split_names()
    cfg = config(dtype=torch.bfloat16, router_dtype=torch.float32)
    block = load_block(cfg, names, PREFIX, rank=0, world_size=1)
    assert block["gate.weight"].dtype == torch.float32
    assert torch.equal(block["gate.weight"], names[PREFIX + "gate.weight"])
    assert block["w1"].dtype == block["w2"].dtype == torch.bfloat16


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX.rstrip(".")])
def test_the_last_dot_of_the_prefix_may_be_left_out(prefix: str) -> None:
    assert "w1" in load_block(config(), split_names(), prefix, rank=0, world_size=1)


def test_a_prefix_is_taken_as_it_is() -> None:
    odd = "{x}%s.{}."
    names = {odd + name.removeprefix(PREFIX): value for name, value in split_names().items()}
    block, expected = (
        load_block(config(), found, prefix, 0, 2)
        for found, prefix in ((names, odd), (split_names(), PREFIX))
    )
    assert all(torch.equal(block[name], expected[name]) for name in expected)


def test_the_prefix_may_be_empty() -> None:
    names = {name.removeprefix(PREFIX): tensor for name, tensor in split_names().items()}
    assert_same_block(
        load_block(config(), names, "", rank=0, world_size=1),
        load_block(config(), split_names(), PREFIX, rank=0, world_size=1),
    )


@pytest.mark.parametrize(
    "name",
    [
        "gate.e_score_correction_bias",  # DeepSeek-V3, GLM-4.5, dots.llm1
        "e_score_correction_bias",  # MiniMax-M2
        "moe_statics.e_score_correction_bias",  # ERNIE-4.5, its files
        "gate.moe_statics.e_score_correction_bias",  # and its modules
        "expert_bias",  # LFM2
        "gate.expert_bias",  # Ling
        "experts.e_score_correction_bias",  # Solar
    ],
)
@pytest.mark.parametrize("shape", [(EXPERTS,), (1, EXPERTS)])
def test_a_selection_bias_is_found_wherever_a_family_keeps_it(
    name: str, shape: tuple[int, ...]
) -> None:
    bias = torch.randn(shape)
    names = split_names() | {PREFIX + name: bias}
    block = load_block(config(selection_bias=True), names, PREFIX, rank=1, world_size=2)
    assert torch.equal(block["gate.selection_bias"], bias.reshape(EXPERTS))
    with pytest.raises(ValueError, match=f"^{re.escape(PREFIX + name)} needs a config with sel"):
        load_block(config(), names, PREFIX, rank=1, world_size=2)


def test_a_selection_bias_that_the_config_needs_must_be_there_once() -> None:
    cfg = config(selection_bias=True)
    names = split_names()
    with pytest.raises(ValueError, match=r"no selection bias is under .* with shape \[4\]$"):
        load_block(cfg, names, PREFIX, rank=0, world_size=1)
    names[PREFIX + "e_score_correction_bias"] = torch.zeros(2, EXPERTS)
    with pytest.raises(ValueError, match=r"has shape \[2, 4\]; this config needs \[1, 4\]$"):
        load_block(cfg, names, PREFIX, rank=0, world_size=1)
    names[PREFIX + "gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    with pytest.raises(ValueError, match=r"are both a selection bias; keep one$"):
        load_block(cfg, names, PREFIX, rank=0, world_size=1)


def test_other_layers_are_not_looked_at() -> None:
    others = {
        "model.layers.30.mlp.experts.0.gate_proj.weight": torch.ones(1),
        "model.layers.30.mlp.experts.0.gate_proj.weight_scale_inv": torch.ones(1),
        "model.layers.3.self_attn.q_proj.weight": torch.ones(1),
    }
    assert_same_block(
        load_block(config(), split_names() | others, PREFIX, rank=0, world_size=1),
        load_block(config(), split_names(), PREFIX, rank=0, world_size=1),
    )


SHARED = ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")


def test_what_the_layer_has_no_use_for_is_named_unless_the_caller_has_one() -> None:
    names = split_names() | {PREFIX + name: torch.ones(1) for name in SHARED}
    message = (
        f"{PREFIX}{SHARED[0]}, and 1 more tensors under {PREFIX!r}, is not used by the layer, "
        "whose shared_experts is 0; if it is computed elsewhere, pass "
        "ignore=['shared_experts.']"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_block(config(), names, PREFIX, rank=0, world_size=1)
    assert_same_block(
        load_block(config(), names, PREFIX, 0, 1, ["shared_experts."]),
        load_block(config(), split_names(), PREFIX, rank=0, world_size=1),
    )
    names[PREFIX + "shared_expert_gate.weight"] = torch.ones(1)
    with pytest.raises(
        ValueError, match=r"_gate\.weight is not used by .*, whose shared_gate is F"
    ):
        load_block(config(), names, PREFIX, 0, 1, ["shared_experts."])


@pytest.mark.parametrize(
    "ignore", ["gate.", "experts.", "gate.weight", "experts.1.", "e_score", ""]
)
def test_what_the_layer_uses_cannot_be_ignored(ignore: str) -> None:
    names = split_names() | {PREFIX + "e_score_correction_bias": torch.zeros(EXPERTS)}
    with pytest.raises(ValueError, match=r"^ignore is \[.*\] and .* is the layer's; it is needed$"):
        load_block(config(selection_bias=True), names, PREFIX, 0, 1, [ignore])


def test_ignore_is_a_sequence_of_strings_and_no_string() -> None:
    with pytest.raises(TypeError, match=r"must be a sequence of strings: \['shared_experts\.'\]"):
        load_block(config(), split_names(), PREFIX, 0, 1, "shared_experts.")
    for wrong in (None, 1, [1], ["shared_experts.", None], b"shared_experts."):
        with pytest.raises(TypeError, match=r"^ignore is .*must be a sequence of strings, \(\)"):
            load_block(config(), split_names(), PREFIX, 0, 1, wrong)  # type: ignore[arg-type]
    assert load_block(config(), split_names(), PREFIX, 0, 1, frozenset(("shared_experts.",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["gate.weight", "experts.1.gate_proj.weight", "experts.3.down_proj.weight"]
)
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(name: str) -> None:
    names = split_names()
    shape = list(names.pop(PREFIX + name).shape)
    message = f"{PREFIX}{name} is missing; this config needs it with shape {shape}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_block(config(), names, PREFIX, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (split_names, "gate.weight"),
        (split_names, "experts.2.up_proj.weight"),
        (fused_names, "experts.gate_up_proj"),
        (fused_names, "experts.down_proj"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(names: Any, name: str) -> None:
    state_dict = names()
    expected = list(state_dict[PREFIX + name].shape)
    state_dict[PREFIX + name] = state_dict[PREFIX + name].transpose(-1, -2)
    found = list(state_dict[PREFIX + name].shape)
    message = f"{PREFIX}{name} has shape {found}; this config needs {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_block(config(), state_dict, PREFIX, rank=0, world_size=1)


def test_a_wrong_prefix_is_answered_with_the_nearest_right_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'model\.layers\.3\.' .*1 prefixes .*'model\.layers\.3\.mlp\.'"
    ):
        load_block(config(), split_names(), "model.layers.3", rank=0, world_size=1)
    with pytest.raises(ValueError, match="no name in the state_dict is that of an expert's weight"):
        load_block(config(), {"gate.weight": torch.ones(1)}, "", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experts.0.gate_proj.weight_scale_inv", "weight is torch.float32; beside the other parts"),
        ("experts.0.gate_proj.weight_zero_point", "is no format that can be read"),
        ("gate.bias", "is not understood"),
        ("router.weight", "is not used by the layer"),
        ("correction_bias", "is not used by the layer"),
        ("gate.e_score_correction_bias", "needs a config with selection_bias=True"),
        ("experts.0.gate_proj.bias", "needs a config with bias=True"),
        ("experts.gate_up_proj", "stored in 2 layouts at once"),
        ("experts.03.gate_proj.weight", r"experts\.03\.gate_proj\.weight is not understood"),
        ("experts.00.down_proj.weight", r"experts\.00\.down_proj\.weight is not understood"),
        ("experts.\u0663.gate_proj.weight", "experts\\.\u0663\\.gate_proj\\.weight is not under"),
        (f"experts.{'9' * 5000}.gate_proj.weight", "99.gate_proj.weight is not understood"),
    ],
)
def test_a_tensor_that_would_be_silently_ignored_is_refused(name: str, message: str) -> None:
    names = split_names() | {PREFIX + name: torch.ones(EXPERTS)}
    with pytest.raises(ValueError, match=message):
        load_block(config(), names, PREFIX, rank=0, world_size=1)


def test_quantised_weights_are_refused() -> None:
    names = split_names()
    name = PREFIX + "experts.0.up_proj.weight"
    names[name] = names[name].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"{name} is torch.float8_e4m3fn; dequantise it"):
        load_block(config(), names, PREFIX, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("changes", "rank", "world_size", "message"),
    [
        ({"activation": "relu"}, 0, 1, "activation is 'relu'; these models need 'swiglu'"),
        ({}, 2, 2, "rank is 2; it must be at least 0 and below 2"),
        ({}, -1, 2, "rank is -1; it must be at least 0 and below 2"),
        ({}, 0, 0, "world_size is 0; it must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changes: dict[str, Any], rank: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_block(config(**changes), split_names(), PREFIX, rank, world_size)
