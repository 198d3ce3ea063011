# SPDX-License-Identifier: Apache-2.0
"""Of every family its config, its files and its modules give the layer that the family computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moeos import MoEConfig, MoELayer, World
from moeos.checkpoints import load_block
from moeos.config import reference
from moeos.config.hf.families import FAMILIES
from moeos.world import virtual
from tests.layers import NEAR_TIE, TOLERANCE
from tests.nightly import in_turn
from tests.processes import ROOT
from tests.tiny_models import TINY, TinyBlock, make, tiny

TOKENS = (100, 37, 1, 64)
"""By rank."""

models = pytest.mark.parametrize("name", TINY)
WITHOUT_SHARED = ("nemotron_h_latent",)
"""Rows of families with shared experts that read what a layer does not."""
with_shared = pytest.mark.parametrize(
    "name",
    [
        name
        for name, row in TINY.items()
        if name not in (*WITHOUT_SHARED, "granitemoe") and FAMILIES[row.family].shared is not None
    ],
)


def whole(block: TinyBlock) -> dict[str, Tensor]:
    return load_block(block.config, block.state_dict, block.prefix, 0, 1, block.ignore)


def sure(block: TinyBlock, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Which tokens no rounding routes otherwise; all of them, where the caller routes."""
    if block.config.routing != "layer":
        return torch.ones(len(x), dtype=torch.bool)
    routing = reference.route(
        x,
        weights["gate.weight"],
        block.config,
        weights.get("gate.selection_bias"),
        router_bias=weights.get("gate.bias"),
        expert_scale=weights.get("gate.expert_scale"),
    )
    return routing.margin >= NEAR_TIE


def test_every_family_has_a_tiny_model() -> None:
    assert {row.family for row in TINY.values()} == FAMILIES.keys()


@models
def test_files_and_modules_give_the_same_block(name: str, tmp_path: Path) -> None:
    block = tiny(name)
    expected = whole(block)
    tensors, prefix = block.files(tmp_path)
    actual = load_block(block.config, tensors, prefix, 0, 1, block.ignore)
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key


WAYS = {
    "modules, alone": (False, 1),
    "modules, two ranks": (False, 2),
    "files, four ranks": (True, 4),
}


@pytest.mark.parametrize(("name", "way"), in_turn(TINY, WAYS))
def test_a_layer_of_each_family_computes_what_transformers_module_computes(
    name: str, way: str, tmp_path: Path
) -> None:
    of_files, ranks = WAYS[way]
    block = tiny(name)
    tensors, prefix = block.files(tmp_path) if of_files else (block.state_dict, block.prefix)
    cfg = MoEConfig.from_hf(block.hf_config, block.row.layer, dtype=torch.float32)
    x = [block.draw(tokens, seed) for seed, tokens in enumerate(TOKENS[:ranks])]
    given = [block.layer_input(rows).float() for rows in x]

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(cfg, world, tensors, prefix, block.ignore)
        y: Tensor = layer(given[world.rank], **block.routing(x[world.rank]))
        return y

    weights = whole(block)
    for rows, inputs, y in zip(x, given, virtual.run(rank_main, ranks=ranks), strict=True):
        kept = sure(block, weights, inputs)
        assert int((~kept).sum()) <= 1
        error = reference.relative_error(y[kept], block.output(rows)[kept])
        assert error <= TOLERANCE[torch.float32], f"relative error {error:.2e}"


@models
def test_the_reference_computes_what_transformers_module_computes(name: str) -> None:
    block = tiny(name)
    weights = whole(block)
    x = block.draw(50)
    given = block.layer_input(x)
    routing = block.routing(x)
    routing.pop("weigh", None)
    gate = weights.pop("gate.weight")
    names = {"gate.bias": "router_bias", "gate.selection_bias": "selection_bias"}
    kept = sure(block, whole(block), given)
    assert int((~kept).sum()) <= 1
    y = reference.moe(
        x=given,
        gate_weight=gate,
        cfg=block.config,
        **routing,
        **{names.get(key, key.removeprefix("gate.")): part for key, part in weights.items()},
    )
    assert reference.relative_error(y[kept], block.output(x)[kept]) <= 1e-6


