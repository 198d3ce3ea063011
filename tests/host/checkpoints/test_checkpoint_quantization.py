# SPDX-License-Identifier: Apache-2.0
"""What a quantization_config says of each layer: its format, what it leaves out, and what cannot be
read. Matching is compared with the libraries that write such configs, and numbers with those that
their own functions make of the tensors.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moeos
from moeos import MoEConfig, MoELayer
from moeos.checkpoints import load_block, stored_matrices
from moeos.config.hf import modules
from moeos.config.hf.families import FAMILIES
from moeos.config.hf.modules import Matrix
from tests.host.checkpoints import test_stored_matrices as drawn
from tests.host.cli.commands import invoke
from tests.tiny_models import TINY, tiny

EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 40,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
}
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
LAYER = "model.layers.3.mlp."

Parts = dict[str, Tensor]


def fp8(**others: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **others}


def group(targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"] if targets is None else targets, "weights": weights}


def compressed(*groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    numbered = {f"group_{number}": one for number, one in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": numbered, **others}


def quantized(config: dict[str, Any], method: dict[str, Any]) -> dict[str, Any]:
    return config | {"quantization_config": method}


CHANNEL = group(type="float", num_bits=8, strategy="channel")
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_the_names_of_experts_are_those_of_the_familys_files(name: str, tmp_path: Path) -> None:
    block = tiny(name)
    tensors, prefix = block.files(tmp_path)
    family = FAMILIES[block.row.family]
    within = block.hf_config.get_text_config() is not block.hf_config
    experts = range(
        block.config.router_rows
    )  # with those that LongCat-Flash stores, and no call reads
    every = modules.of_layer(family, block.row.layer, experts, within=within)
    known = {own for matrix in every.experts for own in matrix.own}
    shared = {own for matrix in every.shared for own in matrix.own}
    stored = {end for end in tensors if (end.startswith(prefix) and "proj" in end) or ".w" in end}
    around = prefix + "experts."
    if family.layouts[0].name == "stacked, linear":  # Granite's have no module of all experts
        around = prefix
    found = {end.removesuffix(".weight") for end in stored if end.startswith(around)}
    found = {end for end in found if "router" not in end and "bias" not in end}
    assert found
    assert found <= known
    if family.shared is not None and block.config.shared_experts:
        of_shared = {end.removesuffix(".weight") for end in tensors if ".shared_" in end}
        of_layer = {end for end in of_shared if f"layers.{block.row.layer}." in end}
        assert {end for end in of_layer if not end.endswith("_gate")} <= shared


NAMES = [
    *(f"model.layers.{layer}.mlp.experts.{e}.gate_proj" for layer in (1, 3, 33) for e in (0, 11)),
    "model.layers.3.mlp.shared_experts.down_proj",
    "model.layers.3.mlp.experts",
    "language_model.model.layers.3.mlp.experts.1.up_proj",
]


@pytest.mark.parametrize(
    "entry",
    [
        *("model.layers.3", "model.layers.3.", "model.layers.3.mlp", "model.layers", "layers.3"),
        *("model.layers.3.mlp.experts", "model.layers.3.mlp.experts.1", "experts", "gate", ""),
        *("gate_proj", "_proj", "model.layers.3.mlp.gate", "mlp.experts", "model.layers.*"),
        *(r"model\.layers\.(1|33)\.mlp", r".*experts\.0", r".*shared", "model.layers.3.mlp.shared"),
        *("lm_head", "shared_experts", r"model.layers.3.*_proj", "(?:language_)?model", "11"),
    ],
)
def test_modules_to_not_convert_mean_what_they_mean_to_transformers(entry: str) -> None:
    library = pytest.importorskip("transformers.quantizers.quantizers_utils")
    rule = modules.by_prefix("field", [entry])
    for name in NAMES:
        assert rule(Matrix((name,))) == (not library.should_convert_module(name, [entry])), name
        assert rule(Matrix(("other",), (name,))) == rule(Matrix((name,))) or entry == ""


@pytest.mark.parametrize(
    "entries",
    [
        ["re:.*layers\\.3\\..*"],
        ["re:layers.3"],
        ["model.layers.3.mlp.experts"],
        ["model.layers.3.mlp.experts.0.gate_proj", "Linear"],
        ["Linear", "re:.*gate_proj$", "re:.*experts"],
        ["re:.*down_proj", "re:.*shared.*", "Module"],
        ["re:.*gate", "lm_head", "Embedding", "Qwen3MoeSparseMoeBlock"],
        [],
    ],
)
def test_targets_and_ignore_mean_what_they_mean_to_compressed_tensors(entries: list[str]) -> None:
    library = pytest.importorskip("compressed_tensors.utils.match")
    linear = nn.Linear(1, 1, device="meta")
    rule, best = modules.by_target("f", entries), modules.best_target("f", entries)
    for name in NAMES:
        matrix = Matrix((name,), ("no.experts",))
        assert rule(matrix) == library.is_match(name, linear, entries), name
        matched = library.match_targets(name, linear, entries)
        assert best(matrix) == next(iter(matched), None), name


@pytest.mark.parametrize(
    "entry",
    ["model.layers.3*", "*.mlp.experts.*", "*shared*", "*.1.*", "model.layers.[13].*", "x*"],
)
def test_patterns_of_modelopt_are_those_of_fnmatch(entry: str) -> None:
    rule = modules.by_glob("field", [entry])
    for name in NAMES:
        assert rule(Matrix((name,))) == fnmatch.fnmatchcase(name, entry), name


def test_a_module_without_a_star_is_left_out_with_all_in_it_and_no_other() -> None:
    rule = modules.by_glob("field", ["model.layers.3"])
    assert [name for name in NAMES if rule(Matrix((name,)))] == [
        name for name in NAMES if name.startswith("model.layers.3.")
    ]


# --- configs --------------------------------------------------------------------------------------

QWEN_LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    ("a module", fp8(modules_to_not_convert=["lm_head", LAYER + "experts"]), "fp8_block128"),
    ("the layer", fp8(modules_to_not_convert=["model.layers.3"]), "fp8_block128"),
    ("MiniMax' field", fp8(ignored_layers=["lm_head", "model.layers.3.mlp"]), "fp8_block128"),
    (
        "each matrix",
        fp8(
            modules_to_not_convert=[
                f"{LAYER}experts.{expert}.{name}" for expert in range(EXPERTS) for name in SHAPES
            ]
        ),
        "fp8_block128",
    ),
    ("a regex", compressed(CHANNEL, ignore=["lm_head", r"re:.*layers\.3\..*"]), "fp8_channel"),
    (
        "each matrix by its name",
        compressed(
            CHANNEL,
            ignore=[
                f"{LAYER}experts.{expert}.{name}" for expert in range(EXPERTS) for name in SHAPES
            ],
        ),
        "fp8_channel",
    ),
    (
        "what no target names",
        compressed(
            group([r"re:.*layers\.(?!3\.).*experts.*"], type="float", num_bits=8, strategy="tensor")
        ),
        "fp8_tensor",
    ),
    ("a glob", NVFP4 | {"ignore": ["lm_head", "model.layers.3.mlp*"]}, "nvfp4"),
    ("modelopt's other field", NVFP4 | {"exclude_modules": ["model.layers.3.*"]}, "nvfp4"),
]


@pytest.mark.parametrize(
    ("method", "name"), [row[1:] for row in QWEN_LEFT_OUT], ids=[row[0] for row in QWEN_LEFT_OUT]
)
def test_a_layer_that_is_left_out_has_no_format_and_loads_its_numbers(
    method: dict[str, Any], name: str
) -> None:
    config = quantized(QWEN, method)
    assert MoEConfig.from_hf(config, 3).weight_format is None
    for other in (0, 13, 30, 33):
        assert MoEConfig.from_hf(config, other).weight_format == name
    with pytest.raises(ValueError, match=r"for layers \[3\].*say which layer, MoEConfig\.from_hf"):
        MoEConfig.from_hf(config)
    assert MoEConfig.from_hf(config, dequantize=True).weight_format is None
    tensors, expected = plain_block()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_block(MoEConfig.from_hf(config, 3), tensors, LAYER, 0, 1)
    assert torch.equal(found["w1"], expected[0])
    assert torch.equal(found["w2"], expected[1])


def plain_block() -> tuple[Parts, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tensors = {LAYER + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    for expert in range(EXPERTS):
        for name, shape in SHAPES.items():
            drawn_ = torch.randn(shape, generator=generator)
            tensors[f"{LAYER}experts.{expert}.{name}.weight"] = drawn_
    each = [
        [tensors[f"{LAYER}experts.{expert}.{name}.weight"] for name in SHAPES]
        for expert in range(EXPERTS)
    ]
    w1 = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
    return tensors, (w1, torch.stack([down for *_, down in each]))


@pytest.mark.parametrize(
    ("method", "experts", "shared"),
    [
        (fp8(), "fp8_block128", "fp8_block128"),
        (fp8(modules_to_not_convert=["gate", "lm_head"]), "fp8_block128", "fp8_block128"),
        (fp8(modules_to_not_convert=["shared_experts"]), "fp8_block128", "fp8_block128"),
        (fp8(modules_to_not_convert=[".*shared_experts"]), "fp8_block128", None),
        (
            fp8(modules_to_not_convert=[LAYER + "shared_experts.down_proj"]),
            "fp8_block128",
            None,  # what is not all in the format is read in numbers
        ),
        (compressed(CHANNEL, ignore=["re:.*mlp.gate$"]), "fp8_channel", "fp8_channel"),
        (compressed(CHANNEL, ignore=["re:.*shared_experts.*"]), "fp8_channel", None),
        (
            compressed(
                CHANNEL,
                group(
                    [r"re:.*mlp\.experts.*"],
                    **{"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group"},
                ),
            ),
            "int4_group32",
            None,
        ),
        (
            compressed(
                group(["re:.*self_attn.*"], type="float", num_bits=4, group_size=16), CHANNEL
            ),
            "fp8_channel",
            "fp8_channel",
        ),
        (compressed(CHANNEL, ignore=["Linear"]), None, None),
        (compressed(group(["re:.*self_attn.*"], type="float", num_bits=8)), None, None),
        (NVFP4 | {"ignore": ["*.mlp.gate", "*shared_experts*"]}, "nvfp4", None),
        (NVFP4 | {"ignore": ["model.layers.*.self_attn*"]}, "nvfp4", "nvfp4"),
        ({"quant_method": "gptq", "modules_to_not_convert": [".*mlp"]}, None, None),
    ],
)
def test_routed_and_shared_experts_are_in_the_format_of_their_own_matrices(
    method: dict[str, Any], experts: str | None, shared: str | None
) -> None:
    found = MoEConfig.from_hf(quantized(DEEPSEEK, method), 3)
    assert (found.weight_format, found.shared_weight_format) == (experts, shared)
    alone = MoEConfig.from_hf(quantized(DEEPSEEK, method), 3, shared=False)
    assert (alone.weight_format, alone.shared_weight_format) == (experts, None)


def test_the_text_model_within_another_is_named_as_that_names_it() -> None:
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
    }
    for stem in ("model.language_model.", "language_model.model.", "model."):
        method = fp8(modules_to_not_convert=[f"{stem}layers.3.mlp"])
        outer = {"model_type": "qwen3_5_moe", "text_config": text, "quantization_config": method}
        assert MoEConfig.from_hf(outer, 3).weight_format is None
        assert MoEConfig.from_hf(outer, 2).weight_format == "fp8_block128"


def test_gpt_oss_leaves_out_what_its_own_config_names_and_a_layer_that_is_added() -> None:
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    sizes = {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 4}
    # A star is that of a regular expression, as transformers reads it.
    for added, layers in ((None, ()), ("model.layers.3", (3,)), ("model.layers.3.*", (3, 31))):
        entries = left_out if added is None else [*left_out, added]
        method = {"quant_method": "mxfp4", "modules_to_not_convert": entries}
        for layer in (0, 3, 13, 31):
            found = MoEConfig.from_hf(quantized(sizes, method), layer).weight_format
            assert found == (None if layer in layers else "mxfp4")


def test_a_config_object_of_transformers_says_the_same_as_its_json() -> None:
    transformers = pytest.importorskip("transformers")
    method = compressed(CHANNEL, ignore=[r"re:.*layers\.3\..*"])
    config = transformers.Qwen3MoeConfig(**(QWEN | {"quantization_config": method}))
    assert MoEConfig.from_hf(config, 3).weight_format is None
    assert MoEConfig.from_hf(config, 2).weight_format == "fp8_channel"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            fp8(modules_to_not_convert=["("]),
            r"modules_to_not_convert has '\(', which is no regular",
        ),
        (compressed(CHANNEL, ignore=["re:["]), r"ignore has 're:\[', which is no regular"),
        (fp8(modules_to_not_convert="lm_head"), r"modules_to_not_convert is 'lm_head'; it must be"),
        (compressed(CHANNEL, ignore=[3]), r"ignore is \[3\]; it must be a list of strings"),
    ],
)
def test_an_entry_that_means_nothing_is_named(method: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match="quantization_config." + said):
        MoEConfig.from_hf(quantized(QWEN, method), 3)


def test_moeos_plan_counts_a_layer_that_is_left_out_in_numbers(tmp_path: Path) -> None:
    config = quantized(QWEN, fp8(modules_to_not_convert=["model.layers.3"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    numbers = EXPERTS * sum(rows * columns for rows, columns in SHAPES.values())
    gate, scales = 4 * EXPERTS * HIDDEN, 4 * EXPERTS * 6  # a block is 128 x 128
    for layer, weights in ((2, numbers + scales), (3, 4 * numbers)):
        toml = tmp_path / f"{layer}.toml"
        toml.write_text(f'hf_config = "config.json"\nhf_layer = {layer}\nmax_tokens = 8\n')
        code, out, _ = invoke("plan", toml, "--ranks", "1")
        assert code == 0
        assert f"{(weights + gate) / 1024:.4g} KiB of weights a rank" in out


# --- what one layer mixes -------------------------------------------------------------------------


def mixed_block(numbers: Callable[[int, str], bool]) -> tuple[Parts, Tensor, Tensor]:
    """A block of which some matrices are in numbers, and others in blocks of FP8."""
    generator = torch.Generator().manual_seed(4)
    tensors = {LAYER + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    every = []
    for expert in range(EXPERTS):
        made = {}
        for name, shape in SHAPES.items():
            how = drawn.plain if numbers(expert, name) else drawn.fp8_blocks
            parts, made[name] = how(generator, shape)
            tensors |= {f"{LAYER}experts.{expert}.{name}.{end}": one for end, one in parts.items()}
        every.append(made)
    w1 = torch.stack([torch.cat((one["gate_proj"], one["up_proj"])) for one in every])
    return tensors, w1, torch.stack([one["down_proj"] for one in every])


def test_a_matrix_that_is_left_out_of_a_layer_is_named_and_read_in_numbers() -> None:
    config = quantized(QWEN, fp8(modules_to_not_convert=[".*down_proj"]))
    with pytest.raises(
        ValueError,
        match=r"^quantization_config means model\.layers\.3\.mlp\.experts\.0\.gate_proj in "
        r"fp8_block128 and model\.layers\.3\.mlp\.experts\.0\.down_proj in numbers, .* pass dequan",
    ):
        MoEConfig.from_hf(config, 3)
    tensors, w1, w2 = mixed_block(lambda expert, name: name == "down_proj")
    with pytest.warns(UserWarning, match="are dequantised"):
        found = load_block(MoEConfig.from_hf(config, 3, dequantize=True), tensors, LAYER, 0, 1)
    torch.testing.assert_close(found["w1"].double(), w1, rtol=2**-22, atol=0.0)
    torch.testing.assert_close(found["w2"].double(), w2, rtol=2**-22, atol=0.0)


def test_an_expert_that_is_left_out_of_a_layer_is_named_with_what_works() -> None:
    method = fp8(modules_to_not_convert=[LAYER + "experts.1"])
    for dequantize in (False, True):
        with pytest.raises(ValueError, match=r"experts\.1\.gate_proj in numbers, .*: dequantize "):
            MoEConfig.from_hf(quantized(QWEN, method), 3, dequantize=dequantize)
    follow_elsewhere()


def follow_elsewhere() -> None:
    """Experts that another library has dequantized, and a config without quantization_config."""
    tensors, expected = plain_block()
    found = load_block(MoEConfig.from_hf(QWEN, 3), tensors, LAYER, 0, 1)
    assert torch.equal(found["w1"], expected[0])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": None}, "quant_method is None"),
        (fp8(weight_block_size=[64, 64]), r"weight_block_size is \[64, 64\]"),
        ({"quant_method": "modelopt"}, "quant_algo is None"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (compressed(group(type="float", num_bits=6)), "weights is 'float of 6 bits'"),
        (compressed(group(type="int", num_bits=3)), "weights is 'int of 3 bits'"),
        (compressed(group(type="float", num_bits=4, group_size=64)), "group_size is 64"),
        (
            compressed(group(type="float", num_bits=8, strategy="block", block_structure=[64, 64])),
            r"block_structure is \[64, 64\]",
        ),
        (
            compressed(group(type="int", num_bits=4, group_size=128, actorder="group")),
            "actorder is 'group'",
        ),
    ],
)
def test_what_cannot_be_read_at_all_is_not_said_to_be_dequantized_here(
    method: dict[str, Any], said: str
) -> None:
    for dequantize in (False, True):
        with pytest.raises(ValueError, match=said + r"; what is read here is .*: dequantize "):
            MoEConfig.from_hf(quantized(QWEN, method), 3, dequantize=dequantize)


# --- what other libraries make of tensors ---------------------------------------------------------


def scheme_of(**weights: Any) -> Any:
    library = pytest.importorskip("compressed_tensors.quantization")
    args = library.QuantizationArgs(**weights)
    return library.QuantizationScheme(targets=["Linear"], weights=args)


def compressor_of(name: str) -> Any:
    library = pytest.importorskip("compressed_tensors.compressors.base")
    return library.BaseCompressor.get_value_from_registry(name)


def grid_of(strategy: str, shape: tuple[int, int], size: int | None) -> tuple[int, ...]:
    rows, columns = shape
    return {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, columns // (size or 1)),
        "block": (-(-rows // 128), -(-columns // 128)),
    }[strategy]


Case = tuple[str, dict[str, Any], str | None]

WRITTEN: dict[str, Case] = {
    "FP8_BLOCK": (
        "float-quantized",
        {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        "fp8_block128",
    ),
    "FP8 in groups": (
        "float-quantized",
        {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32},
        None,
    ),
    "W8A8": ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}, None),
    "int8, a scale a matrix": (
        "int-quantized",
        {"type": "int", "num_bits": 8, "strategy": "tensor"},
        None,
    ),
    "int8 in groups": (
        "int-quantized",
        {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 64},
        None,
    ),
    "int8, asymmetric": (
        "int-quantized",
        {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": False},
        None,
    ),
    "W8A16": (
        "pack-quantized",
        {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 128},
        None,
    ),
    "W4A16": (
        "pack-quantized",
        {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128},
        None,
    ),
    "W4A16_ASYM": (
        "pack-quantized",
        {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32},
        "mxfp4",
    ),
}


def written(case: Case) -> tuple[Parts, Tensor, Tensor]:
    """A block that compressed-tensors has compressed, and what it decompresses that to."""
    name, weights, _ = case
    scheme, compressor = scheme_of(**weights), compressor_of(name)
    generator = torch.Generator().manual_seed(6)
    tensors = {LAYER + "gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    every = []
    for expert in range(EXPERTS):
        made = {}
        for matrix, shape in SHAPES.items():
            grid = grid_of(weights["strategy"], shape, weights.get("group_size"))
            scale = 2.0 ** torch.randint(-6, -2, grid, generator=generator)
            if name != "mxfp4-pack-quantized":
                scale = scale * (1 + torch.rand(grid, generator=generator))
            zero = torch.zeros(grid, dtype=torch.int8)
            if weights.get("symmetric") is False:
                zero = torch.randint(-7, 7, grid, generator=generator).to(torch.int8)
            drawn_ = {
                "weight": torch.randn(shape, generator=generator),
                "weight_scale": scale,
                "weight_zero_point": zero,
            }
            parts = compressor.compress(drawn_, scheme)
            back = compressor.decompress(dict(parts), scheme)["weight"]
            made[matrix] = back.detach().double()
            tensors |= {f"{LAYER}experts.{expert}.{matrix}.{end}": p for end, p in parts.items()}
        every.append(made)
    w1 = torch.stack([torch.cat((one["gate_proj"], one["up_proj"])) for one in every])
    return tensors, w1, torch.stack([one["down_proj"] for one in every])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_compressed_tensors_writes_is_read_as_it_decompresses_it(name: str) -> None:
    case = WRITTEN[name]
    config = quantized(QWEN, compressed(group(**case[1])))
    tensors, w1, w2 = written(case)
    cfg = MoEConfig.from_hf(config, 3, dequantize=True)
    found = drawn.read(cfg, {**tensors})
    torch.testing.assert_close(found["w1"].double(), w1, rtol=2**-20, atol=0.0)
    torch.testing.assert_close(found["w2"].double(), w2, rtol=2**-20, atol=0.0)
    half = drawn.read(cfg, tensors, 1, 2)
    assert torch.equal(half["w2"], found["w2"][1:])
    if case[2] is None:
        with pytest.raises(ValueError, match=r": pass dequantize=True \(in TOML hf_dequantize"):
            MoEConfig.from_hf(config, 3)
        return
    cfg = MoEConfig.from_hf(config, 3)
    assert cfg.weight_format == case[2]
    own = drawn.held(cfg, tensors)
    drawn.assert_as_expected(cfg, own, EXPERTS)
    torch.testing.assert_close(drawn.meant(cfg, own, "w1"), w1, rtol=2**-20, atol=0.0)
    torch.testing.assert_close(drawn.meant(cfg, own, "w2"), w2, rtol=2**-20, atol=0.0)


def test_fp8_blocks_of_compressed_tensors_compute_what_their_numbers_do() -> None:
    tensors, w1, w2 = written(WRITTEN["FP8_BLOCK"])
    config = quantized(QWEN, compressed(group(**WRITTEN["FP8_BLOCK"][1])))
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(7))
    ids = torch.arange(6).remainder(EXPERTS).view(6, 1)
    with moeos.init("twin") as world:
        layer = MoELayer.from_hf(MoEConfig.from_hf(config, 3), world, tensors, LAYER)
        output = layer(x, topk_ids=ids, topk_weights=torch.ones(6, 1))
    for row, expert in enumerate(ids.flatten().tolist()):
        gate, up = (w1[expert] @ x[row].double()).chunk(2)
        expected = w2[expert] @ (nn.functional.silu(gate) * up)
        near = {"rtol": 0.0, "atol": 1e-6 * float(expected.abs().max())}
        torch.testing.assert_close(output[row].double(), expected, **near)


@pytest.mark.parametrize(
    ("how", "wanted", "found"),
    [
        ("FP8_BLOCK", "fp8_channel", "fp8_block128"),
        ("FP8_BLOCK", "fp8_tensor", "fp8_block128"),
        ("FP8 in groups", "fp8_channel", None),
        ("W8A8", "fp8_channel", None),
        ("W8A16", "int4_group32", None),
        ("W4A16", "int4_group32", None),
        ("MXFP4", "nvfp4", "mxfp4"),
    ],
)
def test_the_format_that_a_refusal_names_loads(how: str, wanted: str, found: str | None) -> None:
    tensors, _, _ = written(WRITTEN[how])
    cfg = MoEConfig.from_hf(QWEN, 3, weight_format=wanted)
    with pytest.raises(ValueError, match=rf"experts\.0\.gate_proj\..*: set .*format={found!r}"):
        load_block(cfg, tensors, LAYER, 0, 1)
    again = MoEConfig.from_hf(QWEN, 3, weight_format=found)
    drawn.read(again, tensors)


REFUSED: list[tuple[drawn.How, str, str]] = [
    (drawn.fp8_blocks, "mxfp4", "weight_format"),
    (drawn.fp8_rows, "fp8_tensor", "weight_format"),
    (drawn.fp8_rows, "fp8_block128", "weight_format"),
    (drawn.fp8_matrix, "fp8_block128", "weight_format"),
    (drawn.fp8_blocks_of_compressed_tensors, "fp8_channel", "weight_format"),
    (drawn.mxfp4_packed, "nvfp4", "weight_format"),
    (drawn.e5m2, "fp8_block128", "weight_format"),
    (drawn.int8_rows, "fp8_channel", "weight_format"),
    (drawn.int8_with_zeros, "fp8_channel", "weight_format"),
    (drawn.int4_rows, "int4_group32", "weight_format"),
    (drawn.int4_fp16, "int4_group32", "weight_format"),
    (drawn.plain, "fp8_channel", "weight_format"),
    (drawn.fp8_rows, "fp8_tensor", "shared_weight_format"),
    (drawn.e5m2, "fp8_block128", "shared_weight_format"),
    (drawn.int4_rows, "int4_group32", "shared_weight_format"),
    (drawn.plain, "nvfp4", "shared_weight_format"),
]


@pytest.mark.parametrize(("how", "wanted", "field"), REFUSED)
def test_what_a_refused_matrix_is_to_be_held_as_is_loaded(
    how: drawn.How, wanted: str, field: str
) -> None:
    tensors, fields = drawn.block(how)[0], {"weight_format": wanted}
    if field == "shared_weight_format":
        own = {row: each for each, row in drawn.HELD.values()}[wanted]
        tensors = drawn.block(own)[0] | {
            name: part for name, part in drawn.with_shared(how).items() if ".shared_" in name
        }
        fields |= {"shared_experts": 1, "shared_intermediate": drawn.INTERMEDIATE, field: wanted}
    with pytest.raises(ValueError, match=f": set {field}=") as caught:
        drawn.read(drawn.config(**fields), tensors)
    (said,) = re.findall(rf": set {field}=(\w+|'\w+')", str(caught.value))
    drawn.read(drawn.config(**fields | {field: ast.literal_eval(said)}), tensors)


def test_several_shared_experts_in_a_format_are_loaded_as_the_refusal_says() -> None:
    tensors = drawn.with_shared(drawn.fp8_rows)
    half = drawn.INTERMEDIATE // 2
    fields: dict[str, Any] = {"weight_format": "fp8_channel", "shared_intermediate": half}
    fields |= {"shared_experts": 2, "shared_weight_format": "fp8_channel"}
    with pytest.raises(
        ValueError,
        match=rf"set shared_experts=1 and shared_intermediate={2 * half}, or shared_weight_format",
    ):
        drawn.read(drawn.config(**fields), tensors)
    one = {"shared_experts": 1, "shared_intermediate": 2 * half}
    for others in (one, {"shared_weight_format": None}):
        drawn.read(drawn.config(**fields | others), tensors)


# --- scales ---------------------------------------------------------------------------------------

SCALES: list[tuple[drawn.How, str, str, int | float]] = [
    (drawn.fp8_blocks, "fp8_block128", "weight_scale_inv", float("nan")),
    (drawn.fp8_blocks, "fp8_block128", "weight_scale_inv", float("inf")),
    (drawn.fp8_blocks_ue8m0, "fp8_block128", "weight_scale_inv", 0xFF),
    (drawn.fp8_blocks_of_bytes, "fp8_block128", "weight_scale_inv", 0xFF),
    (drawn.fp8_rows, "fp8_channel", "weight_scale", float("-inf")),
    (drawn.fp8_matrix, "fp8_tensor", "weight_scale", float("nan")),
    (drawn.nvfp4, "nvfp4", "weight_scale", 0x7F),
    (drawn.nvfp4, "nvfp4", "weight_scale", 0xFF),
    (drawn.nvfp4, "nvfp4", "weight_scale_2", float("nan")),
    (drawn.nvfp4_packed, "nvfp4", "weight_global_scale", 0.0),
    (drawn.int4, "int4_group32", "weight_scale", float("nan")),
    (drawn.mxfp4_packed, "mxfp4", "weight_scale", 0xFF),
]


@pytest.mark.parametrize(("how", "name", "end", "bad"), SCALES)
def test_a_scale_that_is_no_finite_number_is_named(
    how: drawn.How, name: str, end: str, bad: int | float
) -> None:
    tensors, _, _ = drawn.block(how)
    full = f"{drawn.PREFIX}experts.1.up_proj.{end}"
    scale = tensors[full] = tensors[full].clone()
    every = (scale.view(torch.uint8) if isinstance(bad, int) else scale).view(-1)
    at = every.numel() // 2
    every[at] = bad
    index = list(torch.unravel_index(torch.tensor(at), scale.shape)) if scale.dim() else []
    first = [int(one) for one in index]
    said = (
        f"^{full} has 1 of {scale.numel()} scales that are no finite numbers, the first .* at "
        f"{first}; the file is damaged".replace("[", r"\[")
    )
    for cfg in (drawn.config(weight_format=name), drawn.config()):
        with pytest.raises(ValueError, match=said):
            drawn.read(cfg, tensors)
        # Another rank's experts are not its own to read.
        drawn.read(cfg, tensors, 1, 2)
    del tensors[full]
    every[at] = 1
    drawn.read(drawn.config(), tensors | {full: scale})


def test_a_scale_of_shared_experts_and_of_gpt_oss_is_named_likewise() -> None:
    shared: dict[str, Any] = {"shared_experts": 1, "shared_intermediate": drawn.INTERMEDIATE}
    tensors = drawn.with_shared(drawn.fp8_rows)
    full = f"{drawn.PREFIX}shared_experts.down_proj.weight_scale"
    tensors[full] = torch.full_like(tensors[full], torch.nan)
    for kept in ("fp8_channel", None):
        cfg = drawn.config(weight_format="fp8_channel", shared_weight_format=kept, **shared)
        with pytest.raises(ValueError, match=rf"^{full} has 160 of 160 scales that are no finite"):
            drawn.read(cfg, tensors)
    parts = {"blocks": torch.zeros(64, 2, 16, dtype=torch.uint8), "scales": torch.full((64, 2), 9)}
    parts["scales"] = parts["scales"].to(torch.uint8)
    parts["scales"][5, 1] = 0xFF
    with pytest.raises(
        stored_matrices.Unfit, match=r"^scales has 1 of 128 scales .* nan at \[5, 1\]"
    ):
        stored_matrices.require_finite(stored_matrices.BY_NAME["mxfp4"], parts)


# --- layers that predict further tokens -----------------------------------------------------------

GLM = DEEPSEEK | {"model_type": "glm4_moe", "num_hidden_layers": 46, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    "config",
    [
        DEEPSEEK,
        GLM,
        DEEPSEEK | {"model_type": "deepseek_v32", "mlp_layer_types": ["sparse"] * 61},
        DEEPSEEK | {"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 2},
        DEEPSEEK
        | {"model_type": "deepseek_v4", "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 58},
    ],
    ids=lambda config: config["model_type"],
)
def test_layers_that_predict_further_tokens_are_read_as_the_others(config: dict[str, Any]) -> None:
    layers, more = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    for layer in range(layers, layers + more):
        assert MoEConfig.from_hf(config, layer) == MoEConfig.from_hf(config, layers - 1)
    said = f"^layer is {layers + more}; it must be at least 0 and below {layers + more}, as num_nex"
    with pytest.raises(ValueError, match=said):
        MoEConfig.from_hf(config, layers + more)
    without = config | {"num_nextn_predict_layers": 0}
    with pytest.raises(ValueError, match=rf"^layer is {layers}; it must be .* below {layers}$"):
        MoEConfig.from_hf(without, layers)


def test_the_layer_behind_deepseek_v3s_last_is_loaded_by_its_name() -> None:
    prefix = "model.layers.61.mlp."
    config = quantized(DEEPSEEK, fp8(modules_to_not_convert=["model.layers.61"]))
    assert MoEConfig.from_hf(config).weight_format == "fp8_block128"
    cfg = MoEConfig.from_hf(config, 61)
    assert (cfg.weight_format, cfg.shared_weight_format) == (None, None)
    generator = torch.Generator().manual_seed(8)
    tensors = {
        prefix + "gate.weight": torch.randn(8, HIDDEN, generator=generator),
        prefix + "gate.e_score_correction_bias": torch.randn(8, generator=generator),
        "model.layers.61.eh_proj.weight": torch.zeros(1),
    }
    for module in (*(f"experts.{expert}" for expert in range(8)), "shared_experts"):
        for name, shape in SHAPES.items():
            tensors[f"{prefix}{module}.{name}.weight"] = torch.randn(shape, generator=generator)
    found = load_block(cfg, tensors, prefix, 0, 1)
    assert torch.equal(found["w2"][7], tensors[prefix + "experts.7.down_proj.weight"])
    assert torch.equal(found["shared_w2"][0], tensors[prefix + "shared_experts.down_proj.weight"])