@with_shared
def test_the_shared_experts_of_a_family_are_in_its_layer_unless_the_caller_adds_them(
    name: str,
) -> None:
    block = tiny(name)
    cfg = block.config
    assert (cfg.shared_experts, cfg.shared_gate) == (1, "qwen" in name)
    assert block.shared_output(block.draw(3)).norm() > 0.1
    assert {"shared_w1", "shared_w2"} <= whole(block).keys()
    alone = tiny(name, shared=False)
    assert (
        dataclasses.replace(cfg, shared_experts=0, shared_intermediate=0, shared_gate=False)
        == alone.config
    )
    assert whole(alone).keys() == whole(block).keys() - {"shared_w1", "shared_w2", "shared_gate"}
    names = FAMILIES[block.row.family].shared_names
    for begin in names:
        with pytest.raises(ValueError, match=r"ignore is .* and .* is the layer's, whose shared_e"):
            load_block(cfg, block.state_dict, block.prefix, 0, 1, (*block.row.ignore, begin))
    if names:
        with pytest.raises(ValueError, match=r"is not used by the layer, whose shared_experts is"):
            load_block(alone.config, block.state_dict, block.prefix, 0, 1, block.row.ignore)
    bare = {
        key: tensor
        for key, tensor in block.state_dict.items()
        if ".shared_" not in key or "shared_expert_gate" in key
    }
    with pytest.raises(ValueError, match=r"shared_experts is 1, and there is no shared expert suc"):
        load_block(cfg, bare, block.prefix, 0, 1, block.ignore)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "deepseek_v3", "n_shared_experts": 3}, (1, 3 * 2048, False)),
        ({"model_type": "deepseek_v3", "n_shared_experts": 0}, (0, 0, False)),
        ({"model_type": "ernie4_5_moe"}, (1, 2 * 1536, False)),
        ({"model_type": "ernie4_5_moe", "moe_num_shared_experts": 0}, (0, 0, False)),
        ({"model_type": "qwen2_moe"}, (1, 5632, True)),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0}, (0, 0, False)),
        ({"model_type": "llama4_text", "intermediate_size_mlp": 16384}, (1, 8192, False)),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 8}, (1, 11008, False)),
        ({"model_type": "granitemoe"}, (0, 0, False)),
        ({"model_type": "granitemoehybrid"}, (1, 1024, False)),
        ({"model_type": "nemotron_h", "moe_latent_size": 1024}, (0, 0, False)),
        ({"model_type": "mixtral"}, (0, 0, False)),
    ],
)
def test_a_config_gives_the_shared_experts_as_one_mlp_of_their_widths_together(
    values: dict[str, Any], expected: tuple[int, int, bool]
) -> None:
    cfg = MoEConfig.from_hf(values)
    assert (cfg.shared_experts, cfg.shared_intermediate, cfg.shared_gate) == expected
    cfg = MoEConfig.from_hf(values, shared=False)
    assert (cfg.shared_experts, cfg.shared_intermediate, cfg.shared_gate) == (0, 0, False)


@models
def test_a_config_is_read_from_an_object_and_from_its_json_alike(name: str) -> None:
    block = tiny(name)
    written = json.loads(block.hf_config.to_json_string())
    assert MoEConfig.from_hf(written, block.row.layer, dtype=torch.float32) == block.config


@models
def test_what_a_config_does_not_say_is_what_transformers_takes_for_it(name: str) -> None:
    row = TINY[name]
    made = getattr(transformers, row.config or f"{row.model}Config")
    needed = {
        "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
        "deepseek_v2": {"num_experts_per_tok": 2},
        "gemma4": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8},
    }.get(row.family, {})
    needed |= {"enable_moe_block": True} if row.family == "gemma4" else {}
    changes: dict[str, Any] = {}
    if row.family == "deepseek_v2":
        changes = {"intermediate": 8, "shared_intermediate": 8}
    config = made(**needed).get_text_config()
    absent = {"model_type": config.model_type, **needed}
    assert MoEConfig.from_hf(absent, **changes) == MoEConfig.from_hf(config, **changes)
    assert MoEConfig.from_hf(config, **changes).family == row.family


PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"model_type": "mixtral", "torch_dtype": "bfloat16"},
    "olmoe-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "torch_dtype": "bfloat16",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""What config.json of published models says of their blocks, by the config of the same layer."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_of_a_published_model_is_the_one_in_configs(name: str) -> None:
    expected = MoEConfig.from_toml(ROOT / "configs" / f"{name}.toml")
    actual = MoEConfig.from_hf(
        PUBLISHED[name], layer=3, shared=False, dequantize=True, max_tokens=expected.max_tokens
    )
    assert dataclasses.replace(actual, family=None, router_dtype=None) == expected


_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
AS_FILES_HAVE_THEM: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "gpt-oss": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "hidden_act": "silu",
            "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        0,
        {
            **{"experts": 128, "intermediate": 2880, "activation": "swigluoai", "bias": True},
            **{"router_bias": True, "resolved_swiglu_limit": 7.0, "resolved_swiglu_alpha": 1.702},
        },
    ),
    "llama-4": (
        {
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "interleave_moe_layer_step": 2,
                "num_hidden_layers": 48,
                "num_local_experts": 128,
                "num_experts_per_tok": 1,
                "hidden_act": "silu",
            },
        },
        1,
        {
            **{"experts": 128, "intermediate": 8192, "top_k": 1, "scoring": "sigmoid"},
            **{"apply_router_weight_on_input": True, "renormalize": False},
        },
    ),
    "deepseek-v4, hashed": (
        _V4,
        2,
        {"routing": "ids", "selection_bias": False, "scoring": "sqrtsoftplus"},
    ),
    "deepseek-v4": (
        _V4,
        3,
        {
            **{"routing": "layer", "selection_bias": True, "scoring": "sqrtsoftplus"},
            **{"swiglu_limit": 10.0, "routed_scaling": 1.5},
        },
    ),
    "longcat-flash": (
        {
            "model_type": "longcat_flash",
            "hidden_size": 6144,
            "ffn_hidden_size": 12288,
            "expert_ffn_hidden_size": 2048,
            "num_layers": 28,
            "n_routed_experts": 512,
            "zero_expert_num": 256,
            "zero_expert_type": "identity",
            "moe_topk": 12,
            "routed_scaling_factor": 6.0,
        },
        27,
        {"experts": 512, "zero_experts": 256, "top_k": 12, "renormalize": False},
    ),
    "nemotron-h": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 4096,
            "hybrid_override_pattern": "MEM*E",
            "num_hidden_layers": 5,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "mlp_hidden_act": "relu2",
            "routed_scaling_factor": 5.0,
        },
        4,
        {"hidden": 1024, "routing": "caller", "activation": "relu2", "top_k": 22},
    ),
}
"""A config.json with fields as files of the family have them, a layer, and what is read of it."""


@pytest.mark.parametrize("name", AS_FILES_HAVE_THEM)
def test_a_config_as_files_have_it_gives_the_rules_of_its_family(name: str) -> None:
    values, layer, expected = AS_FILES_HAVE_THEM[name]
    cfg = MoEConfig.from_hf(values, layer)
    assert {field: getattr(cfg, field) for field in expected} == expected


def test_the_text_model_of_several_kinds_of_input_is_taken() -> None:
    text = {**PUBLISHED["deepseek-v3"], "model_type": "kimi_k2"}
    cfg = MoEConfig.from_hf({"model_type": "kimi_k25", "text_config": text, "dtype": "float16"})
    assert (cfg.family, cfg.dtype) == ("deepseek_v3", torch.float16)
    unnamed = {"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 64}}
    assert MoEConfig.from_hf(unnamed).family == "qwen3_5_moe"


def changed(**fields: Any) -> dict[str, Any]:
    return {**PUBLISHED["deepseek-v3"], "num_hidden_layers": 61, **fields}


@pytest.mark.parametrize(
    ("config", "layer", "message"),
    [
        (
            changed(scoring_func="softmax"),
            3,
            "scoring_func is 'softmax'; what works here is 'sigmoid' or 'noaux_tc' or null",
        ),
        (changed(hidden_act="gelu"), 3, "hidden_act is 'gelu'; what works here is 'silu' or"),
        (changed(model_type="deepseek_v5"), 3, "model_type is 'deepseek_v5'.*nearest is 'deepseek"),
        (changed(dtype="int8"), 3, "dtype is 'int8'; what works here is 'float32' or"),
        (
            changed(quantization_config={"quant_method": "gptq"}),
            3,
            "quantization_config.quant_method is 'gptq'; what is read here is 'fp8'",
        ),
        (
            changed(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
            3,
            r"weight_block_size is \[64, 64\]; what is read here is \[128, 128\]",
        ),
        (
            changed(),
            2,
            r"layer is 2, which has no routed experts, as first_k_dense_replace is 3; those with "
            r"experts are \[3, 4, 5, 6, 7, 8, 9, 10, \.\.\.\]",
        ),
        (changed(swiglu_limit=7.0), 3, "swiglu_limit is 7.0; what works here is null"),
        (changed(), 61, "layer is 61; it must be at least 0 and below 61"),
        (
            {"model_type": "nemotron_h", "moe_latent_size": 1025},
            None,
            "moe_latent_size: hidden is 1025; it must be a positive multiple of 8",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [1, 2]},
            None,
            r"moe_topk is \[1, 2\], one number a layer; say which",
        ),
        ({"model_type": "dots1"}, None, "n_routed_experts is missing"),
        (changed(hidden_size=None), 3, "^hidden_size is None; it must be a number"),
        (changed(moe_intermediate_size=None), 3, "^moe_intermediate_size is None; it must be"),
        (changed(n_routed_experts=None), 3, "^n_routed_experts is None; it must be a number"),
        (changed(num_experts_per_tok=None), 3, "^num_experts_per_tok is None; it must be a number"),
        (changed(n_shared_experts=None), 3, "^n_shared_experts is None; it must be a number"),
        (
            {"model_type": "hunyuan_v1_moe", "moe_topk": [None, 2]},
            0,
            "^moe_topk is None; it must be a number",
        ),
        (changed(n_shared_experts=-1), 3, "n_shared_experts is -1; it must be at least 0"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20},
            None,
            "shared_expert_intermediate_size: shared_intermediate is 20; it must be a positive",
        ),
    ],
)
def test_a_config_for_which_there_is_no_rule_is_named_with_what_works(
    config: dict[str, Any], layer: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig.from_hf(config, layer)


def test_a_size_that_another_name_has_may_be_null_under_the_first() -> None:
    names = {"num_experts": None, "num_local_experts": 16, "routed_scaling_factor": None}
    assert MoEConfig.from_hf({"model_type": "qwen3_moe", **names}).experts == 16


def test_a_config_that_is_neither_an_object_of_transformers_nor_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"config is a str; it must be a transformers config"):
        MoEConfig.from_hf("deepseek_v3")
    with pytest.raises(TypeError, match="layer is True; it must be of type int"):
        MoEConfig.from_hf(PUBLISHED["deepseek-v3"], True)
    with pytest.raises(TypeError, match="shared is 1; it must be True or False"):
        MoEConfig.from_hf(PUBLISHED["deepseek-v3"], shared=1)  # type: ignore[arg-type]


def test_each_layer_may_have_numbers_of_its_own() -> None:
    lists = {"model_type": "hunyuan_v1_moe", "num_experts": [8, 16], "moe_topk": [1, 2]}
    sizes = [MoEConfig.from_hf(lists, layer) for layer in (0, 1)]
    assert [(cfg.experts, cfg.top_k) for cfg in sizes] == [(8, 1), (16, 2)]


SOME_DENSE: dict[str, dict[str, Any]] = {
    "every": {},
    "every_nth": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "after_first": {"first_k_dense_replace": 2},
    "between": {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "listed": {"moe_layers": [1, 3]},
    "periodic": {"expert_layer_offset": 0},
    "by_type": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "by_pattern": {"layers_block_type": ["mlp", "moe", "mlp", "moe"]},
}
"""By a family's rule: what makes some of four layers dense."""


@models
def test_the_layers_with_experts_are_those_of_transformers_model(name: str) -> None:
    rule = FAMILIES[TINY[name].family].experts_in
    changes: dict[str, Any] = {} if TINY[name].family == "deepseek_v4" else SOME_DENSE[rule]
    config, model = make(name, **({"num_hidden_layers": 4, **changes} if changes else {}))
    paths = [path for path, _ in model.named_modules() if path.endswith(".experts")]
    numbers = {int(path.split("layers.")[1].split(".")[0]) for path in paths}
    assert numbers
    layers = [len(blocks) for path, blocks in model.named_modules() if path.endswith("layers")]
    for layer in range(max(layers)):
        if layer in numbers:
            MoEConfig.from_hf(config, layer)
        else:
            with pytest.raises(ValueError, match="which has no routed experts"):
                MoEConfig.from_hf(config, layer)
    predicts = FAMILIES[TINY[name].family].predicts
    end = max(layers) + (getattr(config, predicts, 0) if predicts is not None else 0)
    beyond = rf"layer is {end}; it must be .* below|; layer {end} is beyond it"
    with pytest.raises(ValueError, match=beyond):
        MoEConfig.from_hf(config, end)


def test_a_layer_that_cannot_route_as_its_model_does_says_so_before_it_computes() -> None:
    block = tiny("phimoe")
    assert block.config.routing == "caller"

    def rank_main(world: World) -> bool:
        layer = MoELayer.from_hf(block.config, world, block.state_dict, block.prefix)
        with pytest.raises(ValueError, match=r"^topk_ids is None, and routing is 'caller': the "):
            layer(block.draw(3))
        return True

    assert all(virtual.run(rank_main, ranks=2))
    weights = whole(block)
    with pytest.raises(ValueError, match=r"^topk_ids is None, and routing is 'caller'"):
        reference.moe(
            block.draw(3), weights["gate.weight"], weights["w1"], weights["w2"], block.config
        )


def test_projections_around_the_experts_are_the_callers_and_the_error_says_how() -> None:
    block = tiny("nemotron_h_latent")
    cfg = block.config
    assert (cfg.hidden, cfg.routing, cfg.family) == (32, "caller", "nemotron_h")
    shared = FAMILIES["nemotron_h"].shared_names

    def load(ignore: Sequence[str]) -> dict[str, Tensor]:
        return load_block(cfg, block.state_dict, block.prefix, 0, 1, ignore)

    with pytest.raises(
        ValueError, match=r"fc1_latent_proj\.weight.* the caller projects: pass fc1"
    ):
        load(shared)
    projections = ("fc1_latent_proj.", "fc2_latent_proj.")
    with pytest.raises(ValueError, match=r"whose caller routes: pass ignore=\['gate\.'\]$"):
        load((*shared, *projections))
    given = load((*shared, *projections, "gate."))
    assert not given["gate.weight"].any()
    cfg = dataclasses.replace(cfg, selection_bias=True)
    assert not load((*shared, *projections, "gate."))["gate.selection_bias"].any()
    plain = tiny("nemotron_h", shared=False)
    with pytest.raises(ValueError, match=r"ignore is .*gate\.\S+ is the layer's; it is needed"):
        load_block(plain.config, plain.state_dict, plain.prefix, 0, 1, (*shared, "gate."))


def test_a_block_with_latent_experts_is_what_transformers_computes_with_its_projections() -> None:
    block = tiny("nemotron_h_latent")
    x = block.draw(37)
    expected = block.module(x.double().unsqueeze(0)).squeeze(0)

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(block.config, world, block.state_dict, block.prefix, block.ignore)
        y: Tensor = layer(block.layer_input(x).float(), **block.routing(x))
        return y

    for y in virtual.run(rank_main, ranks=2):
        whole = block.module.fc2_latent_proj(y.double()) + block.module.shared_experts(x.double())
        assert reference.relative_error(whole, expected) <= TOLERANCE[torch.float32]


def test_a_hashed_layer_takes_ids_from_a_table_of_its_caller_and_weighs_them_itself() -> None:
    block = tiny("deepseek_v4_hashed")
    assert block.config.routing == "ids"
    x, numbers = block.draw(37), block.token_numbers(37)
    expected = block.module(x.double().unsqueeze(0), input_ids=numbers).squeeze(0)
    with pytest.raises(
        ValueError, match=r"gate\.tid2eid is not used by the layer: its experts are"
    ):
        load_block(block.config, block.state_dict, block.prefix, 0, 1)

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(block.config, world, block.state_dict, block.prefix, block.ignore)
        with pytest.raises(ValueError, match="topk_ids is None, and routing is 'ids'"):
            layer(x)
        table = block.state_dict[block.prefix + "gate.tid2eid"]
        y: Tensor = layer(x, topk_ids=table[numbers], weigh=True)
        return y

    for y in virtual.run(rank_main, ranks=2):
        assert reference.relative_error(y, expected) <= TOLERANCE[torch.float32]


def test_gpt_oss_as_it_is_shipped_computes_what_transformers_dequantises() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    block = tiny("gpt_oss")
    cfg, tensors = block.config, dict(block.state_dict)
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        where = f"{block.prefix}experts.{name}"
        experts, inputs, outputs = tensors.pop(where).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        # Numbers are up to 6 times a power of two; rows are to have norms about 1.
        scales = torch.randint(122, 125, shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{where}_blocks": blocks, f"{where}_scales": scales}
        dequantised = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(block.module.experts, name).copy_(dequantised)
    x = [block.draw(tokens, seed) for seed, tokens in enumerate(TOKENS[:2])]

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(cfg, world, tensors, block.prefix)
        y: Tensor = layer(x[world.rank])
        return y

    with pytest.warns(UserWarning, match="MXFP4.* are dequantised"):
        outputs = virtual.run(rank_main, ranks=2)
    for rows, y in zip(x, outputs, strict=True):
        assert reference.relative_error(y, block.output(rows)) <= TOLERANCE[torch.float32]


def test_a_toml_file_may_name_the_config_of_a_model_and_say_what_is_otherwise(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["deepseek-v3"]))
    toml = tmp_path / "layer.toml"
    toml.write_text('hf_config = "config.json"\nhf_layer = 3\nmax_tokens = 64\n[run]\ntokens = 8\n')
    expected = MoEConfig.from_hf(PUBLISHED["deepseek-v3"], 3, max_tokens=64)
    assert MoEConfig.from_toml(toml) == expected
    toml.write_text('hf_config = "config.json"\nhf_layer = 3\nhf_shared = false\n')
    assert MoEConfig.from_toml(toml).shared_experts == 0
    toml.write_text('hf_config = "config.json"\nhf_shared = 0\n')
    with pytest.raises(TypeError, match=r"layer\.toml: hf_shared is 0; it must be of type bool"):
        MoEConfig.from_toml(toml)
    toml.write_text('hf_config = "config.json"\nhf_layer = 3\nhf_dequantize = true\n')
    assert MoEConfig.from_toml(toml).weight_format is None
    toml.write_text('hf_config = "config.json"\nhf_dequantize = 1\n')
    with pytest.raises(TypeError, match=r"layer\.toml: hf_dequantize is 1; it must be of type b"):
        MoEConfig.from_toml(toml)
    toml.write_text('hf_config = "config.json"\nhf_layer = 2\n')
    with pytest.raises(ValueError, match=r"layer\.toml: layer is 2, which has no routed experts"):
        MoEConfig.from_toml(toml)
    toml.write_text('hf_config = "config.json"\nmax_token = 2\n')
    with pytest.raises(ValueError, match=r"unknown key 'max_token'; the nearest .* 'max_tokens'"):
        MoEConfig.from_toml(toml)
    toml.write_text("hf_layer = 2\n")
    with pytest.raises(TypeError, match=r"hf_config is None; it must be a path"):
        MoEConfig.from_toml(toml)
    (tmp_path / "config.json").write_text("[]")
    toml.write_text('hf_config = "config.json"\n')
    with pytest.raises(ValueError, match=r"config\.json: holds a list; it must hold an object"):
        MoEConfig.from_toml(toml)
